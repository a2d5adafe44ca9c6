"""The loss as a value: any loss of torch.nn or a callable, and the weight of each micro-batch in the batch's loss."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone calls it F
from torch.utils import _pytree as pytree

from torchslicer.errors import ConfigError, DataError, StageError, UserError, nearest
from torchslicer.pipeline.batch import describe
from torchslicer.pipeline.specs import check_params, construct, find_class, normalized, read_spec

_ALIASES = {
    "ce": "crossentropy",
    "xent": "crossentropy",
    "mae": "l1",
    "l2": "mse",
    "binarycrossentropy": "bce",
    "binarycrossentropywithlogits": "bcewithlogits",
    "kl": "kldiv",
    "triplet": "tripletmargin",
}
_TRIPLET = (nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss)
_PAIR = (nn.CosineEmbeddingLoss, nn.MarginRankingLoss)
_COUNTED = (nn.CrossEntropyLoss, nn.NLLLoss)
_PICK = "give a callable (output, target) that picks what it needs"
_WITH_PARAMETERS = ("AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss")


@dataclass(frozen=True)
class Criterion:
    """A loss. Make one with `build_criterion`.

    Attributes:
        name: What to call it in messages.
        function: Module or callable ``(output, target)``.
        reduction: ``"mean"``, ``"sum"`` or ``"batchmean"``.
    """

    name: str
    function: Callable[..., Any]
    reduction: str = "mean"

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss, a tensor without dimensions, computed in float32 (float64 stays).

        Losses on several outputs take a tuple: CosineEmbedding and MarginRanking ``(x1, x2)``, Triplet ``(anchor,
        positive, negative)`` (no target), GaussianNLL ``(mean, var)``. CTC takes ``log_probs`` and the target
        ``(targets, input_lengths, target_lengths)``.

        Raises:
            ConfigError: If the output's form does not suit the loss, or the result is not a single number.
            StageError: If the loss refuses the values; the message says what they were.
        """
        arguments = self._arguments(_upcast(output), _upcast(target))
        device_type = _device_type(output)
        if device_type != "cpu":  # there a label that is no class would end the whole process's use of the device
            self._check_classes(output, target, None)
        try:
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    result = self.function(*arguments)
            else:
                result = self.function(*arguments)
        except UserError:
            raise
        except Exception as error:
            self._check_classes(output, target, error)
            found = f"output {describe(output)}, target {describe_labels(target)}"
            raise StageError(f"criterion {self.name}: {type(error).__name__}: {error} ({found})") from error
        return self._checked(result)

    def _check_classes(self, output: Any, target: Any, error: Exception | None) -> None:
        """Raise `StageError` if a class index is none of the classes that *output* has scores for."""
        if not (isinstance(self.function, _COUNTED) and isinstance(output, Tensor) and _is_index(target)):
            return
        classes, ignored = output.shape[min(output.dim() - 1, 1)], self.function.ignore_index
        target = target.long()  # of uint8, 156 equals -100
        bad = target[(target != ignored) & ((target < 0) | (target >= classes))]
        if bad.numel():
            raise StageError(
                f"criterion {self.name}: {bad.numel()} of {target.numel()} targets are no class: they are from "
                f"{int(bad.min())} to {int(bad.max())}, expected 0 to {classes - 1} (or {ignored}, which is ignored), "
                f"since the model's output has shape {tuple(output.shape)}; correct the labels, or give the model as "
                "many outputs as there are classes"
            ) from error

    def weighted_loss(self, output: Any, target: Any, share: float) -> Tensor:
        """Return ``share * loss``, the part of a micro-batch in the batch's loss.

        A share of exactly 0 (every target of the micro-batch is ignored) gives 0 with zero gradients: the loss
        alone would be 0 / 0 there, though the whole batch's is finite.
        """
        if share == 0.0:
            return _connected_zero(output)
        loss = self.loss(output, target)
        return loss if share == 1.0 else loss * share

    def count(self, target: Any, size: int) -> Tensor | float | None:
        """Return the number that the loss divides by for this target; None if it does not divide (``"sum"``).

        For CrossEntropy and NLL with class indices it is the sum of the class weights over the targets that are
        not ignored; for everything else the number of samples, *size*.
        """
        if self.reduction == "sum":
            return None
        if isinstance(self.function, _COUNTED) and isinstance(target, Tensor) and not target.is_floating_point():
            return self._count_classes(self.function, target)
        return float(size)

    def _count_classes(self, function: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> Tensor:
        target = target.long()  # of uint8, 156 equals -100
        kept = target[target != function.ignore_index]
        if function.weight is None:
            return torch.tensor(float(kept.numel()), dtype=torch.float64)
        weight = function.weight.detach().to(kept.device, torch.float64)
        try:
            return weight[kept].sum()
        except IndexError as error:
            raise DataError(
                f"{self.name}: a target is no class: {len(weight)} class weights, targets from "
                f"{int(kept.min())} to {int(kept.max())}"
            ) from error

    def shares(self, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
        """Return the weight of each micro-batch of one step, so that the weighted losses add up to the batch's loss.

        It is ``count / total``; 1.0 for a sum or a single micro-batch. If the total is 0 (every target is ignored)
        it is ``1 / m``: each loss is nan then, as the whole batch's would be.
        """
        if len(targets) == 1 or self.reduction == "sum":
            return [1.0] * len(targets)
        counts = [self.count(target, size) for target, size in zip(targets, sizes, strict=True)]
        numbers = [float(count) for count in counts if count is not None]
        total = sum(numbers)
        if total == 0.0:
            return [1.0 / len(numbers)] * len(numbers)
        return [number / total for number in numbers]

    def to(self, device: torch.device | str) -> Criterion:
        """Return the criterion with its weights on *device*; the module it was built from is left alone."""
        if not isinstance(self.function, nn.Module):
            return self
        wanted = torch.empty(0, device=device).device
        tensors = [*self.function.parameters(), *self.function.buffers()]
        if all(tensor.device == wanted for tensor in tensors):
            return self
        return replace(self, function=copy.deepcopy(self.function).to(wanted))

    def _arguments(self, output: Any, target: Any) -> tuple[Any, ...]:
        function = self.function
        if isinstance(function, _TRIPLET):
            return self._outputs(output, 3, "(anchor, positive, negative)")
        if isinstance(function, _PAIR):
            return (*self._outputs(output, 2, "(x1, x2)"), target)
        if isinstance(function, nn.GaussianNLLLoss):
            mean, var = self._outputs(output, 2, "(mean, var)")
            return mean, target, var
        if isinstance(function, nn.CTCLoss):
            if not isinstance(target, (tuple, list)) or len(target) != 3:
                form = "(targets, input_lengths, target_lengths)"
                raise ConfigError(f"{self.name} takes the target {form}, got {describe(target)}")
            return (output, *target)
        if not isinstance(output, Tensor) and type(function) in _loss_classes().values():
            got = describe(output)
            raise ConfigError(f"{self.name} takes one tensor, the model returns {got}; {_PICK}")
        return output, target

    def _outputs(self, output: Any, number: int, form: str) -> tuple[Any, ...]:
        if not isinstance(output, (tuple, list)) or len(output) != number:
            raise ConfigError(f"{self.name} takes the model's output as {form}, got {describe(output)}")
        return tuple(output)

    def _checked(self, result: Any) -> Tensor:
        if not isinstance(result, Tensor):
            raise ConfigError(f"criterion {self.name} must return a tensor, got {type(result).__name__}")
        if result.dim() != 0:
            raise ConfigError(
                f"criterion {self.name} must return a single number, got shape {tuple(result.shape)}; "
                "reduce it with .mean() or .sum()"
            )
        return result


def build_criterion(spec: Any) -> Criterion:
    """Build a criterion from what a user may give.

    Args:
        spec: A name in any usual spelling (``"cross_entropy"``, ``"MSELoss"``), ``{"name": ..., "params": {...}}``,
            an `nn.Module`, a class or factory without arguments, or a callable ``(output, target)``. Parameters
            given as lists of numbers become float tensors.

    Raises:
        ConfigError: If the name or a parameter is unknown or impossible, the loss gives no single number, or it has
            parameters to train.

    Example:
        >>> build_criterion("mse").loss(torch.zeros(2), torch.ones(2))
        tensor(1.)
    """
    if isinstance(spec, Criterion):
        return spec
    if isinstance(spec, (str, Mapping)):
        name, params = read_spec(spec, "criterion")
        if isinstance(name, str):
            known = find_class(name, _loss_classes(), "criterion", aliases=_ALIASES, refused=_WITH_PARAMETERS)
            return _from_class(known, params)
        return build_criterion(functools.partial(name, **params) if params else name)
    if isinstance(spec, functools.partial):
        return _from_partial(spec)
    if isinstance(spec, nn.Module) or (callable(spec) and not _is_factory(spec)):
        return _from_callable(spec)
    if callable(spec):
        return _from_factory(spec)
    forms = "a name, a dictionary, a module, a factory or a callable (output, target)"
    raise ConfigError(f"criterion must be {forms}, got {type(spec).__name__}")


def _from_class(cls: type, params: Mapping[str, Any]) -> Criterion:
    where = f"criterion {cls.__name__}"
    _refuse_trainable(cls.__name__, trainable=cls.__name__ in _WITH_PARAMETERS)
    check_params(cls, params, where)
    if "reduction" in params:
        _check_reduction(cls, cls.__name__, params["reduction"])
    tensors = {name: _number_list_to_tensor(value) for name, value in params.items()}
    return _from_callable(construct(where, lambda: cls(**tensors)))


def _from_partial(spec: functools.partial[Any]) -> Criterion:
    cls = spec.func if isinstance(spec.func, type) else _class_of_function(spec.func)
    if cls is not None and not spec.args:
        return _from_class(cls, spec.keywords)
    if _is_factory(spec):
        return _from_factory(spec)
    return _from_callable(spec, reduction=spec.keywords.get("reduction"))


def _from_factory(factory: Callable[[], Any]) -> Criterion:
    name = getattr(factory, "__name__", type(factory).__name__)
    return _from_callable(construct(f"criterion {name}", factory))


def _from_callable(function: Any, *, reduction: Any = None) -> Criterion:
    cls = _class_of_function(function)
    if cls is not None:
        return _from_class(cls, {})
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"the criterion's factory must return a module or a callable (output, target), got {name}")
    if isinstance(function, nn.Module):
        _refuse_trainable(name, trainable=any(p.requires_grad for p in function.parameters()))
    reduction = getattr(function, "reduction", "mean") if reduction is None else reduction
    return Criterion(name, function, _check_reduction(type(function), name, reduction))


def _check_reduction(cls: type, name: str, reduction: Any) -> str:
    allowed = ["mean", "sum", "batchmean"] if issubclass(cls, nn.KLDivLoss) else ["mean", "sum"]
    if reduction in allowed:
        return str(reduction)
    if reduction == "none":
        raise ConfigError(
            f'criterion {name} has reduction="none": training needs a single number; use "mean" or "sum", '
            "or give a callable (output, target) that reduces"
        )
    if cls in _loss_classes().values():
        hint = nearest(str(reduction), allowed)
        raise ConfigError(f"criterion {name} has no reduction {reduction!r}{hint}; it is one of {allowed}")
    return "mean"  # a custom loss may mean anything by it; samples are the best guess


def _refuse_trainable(name: str, *, trainable: bool) -> None:
    if trainable:
        raise ConfigError(
            f"criterion {name} has parameters of its own: no stage holds them, so no optimizer would train them. Make "
            "the layer the last one of the model and use a loss without parameters, or freeze it: requires_grad_(False)"
        )


@functools.cache
def _loss_classes() -> dict[str, type]:
    classes = {name: getattr(nn, name) for name in dir(nn) if name.split("2d")[0].endswith("Loss")}
    return {name: cls for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, nn.Module)}


