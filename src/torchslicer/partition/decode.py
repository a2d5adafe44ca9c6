"""Reading a plan from JSON: every key and type is checked, so that a damaged file is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torchslicer.errors import ConfigError, nearest

Decoder = Callable[[Any, str], Any]


def decode_plan(text: str, *, version: int) -> dict[str, Any]:
    """Return the fields of the plan that *text* holds, with lists as tuples and the version taken off.

    Raises:
        ConfigError: The text is not JSON, of another version, or a key is unknown, missing or of a wrong type.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"plan: not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    if not isinstance(data, dict):
        raise _wrong("plan", "an object", data)
    found = data.pop("version", None)
    if found != version or isinstance(found, bool):
        raise ConfigError(f"plan: version {found!r} cannot be read, this TorchSlicer reads version {version}")
    return _fields(data, "plan", _PLAN)


def _fields(data: Any, where: str, decoders: Mapping[str, Decoder]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _wrong(where, "an object", data)
    for key in data:
        if key not in decoders:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, decoders)}")
    missing = [key for key in decoders if key not in data]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(map(repr, missing))}")
    return {key: decode(data[key], f"{where}.{key}") for key, decode in decoders.items()}


def _wrong(where: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"{where}: expected {expected}, got {found!r:.80}")


def _text(data: Any, where: str) -> str:
    if not isinstance(data, str):
        raise _wrong(where, "a text", data)
    return data


def _count(data: Any, where: str) -> int:
    if isinstance(data, bool) or not isinstance(data, int) or data < 0:
        raise _wrong(where, "an integer that is not negative", data)
    return data


def _share(data: Any, where: str) -> float:
    if isinstance(data, bool) or not isinstance(data, (int, float)) or not (math.isfinite(data) and 0 <= data <= 1):
        raise _wrong(where, "a number from 0 to 1, or null", data)
    return float(data)


def _optional(decode: Decoder) -> Decoder:
    return lambda data, where: None if data is None else decode(data, where)


def _list_of(decode: Decoder) -> Decoder:
    def decode_list(data: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _wrong(where, "a list", data)
        return tuple(decode(item, f"{where}[{position}]") for position, item in enumerate(data))

    return decode_list


def _object_of(decode: Decoder) -> Decoder:
    def decode_object(data: Any, where: str) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        return {key: decode(item, f"{where}[{key!r}]") for key, item in data.items()}

    return decode_object


_STAGE: Mapping[str, Decoder] = {
    "index": _count,
    "units": _list_of(_text),
    "first_unit": _count,
    "last_unit": _count,
    "parameters": _list_of(_text),
    "buffers": _list_of(_text),
    "num_parameters": _count,
    "parameter_bytes": _count,
    "buffer_bytes": _count,
    "time_share": _optional(_share),
    "device": _text,
}
_BOUNDARY: Mapping[str, Decoder] = {
    "name": _text,
    "producer": _count,
    "consumers": _list_of(_count),
    "size_bytes": _optional(_count),
}
_PLAN: Mapping[str, Decoder] = {
    "model": _text,
    "source": _text,
    "strategy": _text,
    "num_stages": _count,
    "stages": _list_of(lambda data, where: _fields(data, where, _STAGE)),
    "boundaries": _list_of(lambda data, where: _fields(data, where, _BOUNDARY)),
    "shared": _object_of(_list_of(_count)),
}
