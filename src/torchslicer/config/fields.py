"""The types of the settings: what each accepts, and what it turns it into."""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import NotRequired, TypedDict

from torchslicer.cluster.ports import port_pairs
from torchslicer.config.problems import invalid
from torchslicer.errors import ConfigError

_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,4})?")
_ADDRESS = re.compile(r"(unix:\S+|(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5}))")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_DEPTH = 16


def _not_bool(value: object) -> object:
    # bool is an int for Python and for pydantic, so `epochs: true` would train one epoch
    if isinstance(value, bool):
        raise invalid("expected a number")
    return value


def _comma_list(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, tuple) else value


def _path_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_device(value: str) -> str:
    if re.fullmatch(r"gpu(:.*)?", value):
        raise invalid("expected a device such as 'cpu' or 'cuda:0'; did you mean 'cuda'?")
    if not _DEVICE.fullmatch(value):
        raise invalid("expected 'auto' or a device such as 'cpu', 'cuda' or 'cuda:0'")
    return value


def _check_address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match["port"] or 0) > 65535:
        raise invalid("expected 'HOST:PORT' with a port up to 65535")
    return value


def _check_worker_address(value: str) -> str:
    return value if re.fullmatch(r"[^\s:/\[\]]+", value) else _check_address(value)


def _check_data_port(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise invalid("expected a port or a range 'FIRST-LAST'")
    try:
        port_pairs(value)
    except ConfigError as error:
        raise invalid(str(error), show_value=False) from None
    text = str(value).strip()
    return int(text) if text.isdigit() else text


def _check_run_id(value: str) -> str:
    if ".." in value or not _RUN_ID.fullmatch(value):
        raise invalid("expected 1-64 letters, digits, '.', '_' or '-', starting with a letter or digit, without '..'")
    return value


def _upper_level(value: object) -> object:
    if not isinstance(value, str):
        return value
    level = value.strip().upper()
    return "WARNING" if level == "WARN" else level


def plain(value: Any) -> Any:
    """Return *value* as plain data: None, bool, int, finite float, str, list, dict.

    Text that reads as a number or a truth value becomes one, so a quoted ``"1e-4"`` or ``"false"`` does what it says.

    >>> plain({"lr": "1e-4", "betas": (0.9, 0.999), "nesterov": "false"})
    {'lr': 0.0001, 'betas': [0.9, 0.999], 'nesterov': False}
    """
    return _plain(value, 0)


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise invalid(f"expected data nested at most {_MAX_DEPTH} deep", show_value=False)
    if isinstance(value, Mapping):
        return {_plain_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain_scalar(value)


def _plain_key(key: object) -> str:
    if isinstance(key, str):
        return str(key)
    raise invalid(f"expected names as keys, found the key {key!r}")


def _plain_scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _from_text(str(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(float(value))
    raise invalid("expected plain data: a number, text, true/false, null, a list or a mapping")


def _from_text(text: str) -> str | int | float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("+-").isdigit() and len(text) < 400 else _finite(float(text))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise invalid("expected a finite number")
    return value


def _named(value: object) -> object:
    """Expand the short form: ``"adamw"`` means ``{"name": "adamw", "params": {}}``."""
    if isinstance(value, str):
        return {"name": value, "params": {}}
    if not isinstance(value, Mapping):
        raise invalid("expected a name or a mapping {name: ..., params: {...}}")
    full = dict(value)
    if full.get("params") is None:
        full["params"] = {}
    return full


def _plain_extras(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item if key == "name" else plain(item) for key, item in value.items()}


def new_run_id() -> str:
    """Make a name for a run: the UTC time and four random characters.

    >>> len(new_run_id())
    20
    """
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


Plain = Annotated[Any, AfterValidator(plain)]
Name = Annotated[str, Field(min_length=1)]


@with_config(ConfigDict(extra="forbid"))
class Named(TypedDict):
    """A criterion: its name and the arguments of its constructor."""

    name: Name
    params: dict[str, Plain]


@with_config(ConfigDict(extra="forbid"))
class NamedOptimizer(TypedDict):
    """An optimizer: its name, its options, and optionally options for groups of parameters."""

    name: Name
    params: dict[str, Plain]
    groups: NotRequired[list[dict[str, Plain]]]


@with_config(ConfigDict(extra="allow"))
class NamedScheduler(TypedDict):
    """A scheduler: its name and options; further keys are for the trainer to check."""

    name: Name
    params: dict[str, Plain]


Criterion = Annotated[Named, BeforeValidator(_named)]
Optimizer = Annotated[NamedOptimizer, BeforeValidator(_named)]
Scheduler = Annotated[NamedScheduler, BeforeValidator(_named), AfterValidator(_plain_extras)]

Count = Annotated[int, Field(ge=1), BeforeValidator(_not_bool)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(_not_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_not_bool)]
Port = Annotated[int, Field(ge=0, le=65535), BeforeValidator(_not_bool)]
DataPort = Annotated[int | str, BeforeValidator(_check_data_port)]
PortOffset = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_not_bool)]
Verbosity = Annotated[int, Field(ge=0, le=3), BeforeValidator(_not_bool)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_not_bool)]
PositiveOrZero = Annotated[float, Field(ge=0), BeforeValidator(_not_bool)]

Device = Annotated[str, AfterValidator(_check_device)]
Address = Annotated[str, AfterValidator(_check_address)]
WorkerAddress = Annotated[str, AfterValidator(_check_worker_address)]
PathText = Annotated[str, Field(min_length=1), BeforeValidator(_path_text)]
RunId = Annotated[str, AfterValidator(_check_run_id)]
Level = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper_level)]

Names = Annotated[list[Name], BeforeValidator(_comma_list)]
Devices = Annotated[list[Device], BeforeValidator(_comma_list)]
Addresses = Annotated[list[Address], BeforeValidator(_comma_list)]
