"""Cuts as the user says them, checked: a number of stages, first units of stages, or names of modules."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torchslicer.errors import SliceError, nearest
from torchslicer.graph.model import ModelGraph
from torchslicer.partition.optimal import cut_positions

_MOST_HINTS = 5
_SHOWN_UNITS = 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NEXT_UNIT_FROM = 1023.95  # what would print as 1024.0


def check_num_stages(graph: ModelGraph, n: int) -> None:
    """Check that *graph* can be cut into exactly *n* non-empty stages.

    Raises:
        SliceError: *n* is not a positive integer, or larger than the units or the allowed cuts permit.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise SliceError(f"n, the number of stages, must be an integer, got {n!r}")
    num_units = len(graph.units)
    if not 1 <= n <= num_units:
        raise SliceError(
            f"{model_name(graph)} has {num_units} {'unit' if num_units == 1 else 'units'} and cannot be cut into {n} "
            f"non-empty stages: ask for n from 1 to {num_units}{_split_hint(graph) if n > num_units else ''}"
        )
    cut_positions(num_units, n=n, forbidden=graph.forbidden)


def validate_cuts(graph: ModelGraph, starts: Sequence[int], n: int) -> tuple[int, ...]:
    """Check that *starts*, the first units of stages 1..n-1, make exactly *n* non-empty stages, and return them.

    Raises:
        SliceError: They do not, or a cut is forbidden; the message says why and what works.
    """
    check_num_stages(graph, n)
    units = tuple(_unit_index(start) for start in starts)
    if len(units) != n - 1:
        raise SliceError(
            f"{n} stages need {n - 1} cuts (the first units of stages 1 to {n - 1}), got {len(units)}: {list(units)}"
        )
    previous = 0
    for stage, unit in enumerate(units, start=1):
        if not previous < unit < len(graph.units):
            raise SliceError(
                f"stage {stage} cannot start at unit {unit}: cuts must ascend from 1 to {len(graph.units) - 1} so that "
                f"no stage is empty, got {list(units)}"
            )
        if unit in graph.forbidden:
            raise SliceError(_forbidden_message(graph, unit))
        previous = unit
    return units


def cuts_from_names(graph: ModelGraph, names: Sequence[str], n: int | None = None) -> tuple[int, ...]:
    """Return the first units of stages 1..n-1 for cuts given as paths of modules, such as ``["layer2", "layer4.0"]``.

    A cut falls before the first unit that is the named module or lies inside it.

    Raises:
        SliceError: A name is unknown, given twice, out of order or at the very beginning; or *n* is not one more
            than the number of names; or a cut is forbidden.
    """
    if isinstance(names, str):
        raise SliceError(f"cuts must be a list of module names, got the single text {names!r}: write cuts=[{names!r}]")
    if n is not None and n != len(names) + 1:
        raise SliceError(f"n={n} stages need {n - 1} cuts, got {len(names)}: leave n out or make them agree")
    starts = [_start_of(graph, name) for name in names]
    _check_order(graph, names, starts)
    return validate_cuts(graph, starts, len(names) + 1)


def model_name(graph: ModelGraph) -> str:
    """Return the class name of the model."""
    return type(graph.model).__name__


def format_bytes(size_bytes: int) -> str:
    """Return *size_bytes* for people, in powers of 1024.

    >>> format_bytes(512), format_bytes(65536), format_bytes(5 * 2**20)
    ('512 B', '64.0 KiB', '5.0 MiB')
    """
    size, unit = float(size_bytes), 0
    while size >= _NEXT_UNIT_FROM and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} B"


def _unit_index(start: object) -> int:
    if isinstance(start, bool):
        raise SliceError(f"a cut must be the index of a unit, got {start!r}")
    try:
        return operator.index(start)  # type: ignore[arg-type]  # numpy integers too
    except TypeError:
        raise SliceError(f"a cut must be the index of a unit, got {start!r} ({type(start).__name__})") from None


def _start_of(graph: ModelGraph, name: object) -> int:
    if not isinstance(name, str) or not name:
        raise SliceError(f"a cut must be the path of a module, such as 'layer2', got {name!r}")
    for unit in graph.units:
        if unit.name == name or unit.name.startswith(name + "."):
            return unit.index
    whole = (unit.name for unit in graph.units if unit.kind != "functions")
    kept_whole = next((path for path in whole if name.startswith(path + ".")), None)
    inside = f"; {kept_whole!r} is one unit and cannot be cut inside" if kept_whole else _meant(graph, name)
    raise SliceError(f"no unit of {model_name(graph)} is or lies in a module {name!r}{inside}")


def _meant(graph: ModelGraph, name: str) -> str:
    """Say which module was meant, or, where none is near, which there are."""
    units = [unit.name for unit in graph.units if unit.kind != "functions"]
    shown = ", ".join(units[:_SHOWN_UNITS]) + (", ..." if len(units) > _SHOWN_UNITS else "")
    return nearest(name, _paths(graph)) or f"; its units are {shown}"


def _paths(graph: ModelGraph) -> list[str]:
    """Return all paths that a cut may name: of units, and of the modules around them."""
    paths: dict[str, None] = {}
    for unit in graph.units:
        parts = unit.name.split(".")
        paths.update((".".join(parts[:depth]), None) for depth in range(len(parts), 0, -1))
    return list(paths)


def _check_order(graph: ModelGraph, names: Sequence[str], starts: Sequence[int]) -> None:
    name_at: dict[int, str] = {}
    for name, start in zip(names, starts, strict=True):
        if start == 0:
            raise SliceError(
                f"the cut {name!r} falls before the first unit: stage 0 would be empty, name a later module"
            )
        if start in name_at:
            other = name_at[start]
            which = f"the cut {name!r} is given twice" if other == name else f"{other!r} and {name!r} are the same cut"
            raise SliceError(f"{which}: before unit {start} ({graph.units[start].name!r})")
        name_at[start] = name
    in_order = [name_at[start] for start in sorted(name_at)]
    if list(names) != in_order:
        raise SliceError(f"the cuts {list(names)} are not in the order in which the model runs: write {in_order}")


def _forbidden_message(graph: ModelGraph, unit: int) -> str:
    allowed = [other for other in range(1, len(graph.units)) if other not in graph.forbidden]
    near = [max((o for o in allowed if o < unit), default=None), min((o for o in allowed if o > unit), default=None)]
    works = " or ".join(f"before unit {o} ({graph.units[o].name!r})" for o in near if o is not None)
    advice = f"The nearest cuts that work are {works}" if works else "No cut of this model works: use n=1"
    return f"no cut may fall before unit {unit} ({graph.units[unit].name!r}): {graph.forbidden[unit]}. {advice}"


def _split_hint(graph: ModelGraph) -> str:
    """Say what could be split further: modules that were kept whole, else the heaviest units."""
    sizes = {unit.index: sum(map(graph.size_bytes, unit.parameters)) for unit in graph.units}
    heaviest = sorted(graph.units, key=lambda unit: (-sizes[unit.index], unit.index))
    whole = [unit for unit in heaviest if unit.kind == "opaque"]
    listed = ", ".join(f"{u.name!r} {format_bytes(sizes[u.index])}" for u in (whole or heaviest)[:_MOST_HINTS])
    if whole:
        return f". These were kept whole because they could not be traced and could be split further: {listed}"
    return f". Units that could be written as several modules, heaviest first: {listed}" if listed else ""
