"""Errors that show where in a schedule they are: the whole grid, with an arrow at the failing action."""

from __future__ import annotations

from collections.abc import Iterable

from torchslicer.errors import ScheduleError
from torchslicer.schedule.actions import Schedule

Place = tuple[int, int]
"""A rank and a position in its list; the position after the last means the end of the list."""

_ARROW = "->"
_MAX_COLUMNS = 40


def order_grid(schedule: Schedule, marks: Iterable[Place] = ()) -> str:
    r"""The lists of all ranks, one row a rank, with an arrow at each place of *marks*.

    Wide schedules are shown around the first mark.

    >>> print(order_grid(Schedule.parse("schedule x stages=1 microbatches=1 ranks=1\n0F0,0B0"), [(0, 1)]))
    rank 0 |   0F0 ->0B0
    """
    marked = sorted(set(marks))
    width = max([*(len(actions) for actions in schedule.ranks), *(position + 1 for _, position in marked)])
    first = max(0, min(marked[0][1] - _MAX_COLUMNS // 2, width - _MAX_COLUMNS)) if marked else 0
    columns = range(first, min(width, first + _MAX_COLUMNS))
    cells = [[_cell(schedule, (rank, column), marked) for column in columns] for rank in range(schedule.num_ranks)]
    size = max((len(cell) for row in cells for cell in row), default=0)
    left, right = " ..." if first else "", " ..." if columns.stop < width else ""
    return "\n".join(
        f"rank {rank} |{left} {' '.join(cell.ljust(size) for cell in row)}".rstrip() + right
        for rank, row in enumerate(cells)
    )


def _cell(schedule: Schedule, place: Place, marked: list[Place]) -> str:
    rank, column = place
    arrow = _ARROW if place in marked else " " * len(_ARROW)
    actions = schedule.ranks[rank]
    if column < len(actions):
        return f"{arrow}{actions[column]}"
    return f"{arrow}(end)" if place in marked else ""


def failure(schedule: Schedule, message: str, *marks: Place) -> ScheduleError:
    """The error to raise for a fault of *schedule* at the places *marks*."""
    where = f"schedule {schedule.name!r}"
    if marks:
        where += f", rank {marks[0][0]}, position {marks[0][1]}"
    return ScheduleError(f"{where}: {message}\n{order_grid(schedule, marks)}")
