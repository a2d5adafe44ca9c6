"""The optimal contiguous cut, by dynamic programming.

The objective is PipeDream's (Narayanan et al., SOSP 2019, section 3.1) without replication: minimise the heaviest
stage, since it sets the pace of the pipeline. Among the cuts that reach that minimum the most even one is taken
(smallest sum of squares), and among those the one whose cuts come earliest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from torchslicer.errors import SliceError
from torchslicer.partition.cost import RangeCost

Cost = Callable[[int, int], float]
_Table = NDArray[np.float64]
_Combine = Callable[[_Table, _Table], _Table]

_NOTHING: Mapping[int, str] = MappingProxyType({})
_MOST_REASONS = 5


def optimal_starts(
    cost: Sequence[float] | RangeCost | Cost, *, n: int, num_units: int, forbidden: Mapping[int, str] = _NOTHING
) -> tuple[int, ...]:
    """Return the first units of stages 1..n-1 of the cut whose heaviest stage is lightest.

    Args:
        cost: The cost of each unit if costs add up, or a `RangeCost`, or any ``cost(start, stop)``. Fast for the
            first two; a function is called once for every range between two allowed cuts.
        n: Number of stages, none of them empty.
        num_units: Number of units.
        forbidden: ``{unit: reason}``: no cut just before these units.

    Raises:
        SliceError: There are not enough allowed cuts for *n* stages, or a cost is not a number.

    >>> optimal_starts([5, 1, 1, 1, 4], n=3, num_units=5)
    (1, 4)
    >>> optimal_starts([5, 1, 1, 1, 4], n=3, num_units=5, forbidden={4: "in-place"})
    (1, 3)
    """
    positions = cut_positions(num_units, n=n, forbidden=forbidden)
    weights = _weights(cost, positions)
    heaviest = _best_from(weights, n, np.maximum)[0, 0]
    squares = np.where(weights <= heaviest, np.square(weights), np.inf)
    picked = _walk(squares, _best_from(squares, n, np.add), n)
    return tuple(positions[row] for row in picked)


def nearest_starts(wanted: Sequence[int], *, num_units: int, forbidden: Mapping[int, str]) -> tuple[int, ...]:
    """Return allowed cuts as near as possible to the ascending *wanted* ones: the total shift is the smallest.

    Raises:
        SliceError: There are not enough allowed cuts.

    >>> nearest_starts([2, 4], num_units=6, forbidden={4: "in-place"})
    (2, 3)
    """
    n = len(wanted) + 1
    positions = cut_positions(num_units, n=n, forbidden=forbidden)
    inner = np.asarray(positions[1:-1], dtype=np.float64)
    size = len(positions)
    # Column q of stage s's table: how far the start of stage s+1 shifts if it is positions[q].
    shifts = np.full((n, size), np.inf)
    for stage, start in enumerate(wanted):
        shifts[stage, 1:-1] = np.abs(inner - start)
    shifts[n - 1, size - 1] = 0.0
    total = np.full((n + 1, size), np.inf)
    total[n, size - 1] = 0.0
    for stage in range(n - 1, -1, -1):
        later = shifts[stage] + total[stage + 1]
        total[stage, :-1] = np.minimum.accumulate(later[::-1])[::-1][1:]
    row, picked = 0, []
    for stage in range(n - 1):
        row += 1 + int(np.argmin((shifts[stage] + total[stage + 1])[row + 1 :]))
        picked.append(positions[row])
    return tuple(picked)


def cut_positions(num_units: int, *, n: int, forbidden: Mapping[int, str] = _NOTHING) -> list[int]:
    """Return where stages may start or end, in order, with 0 and *num_units*.

    Raises:
        SliceError: *n* non-empty stages are not possible with these.

    >>> cut_positions(4, n=2, forbidden={2: "in-place"})
    [0, 1, 3, 4]
    """
    if not 1 <= n <= num_units:
        raise SliceError(f"{num_units} units cannot be cut into {n} non-empty stages: ask for 1 to {num_units}")
    positions = [0, *(unit for unit in range(1, num_units) if unit not in forbidden), num_units]
    most = len(positions) - 1
    if n > most:
        raise SliceError(
            f"{num_units} units cannot be cut into {n} stages: at most {most} are possible, because no cut may fall "
            f"{_reasons(forbidden, num_units)}. Ask for n <= {most}"
        )
    return positions


def _reasons(forbidden: Mapping[int, str], num_units: int) -> str:
    """Say which cuts are forbidden and why; cuts with the same reason together."""
    units_of: dict[str, list[str]] = {}
    for unit in sorted(forbidden):
        if 0 < unit < num_units:
            units_of.setdefault(forbidden[unit], []).append(str(unit))
    texts = [f"before unit {', '.join(units)} ({reason})" for reason, units in units_of.items()]
    more = len(texts) - _MOST_REASONS
    return "; ".join(texts[:_MOST_REASONS]) + (f"; and {more} more reasons" if more > 0 else "")


def _weights(cost: Sequence[float] | RangeCost | Cost, positions: Sequence[int]) -> _Table:
    """Return the cost of a stage from each position to each later one; infinite elsewhere."""
    if isinstance(cost, RangeCost):
        return _checked(cost.matrix(positions), positions)
    if isinstance(cost, Sequence):
        if len(cost) != positions[-1]:
            raise SliceError(f"expected {positions[-1]} costs, one a unit, got {len(cost)}")
        return _checked(RangeCost(additive=tuple(cost)).matrix(positions), positions)
    table = np.full((len(positions), len(positions)), np.inf)
    for row, start in enumerate(positions):
        table[row, row + 1 :] = [cost(start, stop) for stop in positions[row + 1 :]]
    return _checked(table, positions)


def _checked(table: _Table, positions: Sequence[int]) -> _Table:
    upper = np.triu(np.ones(table.shape, dtype=np.bool_), k=1)
    wrong = np.argwhere(upper & ~(np.isfinite(table) & (table >= 0)))
    if len(wrong):
        row, column = map(int, wrong[0])
        raise SliceError(
            f"the cost of units [{positions[row]}, {positions[column]}) must be finite and not negative, "
            f"got {table[row, column]}"
        )
    return table


def _window(stage: int, n: int, last: int) -> slice:
    """Rows where *stage* of *n* can start, if each stage before and after it has at least one unit."""
    if stage == 0:
        return slice(0, 1)
    return slice(last, last + 1) if stage == n else slice(stage, last - (n - stage) + 1)


def _best_from(weights: _Table, n: int, combine: _Combine) -> _Table:
    """Return ``best[stage, row]``: the best that stages ``stage..n-1`` reach when *stage* starts at *row*.

    ``best[n]`` is the empty rest: 0 at the last position.
    """
    last = len(weights) - 1
    best = np.full((n + 1, last + 1), np.inf)
    best[n, last] = 0.0
    for stage in range(n - 1, -1, -1):
        rows, columns = _window(stage, n, last), _window(stage + 1, n, last)
        best[stage, rows] = combine(weights[rows, columns], best[stage + 1, columns]).min(axis=1)
    return best


def _walk(squares: _Table, best: _Table, n: int) -> list[int]:
    """Return the rows where stages 1..n-1 start, each the earliest of the best."""
    last, row, picked = len(squares) - 1, 0, []
    for stage in range(n - 1):
        columns = _window(stage + 1, n, last)
        row = columns.start + int(np.argmin(squares[row, columns] + best[stage + 1, columns]))
        picked.append(row)
    return picked
