"""Whether a schedule is one that may be run."""

from __future__ import annotations

from dataclasses import dataclass

from torchslicer.errors import ScheduleError
from torchslicer.schedule.actions import Action, ActionKind, Schedule
from torchslicer.schedule.grid import Place, failure
from torchslicer.schedule.order import Dependencies, deadlock, walk
from torchslicer.schedule.simulate import Costs, peak_in_flight


@dataclass(frozen=True, kw_only=True)
class _StageList:
    """The actions of one stage with their places, and the place behind the last action of its rank."""

    stage: int
    actions: tuple[tuple[Place, Action], ...]
    end: Place

    def microbatches(self, *kinds: ActionKind) -> list[int]:
        return [action.microbatch or 0 for _, action in self.actions if action.kind in kinds]


def validate(schedule: Schedule, *, max_in_flight: int | None = None) -> None:
    r"""Check that *schedule* does each piece of work once, in a good order, and cannot deadlock.

    Each stage is on one rank and has F once for each micro-batch; B once, or I and W once, for each, or no stage has a
    backward at all; STEP on every stage that is trained or on none, after all its work. F comes before B or I, I before
    W. Forwards, and what accumulates gradients (B, W), go in ascending micro-batch order. If anything is sent, every
    boundary between ranks has its sends and receives, in an order that cannot deadlock even if receives block.

    Args:
        schedule: What to check.
        max_in_flight: If given, the most micro-batches that any stage may hold at once.

    Raises:
        ScheduleError: the first fault found, with the whole grid and an arrow at the failing action.

    >>> validate(Schedule.parse("schedule x stages=1 microbatches=1 ranks=1\n0F0,0B0,0STEP"))
    """
    Dependencies(schedule)  # refuses what is doubled, out of range or on a second rank
    stages = _stage_lists(schedule)
    for stage in stages:
        _check_complete(schedule, stage)
        _check_order(schedule, stage)
    _check_alike(schedule, stages)
    if schedule.has_communication:
        _check_communication(schedule)
    walked = walk(schedule, Costs().table(schedule.num_stages), blocking=True)
    if walked.stuck:
        raise deadlock(schedule, walked.stuck)
    if max_in_flight is not None:
        _check_in_flight(schedule, max_in_flight)


def _stage_lists(schedule: Schedule) -> list[_StageList]:
    found: list[list[tuple[Place, Action]]] = [[] for _ in range(schedule.num_stages)]
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            found[action.stage].append(((rank, position), action))
    return [
        _StageList(stage=stage, actions=tuple(entries), end=_end(schedule, schedule.placement[stage]))
        for stage, entries in enumerate(found)
    ]


def _end(schedule: Schedule, rank: int | None) -> Place:
    """Behind the last action of *rank*; a stage that no rank has is missed on the last one."""
    rank = schedule.num_ranks - 1 if rank is None else rank
    return rank, len(schedule.ranks[rank])


def _check_complete(schedule: Schedule, stage: _StageList) -> None:
    wanted = set(range(schedule.num_microbatches))
    _check_all(schedule, stage, wanted, ActionKind.F)
    halves = set(stage.microbatches(ActionKind.I)) | set(stage.microbatches(ActionKind.W))
    if halves:
        whole = set(stage.microbatches(ActionKind.B))
        _check_all(schedule, stage, wanted - whole, ActionKind.I)
        _check_all(schedule, stage, wanted - whole, ActionKind.W)
    elif stage.microbatches(ActionKind.B):
        _check_all(schedule, stage, wanted, ActionKind.B)


def _check_all(schedule: Schedule, stage: _StageList, wanted: set[int], kind: ActionKind) -> None:
    got = set(stage.microbatches(kind))
    for microbatch in sorted(wanted - got):
        raise failure(schedule, f"{Action(kind, stage.stage, microbatch)} is missing; add it", stage.end)
    for place, action in stage.actions:
        if action.kind is kind and action.microbatch not in wanted:
            raise failure(schedule, f"{action} does again part of what its B does; remove one", place)


