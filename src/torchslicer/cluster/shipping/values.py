"""Plain values as JSON: what JSON has is written as it is, everything else as ``{"tag": body}``.

Floats are written in hexadecimal, so no bit is lost. Reading makes nothing but the values listed here; whatever else a
description may hold (tensors, modules, functions) is left to the two handlers that the caller passes.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchslicer.cluster.shipping.names import shorten
from torchslicer.errors import ShippingError
from torchslicer.graph.model import Ref

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 64
_MAX_INT = 2**64
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|meta)(:[0-9]{1,2})?")
_NAMED: dict[str, dict[str, Any]] = {
    kind: {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, cls)}
    for kind, cls in (("dtype", torch.dtype), ("memory_format", torch.memory_format), ("layout", torch.layout))
}
_TYPES = {cls.__name__: cls for cls in (bool, int, float, complex)}

WriteOther = Callable[[Any, Callable[[Any], Any]], Any]
"""Called with a value that is not plain and the writer for the values inside it; returns its JSON, or raises."""

ReadOther = Callable[[str, Any, Callable[[Any], Any]], Any]
"""Called with an unknown tag, its body and the reader for the values inside; returns the value, or raises."""


def dump(description: Any) -> bytes:
    """Return *description* as JSON text.

    Raises:
        ShippingError: It is larger than 16 MiB.

    Example:
        >>> dump({"a": [1, None]})
        b'{"a":[1,null]}'
    """
    text = json.dumps(description, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_BYTES:
        raise ShippingError(f"the description takes {len(text)} bytes, the limit is {MAX_BYTES}; cut into more stages")
    return text


def load(text: bytes) -> Any:
    """Read what `dump` wrote.

    Raises:
        ShippingError: The text is too long, no JSON, nested too deeply, or names a key twice.

    Example:
        >>> load(b'{"a": [1, null]}')
        {'a': [1, None]}
    """
    if len(text) > MAX_BYTES:
        raise ShippingError(f"the description takes {len(text)} bytes, the limit is {MAX_BYTES}")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError) as error:
        raise ShippingError(f"the description is no JSON that can be used: {str(error)[:100]}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is given twice")
    return made


def _no_float(text: str) -> Any:
    raise ValueError(f"floats are written in hexadecimal, got {text:.20}")


class ValueWriter:
    """Turns values into JSON.

    Example:
        >>> ValueWriter()((1, 0.5))
        {'tuple': [1, {'float': '0x1.0000000000000p-1'}]}
    """

    def __init__(self, other: WriteOther | None = None) -> None:
        self._other = other
        self._depth = 0

    def __call__(self, value: Any) -> Any:
        """Return the JSON of *value*.

        Raises:
            ShippingError: A part of it is not plain and the handler for other values does not take it.
        """
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise ShippingError(f"values are nested deeper than {MAX_DEPTH}, or contain themselves")
            return self._write(value)
        finally:
            self._depth -= 1

    def _write(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int and abs(value) <= _MAX_INT:
            return value
        if kind is list:
            return [self(item) for item in value]
        if kind in _WRITERS:
            tag, write = _WRITERS[kind]
            return {tag: write(self, value)}
        if value in _TYPES.values() if isinstance(value, type) else False:
            return {"type": value.__name__}
        if self._other is None:
            raise ShippingError(f"a {kind.__module__}.{kind.__qualname__} is no plain value")
        return self._other(value, self)

    def _pairs(self, value: Mapping[Any, Any]) -> list[Any]:
        return [[self(key), self(item)] for key, item in value.items()]

    def _items(self, value: Any) -> list[Any]:
        return [self(item) for item in value]

    def _sorted(self, value: Any) -> list[Any]:
        """A set has no order: sort it, so that the same value has the same text."""
        return sorted((self(item) for item in value), key=json.dumps)


def _float_text(value: float) -> str:
    return value.hex() if math.isfinite(value) else str(value)


_WRITERS: dict[type, tuple[str, Callable[[ValueWriter, Any], Any]]] = {
    float: ("float", lambda _, value: _float_text(value)),
    complex: ("complex", lambda _, value: [_float_text(value.real), _float_text(value.imag)]),
    tuple: ("tuple", ValueWriter._items),
    dict: ("dict", ValueWriter._pairs),
    OrderedDict: ("ordered", ValueWriter._pairs),
    set: ("set", ValueWriter._sorted),
    frozenset: ("frozenset", ValueWriter._sorted),
    torch.Size: ("size", lambda _, value: [int(item) for item in value]),
    slice: ("slice", lambda write, value: write._items((value.start, value.stop, value.step))),
    range: ("range", lambda write, value: write._items((value.start, value.stop, value.step))),
    bytes: ("bytes", lambda _, value: value.hex()),
    type(...): ("ellipsis", lambda *_: True),
    Ref: ("ref", lambda _, value: value.index),
    torch.device: ("device", lambda _, value: str(value)),
    torch.dtype: ("dtype", lambda _, value: str(value).removeprefix("torch.")),
    torch.memory_format: ("memory_format", lambda _, value: str(value).removeprefix("torch.")),
    torch.layout: ("layout", lambda _, value: str(value).removeprefix("torch.")),
}


class ValueReader:
    """Turns JSON back into values.

    Example:
        >>> ValueReader()({"tuple": [1, {"float": "0x1.0000000000000p-1"}]})
        (1, 0.5)
    """

    def __init__(self, other: ReadOther | None = None) -> None:
        self._other = other
        self._depth = 0

    def __call__(self, data: Any) -> Any:
        """Return the value that *data* stands for.

        Raises:
            ShippingError: It is nothing that `ValueWriter` writes.
        """
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise ShippingError(f"values are nested deeper than {MAX_DEPTH}")
            return self._read(data)
        finally:
            self._depth -= 1

    def _read(self, data: Any) -> Any:
        if data is None or type(data) in (bool, str):
            return data
        if type(data) is int:
            return integer(data, -_MAX_INT, _MAX_INT)
        if type(data) is list:
            return [self(item) for item in data]
        if type(data) is not dict or len(data) != 1:
            raise ShippingError(f"expected a value, got {shorten(data)}")
        ((tag, body),) = data.items()
        try:
            if tag in _READERS:
                return _READERS[tag](self, body)
        except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
            if isinstance(error, ShippingError):
                raise
            raise ShippingError(f"{shorten(tag)} cannot be made from {shorten(body)}") from error
        if self._other is None:
            raise ShippingError(f"expected a plain value, got {shorten(tag)}")
        return self._other(tag, body, self)

    def _items(self, body: Any) -> list[Any]:
        return [self(item) for item in listed(body)]

    def _pairs(self, body: Any) -> Iterator[tuple[Any, Any]]:
        for pair in listed(body):
            key, value = listed(pair, 2)
            yield self(key), self(value)


def _real(body: Any) -> float:
    if not isinstance(body, str) or len(body) > 40:
        raise ShippingError(f"expected a float in hexadecimal, got {shorten(body)}")
    return float(body) if body in ("nan", "inf", "-inf") else float.fromhex(body)


def _device(_: ValueReader, body: Any) -> torch.device:
    if not isinstance(body, str) or not _DEVICE.fullmatch(body):
        raise ShippingError(f"{shorten(body)} is no device")
    return torch.device(body)


def _named(kind: str) -> Callable[[ValueReader, Any], Any]:
    return lambda _, body: _NAMED[kind][body]


_READERS: dict[str, Callable[[ValueReader, Any], Any]] = {
    "float": lambda _, body: _real(body),
    "complex": lambda _, body: complex(*map(_real, listed(body, 2))),
    "tuple": lambda read, body: tuple(read._items(body)),
    "dict": lambda read, body: dict(read._pairs(body)),
    "ordered": lambda read, body: OrderedDict(read._pairs(body)),
    "set": lambda read, body: set(read._items(body)),
    "frozenset": lambda read, body: frozenset(read._items(body)),
    "size": lambda _, body: torch.Size(integer(item) for item in listed(body)),
    "slice": lambda read, body: slice(*map(read, listed(body, 3))),
    "range": lambda _, body: range(*(integer(item, -_MAX_INT, _MAX_INT) for item in listed(body, 3))),
    "bytes": lambda _, body: bytes.fromhex(text(body)),
    "ellipsis": lambda *_: ...,
    "ref": lambda _, body: Ref(integer(body)),
    "device": _device,
    "dtype": _named("dtype"),
    "memory_format": _named("memory_format"),
    "layout": _named("layout"),
    "type": lambda _, body: _TYPES[body],
}


def listed(data: Any, length: int | None = None) -> list[Any]:
    """Return *data* if it is a list (of *length* items).

    Raises:
        ShippingError: It is not.
    """
    if type(data) is not list or (length is not None and len(data) != length):
        wanted = "" if length is None else f" of {length} items"
        got = f"one of {len(data)}" if type(data) is list else shorten(data)
        raise ShippingError(f"expected a list{wanted}, got {got}")
    return data


def pairs(data: Any) -> list[tuple[str, Any]]:
    """Return *data* if it is a list of names, each once, with a value.

    Raises:
        ShippingError: It is not.

    Example:
        >>> pairs([["a", 1]])
        [('a', 1)]
    """
    found = [(text(name), value) for name, value in (listed(item, 2) for item in listed(data))]
    if len(dict(found)) != len(found):
        raise ShippingError("a name is given twice")
    return found


def text(data: Any) -> str:
    """Return *data* if it is a string.

    Raises:
        ShippingError: It is not.
    """
    if type(data) is not str:
        raise ShippingError(f"expected a string, got {shorten(data)}")
    return data


def flag(data: Any) -> bool:
    """Return *data* if it is a truth value.

    Raises:
        ShippingError: It is not.
    """
    if type(data) is not bool:
        raise ShippingError(f"expected true or false, got {shorten(data)}")
    return data


def integer(data: Any, low: int = 0, high: int = 2**63 - 1) -> int:
    """Return *data* if it is an integer from *low* to *high*.

    Raises:
        ShippingError: It is not.
    """
    if type(data) is not int or not low <= data <= high:
        got = shorten(data) if type(data) is not int or data.bit_length() < 128 else "a huge integer"
        raise ShippingError(f"expected an integer from {low} to {high}, got {got}")
    return data


def record(data: Any, keys: tuple[str, ...], what: str) -> list[Any]:
    """Return the values of a dictionary that has exactly *keys*, in their order.

    Raises:
        ShippingError: A key is missing or unknown.

    Example:
        >>> record({"b": 2, "a": 1}, ("a", "b"), "pair")
        [1, 2]
    """
    if type(data) is not dict:
        raise ShippingError(f"{what}: expected a dictionary, got {shorten(data)}")
    if set(data) != set(keys):
        unknown = [shorten(key) for key in data if key not in keys][:5]
        missing = [key for key in keys if key not in data]
        raise ShippingError(f"{what}: unknown keys {unknown}, missing keys {missing}")
    return [data[key] for key in keys]
