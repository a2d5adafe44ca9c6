"""Tensors as bytes and back, with every bit, every stride and the alignment of the memory.

A dense tensor (any order of dimensions, no gaps) travels as the memory it lies in: nothing is copied, neither here
nor there. Anything else (slices with gaps, expanded dimensions) travels as a compact copy that the receiver spreads.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from torchslicer.errors import FrameError
from torchslicer.transport.dtypes import bits_of

ALIGNMENT = 64


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last in memory, gaps included.

    >>> span((2, 3), (10, 1)), span((4, 5), (0, 1)), span((0, 5), (5, 1))
    (13, 5, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def reduced_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return *shape* with expanded dimensions (stride 0) counted once.

    >>> reduced_shape((4, 5), (0, 1))
    (1, 5)
    """
    return tuple(min(size, 1) if stride == 0 else size for size, stride in zip(shape, strides, strict=True))


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Say whether the elements fill their memory without gap or overlap, in whatever order of dimensions.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (4, 1)), is_dense((2, 3), (0, 1))
    (True, False, False)
    """
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(strides, shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def outgoing_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the tensor to send, in CPU memory and with its bits as they are, and its alignment.

    Raises:
        FrameError: The tensor has no strides (sparse and nested layouts).
    """
    if tensor.layout != torch.strided:
        raise FrameError(f"a tensor of layout {tensor.layout} cannot be sent; convert it with to_dense()")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if not tensor.is_cpu:
        return _pinned_copy(tensor), 0
    return tensor, tensor.data_ptr() % ALIGNMENT


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy from an accelerator; pinned memory lets the copy engine write it without a detour."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    pinned, reduced = tensor.is_cuda, reduced_shape(tuple(tensor.shape), tensor.stride())
    bits = tensor.view(bits_of(tensor.dtype))
    copy = torch.empty_strided(shape, strides, dtype=bits.dtype, pin_memory=pinned)
    copy.as_strided(reduced, strides).copy_(bits.as_strided(reduced, strides), non_blocking=pinned)
    if pinned:
        torch.cuda.current_stream(tensor.device).synchronize()
    return copy.view(tensor.dtype)


def wire_bytes(tensor: torch.Tensor, num_bytes: int, *, dense: bool) -> memoryview:
    """Return the bytes of *tensor* as they travel. The view is valid for as long as *tensor* (or its copy) lives."""
    if not dense:
        reduced = reduced_shape(tuple(tensor.shape), tensor.stride())
        tensor = tensor.view(bits_of(tensor.dtype)).as_strided(reduced, tensor.stride()).contiguous()
    return _view(tensor, num_bytes)


@lru_cache(maxsize=1024)
def _array_type(num_bytes: int) -> Any:
    # A subclass, because only instances of a Python class can carry the reference that keeps the memory alive.
    return type("_Memory", (ctypes.c_ubyte * num_bytes,), {"owner": None})


def _view(tensor: torch.Tensor, num_bytes: int) -> memoryview:
    """Look at a tensor's memory; ten times quicker than through NumPy, and for every dtype."""
    if num_bytes == 0:
        return memoryview(bytearray())
    return memory_at(tensor.data_ptr(), num_bytes, tensor)


def memory_at(address: int, num_bytes: int, owner: object) -> memoryview:
    """Look at memory, which *owner* keeps alive: it lives as long as what is made of the view."""
    memory = _array_type(num_bytes).from_address(address)
    memory.owner = owner
    return memoryview(memory).cast("B")  # ctypes' own view does not know slices


class Arrival:
    """Where one payload lands: fill :attr:`view`, then take the result from :meth:`finish`."""

    __slots__ = ("_spread", "_tensor", "view")

    def __init__(self, num_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._tensor: torch.Tensor | None = None
        self._spread: torch.Tensor | None = None
        if dtype is None:
            self.view = memoryview(bytearray(num_bytes))

    @classmethod
    def of_tensor(
        cls, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, *, alignment: int, num_bytes: int
    ) -> Arrival:
        """Allocate a tensor of exactly these sizes and strides, whose address modulo 64 is *alignment*."""
        arrival = cls(num_bytes, dtype)
        tensor = _aligned(shape, strides, dtype, alignment)
        arrival._tensor = tensor
        if is_dense(shape, strides):
            arrival.view = _view(tensor, num_bytes)
        else:
            bits = bits_of(dtype)
            arrival._spread = torch.empty(reduced_shape(shape, strides), dtype=bits)
            arrival.view = _view(arrival._spread, num_bytes)
        return arrival

    def finish(self) -> torch.Tensor | bytes:
        """Return the payload, once the view is filled."""
        tensor, spread = self._tensor, self._spread
        if tensor is None:
            return bytes(self.view)
        if spread is not None:
            tensor.view(spread.dtype).as_strided(tuple(spread.shape), tensor.stride()).copy_(spread)
        return tensor


def _aligned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, alignment: int) -> torch.Tensor:
    if alignment == 0:
        # As integers where torch warns about the dtype (complex32) or may lack a way to allocate it.
        wanted = dtype if dtype.is_floating_point or dtype == torch.int64 else bits_of(dtype)
        tensor = torch.empty_strided(shape, strides, dtype=wanted)
        if tensor.data_ptr() % ALIGNMENT == 0:
            return tensor if wanted == dtype else tensor.view(dtype)
    return _at_offset(shape, strides, dtype, alignment)


def _at_offset(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, alignment: int) -> torch.Tensor:
    elements = span(shape, strides)
    if elements == 0:
        return torch.empty_strided(shape, strides, dtype=bits_of(dtype)).view(dtype)
    block = torch.empty(elements * dtype.itemsize + ALIGNMENT - 1, dtype=torch.uint8)
    offset = (alignment - block.data_ptr()) % ALIGNMENT
    # `frombuffer` is the one way to a tensor at an address that is not a multiple of its element.
    return torch.frombuffer(_view(block, block.numel()), dtype=dtype, count=elements, offset=offset).as_strided(
        shape, strides
    )
