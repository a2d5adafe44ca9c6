from __future__ import annotations

import math
import time

import pytest

from torchslicer.errors import SliceError
from torchslicer.partition import cut_positions, nearest_starts, optimal_starts


@pytest.mark.parametrize(
    ("costs", "n", "starts"),
    [
        ([5], 1, ()),
        ([1, 1, 1, 1], 2, (2,)),
        ([1, 1, 1], 3, (1, 2)),
        ([9, 1, 1, 1], 2, (1,)),
        ([1, 1, 1, 9], 2, (3,)),
        ([5, 1, 1, 1, 4], 3, (1, 4)),
        ([0, 0, 7, 0, 0], 3, (1, 2)),  # every cut is optimal and as even: the earliest
    ],
)
def test_the_heaviest_stage_is_as_light_as_possible(costs: list[int], n: int, starts: tuple[int, ...]) -> None:
    assert optimal_starts(costs, n=n, num_units=len(costs)) == starts


def test_among_equal_maxima_the_most_even_cut_wins() -> None:
    # The last unit sets the maximum of 8; 1+1 | 1+1 | 8 is more even than 1 | 1+1+1 | 8.
    assert optimal_starts([1, 1, 1, 1, 8], n=3, num_units=5) == (2, 4)


def test_the_earliest_of_equally_even_cuts_wins() -> None:
    assert optimal_starts([1, 1, 1], n=2, num_units=3) == (1,)


def test_any_cost_of_a_range_will_do() -> None:
    def longest_name(start: int, stop: int) -> float:
        return float(max([3, 1, 4, 1, 5][start:stop]))

    assert optimal_starts(longest_name, n=2, num_units=5) == (1,)


def test_forbidden_cuts_are_avoided() -> None:
    assert optimal_starts([1, 1, 1, 1], n=2, num_units=4, forbidden={2: "in-place"}) in {(1,), (3,)}
    assert optimal_starts([1] * 4, n=3, num_units=4, forbidden={2: "in-place"}) == (1, 3)


def test_too_many_forbidden_cuts_name_the_most_stages_and_the_reasons() -> None:
    forbidden = {1: "x is written in place", 3: "x is written in place", 2: "a generator crosses"}
    with pytest.raises(SliceError) as caught:
        optimal_starts([1] * 5, n=3, num_units=5, forbidden=forbidden)
    assert str(caught.value) == (
        "5 units cannot be cut into 3 stages: at most 2 are possible, because no cut may fall before unit 1, 3 "
        "(x is written in place); before unit 2 (a generator crosses). Ask for n <= 2"
    )


def test_of_many_reasons_the_first_few_are_said() -> None:
    with pytest.raises(SliceError, match=r"\(reason 5\); and 3 more reasons\. Ask for n <= 1"):
        cut_positions(9, n=2, forbidden={unit: f"reason {unit}" for unit in range(1, 9)})


@pytest.mark.parametrize("n", [0, -1, 4])
def test_a_number_of_stages_that_cannot_be_is_refused(n: int) -> None:
    with pytest.raises(SliceError, match=f"3 units cannot be cut into {n} non-empty stages"):
        optimal_starts([1, 1, 1], n=n, num_units=3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_costs_must_be_numbers(bad: float) -> None:
    with pytest.raises(SliceError, match=r"must be finite and not negative"):
        optimal_starts([1, bad, 1], n=2, num_units=3)
    with pytest.raises(SliceError, match=r"units \[0, 1\) must be finite"):
        optimal_starts(lambda start, stop: bad, n=2, num_units=3)


def test_one_cost_a_unit_is_needed() -> None:
    with pytest.raises(SliceError, match="expected 3 costs, one a unit, got 2"):
        optimal_starts([1, 1], n=2, num_units=3)


def test_a_large_model_is_cut_fast() -> None:
    costs = [(unit * 7919) % 101 + 1 for unit in range(1500)]
    began = time.process_time()
    starts = optimal_starts(costs, n=16, num_units=1500)
    assert time.process_time() - began < 2.0  # 0.3 s when the machine is idle
    assert len(starts) == 15


@pytest.mark.parametrize(
    ("wanted", "forbidden", "starts"),
    [
        ([2, 4], {}, (2, 4)),
        ([2, 4], {2: "r"}, (1, 4)),
        ([2, 4], {4: "r", 5: "r"}, (2, 3)),
        ([2, 4], {1: "r", 2: "r", 4: "r"}, (3, 5)),
        ([2, 4], {3: "r", 4: "r", 5: "r"}, (1, 2)),
    ],
)
def test_the_nearest_cuts_shift_as_little_as_possible(
    wanted: list[int], forbidden: dict[int, str], starts: tuple[int, ...]
) -> None:
    assert nearest_starts(wanted, num_units=6, forbidden=forbidden) == starts
