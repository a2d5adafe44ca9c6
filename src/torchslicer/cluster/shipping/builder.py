"""The other way to ship a model: its name. Workers build it themselves and only the tensors of their stage travel.

Nothing of the coordinator's runs: the worker's own list says which builders may be called, and `digest` makes sure that
both sides have cut the same model. `built_stage` carries a stage in this way.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.modules import STANDARD
from torchslicer.cluster.shipping.names import split_name
from torchslicer.errors import ShippingError

logger = logging.getLogger("torchslicer.shipping")


@dataclass(frozen=True)
class Builder:
    """How a model was made: by a function that has the same name on every machine.

    Attributes:
        reference: ``"my_package.models:make"``.
        arguments: Keyword arguments: what JSON has.
        pack: The user's pack function, which workers must find by its name, too.
    """

    reference: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pack: Callable[[nn.Module], Sequence[nn.Module]] | None = None

    def build(self) -> nn.Module:
        """Build the model here, on the caller's side.

        Raises:
            ShippingError: There is no such function, no worker could call it, or what it makes is no module.

        Example:
            >>> Builder("torchslicer.nowhere:make").build()
            Traceback (most recent call last):
            torchslicer.errors.ShippingError: allow builder 'torchslicer.nowhere:make': expected a function of ...
        """
        split_name(self.reference)
        allowed = Allowed(allow_builders=[self.reference])
        return _made(self.reference, _maker(self.reference, dict(self.arguments), allowed)())


def build_from_reference(
    reference: str, kwargs: Mapping[str, Any], allowed: Allowed, *, with_values: bool = False
) -> nn.Module:
    """Build a model on a worker, without memory for its tensors where that is possible.

    Args:
        reference: ``"my_package.models:make"``.
        kwargs: Keyword arguments: what JSON has.
        allowed: What this worker accepts; its ``allow_builders`` decides.
        with_values: Give the tensors memory and values in any case.

    Raises:
        ShippingError: The builder is not allowed, an argument is no JSON, it raises, or what it makes is no module.

    Example:
        >>> build_from_reference("torch.nn.modules.linear:Linear", {"in_features": 2, "out_features": 1}, Allowed())
        Traceback (most recent call last):
        torchslicer.errors.ShippingError: builder 'torch.nn.modules.linear:Linear' is not among the builders ...
    """
    make = _maker(reference, kwargs, allowed)
    model = None if with_values else _without_memory(reference, make)
    if model is not None:
        return model
    try:
        return _made(reference, make())
    except ShippingError:
        raise
    except Exception as error:
        raise ShippingError(f"builder '{reference}' raised here {type(error).__name__}: {error}") from error


def _maker(reference: str, kwargs: Any, allowed: Allowed) -> Callable[[], Any]:
    make = allowed.builder(reference)
    if type(kwargs) is not dict or not all(type(key) is str and key.isidentifier() for key in kwargs):
        raise ShippingError(f"builder '{reference}': its arguments are a dictionary with names for keys")
    _check_json(reference, kwargs)
    return functools.partial(make, **kwargs)


def _made(reference: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ShippingError(f"builder '{reference}' must return a torch.nn.Module, got a {type(model).__name__}")
    return model


def _without_memory(reference: str, make: Callable[[], Any]) -> nn.Module | None:
    """Return the model on the device 'meta', None if the builder needs values or its model must keep its tensors."""
    try:
        with _WithoutMemory(torch.device("meta")):
            model = make()
    except Exception as error:  # noqa: BLE001 - the builder is called again with values, and what that raises is told
        logger.info("builder '%s' cannot build without memory (%s); building on the CPU", reference, error)
        return None
    return model if isinstance(model, nn.Module) and not _has_more_than_values(model) else None


class _WithoutMemory(DeviceContext):
    """Makes tensors on 'meta', but none that a module makes while it is imported: those outlive the builder."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._before = frozenset(sys.modules)
        self._settled = len(sys.modules)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._importing():
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _importing(self) -> bool:
        if len(sys.modules) == self._settled:
            return False
        new = [module for name, module in list(sys.modules.items()) if name not in self._before]
        if any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in new):
            return True
        self._settled = len(sys.modules)
        return False


def _has_more_than_values(model: nn.Module) -> bool:
    """Whether a tensor has hooks or attributes, or is held in another place: a new one could not take its place."""
    elsewhere = [
        leaf
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in STANDARD
        for leaf in pytree.tree_leaves(value)
    ]
    return any(isinstance(leaf, Tensor) for leaf in elsewhere) or any(
        tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None) or vars(tensor)
        for tensor in (*model.parameters(), *model.buffers())
    )


def _check_json(reference: str, value: Any, depth: int = 0) -> None:
    if depth > 16:
        raise ShippingError(f"builder '{reference}': its arguments are nested too deeply")
    if type(value) is dict and all(type(key) is str for key in value):
        value = [item for entry in value.items() for item in entry]
    if type(value) is list:
        for item in value:
            _check_json(reference, item, depth + 1)
    elif type(value) is int and value.bit_length() > 64:
        raise ShippingError(f"builder '{reference}': an argument is an integer of more than 64 bits; give it as text")
    elif type(value) is str and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ShippingError(f"builder '{reference}': an argument is no Unicode text: {value!r:.80}")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ShippingError(f"builder '{reference}': an argument is a {type(value).__name__}; use what JSON has")
