"""SCENARIOS section 2: numerics."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.awkward import EXACT
from tests.support.driver import reference_case, sliced_train, train_case
from tests.support.models import BN_CONV, BN_MLP, MLP, MOE, Batch, Case, mlp4, tokens, vectors
from tests.support.nets_values import IntsAndBools, TiedLM
from tests.support.oracle import (
    ADAMW,
    GRADIENT_PROBE,
    SGD,
    Spec,
    assert_close,
    assert_same_bits,
    reference_train,
)

CASES = {case.name: case for case in EXACT}
TIED = Case("tied_lm", lambda dropout: TiedLM(), tokens(vocab=50, length=6))
PLAIN_SGD: Spec = {"name": "SGD", "params": {"lr": 0.01}}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_s09_microbatches_do_not_change_the_size_of_the_gradient(m: int, reduction: str) -> None:
    """Gradients came out m times too large or too small; a sum must not be divided by m."""
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    options: dict[str, Any] = {
        "steps": 3,
        "dtype": torch.float64,
        "batches": MLP.batches(3, size=16, dtype=torch.float64),
    }
    expected = reference_case(MLP, PLAIN_SGD, criterion=criterion, **options)
    result = train_case(MLP, PLAIN_SGD, n=2, criterion=criterion, use_gpipe=True, n_micro_batches=m, **options)
    assert_close(result, expected, rtol=1e-9)


@pytest.mark.parametrize(("size", "m"), [(8, 3), (7, 4), (10, 4), (5, 4)])
def test_s10_microbatches_of_unequal_size(size: int, m: int) -> None:
    """8 samples in 3 micro-batches: each counts by its share of samples, and the loss is the whole batch's."""
    batches = MLP.batches(2, size=size)
    expected = reference_case(MLP, SGD, steps=2, batches=batches)
    result = train_case(MLP, SGD, n=2, steps=2, batches=batches, n_micro_batches=m)
    assert_close(result, expected, rtol=1e-6)


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("n", [2, 4])
def test_s11_tied_weights_stay_tied(n: int, m: int) -> None:
    """Embedding and head in different stages drifted apart; Adam kept two states."""
    dtype = torch.float64
    expected = reference_case(TIED, ADAMW, steps=5, dtype=dtype)
    result = train_case(TIED, ADAMW, n=n, steps=5, dtype=dtype, n_micro_batches=m)
    assert_close(result, expected, rtol=1e-9)
    assert torch.equal(result.state["head.weight"], result.state["emb.weight"])
    assert isinstance(result.model, TiedLM)
    assert result.model.head.weight is result.model.emb.weight
    assert "emb.weight" in str(result.extra["sliced"].plan)


def test_s11_tied_weights_are_bitwise_exact_without_microbatches() -> None:
    """The gradients of both uses are added in autograd's order."""
    for n in (1, 2, 4):
        assert_same_bits(train_case(TIED, ADAMW, n=n, steps=5), reference_case(TIED, ADAMW, steps=5), where=f"n={n}")


def test_s12_batchnorm_plain_is_exact() -> None:
    """Running statistics and num_batches_tracked included."""
    result = train_case(BN_CONV, SGD, n=2, steps=4)
    assert_same_bits(result, reference_case(BN_CONV, SGD, steps=4))
    assert int(result.state["1.num_batches_tracked"]) == 4


