from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from torchslicer.errors import ScheduleError
from torchslicer.schedule import (
    ActionKind,
    Schedule,
    add_communication,
    eager_one_f_one_b,
    forward_only,
    fuse,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    remove_communication,
    validate,
)

MAKERS = [gpipe, one_f_one_b, eager_one_f_one_b]


def parse(stages: int, microbatches: int, *ranks: str, boundaries: str | None = None) -> Schedule:
    header = f"schedule x stages={stages} microbatches={microbatches} ranks={len(ranks)}"
    if boundaries is not None:
        header += f" boundaries={boundaries}"
    return Schedule.parse("\n".join([header, *ranks, ""]))


@pytest.mark.parametrize(
    "schedule",
    [
        parse(1, 2, "0F0,0F1"),
        parse(1, 2, "0F0,0B0,0F1,0B1"),
        parse(1, 2, "0F0,0I0,0F1,0I1,0W0,0W1,0STEP"),
        parse(1, 2, "0F0,0F1,0I1,0I0,0W0,0W1,0STEP"),  # I accumulates nothing: any order
        parse(1, 2, "0F0,0F1,0B0,0I1,0W1,0STEP"),
        parse(2, 1, "0F0,1F0,1B0,0B0,1STEP,0STEP"),
        parse(2, 1, "0F0,1F0,1B0,0B0,0STEP,1STEP", ""),
    ],
)
def test_valid_schedules(schedule: Schedule) -> None:
    validate(schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (parse(1, 2, "0F0,0B0,0B1"), "0F1 is missing"),
        (parse(1, 2, "0F0,0F1,0B0"), "0B1 is missing"),
        (parse(1, 2, "0F0,0F1,0I0,0W0,0I1"), "0W1 is missing"),
        (parse(1, 2, "0F0,0F1,0I0,0W0,0W1"), "0I1 is missing"),
        (parse(2, 1, "0F0,0B0", "1F0"), "1B0 is missing"),
        (parse(2, 1, "0F0,0B0", ""), "1F0 is missing"),
        (parse(2, 1, "0F0,0B0,0STEP", "1F0,1B0"), "1STEP is missing"),
        (parse(1, 1, "0F0,0STEP"), "0STEP without any backward"),
        (parse(1, 1, "0F0,0F0"), "0F0 does again"),
        (parse(1, 1, "0F0,0B0,0I0"), "0I0 does again"),
        (parse(1, 1, "0F0,0B0,0W0"), "0W0 does again"),
        (parse(1, 1, "0F0,0B0,0STEP,0STEP"), "0STEP does again"),
        (parse(1, 1, "0F0,1F0"), "stage beyond the last, 0"),
        (parse(1, 1, "0F0,0F1"), "micro-batch beyond the last, 0"),
        (parse(1, 2, "0F0", "0F1"), "another rank than the rest of its stage, rank 0"),
        (parse(1, 1, "0B0,0F0"), "0B0 comes before 0F0"),
        (parse(1, 1, "0F0,0W0,0I0"), "0W0 comes before 0I0"),
        (parse(1, 2, "0F1,0F0"), "forward order must be ascending"),
        (parse(1, 2, "0F0,0F1,0B1,0B0"), "gradient order must be ascending"),
        (parse(1, 2, "0F0,0F1,0I0,0I1,0W1,0W0"), "gradient order must be ascending"),
        (parse(1, 2, "0F0,0F1,0I0,0I1,0W1,0B0"), "does again|missing"),
        (parse(1, 2, "0F0,0F1,0B0,0STEP,0B1"), "0B1 comes after the STEP"),
        (parse(2, 1, "1F0,0F0"), "deadlock: rank 0 is at 1F0 and waits for 0F0"),
        (parse(2, 1, "0F0,1F0,0B0,1B0"), "deadlock: rank 0 is at 0B0 and waits for 1B0"),
        (parse(2, 2, "0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"), "deadlock"),
    ],
)
def test_invalid_schedules_are_refused_with_an_arrow(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    grid = str(caught.value).splitlines()[1:]
    assert len(grid) == schedule.num_ranks
    assert sum(row.count("->") for row in grid) >= 1


def test_the_arrow_points_at_the_failing_action() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(parse(2, 2, "0F0,0F1,0B0,0B1", "1F0,1F1,1B1,1B0"))
    assert str(caught.value) == (
        "schedule 'x', rank 1, position 3: 1B0 comes after micro-batch 1: the gradient order must be ascending,"
        " else bits differ\n"
        "rank 0 |   0F0   0F1   0B0   0B1\n"
        "rank 1 |   1F0   1F1   1B1 ->1B0"
    )


def test_a_missing_action_points_at_the_end_of_its_rank() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(parse(2, 1, "0F0,0B0", "1F0"))
    assert str(caught.value).splitlines()[1:] == ["rank 0 |   0F0     0B0", "rank 1 |   1F0   ->(end)"]


def test_wide_grids_are_cut_around_the_arrow() -> None:
    first, second = gpipe(2, 200).ranks
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("wide", 2, 200, (first, (*second[:250], *second[251:]))))
    rows = str(caught.value).splitlines()[1:]
    assert all(row.startswith(f"rank {rank} | ...") for rank, row in enumerate(rows))
    assert rows[1].rstrip().endswith("->(end)")
    assert max(map(len, rows)) < 500


