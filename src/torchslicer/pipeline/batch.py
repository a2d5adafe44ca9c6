"""What a loader yields, made into a `Batch`: the model's inputs by name, the target, and the number of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchslicer.errors import ConfigError, DataError, nearest

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Where the target is looked for in a dictionary, in this order, when no ``target_key`` is given."""

ACCEPTED_FORMS = (
    "accepted forms: (x, y); ((x1, x2), y) and (x1, x2, y) for a model with several inputs; ({name: x, ...}, y); "
    "a dictionary of inputs with the target under target_key= or one of " + ", ".join(TARGET_KEYS)
)

_MISSING = object()


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        inputs: The inputs that were given, by the name of the model's input.
        target: Any structure of tensors, or None (prediction only).
        size: Number of samples.
    """

    inputs: dict[str, Any]
    target: Any
    size: int


class BatchReader:
    """Reads what a loader yields.

    Args:
        input_names: All inputs of the model, in order, optional ones included.
        required: Those that have no default.
        target_key: Where dictionaries hold the target; without it the first of `TARGET_KEYS` found.

    Raises:
        ConfigError: If a required name is no input of the model.

    Example:
        >>> reader = BatchReader(["x"], ["x"])
        >>> batch = reader.read((torch.zeros(4, 2), torch.zeros(4)))
        >>> sorted(batch.inputs), batch.size
        (['x'], 4)
    """

    def __init__(self, input_names: Sequence[str], required: Sequence[str], *, target_key: str | None = None) -> None:
        self.input_names = tuple(input_names)
        self.required = tuple(required)
        self.target_key = target_key
        for name in self.required:
            if name not in self.input_names:
                raise ConfigError(f"required input {name!r} is not one of the model's inputs {list(self.input_names)}")

    def read(self, raw: Any) -> Batch:
        """Read a batch to train or evaluate on; it must have a target.

        Raises:
            DataError: If the form is not one of the accepted ones, a key is unknown, a required input is missing,
                or there is no target.
        """
        inputs, target = self._split(raw, training=True)
        if target is _MISSING:
            raise DataError(f"the batch has no target: got {describe(raw)}; {ACCEPTED_FORMS}")
        return self._batch(inputs, target)

    def read_inputs(self, raw: Any) -> Batch:
        """Read a batch to predict on; a target may be there or not (then it is None).

        Raises:
            DataError: If the form is not one of the accepted ones, a key is unknown or a required input is missing.
        """
        inputs, target = self._split(raw, training=False)
        return self._batch(inputs, None if target is _MISSING else target)

    def _batch(self, inputs: dict[str, Any], target: Any) -> Batch:
        missing = [name for name in self.required if name not in inputs]
        if missing:
            raise DataError(
                f"the batch lacks the required input(s) {missing}: it gives {list(inputs)}, "
                f"the model takes {list(self.input_names)}; {ACCEPTED_FORMS}"
            )
        inputs = {name: to_tensors(value) for name, value in inputs.items()}
        target = to_tensors(target)
        return Batch(inputs, target, batch_size(inputs, target))

    def _split(self, raw: Any, *, training: bool) -> tuple[dict[str, Any], Any]:
        if isinstance(raw, Mapping):
            return self._split_mapping(raw, training=training)
        if isinstance(raw, (tuple, list)):
            return self._split_sequence(raw, training=training)
        if raw is None:
            raise DataError(f"the batch is None; {ACCEPTED_FORMS}")
        return self._positional([raw]), _MISSING

    def _split_mapping(self, raw: Mapping[Any, Any], *, training: bool) -> tuple[dict[str, Any], Any]:
        key = self._find_target_key(raw, training=training)
        inputs = self._named({name: value for name, value in raw.items() if name != key})
        return inputs, _MISSING if key is None else raw[key]

    def _find_target_key(self, raw: Mapping[Any, Any], *, training: bool) -> str | None:
        if self.target_key is not None:
            if self.target_key in raw:
                return self.target_key
            if training:
                keys = [str(key) for key in raw]
                raise DataError(
                    f"the batch has no key {self.target_key!r} (target_key=): its keys are {keys}"
                    + nearest(self.target_key, keys)
                )
            return None
        # A required input may itself be called "y" or "target": then it is an input, not the target.
        return next((key for key in TARGET_KEYS if key in raw and key not in self.required), None)

    def _split_sequence(self, raw: Sequence[Any], *, training: bool) -> tuple[dict[str, Any], Any]:
        if len(raw) == 0:
            raise DataError(f"the batch is an empty {type(raw).__name__}; {ACCEPTED_FORMS}")
        if len(raw) == 1 or (not training and self._all_inputs(raw)):
            return self._whole(raw), _MISSING
        if len(raw) == 2:
            return self._nested(raw[0]), raw[1]
        if len(self.input_names) < max(2, len(raw) - 1) or isinstance(raw[0], Mapping):
            raise DataError(
                f"the batch has {len(raw)} elements ({describe(raw)}) but the model takes "
                f"{len(self.input_names)} input(s) {list(self.input_names)}; {ACCEPTED_FORMS}"
            )
        return self._positional(raw[:-1]), raw[-1]

    def _all_inputs(self, raw: Sequence[Any]) -> bool:
        return len(raw) == len(self.required) and not isinstance(raw[0], (Mapping, tuple, list))

    def _whole(self, raw: Sequence[Any]) -> dict[str, Any]:
        return self._nested(raw[0]) if len(raw) == 1 else self._positional(raw)

    def _nested(self, item: Any) -> dict[str, Any]:
        """Inputs from the first element of a pair: by name, spread over several inputs, or one input."""
        if isinstance(item, Mapping):
            return self._named(item)
        if isinstance(item, (tuple, list)) and 1 < len(item) <= len(self.input_names):
            return self._positional(item)
        return self._positional([item])

    def _positional(self, items: Sequence[Any]) -> dict[str, Any]:
        if len(items) > len(self.input_names):
            raise DataError(f"the batch gives {len(items)} input(s), the model takes {list(self.input_names)}")
        return dict(zip(self.input_names[: len(items)], items, strict=True))

    def _named(self, items: Mapping[Any, Any]) -> dict[str, Any]:
        for key in items:
            if key not in self.input_names:
                raise DataError(
                    f"the batch has a key {key!r} that is no input of the model{nearest(str(key), self.input_names)}; "
                    f"its inputs are {list(self.input_names)}. Drop the key in the collate function or, if it is the "
                    "target, name it with target_key="
                )
        return dict(items)


def batch_size(inputs: Mapping[str, Any], target: Any) -> int:
    """Number of samples: ``size(0)`` of the first tensor that has a dimension, the target's before the inputs'.

    Raises:
        DataError: If no tensor has a dimension.

    Example:
        >>> batch_size({"x": torch.zeros(3, 2)}, None)
        3
    """
    for leaf in _leaves(target, inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.size(0)
    raise DataError(
        f"the batch has no tensor with a batch dimension: inputs {describe(dict(inputs))}, target {describe(target)}"
    )


def to_tensors(structure: Any) -> Any:
    """Return *structure* with its numpy arrays as tensors; every other leaf stays.

    Raises:
        DataError: If an array has a type that torch does not know (strings, objects).

    Example:
        >>> to_tensors((np.ones(2, dtype=np.float32), 3))
        (tensor([1., 1.]), 3)
    """
    if isinstance(structure, torch.Tensor):
        return structure
    return pytree.tree_map(_leaf_to_tensor, structure)


def _leaf_to_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    try:
        # A read-only array is copied: a tensor on it could be written through.
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a numpy array of shape {leaf.shape} and type {leaf.dtype} cannot become a tensor ({error}); "
            "make it a tensor in the data set or the collate function"
        ) from error


def _leaves(*structures: Any) -> Iterable[Any]:
    for structure in structures:
        yield from pytree.tree_leaves(structure)


def batches_of(loader: Any) -> Iterable[Any]:
    """Return *loader*, unless it is one tensor: taken for a loader, each of its rows would be a batch.

    Raises:
        DataError: It is a tensor or a numpy array.
    """
    if isinstance(loader, (torch.Tensor, np.ndarray)):
        raise DataError(
            f"expected a loader, which yields batches, got {describe(loader)}; if that is one batch, "
            "pass a list of it: [x]"
        )
    batches: Iterable[Any] = loader
    return batches


def describe(value: Any) -> str:
    """Return what *value* is, for messages: its kind and shape, never its contents.

    >>> describe((torch.zeros(2, 3), 1))
    'tuple of 2 (tensor of shape (2, 3), int)'
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__.lower()} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {[str(key) for key in value]}"
    if isinstance(value, (tuple, list)):
        shown = ", ".join(describe(item) for item in value[:4]) + (", ..." if len(value) > 4 else "")
        return f"{type(value).__name__} of {len(value)} ({shown})"
    return type(value).__name__