@functools.cache
def _functions() -> list[tuple[Any, type]]:
    """The losses of `torch.nn.functional`, each with its class."""
    by_name = {normalized(name): cls for name, cls in _loss_classes().items()}
    keys = {name: _ALIASES.get(normalized(name), normalized(name)) for name in dir(F) if name.islower()}
    return [(getattr(F, name), by_name[key]) for name, key in keys.items() if key in by_name]


def _class_of_function(function: Any) -> type | None:
    return next((cls for known, cls in _functions() if known is function), None)


def _is_factory(function: Any) -> bool:
    """Whether *function* is called without arguments to make a loss (as against ``(output, target)``)."""
    made_by = function.func if isinstance(function, functools.partial) else function
    if isinstance(made_by, type):
        return True
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return _binds(signature) and not _binds(signature, None, None)


def _binds(signature: inspect.Signature, *arguments: Any) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _upcast(structure: Any) -> Any:
    if not isinstance(structure, Tensor):
        return pytree.tree_map_only(Tensor, _upcast, structure)
    return structure.float() if structure.dtype in (torch.bfloat16, torch.float16) else structure


def _is_index(target: Any) -> bool:
    if not isinstance(target, Tensor) or target.numel() == 0:
        return False
    return not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)


def describe_labels(target: Any) -> str:
    """Return what *target* is, for messages; of integers also the range.

    >>> describe_labels(torch.tensor([3, 11]))
    'tensor of shape (2,) with values from 3 to 11'
    """
    values = f" with values from {int(target.min())} to {int(target.max())}" if _is_index(target) else ""
    return f"{describe(target)}{values}"


def _device_type(structure: Any) -> str:
    leaves = [structure] if isinstance(structure, Tensor) else pytree.tree_leaves(structure)
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")


def _connected_zero(output: Any) -> Tensor:
    """Return 0 with a gradient of zeros for every floating tensor of *output*, whatever its values."""
    zero = torch.zeros(())
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            part = leaf.flatten()[:0].sum(dtype=torch.promote_types(leaf.dtype, torch.float32))
            zero = part + zero.to(part.device)
    return zero


def _number_list_to_tensor(value: Any) -> Any:
    numbers = isinstance(value, (list, tuple)) and value and all(isinstance(item, (int, float)) for item in value)
    return torch.tensor([float(item) for item in value]) if numbers else value