def test_s12_batchnorm_under_microbatches_warns_once_and_names_the_modules() -> None:
    """Results got worse with the number of micro-batches and nobody was told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train_case(BN_CONV, SGD, n=2, steps=3, n_micro_batches=4)
    told = [str(item.message) for item in caught if "BatchNorm" in str(item.message)]
    assert len(told) == 1
    for name in ("1", "4", "7"):
        assert f"{name}" in told[0]
    assert "deferred" in told[0]
    assert all(torch.isfinite(tensor).all() for tensor in result.state.values())
    assert int(result.state["1.num_batches_tracked"]) == 12


def test_s12_no_warning_without_need(recwarn: pytest.WarningsRecorder) -> None:
    """Deferred statistics, a norm in eval mode, or no micro-batches: nothing to warn about."""
    train_case(BN_CONV, SGD, n=2, steps=1)
    train_case(BN_CONV, SGD, n=2, steps=1, n_micro_batches=4, batch_norm="deferred")
    model = BN_CONV.model().train()
    for name in ("1", "4", "7"):
        model.get_submodule(name).eval()
    sliced_train(model, BN_CONV.batches(1), SGD, nn.CrossEntropyLoss(), n_micro_batches=4, train_mode=False)
    assert [str(item.message) for item in recwarn.list if "BatchNorm" in str(item.message)] == []


@pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning")
def test_s13_a_microbatch_of_one_sample_breaks_batchnorm_with_a_clear_error() -> None:
    """Batch 7 in 4 micro-batches leaves one of a single sample, which BatchNorm1d refuses: say why, or avoid it."""
    batches = BN_MLP.batches(2, size=7)
    train_case(BN_MLP, SGD, n=2, steps=2, batches=batches)
    try:
        train_case(BN_MLP, SGD, n=2, steps=2, batches=batches, n_micro_batches=4)
    except (ValueError, RuntimeError) as error:
        text = f"{error} {error.__cause__}"
        assert "micro-batch" in text
        assert "7" in text
        assert "4" in text


def test_s14_dropout_does_not_depend_on_the_number_of_parts() -> None:
    """Draws happened in another order, so results differed with n."""
    case = Case("dropout", lambda dropout: mlp4(0.5), vectors())
    runs = [train_case(case, SGD, n=n, steps=4, seed=0) for n in (1, 2, 4)]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    assert train_case(case, SGD, n=2, steps=4, seed=1).losses != runs[0].losses


def test_s14_two_dropout_layers_draw_different_masks() -> None:
    """Every part had the same seed, so every part had the same mask."""
    masks: list[Tensor] = []
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    nn.init.constant_(model[1].weight, 0.0)
    nn.init.constant_(model[1].bias, 1.0)
    for index in (0, 2):
        model[index].register_forward_hook(lambda module, inputs, output: masks.append(output.detach() > 0))
    batch = (torch.ones(8, 64), torch.zeros(8, dtype=torch.long))
    sliced_train(model, [batch], SGD, nn.CrossEntropyLoss(), n=2)
    assert len(masks) >= 2
    assert not torch.equal(masks[-1], masks[-2])


class Hands(nn.Module):
    """A packed stage that hands on what `form` makes of its output."""

    def __init__(self, layer: nn.Module, form: Any) -> None:
        super().__init__()
        self.layer, self.form = layer, form

    def forward(self, x: Tensor) -> Any:
        return self.form(torch.tanh(self.layer(x)))


class Takes(nn.Module):
    """A packed stage that checks what it got."""

    def __init__(self, layer: nn.Module, check: Any) -> None:
        super().__init__()
        self.layer, self.check = layer, check

    def forward(self, value: Any) -> Tensor:
        return self.layer(self.check(value))


def take_pair(value: Any) -> Tensor:
    hidden, nothing = value
    assert nothing is None
    return hidden


def take_numbers(value: Any) -> Tensor:
    hidden, flag, count = value
    assert flag is True
    assert type(count) is int
    return hidden * count


def take_dict(value: Any) -> Tensor:
    assert sorted(value) == ["h", "mask"]
    assert value["mask"].dtype == torch.bool
    return value["h"].masked_fill(value["mask"], 0.0)


FORMS: dict[str, tuple[Any, Any]] = {
    "tuple with None": (lambda h: (h, None), take_pair),
    "tuple with numbers": (lambda h: (h, True, 3), take_numbers),
    "dict": (lambda h: {"h": h, "mask": h < 0}, take_dict),
}


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_s15_none_bools_ints_tuples_and_dicts_between_stages(form: str, m: int) -> None:
    """Packed stages return more than one tensor; what arrives is what was sent."""
    give, take = FORMS[form]

    def pack(model: nn.Module) -> Sequence[nn.Module]:
        return [Hands(model.get_submodule("0"), give), Takes(model.get_submodule("1"), take)]

    class Whole(nn.Module):
        def __init__(self, stages: Sequence[nn.Module]) -> None:
            super().__init__()
            self.stages = nn.ModuleList(stages)

        def forward(self, x: Tensor) -> Tensor:
            return self.stages[1](self.stages[0](x))

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).double()
    batches = MLP.batches(3, dtype=torch.float64)
    expected = reference_train(Whole(pack(model)), batches, SGD, nn.CrossEntropyLoss())
    options = {"slice_options": {"pack": pack}, "n_micro_batches": m}
    result = sliced_train(model, batches, SGD, nn.CrossEntropyLoss(), n=2, **options)
    assert_close(result, renamed(expected, {"stages.0.layer": "0", "stages.1.layer": "1"}), rtol=1e-9)


def renamed(result: Any, names: dict[str, str]) -> Any:
    """Return the result with the prefixes of its names replaced."""
    state = {}
    for name, tensor in result.state.items():
        prefix = next(old for old in names if name.startswith(old))
        state[names[prefix] + name.removeprefix(prefix)] = tensor
    return type(result)(state, result.losses)


@pytest.mark.parametrize("name", ["structures", "keywords", "two_inputs"])
def test_s15_structures_in_traced_models(name: str) -> None:
    """Dictionaries, None, flags and numbers cross the cuts of a traced model."""
    case = CASES[name]
    for n in (2, 3, 4):
        assert_same_bits(train_case(case, SGD, n=n, steps=3), reference_case(case, SGD, steps=3), where=f"n={n}")


@pytest.mark.parametrize("m", [1, 4])
def test_s16_integer_and_bool_tensors_at_cuts(m: int) -> None:
    """Positions (int64) and a mask (bool) cross three cuts; no gradient is asked of them."""
    case = Case("ints", lambda dropout: IntsAndBools(), tokens(length=6))
    expected = reference_case(case, SGD, steps=3, dtype=torch.float64)
    assert_close(train_case(case, SGD, n=4, steps=3, dtype=torch.float64, n_micro_batches=m), expected, rtol=1e-9)


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_s17_in_place_ops_right_after_a_cut(recompute: str, m: int) -> None:
    """ReLU(inplace=True) as the first op of a stage: no autograd error, and the sender's value is not altered."""
    case = CASES["inplace_relu"]
    slicing = {"cuts": ["1", "3", "5"]}
    expected = reference_case(case, SGD, steps=3, dtype=torch.float64)
    result = train_case(
        case, SGD, n=4, steps=3, dtype=torch.float64, slice_options=slicing, n_micro_batches=m, recompute=recompute
    )
    assert_close(result, expected, rtol=1e-9)


