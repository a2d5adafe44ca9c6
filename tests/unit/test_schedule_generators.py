from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchslicer.errors import ScheduleError
from torchslicer.schedule import (
    ActionKind,
    Schedule,
    eager_one_f_one_b,
    forward_only,
    generate,
    gpipe,
    one_f_one_b,
    register_schedule,
    schedule_names,
    unregister_schedule,
    validate,
)

GOLDEN_1F1B = """\
schedule 1f1b stages=4 microbatches=6 ranks=4
0F0,0F1,0F2,0F3,0B0,0F4,0B1,0F5,0B2,0B3,0B4,0B5,0STEP
1F0,1F1,1F2,1B0,1F3,1B1,1F4,1B2,1F5,1B3,1B4,1B5,1STEP
2F0,2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,2F5,2B4,2B5,2STEP
3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4,3F5,3B5,3STEP
"""
GOLDEN_EAGER = """\
schedule eager-1f1b stages=3 microbatches=6 ranks=3
0F0,0F1,0F2,0F3,0F4,0B0,0F5,0B1,0B2,0B3,0B4,0B5,0STEP
1F0,1F1,1F2,1B0,1F3,1B1,1F4,1B2,1F5,1B3,1B4,1B5,1STEP
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5,2STEP
"""
GOLDEN_GPIPE = """\
schedule gpipe stages=3 microbatches=3 ranks=3
0F0,0F1,0F2,0B0,0B1,0B2,0STEP
1F0,1F1,1F2,1B0,1B1,1B2,1STEP
2F0,2F1,2F2,2B0,2B1,2B2,2STEP
"""
GOLDEN_SHORT_1F1B = """\
schedule 1f1b stages=4 microbatches=2 ranks=4
0F0,0F1,0B0,0B1,0STEP
1F0,1F1,1B0,1B1,1STEP
2F0,2F1,2B0,2B1,2STEP
3F0,3B0,3F1,3B1,3STEP
"""
GOLDEN_FORWARD_ONLY = """\
schedule forward_only stages=2 microbatches=3 ranks=2
0F0,0F1,0F2
1F0,1F1,1F2
"""


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (one_f_one_b(4, 6), GOLDEN_1F1B),
        (eager_one_f_one_b(3, 6), GOLDEN_EAGER),
        (gpipe(3, 3), GOLDEN_GPIPE),
        (one_f_one_b(4, 2), GOLDEN_SHORT_1F1B),
        (forward_only(2, 3), GOLDEN_FORWARD_ONLY),
    ],
)
def test_golden_text(schedule: Schedule, text: str) -> None:
    assert schedule.to_text() == text


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 9])
def test_generated_schedules_are_valid_and_end_with_a_step(name: str, num_stages: int, num_microbatches: int) -> None:
    schedule = generate(name, num_stages, num_microbatches)
    assert schedule.name == name
    assert schedule.num_ranks == num_stages
    for rank, actions in enumerate(schedule.ranks):
        assert schedule.stages_of(rank) == (rank,)
        assert [action.kind for action in actions].count(ActionKind.STEP) == 1
        assert actions[-1].kind is ActionKind.STEP
        for kind in (ActionKind.F, ActionKind.B):
            order = [action.microbatch for action in actions if action.kind is kind]
            assert order == list(range(num_microbatches))


def test_forward_only_is_valid() -> None:
    validate(forward_only(3, 5))


def test_one_microbatch_is_plain_training() -> None:
    assert gpipe(3, 1).ranks == one_f_one_b(3, 1).ranks == eager_one_f_one_b(3, 1).ranks


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager_one_f_one_b, forward_only])
@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (-1, 2), (True, 2), (2.0, 2), ("2", 2)])
def test_counts_are_checked(make: object, counts: tuple[int, int]) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError, match="expected an integer of at least 1"):
        make(*counts)
    with pytest.raises(ScheduleError, match="expected an integer of at least 1"):
        generate("gpipe", *counts)


def test_unknown_names_list_what_is_known_and_the_nearest() -> None:
    with pytest.raises(
        ScheduleError, match=r"'g-pipe' is not known \(known: 1f1b, eager-1f1b, gpipe\); did you mean 'gpipe'\?"
    ):
        generate("g-pipe", 2, 2)
    with pytest.raises(ScheduleError, match="not known"):
        unregister_schedule("nothing-like-it")


@pytest.fixture
def name() -> Iterator[str]:
    yield "mine"
    if "mine" in schedule_names():
        unregister_schedule("mine")


def test_own_schedules_can_be_registered_once(name: str) -> None:
    register_schedule(name)(gpipe)
    assert generate(name, 2, 3) == gpipe(2, 3)
    assert name in schedule_names()
    with pytest.raises(ScheduleError, match="already registered"):
        register_schedule(name)(one_f_one_b)


def test_a_registered_generator_of_invalid_schedules_is_caught(name: str) -> None:
    register_schedule(name)(lambda stages, count: Schedule("mine", stages, count, gpipe(stages, count).ranks[:-1]))
    with pytest.raises(ScheduleError, match="1F0 is missing"):
        generate(name, 2, 2)


def test_a_registered_generator_of_another_size_is_caught(name: str) -> None:
    register_schedule(name)(lambda stages, count: gpipe(stages, count + 1))
    with pytest.raises(ScheduleError, match="asked for 2 stages and 2 micro-batches and made 2 and 3"):
        generate(name, 2, 2)
