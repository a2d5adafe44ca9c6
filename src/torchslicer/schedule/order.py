"""What each action waits for, and the walk of all ranks through their lists.

Dependencies, for stage s and micro-batch i (B stands for B or I)::

    F(s-1, i) -> F(s, i)          B(s+1, i) -> B(s, i)         I(s, i) -> W(s, i)
    F(s, i) -> B(s, i)            F(s, i) -> SEND_F(s, i)      B(s, i) -> SEND_B(s, i)
    SEND_F(s, i) -> RECV_F(t, i) -> F(t, i)                    for every boundary (s, t) between ranks
    SEND_B(t, i) -> RECV_B(s, i) -> B(s, i)                    for every boundary (s, t) between ranks

and every action waits for the one before it on its rank. That is with receives that block. A receive that is only
posted waits for nothing, and what uses its value (F, B) waits for the sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from torchslicer.schedule.actions import Action, ActionKind, Schedule
from torchslicer.schedule.grid import Place, failure

Number = int | float | Fraction
"""A time. Integers and fractions stay exact."""

Times = tuple[Number, Number]
"""When an action starts and ends."""

# B and I make the same thing, the gradient of the stage's inputs, so they share a group.
_GROUPS = (("F",), ("B", "I"), ("W",), ("SEND_F",), ("RECV_F",), ("SEND_B",), ("RECV_B",), ("STEP",))
_GROUP_OF = {ActionKind(kind): group for group, kinds in enumerate(_GROUPS) for kind in kinds}
_F, _B, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B, _STEP = range(len(_GROUPS))


class Dependencies:
    """What each action of one schedule waits for; results of actions are numbered, so that look-ups are quick.

    Raises:
        ScheduleError: an action names a stage or micro-batch that does not exist, comes twice, or is on
            another rank than the rest of its stage.
    """

    def __init__(self, schedule: Schedule, *, blocking: bool = True) -> None:
        self._blocking = blocking
        self._num_stages, self._num_microbatches = schedule.num_stages, schedule.num_microbatches
        self._present = self._number_all(schedule)
        self._communicates = schedule.has_communication
        self._producers: dict[int, list[int]] = {}
        self._consumers: dict[int, list[int]] = {}
        for producer, consumer in schedule.crossings:
            self._producers.setdefault(consumer, []).append(producer)
            self._consumers.setdefault(producer, []).append(consumer)

    def _number_all(self, schedule: Schedule) -> set[int]:
        present: set[int] = set()
        for rank, actions in enumerate(schedule.ranks):
            for position, action in enumerate(actions):
                _check_place(schedule, action, (rank, position))
                result = self.result_of(action)
                if result in present:
                    raise failure(
                        schedule, f"{action} does again what an earlier action does; remove one", (rank, position)
                    )
                present.add(result)
        return present

    def _result(self, group: int, stage: int, microbatch: int) -> int:
        return (group * self._num_stages + stage) * self._num_microbatches + microbatch

    def result_of(self, action: Action) -> int:
        """The number of what *action* makes."""
        return self._result(_GROUP_OF[action.kind], action.stage, action.microbatch or 0)

    def text_of(self, result: int) -> str:
        """The action that makes *result*, as text."""
        rest, microbatch = divmod(result, self._num_microbatches)
        group, stage = divmod(rest, self._num_stages)
        text = f"{stage}{_GROUPS[group][0]}{microbatch}"
        return text if result in self._present else f"{text} (on no rank)"

    def needed_by(self, action: Action) -> list[int]:
        """The results that *action* waits for."""
        group, stage, microbatch = _GROUP_OF[action.kind], action.stage, action.microbatch or 0
        num_stages, num_microbatches = self._num_stages, self._num_microbatches
        return [
            (need * num_stages + place) * num_microbatches + microbatch
            for need, place in self._needs(group, stage, microbatch)
        ]

    def _needs(self, group: int, stage: int, microbatch: int) -> list[tuple[int, int]]:
        if group == _F:
            before = [(_F, stage - 1)] if stage else []
            return before + self._received(_RECV_F, stage, microbatch)
        if group == _B:
            after = [(_B, stage + 1)] if stage + 1 < self._num_stages else []
            return [(_F, stage), *after, *self._received(_RECV_B, stage, microbatch)]
        if group in (_RECV_F, _RECV_B):
            return self._sent(group, stage) if self._blocking else []
        return {_W: [(_B, stage)], _SEND_F: [(_F, stage)], _SEND_B: [(_B, stage)], _STEP: []}[group]

    def _received(self, group: int, stage: int, microbatch: int) -> list[tuple[int, int]]:
        if not self._communicates or self._result(group, stage, microbatch) not in self._present:
            return []
        return [(group, stage)] if self._blocking else [(group, stage), *self._sent(group, stage)]

    def _sent(self, group: int, stage: int) -> list[tuple[int, int]]:
        if group == _RECV_F:
            return [(_SEND_F, producer) for producer in self._producers.get(stage, ())]
        return [(_SEND_B, consumer) for consumer in self._consumers.get(stage, ())]


def _check_place(schedule: Schedule, action: Action, place: Place) -> None:
    if action.stage >= schedule.num_stages:
        raise failure(schedule, f"{action} names a stage beyond the last, {schedule.num_stages - 1}", place)
    if (action.microbatch or 0) >= schedule.num_microbatches:
        last = schedule.num_microbatches - 1
        raise failure(schedule, f"{action} names a micro-batch beyond the last, {last}", place)
    home = schedule.placement[action.stage]
    if home != place[0]:
        raise failure(schedule, f"{action} is on another rank than the rest of its stage, rank {home}", place)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How far the ranks came: times of the actions done, and for each stuck rank its place and what it waits for."""

    times: tuple[tuple[Times, ...], ...]
    stuck: tuple[tuple[Place, str], ...]