def test_s17_an_in_place_add_of_a_parameter_first_in_a_stage() -> None:
    """`x += bias` after a cut."""
    case = CASES["inplace_first"]
    for n in (2, 3, 4):
        assert_same_bits(train_case(case, SGD, n=n, steps=3), reference_case(case, SGD, steps=3), where=f"n={n}")


class GatedBlock(nn.Module):
    """A block with an auxiliary loss on its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate(x)
        return torch.tanh(self.body(x)) * torch.sigmoid(gate), gate.pow(2).mean()


class Gated(nn.Module):
    """Three parts, the middle one with the auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), GatedBlock(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))[0])


def gated_loss(model: nn.Module, batch: Batch, criterion: Any) -> Tensor:
    hidden, aux = model.get_submodule("middle")(model.get_submodule("first")(batch[0]))
    return criterion(model.get_submodule("last")(hidden), batch[1]) + 0.01 * aux


@pytest.mark.parametrize("m", [1, 3, 4])
def test_s18_an_auxiliary_loss_in_a_middle_stage(m: int) -> None:
    """It got no gradient, or one that was m times too large."""
    case = Case(
        "gated",
        lambda dropout: Gated(),
        vectors(),
        pack=lambda model: [model.first, ts.MoEBlockStage(model.middle, aux_loss_weight=0.01), model.last],
        loss=gated_loss,
    )
    expected = reference_case(case, GRADIENT_PROBE, steps=1, dtype=torch.float64)
    assert_close(
        train_case(case, GRADIENT_PROBE, n=3, steps=1, dtype=torch.float64, n_micro_batches=m), expected, rtol=1e-9
    )


@pytest.mark.parametrize("n", [1, 2, 4])
def test_s18_a_mixture_of_experts_trains_its_routers(n: int) -> None:
    """The router's gradient is that of `loss + weight * aux`, bit for bit."""
    expected = reference_case(MOE, GRADIENT_PROBE, steps=1)
    assert_same_bits(train_case(MOE, GRADIENT_PROBE, n=n, steps=1), expected, losses=False)


def test_s18_a_traced_model_may_add_an_auxiliary_loss() -> None:
    """`ts.add_aux_loss` in a submodule's forward is counted, or the model is refused: never ignored."""

    class Block(GatedBlock):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            out, aux = super().forward(x)
            ts.add_aux_loss(aux, 0.01)
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(16, 16), Block(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)))

    def loss(model: nn.Module, batch: Batch, criterion: Any) -> Tensor:
        hidden, aux = GatedBlock.forward(model.middle, model.first(batch[0]))
        return criterion(model.last(hidden), batch[1]) + 0.01 * aux

    case = Case("adds", lambda dropout: Model(), vectors(), loss=loss)
    expected = reference_case(case, GRADIENT_PROBE, steps=1)
    assert_same_bits(train_case(case, GRADIENT_PROBE, n=2, steps=1), expected, losses=False)


@pytest.mark.parametrize("m", [1, 4])
def test_s19_bf16_keeps_float32_weights_state_and_loss(m: int) -> None:
    """Master weights and optimizer state stay float32, and the option is honoured whatever the schedule."""
    result = train_case(MLP, ADAMW, n=3, steps=20, mixed_precision=True, n_micro_batches=m)
    reference = reference_case(MLP, ADAMW, steps=20, autocast=True)
    assert result.losses == pytest.approx(reference.losses, abs=5e-3)
    assert {tensor.dtype for tensor in result.state.values()} == {torch.float32}


def test_s19_a_bf16_model_stays_bf16() -> None:
    """Weights and inputs in bf16 without autocast are trained as they are."""

    def float32_loss(model: nn.Module, batch: Batch, criterion: Any) -> Tensor:
        return criterion(model(batch[0]).float(), batch[1])

    batches = MLP.batches(5, dtype=torch.bfloat16)
    expected = reference_train(MLP.model(dtype=torch.bfloat16), batches, SGD, nn.CrossEntropyLoss(), loss=float32_loss)
    assert_same_bits(train_case(MLP, SGD, n=3, steps=5, dtype=torch.bfloat16), expected)
