"""Strategies: who decides where a model is cut, by name, as a callable, or as the user's own.

A strategy is called as ``(graph, n, costs)`` or ``(graph, n)`` and returns the first units of stages 1..n-1, as
indices of units or as names of modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchslicer.errors import ConfigError, SliceError, nearest
from torchslicer.graph.model import ModelGraph
from torchslicer.partition.cost import RangeCost, UnitCosts, memory_cost, parameter_cost, static_costs, time_cost
from torchslicer.partition.cuts import check_num_stages, cuts_from_names, validate_cuts
from torchslicer.partition.optimal import nearest_starts, optimal_starts

Cutter = Callable[..., Sequence[int] | Sequence[str]]
_Registered = TypeVar("_Registered", bound=Callable[..., Any])

ALIASES = {"param_balanced": "parameters"}
_REGISTRY: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Strategy:
    """A strategy ready for use: whatever it was given as, it takes and returns the same."""

    name: str
    cutter: Cutter

    def __call__(self, graph: ModelGraph, n: int, costs: UnitCosts | None = None) -> tuple[int, ...]:
        """Return the first units of stages 1..n-1, checked.

        Raises:
            SliceError: *n* is not possible, or the strategy's answer is not *n* non-empty stages.
            ConfigError: The strategy cannot be called with a graph and a number of stages.
        """
        check_num_stages(graph, n)
        known = static_costs(graph) if costs is None else costs
        known.check(graph)
        starts = _call(self.cutter, self.name, graph, n, known)
        return _checked_answer(self.name, starts, graph, n)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f'a strategy needs a name: write @register_strategy("name"), got {name!r}')


def register_strategy(name: str) -> Callable[[_Registered], _Registered]:
    """Return a decorator that makes a function or class known as the strategy *name*.

    A class is instantiated without arguments at each use; its instances are called.

    Raises:
        ConfigError: *name* is empty or belongs to another strategy (running the same definition again is all right).

    >>> @register_strategy("first_unit_alone")
    ... def first_unit_alone(graph, n):
    ...     return range(1, n)
    >>> "first_unit_alone" in strategy_names()
    True
    """
    _check_name(name)

    def register(strategy: _Registered) -> _Registered:
        if not callable(strategy):
            raise ConfigError(f"strategy {name!r}: expected a function or a class, got {strategy!r}")
        known = _REGISTRY.get(ALIASES.get(name, name))
        if known is not None and _origin(known) != _origin(strategy):
            raise ConfigError(f"strategy {name!r} already exists ({'.'.join(_origin(known))}): choose another name")
        _REGISTRY[name] = strategy
        return strategy

    return register


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies.

    >>> "uniform" in strategy_names()
    True
    """
    return tuple(sorted({*_REGISTRY, *ALIASES}))


def resolve_strategy(spec: str | Cutter | type) -> tuple[Strategy, str]:
    """Return the strategy that *spec* (a name, a callable or a class) stands for, and its name.

    Raises:
        ConfigError: The name is unknown, or *spec* is neither.

    >>> strategy, name = resolve_strategy("param_balanced")
    >>> name
    'parameters'
    """
    if isinstance(spec, Strategy):
        return spec, spec.name
    if isinstance(spec, str):
        name = ALIASES.get(spec, spec)
        if name not in _REGISTRY:
            known = strategy_names()
            raise ConfigError(f"unknown strategy {spec!r}{nearest(spec, known)} (known: {', '.join(known)})")
        found = _REGISTRY[name]
    elif callable(spec):
        found, name = spec, next((key for key, value in _REGISTRY.items() if value is spec), _name_of(spec))
    else:
        raise ConfigError(f"strategy: expected a name, a callable or a class, got {spec!r}; {_remedy(spec)}")
    return Strategy(name, _instance(found, name)), name


def _remedy(spec: object) -> str:
    """Say where what was given as the strategy belongs."""
    number = isinstance(spec, int)  # slice(model, 3)
    return f"a number of stages goes to n={spec}" if number else "names of modules to cut at go to cuts="


