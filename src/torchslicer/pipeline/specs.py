"""What users write for a criterion, optimizer or scheduler, a name or a dictionary, read and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchslicer.errors import ConfigError, nearest


def normalized(name: str) -> str:
    """Return *name* without case, separators, the ``torch...`` prefix and the ending ``loss``.

    >>> normalized("torch.nn.CrossEntropyLoss"), normalized("cross-entropy")
    ('crossentropy', 'crossentropy')
    """
    word = name.rpartition(".")[2].lower().replace("_", "").replace("-", "").replace(" ", "")
    return word.removesuffix("loss") or word


def read_spec(spec: str | Mapping[str, Any], what: str, extra: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Return name and parameters of a spec that is a name or ``{"name": ..., "params": {...}}``.

    Raises:
        ConfigError: If a key is unknown, the name is missing or the parameters are no mapping.
    """
    if isinstance(spec, str):
        return spec, {}
    known = ["name", "params", *extra]
    for key in spec:
        if key not in known:
            raise ConfigError(
                f"{what}: unknown key {key!r}{nearest(str(key), known)}; keys are {known}, and everything that belongs "
                'to the constructor goes under "params"'
            )
    if "name" not in spec:
        raise ConfigError(f'{what}: the dictionary has no "name"; got keys {list(spec)}')
    params = spec.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f'{what}: "params" must be a dictionary, got {type(params).__name__}')
    return spec["name"], dict(params)


def find_class(
    name: str,
    classes: Mapping[str, type],
    what: str,
    *,
    aliases: Mapping[str, str] | None = None,
    refused: Sequence[str] = (),
) -> type:
    """Return the class called *name* in any spelling.

    Args:
        name: The name.
        classes: All classes.
        what: What they are, for messages.
        aliases: Other names.
        refused: Classes that the caller refuses with the reason: found, but not offered.

    Raises:
        ConfigError: If there is none, with the nearest name and all names.
    """
    by_key = {normalized(known): cls for known, cls in classes.items()}
    key = normalized(name)
    cls = by_key.get((aliases or {}).get(key, key))
    if cls is None:
        offered = sorted(set(classes) - set(refused))
        hint = nearest(key, offered) or nearest(f"{key}loss", offered)
        raise ConfigError(f"unknown {what} {name!r}{hint}; known: {', '.join(offered)}")
    return cls


def check_params(cls: Callable[..., Any], params: Mapping[str, Any], where: str, hidden: Sequence[str] = ()) -> None:
    """Check the names of *params* against the signature of *cls*; *hidden* names are given by the library.

    Raises:
        ConfigError: If a parameter is unknown, with the nearest one and all of them.
    """
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name in parameters if name not in hidden]
    for name in params:
        if name not in known:
            hint = nearest(name, known)
            raise ConfigError(f"{where}: unknown parameter {name!r}{hint}; parameters are {', '.join(known)}")


def construct(where: str, make: Callable[[], Any]) -> Any:
    """Return ``make()``.

    Raises:
        ConfigError: If the constructor refuses its values.
    """
    try:
        return make()
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"{where}: {error}") from error
