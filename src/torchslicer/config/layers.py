"""The sources of settings, and how one of them goes before another.

Python keyword arguments > YAML > environment > defaults, key by key. The value of a key is replaced as a whole: an
optimizer given in YAML does not inherit parameters of one given in the environment. Only ``network.tls`` is a section
of its own: its keys are merged one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel

from torchslicer.config.problems import ALIASES, Loc, Where, at_place, dotted, key_names
from torchslicer.config.yamlio import Document
from torchslicer.errors import ConfigError, nearest

PREFIX = "TORCHSLICER_"

LEGACY_ENVIRONMENT: Mapping[str, str] = {
    "CHECKPOINT_DIR": "checkpoint.dir",
    "CHECKPOINT_ENABLED": "checkpoint.enabled",
    "CHECKPOINT_RESUME": "checkpoint.resume",
    "CHECKPOINT_SAVE_EVERY": "checkpoint.save_every",
    "COORDINATOR_ADDRESS": "network.coordinator_address",
    "COORDINATOR_BIND_ADDRESS": "network.coordinator_bind_address",
    "DEVICE": "network.device",
    "DISCOVERY_BACKEND": "discovery.backend",
    "DISCOVERY_REGISTRATION_DELAY": "discovery.registration_delay_s",
    "DISCOVERY_REGISTRATION_MAX_ATTEMPTS": "discovery.registration_max_attempts",
    "DISCOVERY_REGISTRATION_RPC_TIMEOUT": "discovery.registration_rpc_timeout_s",
    "DISCOVERY_TIMEOUT": "discovery.timeout",
    "DISCOVERY_WATCHDOG_INTERVAL": "discovery.watchdog_interval_s",
    "EPOCHS": "training.epochs",
    "FAULT_MAX_RETRIES": "fault_tolerance.max_retries",
    "FAULT_TOLERANCE_ENABLED": "fault_tolerance.enabled",
    "HEARTBEAT_INTERVAL": "fault_tolerance.heartbeat_interval_s",
    "HEARTBEAT_TIMEOUT": "fault_tolerance.ping_timeout_s",
    "KEEP_ALIVE": "network.keep_alive",
    "LOG_DIR": "logging.dir",
    "LOG_ENABLED": "logging.enabled",
    "LOG_LEVEL": "logging.level",
    "MIXED_PRECISION": "training.mixed_precision",
    "N_MICRO": "pipeline.n_micro",
    "N_WORKERS": "discovery.n_workers",
    "PORT": "network.worker_port",
    "PROFILE_MEMORY": "profile.memory",
    "PROFILE_VERBOSITY": "profile.verbosity",
    "RUN_ID": "run_id",
    "TENSOR_PORT_OFFSET": "transport.tensor_port_offset",
    "TENSOR_TRANSPORT": "transport.tensor",
    "USE_GPIPE": "pipeline.use_gpipe",
    "WORKER_ADDRESS": "network.worker_address",
    "WORKER_INIT_DELAY": "startup.worker_init_delay_s",
    "WORKER_INIT_MAX_ATTEMPTS": "startup.worker_init_max_attempts",
    "WORKER_INIT_RPC_TIMEOUT": "startup.worker_init_rpc_timeout_s",
    "WORKER_PEERS": "discovery.peers",
    "WORKER_TAGS": "network.worker_tags",
    "WORKER_TAG_FILTER": "discovery.tag_filter",
}
"""Environment variables of the public 0.2.0 that still work. ``TORCHSLICER_<SECTION>__<KEY>`` goes before them."""

_FLAT_SECTIONS = ("training", "pipeline", "network")
_FLAT_EXTRA = {"n_workers": ("discovery", "n_workers"), "transport": ("transport", "tensor"), "run_id": ("run_id",)}
_JSON_KEYS = frozenset({"optimizer", "criterion", "scheduler", "tls"})
_LIST_KEYS = frozenset({"peers", "tag_filter", "worker_tags", "cuts", "devices", "names"})
_SUBSECTIONS = frozenset({("network", "tls")})

Path = tuple[str, ...]


@dataclass
class Layers:
    """Settings merged so far, and where each one came from."""

    values: dict[Path, Any] = field(default_factory=dict)
    origins: dict[Path, Where] = field(default_factory=dict)

    def put(self, path: Path, value: Any, origin: Where) -> None:
        """Set the value of one key, whatever an earlier layer said."""
        path = (*path[:-1], ALIASES.get(path[-1], path[-1])) if len(path) == 2 else path
        if path in _SUBSECTIONS:
            value = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            if isinstance(value, Mapping):
                for key, item in value.items():
                    self.put((*path, str(key)), item, origin)
                return
        for deeper in [known for known in self.values if known[: len(path)] == path]:
            del self.values[deeper]
        self.values[path], self.origins[path] = value, origin

    def nested(self) -> dict[str, Any]:
        """Return the settings as sections of keys."""
        data: dict[str, Any] = {}
        for path, value in self.values.items():
            place = data
            for name in path[:-1]:
                if not isinstance(place.get(name), dict):
                    place[name] = {}
                place = place[name]
            place[path[-1]] = value
        return data

    def where(self, loc: Loc) -> str:
        """Say where the setting at *loc* was given."""
        names = tuple(str(part) for part in loc[:3])
        found = (self.origins.get(names[:length]) for length in range(len(names), 0, -1))
        origin = next((one for one in found if one is not None), None)
        return origin(loc) if origin else ""


def add_environment(layers: Layers, model: type[BaseModel], environ: Mapping[str, str]) -> None:
    """Add the settings that *environ* holds. Empty variables count as not set.

    Raises:
        ConfigError: A variable ``TORCHSLICER_<SECTION>__<KEY>`` names no setting, or its JSON is broken.
    """
    for name, target in LEGACY_ENVIRONMENT.items():
        if environ.get(name, "").strip():
            _put_variable(layers, model, name, tuple(target.split(".")), environ[name])
    known = {PREFIX + "__".join(path).upper(): path for path in paths(model)}
    for name in sorted(environ):
        if name in known and environ[name].strip():
            _put_variable(layers, model, name, known[name], environ[name])
        elif name.startswith(PREFIX) and "__" in name and name not in known:
            hint = nearest(name, known)
            raise ConfigError(f"environment variable {name}: there is no such setting{hint}; unset or rename it")


def paths(model: type[BaseModel]) -> Iterable[Path]:
    """List the paths of all settings, other spellings included."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for key in key_names(info.annotation):
                yield (name, key)
                if (name, key) in _SUBSECTIONS:
                    below = info.annotation.model_fields[key].annotation
                    yield from ((name, key, deeper) for deeper in key_names(below))  # type: ignore[arg-type]
        else:
            yield (name,)


