"""SCENARIOS section 1: tracing and partitioning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.driver import sliced_train, train_case
from tests.support.models import BN_CONV, MLP, Case, batchnorm_convnet, mlp4, vectors
from tests.support.nets_forward import Disordered, FlowInRoot, Wrapped
from tests.support.nets_values import Functional, Net, ResidualAcross
from tests.support.oracle import SGD, Result, assert_same_bits, reference_train, snapshot
from torchslicer.errors import SliceError, TraceError, VerificationError

quiet_batchnorm = pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning")


def assert_trains_exactly(model: nn.Module, *, n: int, **slice_options: Any) -> Result:
    """Train three steps sliced and by hand; fail on the first bit that differs."""
    batches, criterion = MLP.batches(3), nn.CrossEntropyLoss()
    expected = reference_train(model, batches, SGD, criterion)
    result = sliced_train(model, batches, SGD, criterion, n=n, slice_options=slice_options)
    assert_same_bits(result, expected, where=type(model).__name__)
    return result


@pytest.mark.parametrize(("layers", "n"), [(5, 4), (9, 6), (5, 5), (8, 3)])
def test_s01_exactly_n_nonempty_parts(layers: int, n: int) -> None:
    """5 layers for 4 stages gave 3 parts, or an empty one, and the fourth worker waited for ever."""
    plan = ts.slice(nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)]), n=n).plan
    sizes = [stage.last_unit - stage.first_unit + 1 for stage in plan.stages]
    assert len(sizes) == n
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("strategy", ["uniform", "parameters", "memory"])
def test_s01_more_stages_than_layers_is_refused_with_both_numbers(strategy: str) -> None:
    """3 layers for 4 stages: an error at slice that names 3 and 4, not fewer parts in silence."""
    with pytest.raises(SliceError, match=r"(?s)(4.*3|3.*4)"):
        ts.slice(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]), n=4, strategy=strategy)


@pytest.mark.parametrize("n", [0, -1])
def test_s01_an_impossible_n_is_refused(n: int) -> None:
    """No stages at all cannot be meant."""
    with pytest.raises(ValueError, match=str(n)):
        ts.slice(mlp4(), n=n)


def test_s02_control_flow_in_the_root_is_refused_or_right() -> None:
    """`if x.mean() > 0` in forward and children in another order: never the order of registration as a guess."""
    with pytest.raises(TraceError) as caught:
        ts.slice(FlowInRoot(), n=2, example=torch.randn(8, 16))
    text = str(caught.value)
    assert "FlowInRoot" in text
    assert "pack" in text
    assert "control flow" in text or "data-dependent" in text


def test_s02_without_example_inputs_the_refusal_asks_for_them() -> None:
    """A model that needs example inputs says so at slice, not at the first batch."""
    with pytest.raises(TraceError, match="example"):
        ts.slice(FlowInRoot(), n=2)


def test_s02_pack_is_the_way_out() -> None:
    """The model that cannot be traced is trained as the stages that the user names."""

    class Half(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return torch.tanh(x) if x.mean() > 0 else x

    assert_trains_exactly(FlowInRoot(), n=2, pack=lambda model: [Half(model.body), model.head])


def test_s02_children_in_another_order() -> None:
    """The order of calls counts, not the order of registration."""
    for n in (2, 3):
        assert_trains_exactly(Disordered(), n=n)


class Liar(Net):
    """Is another function for a tracer than for a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(x) if type(x) is Tensor else self.a(x)
        return self.d(torch.tanh(x))


def test_s02_a_graph_that_computes_something_else_is_refused() -> None:
    """The worst outcome is another function: the graph is compared with the model before training."""
    with pytest.raises(VerificationError):
        sliced_train(Liar(), MLP.batches(2), SGD, nn.CrossEntropyLoss(), n=2)
    with pytest.raises(VerificationError):
        ts.slice(Liar(), n=2, example=torch.randn(4, 16))


@pytest.mark.parametrize("n", [2, 3])
def test_s03_functional_ops_are_kept(n: int) -> None:
    """F.relu, a factor and a view with a dynamic size vanished without a word."""
    assert_trains_exactly(Functional(), n=n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_s04_a_skip_connection_crosses_cuts(n: int) -> None:
    """The add sits one and two stages after the value it needs."""
    result = assert_trains_exactly(ResidualAcross(), n=n)
    plan = result.extra["sliced"].plan
    assert plan.boundaries


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wrapped(mlp4()),
        lambda: nn.Sequential(nn.Sequential(*mlp4())),
        lambda: Wrapped(nn.Sequential(nn.Sequential(*mlp4()))),
    ],
)
def test_s05_a_wrapped_model_is_descended_into(make: Any) -> None:
    """A model whose only child is the real one was a single stage."""
    result = assert_trains_exactly(make(), n=4)
    assert len(result.extra["sliced"].plan.stages) == 4


def test_s05_data_parallel_is_descended_into_or_refused_by_name() -> None:
    """nn.DataParallel around the model: four stages, or an error that says what to do."""
    with torch.no_grad():
        model = nn.DataParallel(mlp4())
    try:
        sliced = ts.slice(model, n=4)
    except SliceError as error:
        assert "module" in str(error) or "DataParallel" in str(error)  # noqa: PT017  (either outcome is right)
    else:
        assert len(sliced.plan.stages) == 4


