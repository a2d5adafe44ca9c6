"""Turns what pydantic reports into one readable :class:`ConfigError`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from torchslicer.errors import ConfigError, nearest

Loc = tuple[str | int, ...]
Where = Callable[[Loc], str]
"""Says where the setting at a path was given: ``"run.yaml, line 3"``, or nothing when that is not known."""

ALIASES: Mapping[str, str] = {"num_microbatches": "n_micro"}
"""Other spellings of a key. The value is the name of the field."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def at_place(place: str) -> Where:
    """Answer the same place for every setting.

    >>> at_place("environment variable EPOCHS")(("training", "epochs"))
    'environment variable EPOCHS'
    """
    return lambda _loc: place


NOWHERE = at_place("")
"""For settings of unknown origin: those given to a constructor."""


def invalid(text: str, *, key: str = "", show_value: bool = True) -> PydanticCustomError:
    """Return the error a validator raises: *text* says what was expected, *key* points below the field."""
    return PydanticCustomError("torchslicer", "{text}", {"text": text, "key": key, "show_value": show_value})


def config_error(
    error: ValidationError,
    model: type[BaseModel],
    *,
    where: Where = NOWHERE,
    at: Loc = (),
    called: Mapping[str, str] | None = None,
) -> ConfigError:
    """Convert every problem in *error* to one line of a :class:`ConfigError`.

    Args:
        error: What pydantic raised.
        model: The class that was validated; its field names are offered for misspelt keys.
        where: Says where a setting was given.
        at: Path of *model* inside the whole configuration.
        called: Fields of *model* that were given under another name, and that name.
    """
    names = called or {}
    problems = [_problem(details, model, where, at, names) for details in error.errors(include_url=False)]
    if len(problems) == 1:
        return ConfigError(problems[0])
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} settings cannot be used:\n{lines}")


def _problem(details: ErrorDetails, model: type[BaseModel], where: Where, at: Loc, called: Mapping[str, str]) -> str:
    context = details.get("ctx", {})
    loc = details["loc"]
    if context.get("key"):
        loc += (context["key"],)
    loc = at + tuple(called.get(str(part), part) for part in loc[:1]) + loc[1:]
    place = where(loc)
    return f"{place + ': ' if place else ''}{dotted(loc)}: {_explain(details, context, model)}"


def _explain(details: ErrorDetails, context: Mapping[str, Any], model: type[BaseModel]) -> str:
    if details["type"] == "extra_forbidden":
        return unknown_key(details["loc"], model)
    text = details["msg"]
    for prefix in ("Input should be ", "Value should be "):
        if text.startswith(prefix):
            text = "expected " + text.removeprefix(prefix)
    if details["type"] == "missing":
        return "this key is required and missing"
    got = context.get("show_value", True)
    return f"{text}, got {_repr.repr(details['input'])}" if got else text


def unknown_key(loc: Loc, model: type[BaseModel]) -> str:
    """Say that the last key of *loc* does not exist, and which one was probably meant."""
    word = str(loc[-1])
    sections = _sections(model)
    home = next((name for name, keys in sections.items() if word in keys), None)
    if len(loc) <= 2 and home is not None:
        return f"unknown key; '{word}' belongs to the section '{home}' ({home}.{word})"
    known = sorted(_known(loc[:-1], model))
    hint = nearest(word, known)
    if not hint and "params" in known:
        hint = f'; an option of it goes under params: {{"name": ..., "params": {{"{word}": ...}}}}'
    return f"unknown key{hint} (known here: {', '.join(known)})"


def _sections(model: type[BaseModel]) -> dict[str, Iterable[str]]:
    found: dict[str, Iterable[str]] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = key_names(field.annotation)
    return found


def key_names(model: type[BaseModel]) -> list[str]:
    """List the keys of a section, other spellings included."""
    fields = list(model.model_fields)
    return fields + [alias for alias, name in ALIASES.items() if name in fields]


def _known(parent: Loc, model: type[BaseModel]) -> Iterable[str]:
    sections = _sections(model)
    if not parent:
        return key_names(model)
    if len(parent) == 1 and parent[0] in sections:
        return sections[str(parent[0])]
    if parent[-1] == "tls":
        return ("ca", "cert", "key", "names")
    return ("groups", "name", "params") if parent[-1] == "optimizer" else ("name", "params")


def dotted(loc: Loc) -> str:
    """Write a path as users do.

    >>> dotted(("training", "optimizer", "params", "betas", 0))
    'training.optimizer.params.betas[0]'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "settings"