def _check_order(schedule: Schedule, stage: _StageList) -> None:
    ready: dict[ActionKind, set[int | None]] = {ActionKind.F: set(), ActionKind.I: set()}
    before = {ActionKind.B: ActionKind.F, ActionKind.I: ActionKind.F, ActionKind.W: ActionKind.I}
    latest = {"forward": -1, "gradient": -1}
    stepped = False
    for place, action in stage.actions:
        if action.kind.is_communication:
            continue
        if stepped:
            raise failure(schedule, f"{action} comes after the STEP of its stage; move it before", place)
        need = before.get(action.kind)
        if need is not None and action.microbatch not in ready[need]:
            first = Action(need, stage.stage, action.microbatch)
            raise failure(schedule, f"{action} comes before {first}; it must come after", place)
        ready.setdefault(action.kind, set()).add(action.microbatch)
        stepped = action.kind is ActionKind.STEP
        _check_ascending(schedule, action, place, latest)


def _check_ascending(schedule: Schedule, action: Action, place: Place, latest: dict[str, int]) -> None:
    """Buffers change in forward order and gradients add up in B or W order: both must be that of the micro-batches."""
    what = {ActionKind.F: "forward", ActionKind.B: "gradient", ActionKind.W: "gradient"}.get(action.kind)
    if what is None or action.microbatch is None:
        return
    if action.microbatch < latest[what]:
        raise failure(
            schedule,
            f"{action} comes after micro-batch {latest[what]}: the {what} order must be ascending, else bits differ",
            place,
        )
    latest[what] = action.microbatch


def _check_alike(schedule: Schedule, stages: list[_StageList]) -> None:
    trained = [bool(stage.microbatches(ActionKind.B, ActionKind.W)) for stage in stages]
    stepped = [bool(stage.microbatches(ActionKind.STEP)) for stage in stages]
    for stage, has_backward, has_step in zip(stages, trained, stepped, strict=True):
        if any(trained) and not has_backward:
            first = Action(ActionKind.B, stage.stage, 0)
            raise failure(schedule, f"{first} is missing; other stages have a backward", stage.end)
        if any(stepped) and not has_step:
            raise failure(schedule, f"{stage.stage}STEP is missing; other stages have one", stage.end)
        if has_step and not has_backward:
            raise failure(schedule, f"{stage.stage}STEP without any backward; remove it", stage.actions[-1][0])


def _check_communication(schedule: Schedule) -> None:
    expected = _expected_communication(schedule)
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if not action.kind.is_communication:
                continue
            if action not in expected:
                raise failure(schedule, f"{action} serves no boundary between ranks; remove it", (rank, position))
            expected.discard(action)
    for action in sorted(expected, key=lambda action: (action.microbatch or 0, action.stage, action.kind.value)):
        raise failure(schedule, f"{action} is missing; add it", _end(schedule, schedule.placement[action.stage]))


def _expected_communication(schedule: Schedule) -> set[Action]:
    kinds = [(ActionKind.SEND_F, ActionKind.RECV_F)]
    if any(action.kind.is_backward for actions in schedule.ranks for action in actions):
        kinds.append((ActionKind.RECV_B, ActionKind.SEND_B))
    return {
        Action(kind, stage, microbatch)
        for pair in schedule.crossings
        for pair_kinds in kinds
        for kind, stage in zip(pair_kinds, pair, strict=True)
        for microbatch in range(schedule.num_microbatches)
    }


def _check_in_flight(schedule: Schedule, limit: int) -> None:
    for stage in range(schedule.num_stages):
        peak = peak_in_flight(schedule, stage)
        if peak > limit:
            raise ScheduleError(
                f"schedule {schedule.name!r}: stage {stage} holds {peak} micro-batches at once, the limit is {limit};"
                " use another schedule (1f1b holds at most as many as there are stages) or fewer micro-batches"
            )
