"""Properties that hold for every schedule, found by hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchslicer.errors import ScheduleError
from torchslicer.schedule import (
    Action,
    ActionKind,
    Costs,
    Schedule,
    add_communication,
    eager_one_f_one_b,
    fuse,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    remove_communication,
    simulate,
    validate,
)

COUNTS = st.integers(1, 7)
MAKERS = st.sampled_from([gpipe, one_f_one_b, eager_one_f_one_b])
SCHEDULES = st.builds(lambda make, stages, count: make(stages, count), MAKERS, COUNTS, COUNTS)
NUMBERS = st.integers(0, 10**6)
ACTIONS = st.one_of(
    st.builds(Action, st.just(ActionKind.STEP), NUMBERS),
    st.builds(Action, st.sampled_from([kind for kind in ActionKind if kind is not ActionKind.STEP]), NUMBERS, NUMBERS),
)
ANY_SCHEDULES = st.builds(
    Schedule,
    st.from_regex(r"[A-Za-z0-9_.+-]+", fullmatch=True),
    st.integers(3, 10**4),
    st.integers(1, 10**4),
    st.lists(st.lists(ACTIONS, max_size=6).map(tuple), min_size=1, max_size=5).map(tuple),
    st.none() | st.lists(st.sampled_from([(0, 1), (0, 2), (1, 2)]), max_size=3).map(tuple),
)


def with_rank(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    ranks = (*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :])
    return Schedule(schedule.name, schedule.num_stages, schedule.num_microbatches, ranks, schedule.boundaries)


@given(ACTIONS)
def test_actions_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(ANY_SCHEDULES)
def test_schedules_round_trip(schedule: Schedule) -> None:
    assert Schedule.parse(schedule.to_text()) == schedule


@given(st.text(max_size=80))
def test_any_text_is_an_action_or_refused(text: str) -> None:
    try:
        action = Action.parse(text)
    except ScheduleError:
        return
    assert str(action) == text.strip()


@given(SCHEDULES, st.data())
def test_a_dropped_action_is_found(schedule: Schedule, data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from([schedule, add_communication(schedule)]))
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    actions = list(schedule.ranks[rank])
    dropped = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    if schedule.num_stages == 1 and dropped.kind is ActionKind.STEP:
        return  # a schedule without any step is valid: gradients accumulate
    if schedule.num_microbatches == schedule.num_stages == 1 and dropped.kind is ActionKind.B:
        actions.pop()  # without its step it would be a valid forward
        validate(with_rank(schedule, rank, actions))
        return
    with pytest.raises(ScheduleError, match=r"missing|before"):
        validate(with_rank(schedule, rank, actions))


@given(SCHEDULES, st.data())
def test_a_doubled_action_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    actions = list(schedule.ranks[rank])
    doubled = data.draw(st.sampled_from(actions))
    actions.insert(data.draw(st.integers(0, len(actions))), doubled)
    with pytest.raises(ScheduleError, match=f"{doubled} does again"):
        validate(with_rank(schedule, rank, actions))


@given(SCHEDULES, st.data())
def test_a_swap_of_dependent_actions_is_found(schedule: Schedule, data: st.DataObject) -> None:
    """Two actions of one kind, or F and B of one micro-batch, or anything and STEP."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    actions = list(schedule.ranks[rank])
    pairs = [
        (low, high)
        for low in range(len(actions))
        for high in range(low + 1, len(actions))
        if actions[low].kind is actions[high].kind
        or actions[low].microbatch == actions[high].microbatch
        or actions[high].kind is ActionKind.STEP
    ]
    low, high = data.draw(st.sampled_from(pairs))
    actions[low], actions[high] = actions[high], actions[low]
    with pytest.raises(ScheduleError):
        validate(with_rank(schedule, rank, actions))


@given(SCHEDULES, st.data())
def test_any_reordering_is_refused_or_runs_to_the_end(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    shuffled = with_rank(schedule, rank, data.draw(st.permutations(list(schedule.ranks[rank]))))
    try:
        validate(shuffled)
    except ScheduleError:
        return
    assert all(len(times) == len(schedule.ranks[0]) for times in simulate(shuffled).times)


@given(st.integers(2, 6), st.integers(2, 6), st.data())
def test_a_backward_ahead_of_what_it_waits_for_is_a_deadlock(stages: int, count: int, data: st.DataObject) -> None:
    """A stage wants the gradient of micro-batch 0 before its last forward; the last stage gives it only after that."""
    schedule = gpipe(stages, count)
    rank = data.draw(st.integers(0, stages - 2))
    actions = list(schedule.ranks[rank])
    early = actions.pop(count)
    assert str(early) == f"{rank}B0"
    actions.insert(count - 1, early)
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(with_rank(schedule, rank, actions))


@given(SCHEDULES)
def test_fuse_keeps_the_order_and_peaks_of_every_stage(schedule: Schedule) -> None:
    fused = fuse(schedule)
    validate(fused)
    for stage in range(schedule.num_stages):
        assert tuple(action for action in fused.ranks[0] if action.stage == stage) == schedule.ranks[stage]
        assert peak_in_flight(fused, stage) == peak_in_flight(schedule, stage)


@given(SCHEDULES, st.data())
def test_communication_over_any_boundaries_is_valid_and_free(schedule: Schedule, data: st.DataObject) -> None:
    stages = schedule.num_stages
    pairs = [(producer, consumer) for consumer in range(stages) for producer in range(consumer)]
    boundaries = data.draw(st.none() | st.lists(st.sampled_from(pairs), unique=True)) if pairs else None
    sent = add_communication(schedule, boundaries)
    validate(sent)
    assert remove_communication(sent) == schedule
    costs = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    drawn = Costs(forward=data.draw(costs), backward=data.draw(costs), weight=data.draw(costs))
    assert simulate(sent, drawn).makespan == simulate(schedule, drawn).makespan


POSITIVE = st.fractions(min_value=Fraction(1, 100), max_value=100, max_denominator=100)


@given(MAKERS, COUNTS, COUNTS, st.tuples(POSITIVE, POSITIVE, POSITIVE))
def test_bubble_formulas(
    make: Callable[[int, int], Schedule], p: int, m: int, costs: tuple[Fraction, Fraction, Fraction]
) -> None:
    forward, backward, weight = costs
    timeline = simulate(make(p, m), Costs(forward=forward, backward=backward, weight=weight))
    assert timeline.makespan - timeline.ideal == (p - 1) * (forward + backward + weight)
    assert timeline.bubble_fraction == Fraction(p - 1, m + p - 1)


@given(SCHEDULES, st.data())
def test_times_respect_every_dependency(schedule: Schedule, data: st.DataObject) -> None:
    stages = schedule.num_stages
    costs = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    timeline = simulate(schedule, Costs(forward=data.draw(costs), backward=data.draw(costs), weight=data.draw(costs)))
    times = {(a.kind, a.stage, a.microbatch): (start, end) for _, a, start, end in timeline.entries()}
    for (kind, stage, microbatch), (start, _) in times.items():
        if kind is ActionKind.F and stage:
            assert times[kind, stage - 1, microbatch][1] <= start
        if kind is ActionKind.B:
            assert times[ActionKind.F, stage, microbatch][1] <= start
            if stage + 1 < stages:
                assert times[kind, stage + 1, microbatch][1] <= start