class _Walker:
    """Lets every rank go on until it waits; who makes a result wakes the ranks that wait for it."""

    def __init__(self, schedule: Schedule, durations: dict[ActionKind, tuple[Number, ...]], *, blocking: bool) -> None:
        self._ranks = schedule.ranks
        self._durations = durations
        self._dependencies = Dependencies(schedule, blocking=blocking)
        self._done: dict[int, Number] = {}
        self._waiting: dict[int, list[int]] = {}
        self._times: list[list[Times]] = [[] for _ in schedule.ranks]
        self._ready = deque(range(schedule.num_ranks))

    def walk(self) -> Walk:
        while self._ready:
            self._advance(self._ready.popleft())
        return Walk(times=tuple(map(tuple, self._times)), stuck=tuple(sorted(self._stuck())))

    def _advance(self, rank: int) -> None:
        actions, times = self._ranks[rank], self._times[rank]
        while len(times) < len(actions):
            action = actions[len(times)]
            needed = self._dependencies.needed_by(action)
            for result in needed:
                if result not in self._done:
                    self._waiting.setdefault(result, []).append(rank)
                    return
            start = times[-1][1] if times else 0
            for result in needed:
                start = max(start, self._done[result])
            self._finish(rank, action, start)

    def _finish(self, rank: int, action: Action, start: Number) -> None:
        end = start + self._durations[action.kind][action.stage]
        self._times[rank].append((start, end))
        result = self._dependencies.result_of(action)
        self._done[result] = end
        self._ready.extend(self._waiting.pop(result, ()))

    def _stuck(self) -> Iterator[tuple[Place, str]]:
        for result, ranks in self._waiting.items():
            for rank in ranks:
                yield (rank, len(self._times[rank])), self._dependencies.text_of(result)


def walk(schedule: Schedule, durations: dict[ActionKind, tuple[Number, ...]], *, blocking: bool = False) -> Walk:
    """Walk all ranks through their lists; linear in the number of actions.

    Raises:
        ScheduleError: see `Dependencies`; a deadlock is no error here but ``Walk.stuck``.
    """
    return _Walker(schedule, durations, blocking=blocking).walk()


def deadlock(schedule: Schedule, stuck: tuple[tuple[Place, str], ...]) -> Exception:
    """The error for a walk that got stuck."""
    waits = "; ".join(
        f"rank {rank} is at {schedule.ranks[rank][position]} and waits for {text}" for (rank, position), text in stuck
    )
    return failure(schedule, f"deadlock: {waits}", *(place for place, _ in stuck))