class OneUnit(nn.Module):
    """A model that is a single unit."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def test_s05_one_unsplittable_unit_is_named() -> None:
    """One LSTM for four stages: the error names the unit, or both numbers, and the way out."""
    with pytest.raises(SliceError, match=r"(?s)lstm|1 .*4|4 .*1"):
        ts.slice(OneUnit(), n=4)


def embedding_model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5000, 16), *[nn.Linear(16, 16) for _ in range(6)], nn.Linear(16, 8))


def best_heaviest(weights: list[int], n: int) -> int:
    """Return the smallest possible weight of the heaviest of *n* contiguous non-empty parts, by trying all."""
    if n == 1:
        return sum(weights)
    choices = range(1, len(weights) - n + 2)
    return min(max(sum(weights[:k]), best_heaviest(weights[k:], n - 1)) for k in choices)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_s06_parameters_are_balanced_as_well_as_possible(n: int) -> None:
    """A huge embedding and small blocks: the heaviest part is no heavier than the best contiguous cut's."""
    model = embedding_model()
    plan = ts.slice(model, n=n, strategy="parameters").plan
    weights = [sum(p.numel() for p in layer.parameters()) for layer in model]
    assert max(stage.num_parameters for stage in plan.stages) == best_heaviest(weights, n)


def test_s06_explicit_cuts_are_honoured_exactly() -> None:
    """Cuts by name: each begins a stage."""
    plan = ts.slice(embedding_model(), n=4, cuts=["1", "2", "7"]).plan
    assert [stage.first_unit for stage in plan.stages] == [0, 1, 2, 7]


def test_s06_an_unknown_cut_names_the_nearest() -> None:
    """A misspelt cut: the error names the nearest name."""
    with pytest.raises(ValueError, match=r"body"):
        ts.slice(Disordered(), n=2, cuts=["bod"])


def test_s06_cuts_and_n_must_agree() -> None:
    """Two cuts make three stages, not four."""
    with pytest.raises(ValueError, match=r"(?s)(3.*4|4.*3|2.*4|4.*2)"):
        ts.slice(embedding_model(), n=4, cuts=["1", "2"])


def test_s06_the_report_has_names_parameters_and_bytes() -> None:
    """What each part holds is known before training."""
    plan = ts.slice(embedding_model(), n=2, cuts=["1"]).plan
    assert plan.stages[0].parameters == ("0.weight",)
    assert plan.stages[0].num_parameters == 80_000
    assert plan.stages[0].parameter_bytes == 320_000
    assert type(plan).from_json(plan.to_json()) == plan


@quiet_batchnorm
@pytest.mark.parametrize("strategy", ["uniform", "parameters", "memory", "time"])
def test_s07_slicing_leaves_no_trace(strategy: str) -> None:
    """Measuring and verifying ran the model: weights, buffers, flags, gradients and the generator must be as before."""
    model = batchnorm_convnet(0.5).train()
    model.get_submodule("1").eval()
    example, target = BN_CONV.batches(1)[0]
    nn.functional.cross_entropy(model(example), target).backward()
    before = Result(snapshot(model), [])
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    ts.slice(model, n=3, strategy=strategy, example=example)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits(Result(snapshot(model), []), before)
    assert [module.training for module in model.modules()] == flags
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, grads, strict=True))


def test_s07_the_verified_first_batch_is_trained_once() -> None:
    """Verification on the first batch of train() leaves no trace in the run."""
    checked = train_case(BN_CONV, SGD, n=2, steps=2)
    unchecked = train_case(BN_CONV, SGD, n=2, steps=2, slice_options={"verify": False})
    assert_same_bits(checked, unchecked)


def test_s08_the_plan_names_first_and_last_module_of_each_part() -> None:
    """Inclusive or exclusive? The printed plan says which modules each stage holds."""
    sliced = ts.slice(mlp4(), n=3)
    text = str(sliced)
    assert str(sliced.plan) in text or text in str(sliced.plan)
    for stage in sliced.plan.stages:
        assert stage.units[0] in text
        assert stage.units[-1] in text
    assert [unit for stage in sliced.plan.stages for unit in stage.units] == [str(i) for i in range(9)]


def test_s08_a_strategy_of_ones_own() -> None:
    """A callable decides, and must answer with n stages."""
    plan = ts.slice(mlp4(), n=3, strategy=lambda graph, n: [2, 7]).plan
    assert [stage.first_unit for stage in plan.stages] == [0, 2, 7]
    with pytest.raises(ValueError, match="3"):
        ts.slice(mlp4(), n=3, strategy=lambda graph, n: [2])


def test_slicing_the_same_model_twice() -> None:
    """Slicing leaves the model usable: again with another n, or without the library."""
    model = mlp4()
    ts.slice(model, n=2)
    ts.slice(model, n=4)
    copy.deepcopy(model)(torch.randn(2, 16)).sum().backward()


def test_a_model_that_takes_no_tensor_graph_at_all() -> None:
    """Something that is no module is refused in one line."""
    with pytest.raises((ValueError, TypeError), match="Module"):
        ts.slice([nn.Linear(2, 2)], n=1)  # type: ignore[arg-type]


def test_a_case_needs_no_pack() -> None:
    """The vectors case is its own check: a plain Sequential in as many stages as it has modules."""
    case = Case("sequential", lambda dropout: mlp4(), vectors())
    assert len(train_case(case, SGD, n=9, steps=1).extra["sliced"].plan.stages) == 9
