"""The truth of the parity tests: a plain PyTorch training loop written by hand, and comparisons of two runs.

``rtol`` is relative to the largest absolute value of the tensor: ``max|a - b| <= rtol * max(max|a|, max|b|)``.
An element near zero in a tensor of ones is not asked for six digits of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Batch, Loss, call_and_compare

Spec = Mapping[str, Any]
OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]

SGD: Spec = {"name": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
ADAM: Spec = {"name": "Adam", "params": {"lr": 0.002}}
ADAMW: Spec = {"name": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.05}}
OPTIMIZERS = (SGD, ADAM, ADAMW)

# A power of two, so that the update is exact and so large that nothing of the gradient's bits is lost when it is
# subtracted from the parameter: after one step equal parameters mean equal gradients.
GRADIENT_PROBE: Spec = {"name": "SGD", "params": {"lr": 2.0**20}}


@dataclass(frozen=True)
class Result:
    """What a run left behind: the state by name, the loss of each step, the norms (where clipped), the model."""

    state: Mapping[str, Tensor]
    losses: Sequence[float]
    norms: Sequence[float] = ()
    model: nn.Module | None = None
    history: Sequence[Mapping[str, Any]] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, also those that are not persistent, also under tied names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def make_optimizer(spec: Spec | OptimizerFactory, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that *spec* (``{"name", "params"}`` or a function of the model) describes."""
    if callable(spec):
        return spec(model)
    kind = getattr(torch.optim, spec["name"])
    made: torch.optim.Optimizer = kind(model.parameters(), **spec["params"])
    return made


def reference_train(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: Spec | OptimizerFactory,
    criterion: Any,
    *,
    epochs: int = 1,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    interval: str = "epoch",
    autocast: bool = False,
    loss: Loss = call_and_compare,
    train_mode: bool = True,
) -> Result:
    """Train a deep copy of *model* with a plain loop and return what came out.

    Args:
        accumulate: That many batches are joined into one, which is what accumulation must equal.
        scheduler: Makes a scheduler from the optimizer; stepped after each step or each epoch, as *interval* says.
        autocast: bf16 autocast around the forward pass; the loss in float32 outside of it.
        loss: Computes the loss of one batch.
        train_mode: Call ``model.train()`` first; False leaves all ``training`` flags as they are.
    """
    model = copy.deepcopy(model)
    if train_mode:
        model.train()
    stepper = make_optimizer(optimizer, model)
    planner = scheduler(stepper) if scheduler else None
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(epochs):
        for batch in join(batches, accumulate):
            stepper.zero_grad(set_to_none=True)
            value = _autocast_loss(model, batch, criterion) if autocast else loss(model, batch, criterion)
            value.backward()
            if max_grad_norm is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)))
            stepper.step()
            losses.append(value.item())
            if planner and interval == "step":
                planner.step()
        if planner and interval == "epoch":
            planner.step()
    return Result(snapshot(model), losses, norms, model)


def _autocast_loss(model: nn.Module, batch: Batch, criterion: Any) -> Tensor:
    *inputs, target = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(*inputs)
    loss: Tensor = criterion(output.float(), target)
    return loss


def micro_train(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: Spec,
    criterion: Any,
    *,
    pieces: int,
    loss: Loss = call_and_compare,
) -> Result:
    """Train with micro-batches by hand, for ``mean`` losses over samples: how far rounding alone may drift."""
    model = copy.deepcopy(model).train()
    stepper = make_optimizer(optimizer, model)
    losses = []
    for batch in batches:
        stepper.zero_grad(set_to_none=True)
        total = 0.0
        for piece in zip(*(item.tensor_split(pieces) for item in batch), strict=True):
            value = loss(model, piece, criterion) * (len(piece[0]) / len(batch[0]))
            value.backward()
            total += value.item()
        stepper.step()
        losses.append(total)
    return Result(snapshot(model), losses, (), model)


