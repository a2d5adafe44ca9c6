"""The tensors of a shipped part: each once, by name, with what is needed to make it the same on the other side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchslicer.cluster.shipping.names import shorten
from torchslicer.cluster.shipping.values import _NAMED, flag, integer, listed, record, text
from torchslicer.errors import ShippingError

_MAX_NAME = 1024
_MAX_DIMS = 64


class TensorWriter:
    """Collects tensors. A tensor met twice is one entry, so what was shared stays shared.

    Args:
        names: Identity of a tensor to the name that it goes by; others get names of their own.
        has_hooks_there: Hooks on tensors are there already, where they go.

    Attributes:
        entries: What is said of each tensor.
        tensors: The tensors, on the memory of the caller's.
    """

    def __init__(self, names: Mapping[int, str], *, has_hooks_there: bool = False) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        self._names = names
        self._has_hooks_there = has_hooks_there
        self._keys: dict[int, str] = {}
        self._alive: list[Tensor] = []

    def key(self, tensor: Tensor) -> str:
        """Return the name that *tensor* travels under.

        Raises:
            ShippingError: It is of a kind that cannot travel.
        """
        if id(tensor) not in self._keys:
            _check_kind(tensor)
            if not self._has_hooks_there:
                _check_hooks(tensor)
            key = self._names.get(id(tensor), f"(unnamed)/{len(self._keys)}")
            self._keys[id(tensor)] = key
            self._alive.append(tensor)  # an identity is taken again once its object is gone
            self.entries[key] = _entry(tensor)
            self.tensors[key] = tensor.detach()
        return self._keys[id(tensor)]

    def check_memory(self) -> None:
        """Refuse tensors that are parts of one another: each would become independent on the other side.

        Raises:
            ShippingError: Two tensors overlap.
        """
        extents = sorted((*_extent(tensor), key) for key, tensor in self.tensors.items() if tensor.numel())
        for (_, end, one), (start, _, other) in itertools.pairwise(extents):
            if start < end:
                raise ShippingError(
                    f"'{one}' and '{other}' share memory without being the same tensor; on a worker they would part. "
                    "Use the same Parameter or buffer in both places, or .clone() one of them"
                )


def _extent(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _check_kind(tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise ShippingError(f"a tensor of the class {type(tensor).__qualname__} cannot be shipped; use a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise ShippingError("only dense tensors can be shipped, no sparse, quantized or nested ones")
    if tensor.is_meta:
        raise ShippingError("a tensor on the device 'meta' has no values to ship")
    if tensor.grad_fn is not None:
        raise ShippingError("a tensor that was computed from parameters is kept here; set it to None or .detach() it")


def _check_hooks(tensor: Tensor) -> None:
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ShippingError(
            "it has gradient hooks, which are code; remove them, or put them into a function that makes the model and "
            'call ts.slice("my_package.models:make")'
        )


def _entry(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": None
        if tensor.is_contiguous() or not _is_dense(tensor.shape, tensor.stride())
        else [*tensor.stride()],
        "parameter": isinstance(tensor, nn.Parameter),
        "requires_grad": tensor.requires_grad,
    }


def _is_dense(shape: Any, stride: Any) -> bool:
    """Whether each place in memory, from the first to the last, belongs to exactly one element."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return expected > 0


class TensorReader:
    """Makes parameters and tensors from what arrived, once each.

    Args:
        entries: What the description says of each tensor.
        tensors: What arrived.

    Raises:
        ShippingError: The two do not fit together.
    """

    def __init__(self, entries: Any, tensors: Mapping[str, Tensor]) -> None:
        if type(entries) is not dict or set(entries) != set(tensors):
            raise ShippingError("the tensors that arrived are not those that the description names")
        self._made = {key: _made(key, entry, tensors[key]) for key, entry in entries.items()}

    def __call__(self, key: Any) -> Tensor:
        """Return the tensor called *key*, the same object each time.

        Raises:
            ShippingError: There is none.
        """
        if not isinstance(key, str) or key not in self._made:
            raise ShippingError(f"there is no tensor called {shorten(key)}")
        return self._made[key]

    def parameter(self, key: Any) -> nn.Parameter:
        """Return the parameter called *key*.

        Raises:
            ShippingError: There is none, or it is no parameter.
        """
        made = self(key)
        if not isinstance(made, nn.Parameter):
            raise ShippingError(f"tensor {shorten(key)} is no parameter")
        return made


def _made(key: Any, entry: Any, tensor: Tensor) -> Tensor:
    if not isinstance(key, str) or len(key) > _MAX_NAME or type(tensor) is not Tensor:
        raise ShippingError(f"tensor {shorten(key)}: expected a plain tensor under a short name")
    dtype, shape, stride, parameter, requires_grad = record(
        entry, ("dtype", "shape", "stride", "parameter", "requires_grad"), f"tensor '{key}'"
    )
    sizes = [integer(size) for size in listed(shape)]
    if str(tensor.dtype) != f"torch.{text(dtype)}" or list(tensor.shape) != sizes or dtype not in _NAMED["dtype"]:
        raise ShippingError(
            f"tensor '{key}': expected {dtype} {sizes[:8]}, got {tensor.dtype} {tuple(tensor.shape)[:8]}"
        )
    plain = _with_stride(key, tensor.detach(), stride)
    if flag(requires_grad) and not (plain.is_floating_point() or plain.is_complex()):
        raise ShippingError(f"tensor '{key}': {dtype} cannot require a gradient")
    return nn.Parameter(plain, requires_grad) if flag(parameter) else plain.requires_grad_(requires_grad)


def _with_stride(key: str, tensor: Tensor, stride: Any) -> Tensor:
    """Lay the tensor out as it was: the order in memory decides which kernel runs, and so the last bits."""
    if stride is None:
        return tensor.contiguous()
    steps = [integer(step) for step in listed(stride, tensor.dim())]
    if tensor.dim() > _MAX_DIMS or not _is_dense(tensor.shape, steps):
        raise ShippingError(f"tensor '{key}': its strides leave gaps or overlap")
    if list(tensor.stride()) == steps:
        return tensor
    return torch.empty_strided(tensor.shape, steps, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