def _put_variable(layers: Layers, model: type[BaseModel], name: str, path: Path, text: str) -> None:
    place = f"environment variable {name}"
    layers.put(path, _from_text(text.strip(), path, model, place), at_place(place))


def _from_text(text: str, path: Path, model: type[BaseModel], place: str) -> Any:
    if text == "null" and _nullable(path, model):
        return None
    if path[-1] in _JSON_KEYS and text.startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: {dotted(path)}: expected a name or a JSON object: {error}") from None
    if path[-1] in _LIST_KEYS and text.startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text  # "[::1]:50051, host:50051" is a list of addresses too
    return text


def _nullable(path: Path, model: type[BaseModel]) -> bool:
    annotation: Any = model
    for name in path:
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return False
        annotation = annotation.model_fields[ALIASES.get(name, name)].annotation
    return len(path) > 1 and type(None) in get_args(annotation)


def add_yaml(layers: Layers, model: type[BaseModel], document: Document) -> None:
    """Add the settings of a YAML file.

    Raises:
        ConfigError: A section is not a mapping, or a key is given under two names.
    """
    sections = {path[0] for path in paths(model) if len(path) == 2}
    for name, value in document.data.items():
        place = document.where((name,))
        if name in sections:
            _put_section(layers, name, value, document.where, place)
        elif name != "run_id" or value is not None:
            layers.put((name,), value, document.where)


def _put_section(layers: Layers, name: str, value: Any, origin: Where, place: str) -> None:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: {name}: expected keys and values, got {value!r:.80}")
    for alias, key in ALIASES.items():
        if alias in value and key in value and value[alias] != value[key]:
            at = origin((name, alias))
            raise ConfigError(f"{at}: {name}.{alias}: {alias} and {key} are two names of one setting and differ")
    for key, item in value.items():
        layers.put((name, str(key)), item, origin)


def add_keywords(layers: Layers, model: type[BaseModel], keywords: Mapping[str, Any]) -> None:
    """Add keyword arguments: ``epochs=2``, ``logging__level="DEBUG"`` or ``logging={"level": "DEBUG"}``.

    None means that an argument was not given.

    Raises:
        ConfigError: A keyword names no setting, or two of them contradict each other.
    """
    names = keyword_names(model)
    sections = {path[0] for path in names.values() if len(path) == 2}
    given = {name: value for name, value in keywords.items() if value is not None}
    seen: dict[Path, str] = {}
    for name, value in given.items():
        place = f"keyword argument {name}"
        if name in sections and isinstance(value, Mapping | BaseModel):
            _put_section(layers, name, value, at_place(place), place)
        elif name in names:
            path = tuple(ALIASES.get(part, part) for part in names[name])
            _refuse_twice(seen, path, name, given)
            layers.put(path, value, at_place(place))
        elif name in sections:
            raise ConfigError(f"{place}: expected a mapping of the keys of this section, got {value!r:.80}")
        elif name != "lr":
            hint = nearest(name, [*names, *sections, "lr"])
            raise ConfigError(f"{place}: there is no such setting{hint}")
    if "lr" in given:
        _put_lr(layers, model, given)


def _refuse_twice(seen: dict[Path, str], path: Path, name: str, given: Mapping[str, Any]) -> None:
    other = seen.setdefault(path, name)
    if other != name and given[other] != given[name]:
        raise ConfigError(f"keyword arguments {other} and {name} are two names of {dotted(path)} and differ")


def keyword_names(model: type[BaseModel]) -> dict[str, Path]:
    """Map the keyword arguments that stand for one key to its path."""
    names: dict[str, Path] = {}
    for path in paths(model):
        if len(path) > 1:
            names["__".join(path)] = path
            if len(path) == 2 and path[0] in _FLAT_SECTIONS:
                names[path[1]] = path
    return {**names, **_FLAT_EXTRA}


def _put_lr(layers: Layers, model: type[BaseModel], given: Mapping[str, Any]) -> None:
    path, place = ("training", "optimizer"), "keyword argument lr"
    optimizer = layers.values.get(path)
    if optimizer is None:
        optimizer = model().model_dump()["training"]["optimizer"]
    optimizer = {"name": optimizer} if isinstance(optimizer, str) else optimizer
    params = optimizer.get("params") or {} if isinstance(optimizer, Mapping) else None
    if not isinstance(optimizer, Mapping) or not isinstance(params, Mapping):
        return  # the check of the merged settings says what is wrong with it
    if isinstance(given.get("optimizer"), Mapping) and params.get("lr", given["lr"]) != given["lr"]:
        raise ConfigError(f"{place}: {given['lr']!r} contradicts the lr {params['lr']!r} of optimizer; give one")
    layers.put(path, {**optimizer, "params": {**params, "lr": given["lr"]}}, at_place(place))
