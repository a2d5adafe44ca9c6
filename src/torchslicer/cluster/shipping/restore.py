"""Make modules from plain data: no constructor runs, no hook is set, only what the worker has listed is imported."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchslicer.cluster.shipping.allow import Allowed, is_config, is_namedtuple, is_namespace
from torchslicer.cluster.shipping.modules import CONFIG_DROPPED, MAX_MODULES, STANDARD, why_not_attribute
from torchslicer.cluster.shipping.names import shorten
from torchslicer.cluster.shipping.tensors import TensorReader
from torchslicer.cluster.shipping.values import MAX_DEPTH, ValueReader, flag, integer, listed, pairs, record, text
from torchslicer.errors import ShippingError

_KEYS = ("class", "training", "parameters", "buffers", "modules", "attributes")
_ATTENTION = ("_attn_implementation", "_attn_implementation_internal", "_experts_implementation")


class ModuleReader:
    """Makes modules from records. Everything is checked before the first module is filled.

    Args:
        records: The modules, by number.
        tensors: Their tensors.
        allowed: What this worker accepts.

    Raises:
        ShippingError: A record is not what `ModuleWriter` writes, or names what this worker does not accept.
    """

    def __init__(self, records: Any, tensors: TensorReader, allowed: Allowed) -> None:
        self.tensors = tensors
        self.allowed = allowed
        self.value = ValueReader(self._other)
        if len(listed(records)) > MAX_MODULES:
            raise ShippingError(f"{len(records)} modules, the limit is {MAX_MODULES}")
        fields = [record(entry, _KEYS, f"module {number}") for number, entry in enumerate(records)]
        _check_tree([_children(entry[4], len(fields)) for entry in fields])
        self.modules = [_blank(allowed.module_class(entry[0])) for entry in fields]
        for module, entry in zip(self.modules, fields, strict=True):
            self._fill(module, entry)

    def module(self, number: Any) -> nn.Module:
        """Return module *number*.

        Raises:
            ShippingError: There is none.
        """
        return self.modules[integer(number, 0, len(self.modules) - 1)]

    def _fill(self, module: nn.Module, entry: list[Any]) -> None:
        _, training, parameters, buffers, modules, attributes = entry
        state = dict(vars(nn.Module()))
        state["training"] = flag(training)
        for name, key in pairs(parameters):
            state["_parameters"][_tensor_name(name)] = None if key is None else self.tensors.parameter(key)
        for item in listed(buffers):
            name, key, persistent = listed(item, 3)
            state["_buffers"][_tensor_name(name)] = None if key is None else self._buffer(key)
            if not flag(persistent):
                state["_non_persistent_buffers_set"].add(name)
        for name, number in pairs(modules):
            state["_modules"][_tensor_name(name)] = None if number is None else self.module(number)
        for name, data in pairs(attributes):
            why = why_not_attribute(type(module), name) or ("is a standard one" if name in STANDARD else "")
            if why:
                raise ShippingError(f"attribute {shorten(name)} of {type(module).__qualname__} {why}")
            state[name] = self.value(data)
        _set_state(module, state)

    def _buffer(self, key: Any) -> Tensor:
        made = self.tensors(key)
        if isinstance(made, nn.Parameter):
            raise ShippingError(f"buffer {shorten(key)} is a parameter")
        return made

    # -- values that are not plain ---------------------------------------------------------------------------------

    def _other(self, tag: str, body: Any, read: Callable[[Any], Any]) -> Any:
        known: dict[str, Callable[[], Any]] = {
            "tensor": lambda: self.tensors(body),
            "module": lambda: self.module(body),
            "class": lambda: self.allowed.module_class(body),
            "function": lambda: self.allowed.function(body),
            "partial": lambda: self._partial(body, read),
            "enum": lambda: self._enum(body),
            "named": lambda: self._named(body, read),
            "object": lambda: self._object(body, read),
        }
        if tag not in known:
            raise ShippingError(f"unknown kind of value {shorten(tag)}")
        return known[tag]()

    def _partial(self, body: Any, read: Callable[[Any], Any]) -> Any:
        name, keywords = listed(body, 2)
        return functools.partial(
            self.allowed.module_class(name), **{_identifier(key): read(value) for key, value in pairs(keywords)}
        )

    def _enum(self, body: Any) -> Any:
        name, member = listed(body, 2)
        cls = self.allowed.data_class(name)
        if not issubclass(cls, enum.Enum) or text(member) not in cls.__members__:
            raise ShippingError(f"'{name}' has no member {shorten(member)}")
        return cls.__members__[member]

    def _named(self, body: Any, read: Callable[[Any], Any]) -> Any:
        name, items = listed(body, 2)
        cls = self.allowed.data_class(name)
        if not is_namedtuple(cls) or len(listed(items)) != len(cls._fields):  # type: ignore[attr-defined]
            raise ShippingError(f"'{name}' is no named tuple of {len(items)} items")
        return tuple.__new__(cls, [read(item) for item in items])

    def _object(self, body: Any, read: Callable[[Any], Any]) -> Any:
        name, items = listed(body, 2)
        cls = self.allowed.data_class(name)
        if is_namedtuple(cls) or issubclass(cls, enum.Enum):
            raise ShippingError(f"'{name}' is no class of objects with attributes")
        values = {_identifier(key): read(value) for key, value in pairs(items)}
        _check_data(cls, values)
        try:
            made = cls() if is_namespace(cls) else object.__new__(cls)
            for key, value in values.items():
                object.__setattr__(made, key, value)
        except (TypeError, AttributeError) as error:
            raise ShippingError(f"no object with these attributes can be made of '{name}': {error}") from error
        return made


def _check_data(cls: type, values: Mapping[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name in values:
        why = "" if name in fields else why_not_attribute(cls, name)
        if why:
            raise ShippingError(f"attribute '{name}' of {cls.__qualname__} {why}")
    if is_config(cls):
        _check_config(cls, values)


def _check_config(cls: type, values: Mapping[str, Any]) -> None:
    for name in CONFIG_DROPPED:
        if values.get(name):
            raise ShippingError(f"configuration {cls.__qualname__}: '{name}' must be empty")
    if values.get("quantization_config") is not None:
        raise ShippingError(f"configuration {cls.__qualname__}: quantized models cannot be shipped")
    for name in _ATTENTION:  # the name of a repository here makes transformers fetch and run its code
        if values.get(name) not in (None, "eager", "sdpa"):
            raise ShippingError(f"configuration {cls.__qualname__}: '{name}' must be 'eager' or 'sdpa'")


def _blank(cls: type[nn.Module]) -> nn.Module:
    try:
        return object.__new__(cls)
    except TypeError as error:  # an abstract class
        raise ShippingError(f"no object can be made of {cls.__qualname__}: {error}") from error


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    try:
        module.__setstate__(state)  # nn.Module's, or that of a class of torch.nn: no other is accepted
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        raise ShippingError(f"the attributes of {type(module).__qualname__} do not fit together: {error}") from error


def _tensor_name(name: Any) -> str:
    if not text(name) or len(name) > 512 or "." in name or name.startswith("__"):
        raise ShippingError(f"{shorten(name)} is no name of a parameter, buffer or module")
    return name  # type: ignore[no-any-return]


def _identifier(name: Any) -> str:
    if not text(name).isidentifier() or name.startswith("__"):
        raise ShippingError(f"{shorten(name)} is no name of an attribute")
    return name  # type: ignore[no-any-return]


def _children(modules: Any, count: int) -> list[int]:
    return [integer(number, 0, count - 1) for _, number in pairs(modules) if number is not None]


def _check_tree(children: list[list[int]]) -> None:
    """Refuse modules that contain themselves, or are nested too deeply: walking them would never end."""
    depth: dict[int, int] = {}
    for start in range(len(children)):
        stack: list[tuple[int, int]] = [(start, 0)]
        open_modules: list[int] = []
        while stack:
            number, state = stack.pop()
            if state == 1:
                open_modules.pop()
                depth[number] = 1 + max((depth[child] for child in children[number]), default=0)
            elif number not in depth:
                if number in open_modules or len(open_modules) >= MAX_DEPTH:
                    raise ShippingError(f"modules contain themselves, or are nested deeper than {MAX_DEPTH}")
                open_modules.append(number)
                stack.append((number, 1))
                stack.extend((child, 0) for child in children[number])
    if max(depth.values(), default=0) > MAX_DEPTH:
        raise ShippingError(f"modules are nested deeper than {MAX_DEPTH}")


def decode_module(description: Any, tensors: Mapping[str, Tensor], allowed: Allowed) -> nn.Module:
    """Return the module that `encode_module` wrote.

    Raises:
        ShippingError: The description is broken, or names what this worker does not accept.

    Example:
        >>> from torchslicer.cluster.shipping.modules import encode_module
        >>> decode_module(*encode_module(nn.Linear(2, 1)), Allowed())
        Linear(in_features=2, out_features=1, bias=True)
    """
    records, entries, _ = record(description, ("modules", "tensors", "required"), "module")
    return ModuleReader(records, TensorReader(entries, tensors), allowed).module(0)
