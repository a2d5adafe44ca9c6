from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.support.graphs import BYTES, chain_graph
from torchslicer.errors import SliceError
from torchslicer.partition import RangeCost, UnitCosts, memory_cost, parameter_cost, static_costs, time_cost


def test_static_costs_count_the_bytes_of_parameters_and_measure_nothing() -> None:
    costs = static_costs(chain_graph([3, 0, 5], tied={2: [0]}))
    assert costs == UnitCosts(time_s=None, parameter_bytes=(12, 0, 32), activation_bytes=None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"time_s": (1.0,)}, "time_s must have 2 entries, one a unit, got 1"),
        ({"time_s": (1.0, math.nan)}, r"time_s\[1\] must be finite"),
        ({"activation_bytes": (-1, 0)}, r"activation_bytes\[0\] must be finite and not negative, got -1"),
        ({"parameter_bytes": (1, -2)}, r"parameter_bytes\[1\]"),
    ],
)
def test_impossible_costs_are_refused(fields: dict[str, tuple[float, ...]], says: str) -> None:
    good: dict[str, Any] = {"time_s": None, "parameter_bytes": (1, 2), "activation_bytes": None}
    with pytest.raises(SliceError, match=says):
        UnitCosts(**{**good, **fields})


def test_costs_of_another_model_are_refused() -> None:
    with pytest.raises(SliceError, match="for 3 units but the model has 2"):
        static_costs(chain_graph([1, 1, 1])).check(chain_graph([1, 1]))


def test_a_tied_parameter_counts_in_each_stage_but_once_inside_one() -> None:
    cost = parameter_cost(chain_graph([10, 1, 0, 1], tied={2: [0], 3: [0]}))
    assert cost(0, 1) == 10 * BYTES
    assert cost(2, 3) == 10 * BYTES
    assert cost(2, 4) == 11 * BYTES
    assert cost(0, 4) == 12 * BYTES


def test_the_matrix_holds_the_cost_of_every_range_between_positions() -> None:
    cost = RangeCost(additive=(1.0, 2.0, 4.0, 8.0), uses=({"a": 16.0}, {"b": 32.0}, {"a": 16.0}, {"a": 16.0}))
    positions = [0, 1, 3, 4]
    expected = [[cost(start, stop) if start < stop else np.inf for stop in positions] for start in positions]
    assert cost.matrix(positions).tolist() == expected


def test_equal_ranges_cost_exactly_the_same_wherever_they_are() -> None:
    table = RangeCost(additive=(0.1,) * 9).matrix(range(10))
    assert len({table[i, i + 3] for i in range(7)}) == 1


def test_memory_counts_copies_buffers_and_measured_activations() -> None:
    graph = chain_graph([10, 10, 0], buffers={1: 5})
    graph.parameters["layer1.weight"].requires_grad_(False)
    static = memory_cost(graph, static_costs(graph))
    assert [static(i, i + 1) for i in range(3)] == [4 * 40, 40 + 20, 0]
    measured = memory_cost(graph, UnitCosts(time_s=None, parameter_bytes=(40, 40, 0), activation_bytes=(1, 2, 3)))
    assert measured(0, 3) == 160 + 60 + 6


def test_time_cost_needs_measurements() -> None:
    with pytest.raises(SliceError, match="needs example="):
        time_cost(static_costs(chain_graph([1, 1])))
    assert time_cost(UnitCosts((0.5, 0.25), (1, 1), None))(0, 2) == 0.75
