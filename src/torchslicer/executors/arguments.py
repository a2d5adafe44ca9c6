"""What a program may pass to the calls that start something, so that another kind is refused before anything starts."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from torchslicer.config import RunConfig
from torchslicer.errors import ConfigError, nearest

P = ParamSpec("P")
R = TypeVar("R")
Check = Callable[[str, Any], None]
"""Raises `ConfigError` if the value of the argument of that name is not of the kind."""


def checked(**checks: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function check the arguments of these names when it is called; None where it is the default says nothing.

    The signature stays, for `help`, `inspect.signature` and type checkers.

    Raises:
        ConfigError: One is of another kind (when the function is called).

    Example:
        >>> @checked(threads=count)
        ... def start(*, threads: int | None = None) -> int | None:
        ...     return threads
        >>> start(threads=0)
        Traceback (most recent call last):
        torchslicer.errors.ConfigError: threads: expected a whole number above 0, got 0
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # one is missing or unknown: Python itself says it best
                return function(*args, **kwargs)
            for name, check in checks.items():
                if name in given and not (given[name] is None and signature.parameters[name].default is None):
                    check(name, given[name])
            return function(*args, **kwargs)

        return call

    return decorate


def refuse(name: str, expected: str, value: Any) -> None:
    """Raise the error for a value of another kind.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(f"{name}: expected {expected}, got {value!r:.80}")


def instance(kinds: Any, expected: str) -> Check:
    """Return the check for values of these classes; a truth value is no number.

    >>> instance(int, "a number")("n", True)
    Traceback (most recent call last):
    torchslicer.errors.ConfigError: n: expected a number, got True
    """

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            refuse(name, expected, value)

    return check


def text(expected: str, *, secret: bool = False) -> Check:
    """Return the check for texts that are not empty; of one that is *secret*, errors show only the class."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or not value:
            refuse(name, expected, type(value) if secret else value)

    return check


def one_of(*known: str) -> Check:
    """Return the check for one of a few names.

    >>> one_of("grpc", "tcp")("transport", "gprc")
    Traceback (most recent call last):
    torchslicer.errors.ConfigError: transport: expected 'grpc' or 'tcp', got 'gprc'; did you mean 'grpc'?
    """

    def check(name: str, value: Any) -> None:
        if value not in known:
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise ConfigError(f"{name}: expected {' or '.join(map(repr, known))}, got {value!r:.80}{hint}")

    return check


def names(example: str) -> Check:
    """Return the check for several texts; one alone would be taken for its letters.

    >>> names("my_package")("trust", "layers")
    Traceback (most recent call last):
    torchslicer.errors.ConfigError: trust: expected a list of texts such as ['my_package'], got 'layers'
    """

    def check(name: str, value: Any) -> None:
        several = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
        if not several or not all(isinstance(part, str) and part for part in value):
            refuse(name, f"a list of texts such as {[example]}", value)

    return check


def whole(name: str, value: Any) -> None:
    """Check that *value* is a whole number."""
    instance(int, "a whole number")(name, value)


def count(name: str, value: Any) -> None:
    """Check that *value* is a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(name, "a whole number above 0", value)


def seconds(name: str, value: Any) -> None:
    """Check that *value* is a time."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        refuse(name, "a number of seconds above 0", value)


flag = instance(bool, "True or False")
path = instance(str | os.PathLike, "a path")
run_config = instance(RunConfig, "a RunConfig, such as RunConfig.load('run.yaml')")