def join(batches: Sequence[Batch], count: int) -> Iterable[Batch]:
    """Yield every *count* batches as one, the last group as short as it comes."""
    for start in range(0, len(batches), count):
        group = batches[start : start + count]
        yield group[0] if len(group) == 1 else tuple(torch.cat(items) for items in zip(*group, strict=True))


def reference_outputs(model: nn.Module, inputs: Sequence[Any], *, grad: bool = False) -> list[Any]:
    """Return the outputs of a copy of *model* in eval mode."""
    model = copy.deepcopy(model).eval()
    with nullcontext() if grad else torch.no_grad():
        return [model(*item) if isinstance(item, tuple) else model(item) for item in inputs]


def assert_same_bits(actual: Result, expected: Result, *, where: str = "", losses: bool = True) -> None:
    """Fail unless every parameter, buffer and loss is bit for bit the same; names the first that is not."""
    _assert_same_names(actual, expected, where)
    for name, tensor in expected.state.items():
        other = actual.state[name]
        assert _described(other) == _described(tensor), (
            f"{where}: '{name}' is {_described(other)}, not {_described(tensor)}"
        )
        assert _same_bits(other, tensor), f"{where}: '{name}' differs{_difference(other, tensor)}"
    if losses:
        assert len(actual.losses) == len(expected.losses), (
            f"{where}: {len(actual.losses)} losses, not {len(expected.losses)}"
        )
        for step, (got, want) in enumerate(zip(actual.losses, expected.losses, strict=True)):
            assert got == want, f"{where}: the loss of step {step} is {got!r}, not {want!r}"


def assert_close(
    actual: Result, expected: Result, *, rtol: float = 1e-6, atol: float = 0.0, where: str = "", losses: bool = True
) -> None:
    """Fail unless every parameter, buffer and loss agrees to *rtol* of its tensor's largest absolute value."""
    _assert_same_names(actual, expected, where)
    for name, tensor in expected.state.items():
        other = actual.state[name]
        assert _described(other) == _described(tensor), (
            f"{where}: '{name}' is {_described(other)}, not {_described(tensor)}"
        )
        worst = relative_difference(other, tensor)
        assert worst <= rtol or absolute_difference(other, tensor) <= atol, (
            f"{where}: '{name}' is off by {worst:.2e} relative"
        )
    if losses:
        assert len(actual.losses) == len(expected.losses), (
            f"{where}: {len(actual.losses)} losses, not {len(expected.losses)}"
        )
        for step, (got, want) in enumerate(zip(actual.losses, expected.losses, strict=True)):
            assert abs(got - want) <= rtol * abs(want) + atol, (
                f"{where}: the loss of step {step} is {got!r}, not {want!r}"
            )


def absolute_difference(a: Tensor, b: Tensor) -> float:
    """Return ``max|a - b|`` (0 for empty tensors)."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return ``max|a - b| / max(max|a|, max|b|)`` (0 for equal tensors)."""
    difference = absolute_difference(a, b)
    if difference == 0.0:
        return 0.0
    return difference / max(float(a.double().abs().max()), float(b.double().abs().max()))


def worst_difference(actual: Result, expected: Result) -> tuple[float, str]:
    """Return the largest relative difference of all tensors, and the name of that tensor."""
    return max((relative_difference(actual.state[name], tensor), name) for name, tensor in expected.state.items())


def _assert_same_names(actual: Result, expected: Result, where: str) -> None:
    missing = sorted(expected.state.keys() - actual.state.keys())
    unknown = sorted(actual.state.keys() - expected.state.keys())
    assert (missing, unknown) == ([], []), f"{where}: missing {missing}, unknown {unknown}"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype}{tuple(tensor.shape)}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Views as bytes: -0.0 and 0.0 differ, NaNs of the same bits are the same.
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _difference(a: Tensor, b: Tensor) -> str:
    count = int((a != b).sum())
    worst = f"{absolute_difference(a, b):.3e} ({relative_difference(a, b):.1e} relative)"
    return f" in {count} of {a.numel()} elements, at most {worst}"
