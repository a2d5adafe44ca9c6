"""How long a schedule takes, how much of that is bubble, and how many micro-batches are in flight.

Exact when the costs are integers or fractions. For GPipe and 1F1B with p stages, m micro-batches and equal stages
(forward F, backward B, weight W)::

    makespan - ideal = (p - 1) (F + B + W)        bubble fraction = (p - 1) / (m + p - 1)
    peak in flight at stage r: m for GPipe, min(m, p - r) for 1F1B
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property

from torchslicer.errors import ScheduleError
from torchslicer.schedule.actions import Action, ActionKind, Schedule
from torchslicer.schedule.order import Number, Times, deadlock, walk

Cost = Number | Sequence[Number]
"""One number for all stages, or one for each."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What actions cost, each one number for all stages or one for each stage.

    Kind F costs ``forward``, B costs ``backward + weight``, I ``backward``, W ``weight``, STEP ``step``, both
    sends ``send``; a receive costs nothing by itself, it waits for its send.
    """

    forward: Cost = 1
    backward: Cost = 1
    weight: Cost = 1
    step: Cost = 0
    send: Cost = 0

    def table(self, num_stages: int) -> dict[ActionKind, tuple[Number, ...]]:
        """The cost of each kind for each stage.

        Raises:
            ScheduleError: a cost is negative or not finite, or there are not as many as stages.

        >>> Costs(forward=[1, 2]).table(2)[ActionKind.F]
        (1, 2)
        """
        forward, backward, weight, step, send = (
            _per_stage(field.name, getattr(self, field.name), num_stages) for field in fields(self)
        )
        both = tuple(b + w for b, w in zip(backward, weight, strict=True))
        free = (0,) * num_stages
        return {
            ActionKind.F: forward,
            ActionKind.B: both,
            ActionKind.I: backward,
            ActionKind.W: weight,
            ActionKind.SEND_F: send,
            ActionKind.RECV_F: free,
            ActionKind.SEND_B: send,
            ActionKind.RECV_B: free,
            ActionKind.STEP: step,
        }


def _per_stage(name: str, cost: Cost, num_stages: int) -> tuple[Number, ...]:
    values = tuple(cost) if isinstance(cost, Sequence) else (cost,) * num_stages
    if len(values) != num_stages:
        raise ScheduleError(f"cost {name!r}: expected one number or {num_stages}, one a stage, got {len(values)}")
    for stage, value in enumerate(values):
        if not math.isfinite(value) or value < 0:
            raise ScheduleError(f"cost {name!r} of stage {stage}: expected a finite number of at least 0, got {value}")
    return values


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each action of a schedule starts and ends; ``times`` has the form of ``schedule.ranks``."""

    schedule: Schedule
    times: tuple[tuple[Times, ...], ...]

    def entries(self) -> Iterator[tuple[int, Action, Number, Number]]:
        """Rank, action, start and end of every action, rank by rank in order."""
        for rank, (actions, times) in enumerate(zip(self.schedule.ranks, self.times, strict=True)):
            for action, (start, end) in zip(actions, times, strict=True):
                yield rank, action, start, end

    @cached_property
    def makespan(self) -> Number:
        """From the start to the end of the last action."""
        return max((times[-1][1] for times in self.times if times), default=0)

    def busy(self, rank: int) -> Number:
        """The time that *rank* works."""
        return sum((end - start for start, end in self.times[rank]), start=0)

    @cached_property
    def ideal(self) -> Number:
        """What the step would take if the busiest rank never waited."""
        return max(self.busy(rank) for rank in range(self.schedule.num_ranks))

    @cached_property
    def bubble_fraction(self) -> Number:
        """The bubble: idle slots / all slots, where all slots = number of ranks x makespan."""
        slots = self.schedule.num_ranks * self.makespan
        idle = slots - sum((self.busy(rank) for rank in range(self.schedule.num_ranks)), start=0)
        if not slots:
            return 0
        return idle / slots if isinstance(slots, float) else Fraction(idle) / slots

    def span(self, rank: int) -> Number:
        """From the first start to the last end on *rank*, without the skew before and after."""
        times = self.times[rank]
        return times[-1][1] - times[0][0] if times else 0

    def peak_in_flight(self, stage: int) -> int:
        """See `peak_in_flight`."""
        return peak_in_flight(self.schedule, stage)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    r"""Let all ranks work through their lists without running anything.

    A receive is posted and takes no time; the action that uses the value waits for the send. So with sends that cost
    nothing, communication does not change any time.

    Raises:
        ScheduleError: the ranks wait for each other in a circle, an action is out of place, or a cost is unfit.

    >>> simulate(Schedule.parse("schedule x stages=1 microbatches=1 ranks=1\n0F0,0B0")).makespan
    3
    """
    walked = walk(schedule, (costs or Costs()).table(schedule.num_stages))
    if walked.stuck:
        raise deadlock(schedule, walked.stuck)
    return Timeline(schedule=schedule, times=walked.times)


def peak_in_flight(schedule: Schedule, stage: int) -> int:
    """The most micro-batches whose forward *stage* has done and whose backward (B, or W) it has not.

    That is how many stashes of activations a stage holds at once. Without a backward nothing is kept: 1.

    Raises:
        ScheduleError: no rank has the stage.
    """
    rank = schedule.placement[stage] if 0 <= stage < schedule.num_stages else None
    if rank is None:
        raise ScheduleError(f"schedule {schedule.name!r}: no rank has stage {stage} of {schedule.num_stages}")
    kinds = [action.kind for action in schedule.ranks[rank] if action.stage == stage]
    if ActionKind.B not in kinds and ActionKind.W not in kinds:
        return 1
    held = peak = 0
    for kind in kinds:
        held += (kind is ActionKind.F) - (kind in (ActionKind.B, ActionKind.W))
        peak = max(peak, held)
    return peak
