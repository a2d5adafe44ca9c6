"""Passes over schedules: each takes a schedule and gives another, and leaves the order of every stage as it is."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from torchslicer.errors import ScheduleError
from torchslicer.schedule.actions import Action, ActionKind, Schedule
from torchslicer.schedule.order import Number
from torchslicer.schedule.simulate import simulate
from torchslicer.schedule.validation import validate

__all__ = ["add_communication", "fuse", "remove_communication", "validate"]

_FUSE_PRIORITY = {ActionKind.B: 0, ActionKind.I: 0, ActionKind.W: 0, ActionKind.F: 1, ActionKind.STEP: 2}


def remove_communication(schedule: Schedule) -> Schedule:
    r"""The schedule without its sends and receives.

    >>> schedule = Schedule.parse("schedule x stages=2 microbatches=1 ranks=2\n0F0\n1F0")
    >>> remove_communication(add_communication(schedule)) == schedule
    True
    """
    ranks = tuple(tuple(action for action in actions if not action.kind.is_communication) for actions in schedule.ranks)
    return Schedule(schedule.name, schedule.num_stages, schedule.num_microbatches, ranks)


def fuse(schedule: Schedule) -> Schedule:
    r"""Merge all ranks into one rank that holds every stage: what local mode runs.

    The actions go in order of their simulated start with unit costs; in ties a backward goes before a forward, then
    the lower stage first. The order of every rank is kept, and so are the in-flight peaks of every stage.

    Raises:
        ScheduleError: the schedule deadlocks.

    >>> text = "schedule x stages=2 microbatches=1 ranks=2\n0F0,0B0,0STEP\n1F0,1B0,1STEP"
    >>> print(fuse(Schedule.parse(text)).to_text().splitlines()[1])
    0F0,1F0,1B0,0B0,1STEP,0STEP
    """
    compute = remove_communication(schedule)
    timeline = simulate(compute)
    keyed = [
        [((times[0], _FUSE_PRIORITY[action.kind], action.stage), action) for action, times in zip(*row, strict=True)]
        for row in zip(compute.ranks, timeline.times, strict=True)
    ]
    # Only heads of ranks are compared, so a rank's own order is kept whatever its keys are.
    merged = heapq.merge(*keyed, key=lambda item: item[0])
    return Schedule(
        schedule.name, schedule.num_stages, schedule.num_microbatches, (tuple(action for _, action in merged),)
    )


def add_communication(schedule: Schedule, boundaries: Iterable[tuple[int, int]] | None = None) -> Schedule:
    r"""Insert sends and receives between ranks; communication that is already there is replaced.

    *boundaries* are the pairs (producer stage, consumer stage) of the values that cross cuts; by default every stage
    feeds the next. A send goes right behind the action that makes the values, and the last sender that a stage
    waits for places the stage's receive, at the same moment of a simulated run with unit costs. So all ranks follow
    one common order in which every send is before its receive: they cannot deadlock.

    Raises:
        ScheduleError: a boundary does not lead to a later stage, or the schedule deadlocks.

    >>> schedule = Schedule.parse("schedule x stages=2 microbatches=1 ranks=2\n0F0,0B0\n1F0,1B0")
    >>> print(add_communication(schedule).to_text(), end="")
    schedule x stages=2 microbatches=1 ranks=2
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    pairs = None if boundaries is None else tuple(sorted(set(boundaries)))
    compute = remove_communication(schedule)
    routed = Schedule(compute.name, compute.num_stages, compute.num_microbatches, compute.ranks, pairs)
    ranks: list[list[Action]] = [[] for _ in routed.ranks]
    for rank, action in _in_common_order(routed):
        ranks[rank].append(action)
    placed = tuple(map(tuple, ranks))
    return Schedule(routed.name, routed.num_stages, routed.num_microbatches, placed, pairs)


def _in_common_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions, with communication, in order of time; of the same moment first sends, then receives, then starts."""
    moments: list[tuple[Number, int, int, Action]] = []
    routes = _Routes(schedule)
    for rank, action, start, end in sorted(simulate(schedule).entries(), key=lambda entry: entry[3]):
        moments.append((start, 2, rank, action))
        moments.extend((end, phase, target, placed) for phase, target, placed in routes.after(rank, action))
    moments.sort(key=lambda moment: moment[:2])  # stable: actions of a rank that take no time stay in order
    return [(rank, action) for _, _, rank, action in moments]


class _Routes:
    """Which sends and receives follow from the end of an action."""

    def __init__(self, schedule: Schedule) -> None:
        self._targets: dict[tuple[bool, int], list[tuple[int, int]]] = {}
        self._num_sources: dict[tuple[bool, int], int] = {}
        self._arrived: dict[tuple[bool, int, int | None], int] = {}
        for producer, consumer in schedule.crossings:
            for backward, source, target in ((False, producer, consumer), (True, consumer, producer)):
                home = schedule.placement[target]
                if home is None:
                    raise ScheduleError(
                        f"schedule {schedule.name!r}: no rank has stage {target}, which a boundary names"
                    )
                self._targets.setdefault((backward, source), []).append((target, home))
                self._num_sources[backward, target] = self._num_sources.get((backward, target), 0) + 1

    def after(self, rank: int, action: Action) -> Iterator[tuple[int, int, Action]]:
        """Phase (0 send, 1 receive), rank and action of what follows *action*, asked for in order of ends."""
        backward, microbatch = action.kind.is_backward, action.microbatch
        targets = self._targets.get((backward, action.stage), [])
        if not targets or not (backward or action.kind is ActionKind.F):
            return
        yield 0, rank, Action(ActionKind.SEND_B if backward else ActionKind.SEND_F, action.stage, microbatch)
        for target, home in targets:
            key = (backward, target, microbatch)
            self._arrived[key] = self._arrived.get(key, 0) + 1
            if self._arrived[key] == self._num_sources[backward, target]:
                yield 1, home, Action(ActionKind.RECV_B if backward else ActionKind.RECV_F, target, microbatch)
