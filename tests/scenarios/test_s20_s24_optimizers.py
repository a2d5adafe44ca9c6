"""SCENARIOS section 3: optimizers, schedulers, clipping, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.support.driver import reference_case, train_case
from tests.support.models import GPT_CASE, MLP, Case, mlp4, vectors
from tests.support.nets_values import frozen
from tests.support.oracle import ADAMW, SGD, Spec, assert_close, assert_same_bits

PLAIN_SGD: Spec = {"name": "SGD", "params": {"lr": 0.4}}


def large_last_layer(dropout: float) -> nn.Module:
    model = mlp4()
    with torch.no_grad():
        model[-1].weight.mul_(100)
    return model


LARGE = Case("large", large_last_layer, vectors())


@pytest.mark.parametrize("m", [1, 4])
def test_s20_clipping_is_over_the_whole_model(m: int) -> None:
    """Each stage clipped its own norm; the reported norm must be the global one."""
    small: Spec = {"name": "SGD", "params": {"lr": 0.01}}
    expected = reference_case(LARGE, small, steps=3, max_grad_norm=1.0, dtype=torch.float64)
    result = train_case(LARGE, small, n=4, steps=3, max_grad_norm=1.0, dtype=torch.float64, n_micro_batches=m)
    assert_close(result, expected, rtol=1e-9)
    assert list(result.norms) == pytest.approx(list(expected.norms), rel=1e-9)
    assert expected.norms[0] > 1.0


@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_s20_an_impossible_limit_is_refused(bad: float) -> None:
    """A norm of zero or less would stop all training."""
    with pytest.raises(ValueError, match="max_grad_norm"):
        train_case(MLP, SGD, n=2, steps=1, max_grad_norm=bad)


def test_s21_a_part_without_parameters() -> None:
    """`optimizer got an empty parameter list`: a part of ReLU, Flatten or Dropout has no optimizer, that is all."""

    def build(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))

    case = Case("empty", build, vectors())
    result = train_case(case, SGD, n=4, steps=3)
    assert_same_bits(result, reference_case(case, SGD, steps=3))
    assert result.extra["sliced"].plan.stages[1].num_parameters == 0


@pytest.mark.parametrize("layers", [("0", "2"), ("8",), ("4",)], ids=str)
def test_s21_a_part_whose_parameters_are_all_frozen(layers: tuple[str, ...]) -> None:
    """All of a stage's parameters are frozen, in front, at the end or in the middle."""
    case = Case("frozen", lambda dropout: frozen(*layers), vectors())
    assert_same_bits(train_case(case, ADAMW, n=5, steps=3), reference_case(case, ADAMW, steps=3))


def test_s22_the_schedule_is_the_same_in_every_part() -> None:
    """StepLR halves the rate each epoch: 0.4, 0.2, 0.1 in all four parts, and in the history."""
    described = {"name": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    expected = reference_case(
        MLP, PLAIN_SGD, steps=2, epochs=3, scheduler=lambda opt: StepLR(opt, step_size=1, gamma=0.5)
    )
    result = train_case(MLP, PLAIN_SGD, n=4, steps=2, epochs=3, scheduler=described)
    assert_same_bits(result, expected)
    assert [entry["lr"] for entry in result.history] == pytest.approx([0.4, 0.2, 0.1])


@pytest.mark.filterwarnings("error")
def test_s22_no_warning_about_the_order_of_steps() -> None:
    """A stage without trainable parameters has no scheduler either; no other one is stepped twice or too early."""
    case = Case("frozen", lambda dropout: frozen("0", "2"), vectors())
    described = {"name": "StepLR", "params": {"step_size": 1, "gamma": 0.5}, "interval": "step"}
    expected = reference_case(
        case, PLAIN_SGD, steps=4, scheduler=lambda opt: StepLR(opt, step_size=1, gamma=0.5), interval="step"
    )
    assert_same_bits(train_case(case, PLAIN_SGD, n=5, steps=4, scheduler=described), expected)


def without_decay(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    plain = [p for name, p in named if name.endswith("bias")]
    rest = [p for name, p in named if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": rest}, {"params": plain, "weight_decay": 0.0}], lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("case", [MLP, GPT_CASE], ids=lambda case: case.name)
def test_s23_parameter_groups_by_name(case: Case) -> None:
    """No weight decay on biases, in whichever part they are."""
    groups = [{"match": "*bias", "weight_decay": 0.0}]
    spec = {"name": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "groups": groups}}
    expected = reference_case(case, without_decay, steps=4)  # type: ignore[arg-type]
    assert_same_bits(train_case(case, spec, n=4, steps=4), expected)


BAD_SPECS: dict[str, tuple[Any, Any, str]] = {
    "misspelt argument": ({"name": "SGD", "params": {"lr": 0.1, "momentm": 0.9}}, "CrossEntropyLoss", "momentum"),
    "misspelt optimizer": ({"name": "AdmW", "params": {}}, "CrossEntropyLoss", "AdamW"),
    "misspelt key": ({"name": "SGD", "parms": {"lr": 0.1}}, "CrossEntropyLoss", "params"),
    "misspelt loss": (SGD, {"name": "CrossEntropyLos", "params": {}}, "CrossEntropyLoss"),
    "misspelt loss argument": (SGD, {"name": "CrossEntropyLoss", "params": {"reducton": "sum"}}, "reduction"),
    "impossible value": ({"name": "SGD", "params": {"lr": -1.0}}, "CrossEntropyLoss", "lr|learning rate"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_s23_what_is_misspelt_is_refused_before_training(name: str) -> None:
    """The error is raised at train(), names the nearest right word, and nothing has changed."""
    optimizer, criterion, hint = BAD_SPECS[name]
    drawn: list[int] = []

    class Loader(list[Any]):
        def __iter__(self) -> Any:
            drawn.append(1)
            return super().__iter__()

    with pytest.raises(ValueError, match=hint):
        train_case(MLP, optimizer, n=2, steps=1, batches=Loader(MLP.batches(1)), criterion=criterion)
    assert drawn == []


def test_s23_an_unknown_option_of_train_is_refused() -> None:
    """A misspelt keyword of train() is a TypeError or names the right one; it is never ignored."""
    with pytest.raises((TypeError, ValueError), match="n_microbatches"):
        train_case(MLP, SGD, n=2, steps=1, n_microbatches=2)


@pytest.mark.parametrize("batches", [2, 3])
def test_s24_accumulation_equals_the_larger_batch(batches: int) -> None:
    """Two batches of 8, each in 2 micro-batches, are one of 16; a final short group is applied, not dropped."""
    expected = reference_case(MLP, SGD, steps=batches, accumulate=2, dtype=torch.float64)
    result = train_case(MLP, SGD, n=2, steps=batches, accumulate=2, n_micro_batches=2, dtype=torch.float64)
    assert_close(result, expected, rtol=1e-9, losses=False)


@pytest.mark.parametrize("bad", [0, -2, 1.5])
def test_s24_an_impossible_number_of_batches_is_refused(bad: Any) -> None:
    """Accumulating no batch cannot be meant."""
    with pytest.raises(ValueError, match="accumulate"):
        train_case(MLP, SGD, n=2, steps=1, accumulate=bad)
