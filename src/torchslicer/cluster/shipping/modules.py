"""Write modules as plain data: class, attributes, submodules, and parameters and buffers by name."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchslicer.cluster.shipping.allow import Importable, is_config, is_data_class, is_namedtuple
from torchslicer.cluster.shipping.names import REMEDY
from torchslicer.cluster.shipping.tensors import TensorWriter
from torchslicer.cluster.shipping.values import MAX_DEPTH, ValueWriter
from torchslicer.errors import ShippingError

MAX_MODULES = 100_000
STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has; the codec writes what is in them, never the attributes themselves."""

_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CONFIG_DROPPED = ("auto_map", "trust_remote_code", "_name_or_path", "_commit_hash", "name_or_path")
"""Attributes of configurations that make transformers look for code or files elsewhere."""


def why_not_attribute(cls: type, name: Any) -> str:
    """Return why an object of *cls* may not be given the attribute *name*, or an empty string."""
    if not isinstance(name, str) or len(name) > 512:
        return "is no name"
    if name.startswith("__") or "_hooks" in name or name in ("forward", "_call_impl", "_compiled_call_impl"):
        return "is not plain data"
    known = inspect.getattr_static(cls, name, None)
    if callable(known) or isinstance(known, (property, classmethod, staticmethod, functools.cached_property)):
        return "replaces a method of its class"
    return ""


class ModuleWriter:
    """Writes modules and the values in them.

    Args:
        tensors: Where tensors are collected.
        allowed: The rules of classes and functions; notes which modules workers must trust.

    Attributes:
        records: The modules written, each once, by number.
        numbers: Identity of each module written to its number.
    """

    def __init__(self, tensors: TensorWriter, allowed: Importable) -> None:
        self.tensors = tensors
        self.allowed = allowed
        self.records: list[dict[str, Any]] = []
        self.value = ValueWriter(self._other)
        self.numbers: dict[int, int] = {}
        self._alive: list[nn.Module] = []
        self._depth = 0

    def number(self, module: nn.Module, path: str) -> int:
        """Write *module* (once) and return its number.

        Raises:
            ShippingError: It cannot be carried; the message names *path*, the attribute and the remedy.
        """
        if id(module) in self.numbers:
            return self.numbers[id(module)]
        self._depth += 1
        try:
            return self._write(module, path)
        finally:
            self._depth -= 1

    def _write(self, module: nn.Module, path: str) -> int:
        if self._depth > MAX_DEPTH or len(self.records) >= MAX_MODULES:
            raise ShippingError(f"module '{path}': more than {MAX_MODULES} modules, or nested deeper than {MAX_DEPTH}")
        number = self.numbers[id(module)] = len(self.records)
        self._alive.append(module)
        entry: dict[str, Any] = {}
        self.records.append(entry)
        with located(path, module):
            entry["class"] = self._class(module)
            state = _state(module)
        entry["training"] = module.training
        entry["parameters"] = [[name, self._key(p, path, name, module)] for name, p in module._parameters.items()]
        entry["buffers"] = [
            [name, self._key(b, path, name, module), name not in module._non_persistent_buffers_set]
            for name, b in module._buffers.items()
        ]
        entry["modules"] = [
            [name, None if child is None else self.number(child, f"{path}.{name}".lstrip("."))]
            for name, child in module._modules.items()
        ]
        entry["attributes"] = [
            [name, self._attribute(module, path, name, value)]
            for name, value in state.items()
            if name not in STANDARD and not _is_cache(type(module), name)
        ]
        return number

    def _class(self, module: nn.Module) -> str:
        if parametrize.is_parametrized(module):
            raise ShippingError(
                "parametrized modules (weight_norm and the like) have classes made at run time, which no worker can "
                'import; let the workers build the model: ts.slice("my_package.models:make", ...) and workers started '
                "with --allow-builder my_package.models:make; or take them off with parametrize.remove_parametrizations"
            )
        if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
            raise ShippingError("compiled or scripted modules cannot be shipped; pass the module as it was before")
        name = self.allowed.name_of_module_class(type(module))
        for hooks in _CALL_HOOKS:
            if getattr(module, hooks):
                raise ShippingError(f"it has {hooks.strip('_').replace('_', ' ')}, which are code; remove them")
        return name

    def _key(self, tensor: Tensor | None, path: str, name: str, module: nn.Module) -> str | None:
        if tensor is None:
            return None
        with located(path, module, name):
            return self.tensors.key(tensor)

    def _attribute(self, module: nn.Module, path: str, name: str, value: Any) -> Any:
        with located(path, module, name):
            why = why_not_attribute(type(module), name)
            if why:
                raise ShippingError(f"it {why}")
            return self.value(value)

    # -- values that are not plain ---------------------------------------------------------------------------------

    def _other(self, value: Any, write: Callable[[Any], Any]) -> Any:
        if isinstance(value, (Tensor, nn.Module)):
            return self._reference(value)
        if isinstance(value, np.generic) and not isinstance(value, (np.flexible, np.object_)):
            return write(value.item())
        if isinstance(value, functools.partial):
            return {"partial": self._partial(value, write)}
        if isinstance(value, type):
            return self._class_value(value)
        if callable(value) and not is_data_class(type(value)):
            return {"function": self.allowed.name_of_function(value)}
        return self._data(value, write)

    def _reference(self, value: Tensor | nn.Module) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self.tensors.key(value)}
        return {"module": self.number(value, f"({type(value).__name__} in an attribute)")}

    def _class_value(self, cls: type) -> Any:
        if issubclass(cls, nn.Module):
            return {"class": self.allowed.name_of_module_class(cls)}
        raise ShippingError(f"the class {cls.__qualname__} is no module class")

    def _partial(self, value: functools.partial[Any], write: Callable[[Any], Any]) -> list[Any]:
        if value.args or not isinstance(value.func, type):
            raise ShippingError("functools.partial is carried only over a module class with keyword arguments")
        return [self.allowed.name_of_module_class(value.func), [[key, write(v)] for key, v in value.keywords.items()]]

    def _data(self, value: Any, write: Callable[[Any], Any]) -> Any:
        cls = type(value)
        if not is_data_class(cls):
            raise ShippingError(f"a {cls.__module__}.{cls.__qualname__} is neither plain data, tensor nor module")
        name = self.allowed.name_of_data_class(cls)
        if isinstance(value, enum.Enum):
            return {"enum": [name, value.name]}
        if is_namedtuple(cls):
            return {"named": [name, [write(item) for item in value]]}
        return {"object": [name, [[key, write(item)] for key, item in _fields(value)]]}