def test_in_flight_limit() -> None:
    validate(one_f_one_b(4, 8), max_in_flight=4)
    with pytest.raises(ScheduleError, match="stage 0 holds 8 micro-batches at once, the limit is 4"):
        validate(gpipe(4, 8), max_in_flight=4)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 8), (5, 3)])
def test_fuse_keeps_order_and_peaks(make: Callable[[int, int], Schedule], stages: int, microbatches: int) -> None:
    schedule = make(stages, microbatches)
    fused = fuse(schedule)
    validate(fused)
    assert (fused.num_ranks, fused.name) == (1, schedule.name)
    for stage in range(stages):
        assert tuple(action for action in fused.ranks[0] if action.stage == stage) == schedule.ranks[stage]
        assert peak_in_flight(fused, stage) == peak_in_flight(schedule, stage)
    assert fuse(add_communication(schedule)) == fused
    assert fuse(fused) == fused


def test_fused_golden() -> None:
    assert fuse(gpipe(2, 2)).to_text().splitlines()[1] == "0F0,0F1,1F0,1F1,1B0,0B0,1B1,0B1,1STEP,0STEP"
    assert fuse(one_f_one_b(2, 3)).to_text().splitlines()[1] == (
        "0F0,0F1,1F0,1B0,0B0,1F1,1B1,0F2,0B1,1F2,1B2,0B2,1STEP,0STEP"
    )
    assert fuse(forward_only(2, 2)).to_text().splitlines()[1] == "0F0,0F1,1F0,1F1"


def test_communication_golden() -> None:
    sent = add_communication(one_f_one_b(2, 2))
    assert sent.to_text().splitlines()[1:] == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0STEP",
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1STEP",
    ]


@pytest.mark.parametrize("make", [*MAKERS, forward_only])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (3, 2), (4, 8), (5, 3)])
def test_communication_is_valid_and_can_be_removed(
    make: Callable[[int, int], Schedule], stages: int, microbatches: int
) -> None:
    schedule = make(stages, microbatches)
    sent = add_communication(schedule)
    validate(sent)
    assert sent.has_communication == (stages > 1)
    assert remove_communication(sent) == schedule
    assert add_communication(sent) == sent
    assert Schedule.parse(sent.to_text()) == sent


def test_sends_stand_right_behind_what_they_send() -> None:
    for actions in add_communication(one_f_one_b(4, 8)).ranks:
        for before, action in itertools.pairwise(actions):
            if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                assert (before.stage, before.microbatch) == (action.stage, action.microbatch)
                assert before.kind is (ActionKind.F if action.kind is ActionKind.SEND_F else ActionKind.B)


@pytest.mark.parametrize("make", MAKERS)
def test_values_that_skip_stages_have_one_send_and_one_receive(make: Callable[[int, int], Schedule]) -> None:
    boundaries = [(2, 3), (0, 1), (1, 2), (0, 3), (0, 3)]
    sent = add_communication(make(4, 6), boundaries)
    validate(sent)
    assert sent.boundaries == ((0, 1), (0, 3), (1, 2), (2, 3))
    kinds = [action.kind for action in sent.ranks[3]]
    assert kinds.count(ActionKind.RECV_F) == kinds.count(ActionKind.SEND_B) == 6
    assert Schedule.parse(sent.to_text()) == sent


def test_no_communication_within_a_rank_or_without_boundaries() -> None:
    assert add_communication(fuse(gpipe(3, 2))) == fuse(gpipe(3, 2))
    assert not add_communication(gpipe(3, 2), boundaries=[]).has_communication


@pytest.mark.parametrize("boundary", [(1, 0), (1, 1), (0, 3), (-1, 0)])
def test_boundaries_must_lead_forward(boundary: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="must lead from a stage to a later one"):
        add_communication(gpipe(3, 2), [boundary])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (parse(2, 1, "0F0,0SEND_F0", "1F0"), "1RECV_F0 is missing"),
        (parse(2, 1, "0F0", "1RECV_F0,1F0"), "0SEND_F0 is missing"),
        (parse(2, 1, "0F0,0SEND_F0,0SEND_F0", "1RECV_F0,1F0"), "0SEND_F0 does again"),
        (parse(2, 1, "0F0,0SEND_F0", "1RECV_F0,1F0,1SEND_F0"), "1SEND_F0 serves no boundary"),
        (parse(2, 1, "0F0,0SEND_F0,1F0"), "0SEND_F0 serves no boundary"),
        (parse(2, 1, "0SEND_F0,0F0", "1RECV_F0,1F0"), "deadlock: rank 0 is at 0SEND_F0 and waits for 0F0"),
        (parse(2, 1, "0F0,0SEND_F0", "1F0,1RECV_F0"), "deadlock: rank 1 is at 1F0 and waits for 1RECV_F0"),
        (parse(2, 1, "0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0"), "1SEND_B0 is missing"),
        (parse(2, 1, "0F0,0SEND_F0", "1RECV_F0,1F0", boundaries=""), "0SEND_F0 serves no boundary"),
        (parse(2, 1, "0F0,0RECV_B0,0SEND_F0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"), "deadlock: rank 0 is at 0RECV_B0"),
    ],
)
def test_faulty_communication_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


def test_passes_refuse_what_cannot_be_simulated() -> None:
    stuck = parse(2, 2, "0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1")
    for run in (fuse, add_communication):
        with pytest.raises(ScheduleError, match="deadlock"):
            run(stuck)
    with pytest.raises(ScheduleError, match="no rank has stage 1"):
        add_communication(parse(2, 1, "0F0", ""))
