"""A batch cut into micro-batches, and outputs of micro-batches put together again."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchslicer.errors import ConfigError, DataError
from torchslicer.pipeline.batch import Batch


def split_sizes(size: int, num_microbatches: int) -> list[int]:
    """Sizes of the micro-batches of *size* samples: they differ by at most one, larger ones first.

    With fewer samples than micro-batches there are as many micro-batches as samples.

    Raises:
        DataError: If there is no sample.
        ConfigError: If ``num_microbatches`` is below 1.

    Example:
        >>> split_sizes(10, 4), split_sizes(2, 4)
        ([3, 3, 2, 2], [1, 1])
    """
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches must be at least 1, got {num_microbatches}")
    if size < 1:
        raise DataError("the batch has no samples (size 0); drop empty batches in the loader")
    pieces = min(size, num_microbatches)
    small, larger = divmod(size, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


def split(structure: Any, sizes: Sequence[int], size: int, *, shared: Collection[str] = ()) -> list[Any]:
    """Cut every tensor of *structure* along dimension 0; the pieces are views.

    Tensors without a dimension and values that are no tensors are repeated. With one piece the very same
    structure is returned.

    Args:
        structure: Nested tuples, lists and dictionaries.
        sizes: Sizes of the pieces; their sum is *size*.
        size: Number of samples of the batch.
        shared: Keys of dictionaries whose values are repeated as they are.

    Raises:
        DataError: If a tensor's dimension 0 is not *size* and the tensor is not shared.

    Example:
        >>> [piece["x"].tolist() for piece in split({"x": torch.arange(3)}, [2, 1], 3)]
        [[0, 1], [2]]
    """
    if sum(sizes) != size:
        raise DataError(f"micro-batches of sizes {list(sizes)} do not add up to the batch size {size}")
    if len(sizes) == 1:
        return [structure]
    leaves, spec = pytree.tree_flatten(structure)
    # Paths are slow to make: only where a name is needed.
    fits = not shared and all(_is_whole(leaf) or leaf.size(0) == size for leaf in leaves)
    paths = [()] * len(leaves) if fits else [path for path, _ in pytree.tree_flatten_with_path(structure)[0]]
    columns = [_split_leaf(path, leaf, sizes, size, shared) for path, leaf in zip(paths, leaves, strict=True)]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(len(sizes))]


def _is_whole(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or leaf.dim() == 0


def _split_leaf(path: Any, leaf: Any, sizes: Sequence[int], size: int, shared: Collection[str]) -> list[Any]:
    if _is_whole(leaf) or _is_shared(path, shared):
        return [leaf] * len(sizes)
    if leaf.size(0) != size:
        raise DataError(
            f"{_path_text(path)} has shape {tuple(leaf.shape)}, but the batch has {size} samples, so its dimension 0 "
            "cannot be cut into micro-batches. If every micro-batch needs it whole (a mask, a table), name it in "
            "shared_inputs=; otherwise give it one row a sample"
        )
    ends = itertools.accumulate(sizes)
    return [leaf.narrow(0, end - length, length) for end, length in zip(ends, sizes, strict=True)]


def _is_shared(path: Any, shared: Collection[str]) -> bool:
    return bool(shared) and any(getattr(key, "key", None) in shared for key in path)


def _path_text(path: Any) -> str:
    """The path of a leaf as people write it: ``inputs.mask``, ``target[0]``."""
    text = ""
    for key in path:
        if isinstance(key, pytree.SequenceKey):
            text += f"[{key.idx}]"
        else:
            text += f".{getattr(key, 'key', getattr(key, 'name', key))}"
    return f"tensor {text.lstrip('.')!r}" if text else "the tensor"


def split_batch(batch: Batch, num_microbatches: int, shared: Collection[str] = ()) -> list[Batch]:
    """Cut a batch into micro-batches.

    Args:
        batch: The batch.
        num_microbatches: How many; fewer if there are fewer samples.
        shared: Inputs that every micro-batch takes whole.

    Raises:
        DataError: If the batch is empty or a tensor cannot be cut.

    Example:
        >>> pieces = split_batch(Batch({"x": torch.zeros(5, 2)}, torch.zeros(5), 5), 2)
        >>> [piece.size for piece in pieces]
        [3, 2]
    """
    sizes = split_sizes(batch.size, num_microbatches)
    if len(sizes) == 1:
        return [batch]
    inputs = split(batch.inputs, sizes, batch.size, shared=shared)
    targets = split({"target": batch.target}, sizes, batch.size)
    return [Batch(i, t["target"], n) for i, t, n in zip(inputs, targets, sizes, strict=True)]


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """Put outputs of consecutive micro-batches or batches together: tensors are concatenated along dimension 0.

    Tensors without a dimension, and values that are no tensors, become a list with one entry a piece; None in
    every piece stays None.

    Raises:
        DataError: If there is no output, the structures differ, or the shapes do not fit.

    Example:
        >>> merge_outputs([(torch.zeros(2, 3), torch.tensor(1.0)), (torch.zeros(1, 3), torch.tensor(2.0))])[0].shape
        torch.Size([3, 3])
    """
    if len(outputs) == 0:
        raise DataError("there are no outputs to put together: the loader yielded no batch")
    first, spec = pytree.tree_flatten_with_path(outputs[0])
    columns: list[list[Any]] = [[leaf] for _, leaf in first]
    for number, output in enumerate(outputs[1:], start=1):
        leaves, other = pytree.tree_flatten(output)
        if other != spec:
            raise DataError(f"output {number} has another structure than output 0: {other} instead of {spec}")
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    merged = [_merge_leaf(path, column) for (path, _), column in zip(first, columns, strict=True)]
    return pytree.tree_unflatten(merged, spec)


def _merge_leaf(path: Any, pieces: list[Any]) -> Any:
    if all(piece is None for piece in pieces):
        return None
    if not all(isinstance(piece, torch.Tensor) and piece.dim() > 0 for piece in pieces):
        return pieces
    if len(pieces) == 1:
        return pieces[0]
    if len({piece.shape[1:] for piece in pieces}) > 1:
        shapes = sorted({tuple(piece.shape) for piece in pieces})
        raise DataError(
            f"{_path_text(path)} of the outputs has different shapes {shapes} and cannot be concatenated; pad the "
            "inputs to one length, or predict one batch at a time"
        )
    return torch.cat(pieces)
