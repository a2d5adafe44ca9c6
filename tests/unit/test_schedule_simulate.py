from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from torchslicer.errors import ScheduleError
from torchslicer.schedule import (
    Action,
    ActionKind,
    Costs,
    Schedule,
    add_communication,
    eager_one_f_one_b,
    forward_only,
    fuse,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    simulate,
    validate,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 7, 8) for m in (1, 2, 3, 4, 5, 8, 16, 32)]
COSTS: list[tuple[int | Fraction, int | Fraction, int | Fraction]] = [
    (1, 1, 1),
    (1, 2, 3),
    (Fraction(1, 3), Fraction(6, 5), Fraction(4, 5)),
    (2, 1, 0),
]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager_one_f_one_b])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_formulas_are_exact(make: Callable[[int, int], Schedule], p: int, m: int) -> None:
    for forward, backward, weight in COSTS:
        timeline = simulate(make(p, m), Costs(forward=forward, backward=backward, weight=weight))
        whole = forward + backward + weight
        assert timeline.ideal == m * whole
        assert timeline.makespan - timeline.ideal == (p - 1) * whole
        assert timeline.bubble_fraction == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peaks_in_flight(p: int, m: int) -> None:
    assert [simulate(gpipe(p, m)).peak_in_flight(rank) for rank in range(p)] == [m] * p
    assert [simulate(one_f_one_b(p, m)).peak_in_flight(rank) for rank in range(p)] == [min(m, p - r) for r in range(p)]
    eager = simulate(eager_one_f_one_b(p, m))
    assert [eager.peak_in_flight(rank) for rank in range(p)] == [min(m, 2 * (p - r) - 1) for r in range(p)]


@pytest.mark.parametrize(("p", "m", "bubble"), [(4, 8, 0.2727), (4, 16, 0.1579), (8, 32, 0.1795)])
def test_numbers_of_the_papers(p: int, m: int, bubble: float) -> None:
    assert round(float(simulate(gpipe(p, m)).bubble_fraction), 4) == bubble
    assert round(float(simulate(one_f_one_b(p, m)).bubble_fraction), 4) == bubble


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """ZB-H1 as PAPERS section 1 states it: rank r always defers r weight gradients."""
    return Schedule("zb-h1", p, m, tuple(_zero_bubble_rank(rank, p, m) for rank in range(p)))


def _zero_bubble_rank(rank: int, p: int, m: int) -> tuple[Action, ...]:
    warm_up = min(m, p - rank)
    actions = [Action(ActionKind.F, rank, i) for i in range(warm_up)]
    done_w = 0
    for i in range(m):
        actions.append(Action(ActionKind.I, rank, i))
        if i + 1 - done_w > rank:
            actions.append(Action(ActionKind.W, rank, done_w))
            done_w += 1
        if warm_up + i < m:
            actions.append(Action(ActionKind.F, rank, warm_up + i))
    actions.extend(Action(ActionKind.W, rank, i) for i in range(done_w, m))
    return (*actions, Action(ActionKind.STEP, rank))


@pytest.mark.parametrize(
    ("forward", "backward", "weight", "makespan"),
    [(1, 1, 1, 39), (1, Fraction(12, 10), Fraction(8, 10), Fraction(402, 10))],
)
def test_split_backward_zero_bubble(
    forward: int, backward: Fraction | int, weight: Fraction | int, makespan: Fraction | int
) -> None:
    schedule = zero_bubble_h1(4, 12)
    validate(schedule)
    timeline = simulate(schedule, Costs(forward=forward, backward=backward, weight=weight))
    assert timeline.ideal == 36
    assert timeline.makespan == makespan == 36 + 3 * (forward + backward - weight)
    assert [timeline.peak_in_flight(rank) for rank in range(4)] == [4, 4, 4, 4]


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Megatron's interleaved 1F1B: rank r holds stages r, r + p, ...; m is a multiple of p."""
    ranks = []
    for rank in range(p):
        order = [(rank + p * chunk, group + i) for group in range(0, m, p) for chunk in range(v) for i in range(p)]
        back = [(s, i) for g in range(0, m, p) for s in range(rank + p * (v - 1), -1, -p) for i in range(g, g + p)]
        ahead = min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1)
        actions = [Action(ActionKind.F, *entry) for entry in order[:ahead]]
        for index, entry in enumerate(back):
            actions.append(Action(ActionKind.B, *entry))
            actions.extend(Action(ActionKind.F, *later) for later in order[ahead + index : ahead + index + 1])
        ranks.append((*actions, *(Action(ActionKind.STEP, rank + p * chunk) for chunk in range(v))))
    return Schedule("interleaved", p * v, m, tuple(ranks))