@register_strategy("uniform")
def uniform(graph: ModelGraph, n: int) -> tuple[int, ...]:
    """Stages of the same number of units, larger ones first; cuts that are forbidden move as little as possible."""
    size, larger = divmod(len(graph.units), n)
    wanted = [stage * size + min(stage, larger) for stage in range(1, n)]
    return nearest_starts(wanted, num_units=len(graph.units), forbidden=graph.forbidden)


@register_strategy("parameters")
def parameters(graph: ModelGraph, n: int) -> tuple[int, ...]:
    """Stages whose heaviest holds as few bytes of parameters as possible."""
    return _optimal(parameter_cost(graph), graph, n)


@register_strategy("memory")
def memory(graph: ModelGraph, n: int, costs: UnitCosts) -> tuple[int, ...]:
    """Stages whose heaviest needs as little memory in training as possible; activations count if measured."""
    return _optimal(memory_cost(graph, costs), graph, n)


@register_strategy("time")
def time(graph: ModelGraph, n: int, costs: UnitCosts) -> tuple[int, ...]:
    """Stages whose slowest is as fast as possible, by the measured time of each unit."""
    return _optimal(time_cost(costs), graph, n)


def _optimal(cost: RangeCost, graph: ModelGraph, n: int) -> tuple[int, ...]:
    if not any(cost.additive) and not any(any(held.values()) for held in cost.uses):
        return uniform(graph, n)  # nothing to balance, and "earliest cuts" would pile all units into the last stage
    return optimal_starts(cost, n=n, num_units=len(graph.units), forbidden=graph.forbidden)


def _origin(strategy: object) -> tuple[str, str]:
    return str(getattr(strategy, "__module__", "?")), _name_of(strategy)


def _name_of(strategy: object) -> str:
    return str(getattr(strategy, "__qualname__", None) or type(strategy).__qualname__)


def _instance(strategy: Callable[..., Any], name: str) -> Cutter:
    if not inspect.isclass(strategy):
        return strategy
    try:
        made = strategy()
    except TypeError as error:
        raise ConfigError(
            f"strategy {name!r}: {strategy.__qualname__} must work without arguments ({error}): give it defaults, or "
            "pass an instance as strategy="
        ) from error
    if not callable(made):
        raise ConfigError(f"strategy {name!r}: {strategy.__qualname__} needs __call__(self, graph, n, costs)")
    return made


def _call(cutter: Cutter, name: str, graph: ModelGraph, n: int, costs: UnitCosts) -> object:
    """Call *cutter* with the costs if it asks for them: by the name ``costs`` or as a third positional argument."""
    try:
        signature = inspect.signature(cutter)
    except ValueError:  # some callables written in C have none
        return cutter(graph, n)
    arguments: tuple[object, ...]
    named: dict[str, object]
    if "costs" in signature.parameters:
        arguments, named = (graph, n), {"costs": costs}
    elif _takes_third(signature):
        arguments, named = (graph, n, costs), {}
    else:
        arguments, named = (graph, n), {}
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        raise ConfigError(
            f"strategy {name!r} must take (graph, n) or (graph, n, costs), but takes {signature}: {error}"
        ) from None
    return cutter(*arguments, **named)


def _takes_third(signature: inspect.Signature) -> bool:
    """Whether a third positional argument must or may be given; one with a default is the strategy's own option."""
    try:
        signature.bind(None, None)
    except TypeError:
        return True
    return any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())


def _checked_answer(name: str, answer: object, graph: ModelGraph, n: int) -> tuple[int, ...]:
    try:
        starts = list(answer)  # type: ignore[call-overload]  # a strategy may return anything
    except TypeError:
        raise SliceError(
            f"strategy {name!r}: expected the {n - 1} first units of stages 1 to {n - 1}, as indices or names, "
            f"got {answer!r}"
        ) from None
    try:
        if starts and all(isinstance(start, str) for start in starts):
            return cuts_from_names(graph, starts, n)
        return validate_cuts(graph, starts, n)
    except SliceError as error:
        raise SliceError(f"strategy {name!r}: {error}") from None