def _is_cache(cls: type, name: str) -> bool:
    """Whether the attribute only holds what a cached property gave; the worker computes it again."""
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return
    config = is_config(type(value))
    for name, item in vars(value).items():
        if config and name in CONFIG_DROPPED:
            continue
        why = why_not_attribute(type(value), name)
        if why and not dataclasses.is_dataclass(value):
            raise ShippingError(f"its attribute '{name}' {why}")
        yield name, item


def _state(module: nn.Module) -> Mapping[str, Any]:
    """The attributes of *module*, or what its class says is to be kept of them."""
    state = module.__getstate__()
    if not isinstance(state, Mapping):
        raise ShippingError("its __getstate__ returns no dictionary")
    return state


class located:  # noqa: N801 - reads as a phrase: with located(...)
    """Adds to a `ShippingError` where it came up and what to do."""

    def __init__(self, path: str, module: Any, attribute: str = "") -> None:
        self._place = f"module '{path or '(model)'}' ({type(module).__qualname__})"
        self._place += f", attribute '{attribute}'" if attribute else ""

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise the error again with its place, unless an inner one has named it."""
        if isinstance(error, ShippingError) and not error.located:
            located_error = ShippingError(f"{self._place}: {error}. {REMEDY}")
            located_error.located = True
            raise located_error from error


def encode_module(module: nn.Module, path: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return one module as plain data and tensors.

    Args:
        module: The module.
        path: What messages call it.

    Raises:
        ShippingError: It cannot be carried.

    Example:
        >>> description, tensors = encode_module(nn.Linear(2, 1))
        >>> description["modules"][0]["class"], sorted(tensors)
        ('torch.nn.modules.linear:Linear', ['bias', 'weight'])
    """
    names = {id(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    writer = ModuleWriter(TensorWriter(names), Importable())
    writer.number(module, path)
    writer.tensors.check_memory()
    return {
        "modules": writer.records,
        "tensors": writer.tensors.entries,
        "required": sorted(writer.allowed.required),
    }, writer.tensors.tensors