@pytest.mark.parametrize(
    ("p", "m", "v", "bubble"),
    [(4, 8, 2, 0.1579), (4, 16, 2, 0.0857), (8, 32, 2, 0.0986), (4, 8, 4, 0.0857), (4, 16, 4, 0.0448)],
)
def test_several_stages_on_a_rank(p: int, m: int, v: int, bubble: float) -> None:
    schedule = interleaved(p, m, v)
    validate(schedule)
    validate(add_communication(schedule))
    validate(fuse(schedule))
    timeline = simulate(schedule)
    assert timeline.makespan - timeline.ideal == (p - 1) * 3
    assert timeline.bubble_fraction == Fraction(p - 1, v * m + p - 1)
    assert round(float(timeline.bubble_fraction), 4) == bubble
    assert schedule.stages_of(0) == tuple(range(0, p * v, p))


def test_times_span_and_busy() -> None:
    timeline = simulate(gpipe(2, 1))
    assert timeline.times == (((0, 1), (4, 6), (6, 6)), ((1, 2), (2, 4), (4, 4)))
    assert [timeline.span(rank) for rank in range(2)] == [6, 3]
    assert [timeline.busy(rank) for rank in range(2)] == [3, 3]
    assert (timeline.makespan, timeline.ideal, timeline.bubble_fraction) == (6, 3, Fraction(1, 2))
    assert [(rank, str(action), start, end) for rank, action, start, end in timeline.entries()][1] == (0, "0B0", 4, 6)


def test_costs_of_each_stage_and_of_steps() -> None:
    timeline = simulate(gpipe(2, 2), Costs(forward=[1, 3], backward=(2, 1), weight=[0, 1], step=[5, 7]))
    # stage 0: F 0-1, 1-2; stage 1: F 1-4, 4-7, B 7-9, 9-11, STEP 11-18; stage 0: B 9-11, 11-13, STEP 13-18
    assert timeline.times[0] == ((0, 1), (1, 2), (9, 11), (11, 13), (13, 18))
    assert timeline.times[1] == ((1, 4), (4, 7), (7, 9), (9, 11), (11, 18))
    assert timeline.ideal == 3 + 3 + 2 + 2 + 7


def test_floats_give_floats() -> None:
    timeline = simulate(gpipe(4, 8), Costs(forward=0.5, backward=0.25, weight=0.25))
    assert isinstance(timeline.bubble_fraction, float)
    assert timeline.bubble_fraction == pytest.approx(3 / 11)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager_one_f_one_b])
def test_free_communication_changes_no_time(make: Callable[[int, int], Schedule]) -> None:
    costs = Costs(forward=[1, 4, 2], backward=[3, 1, 1], weight=[0, 5, 2])
    plain, sent = (simulate(schedule, costs) for schedule in (make(3, 5), add_communication(make(3, 5))))
    assert sent.makespan == plain.makespan
    timed = {action: (start, end) for _, action, start, end in sent.entries()}
    assert all(timed[action] == (start, end) for _, action, start, end in plain.entries())


def test_sends_cost_time_on_their_rank() -> None:
    timeline = simulate(add_communication(gpipe(2, 1)), Costs(send=2))
    # 0F 0-1, send 1-3, 1F 3-4, 1B 4-6, send 6-8, 0B 8-10
    assert timeline.makespan == 10


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), [1, 2, 3], [1, -1]])
def test_unfit_costs_are_refused(value: object) -> None:
    with pytest.raises(ScheduleError, match="cost 'weight'"):
        simulate(gpipe(2, 2), Costs(weight=value))  # type: ignore[arg-type]


def test_free_work_has_no_bubble() -> None:
    timeline = simulate(gpipe(2, 2), Costs(forward=0, backward=0, weight=0))
    assert (timeline.makespan, timeline.bubble_fraction) == (0, 0)


def test_forward_only_keeps_nothing() -> None:
    timeline = simulate(forward_only(3, 5))
    assert timeline.makespan == 5 + 2
    assert [timeline.peak_in_flight(stage) for stage in range(3)] == [1, 1, 1]


def test_peak_of_a_stage_that_is_not_there() -> None:
    for stage in (-1, 2):
        with pytest.raises(ScheduleError, match=f"stage {stage}"):
            peak_in_flight(gpipe(2, 2), stage)


def test_a_deadlock_is_shown() -> None:
    schedule = Schedule.parse("schedule x stages=2 microbatches=2 ranks=2\n0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule)
    assert str(caught.value) == (
        "schedule 'x', rank 0, position 1: deadlock: rank 0 is at 0B0 and waits for 1B0;"
        " rank 1 is at 1F1 and waits for 0F1\n"
        "rank 0 |   0F0 ->0B0   0F1   0B1\n"
        "rank 1 |   1F0 ->1F1   1B0   1B1"
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager_one_f_one_b])
def test_large_schedules_are_simulated_in_seconds(make: Callable[[int, int], Schedule]) -> None:
    timeline = simulate(make(64, 4096))
    assert timeline.bubble_fraction == Fraction(63, 4096 + 63)
