"""Partitions against brute force: every cut of a small model is tried."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import chain_graph
from torchslicer.errors import SliceError
from torchslicer.graph.model import ModelGraph
from torchslicer.partition import (
    Plan,
    UnitCosts,
    build_plan,
    nearest_starts,
    optimal_starts,
    parameter_cost,
    resolve_strategy,
    static_costs,
)
from torchslicer.partition.optimal import Cost


def all_cuts(num_units: int, n: int, forbidden: dict[int, str]) -> list[tuple[int, ...]]:
    """All cuts into n stages, earliest first."""
    return list(combinations([unit for unit in range(1, num_units) if unit not in forbidden], n - 1))


def brute_force(cost: Cost, num_units: int, n: int, forbidden: dict[int, str]) -> tuple[int, ...]:
    def badness(starts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        stages = [cost(*bounds) for bounds in pairwise((0, *starts, num_units))]
        return max(stages), sum(stage * stage for stage in stages), starts

    return min(all_cuts(num_units, n, forbidden), key=badness)


@st.composite
def graphs(draw: st.DrawFn) -> ModelGraph:
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    units = st.integers(0, len(sizes) - 1)
    owners = [unit for unit, size in enumerate(sizes) if size]
    tied = draw(st.dictionaries(units, st.lists(st.sampled_from(owners), max_size=3), max_size=5)) if owners else {}
    pairs = draw(st.lists(st.tuples(units, units), max_size=4))
    return chain_graph(
        sizes,
        tied=tied,
        skips=[(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]],
        outputs=draw(st.lists(units, max_size=2)),
        buffers=draw(st.dictionaries(units, st.integers(1, 9), max_size=3)),
        forbidden=draw(st.dictionaries(st.integers(1, len(sizes)), st.just("in-place"), max_size=4)),
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_additive_costs_equal_brute_force(costs: list[int], data: st.DataObject) -> None:
    size = len(costs)
    forbidden = data.draw(st.dictionaries(st.integers(1, size), st.just("r"), max_size=4))
    most = len([unit for unit in range(1, size) if unit not in forbidden]) + 1
    n = data.draw(st.integers(1, most))
    expected = brute_force(lambda i, j: sum(costs[i:j]), size, n, forbidden)
    assert optimal_starts(costs, n=n, num_units=size, forbidden=forbidden) == expected
    assert optimal_starts(lambda i, j: sum(costs[i:j]), n=n, num_units=size, forbidden=forbidden) == expected


@given(graphs(), st.data())
def test_tied_parameters_and_forbidden_cuts_equal_brute_force(graph: ModelGraph, data: st.DataObject) -> None:
    size = len(graph.units)
    most = len([unit for unit in range(1, size) if unit not in graph.forbidden]) + 1
    n = data.draw(st.integers(1, most))

    def held_bytes(start: int, stop: int) -> int:
        return sum(map(graph.size_bytes, {name for unit in graph.units[start:stop] for name in unit.parameters}))

    found = optimal_starts(parameter_cost(graph), n=n, num_units=size, forbidden=graph.forbidden)
    assert found == brute_force(held_bytes, size, n, graph.forbidden)


@given(st.data())
def test_any_range_cost_equals_brute_force(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    table = data.draw(st.lists(st.integers(0, 9), min_size=(size + 1) ** 2, max_size=(size + 1) ** 2))
    n = data.draw(st.integers(1, size))

    def cost(start: int, stop: int) -> int:
        return table[start * (size + 1) + stop]

    assert optimal_starts(cost, n=n, num_units=size) == brute_force(cost, size, n, {})


@given(st.integers(1, 9), st.data())
def test_nearest_cuts_equal_brute_force(size: int, data: st.DataObject) -> None:
    forbidden = data.draw(st.dictionaries(st.integers(1, size), st.just("r"), max_size=4))
    allowed = [unit for unit in range(1, size) if unit not in forbidden]
    n = data.draw(st.integers(1, len(allowed) + 1))
    wanted = sorted(data.draw(st.lists(st.integers(1, size), min_size=n - 1, max_size=n - 1)))

    def shift(starts: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return sum(abs(start - want) for start, want in zip(starts, wanted, strict=True)), starts

    expected = min(all_cuts(size, n, forbidden), key=shift)
    assert nearest_starts(wanted, num_units=size, forbidden=forbidden) == expected


@given(st.integers(1, 60), st.data())
def test_uniform_sizes_differ_by_at_most_one_and_larger_come_first(size: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, size))
    starts = resolve_strategy("uniform")[0](chain_graph([0] * size), n)
    sizes = [stop - start for start, stop in pairwise((0, *starts, size))]
    assert len(sizes) == n
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(graphs(), st.sampled_from(["uniform", "parameters", "memory", "time"]), st.integers(1, 10))
def test_exactly_n_stages_or_an_error(graph: ModelGraph, name: str, n: int) -> None:
    costs = UnitCosts(tuple(map(float, range(len(graph.units)))), static_costs(graph).parameter_bytes, None)
    strategy, _ = resolve_strategy(name)
    possible = n <= len(graph.units) and all_cuts(len(graph.units), n, graph.forbidden)
    if not possible:
        with pytest.raises(SliceError, match=str(n)):
            strategy(graph, n, costs)
        return
    plan = build_plan(graph, strategy(graph, n, costs), strategy=name, costs=costs)
    check_plan(plan, graph, n)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(plan.table().splitlines()) == 2 + n + len(plan.boundaries) + len(plan.shared)


def check_plan(plan: Plan, graph: ModelGraph, n: int) -> None:
    assert plan.num_stages == len(plan.stages) == n
    units = [unit for stage in plan.stages for unit in range(stage.first_unit, stage.last_unit + 1)]
    assert units == list(range(len(graph.units)))
    assert not set(plan.unit_starts) & (set(graph.forbidden) - {0})
    held: set[Any] = {name for stage in plan.stages for name in (*stage.parameters, *stage.buffers)}
    assert held == {name for unit in graph.units for name in (*unit.parameters, *unit.buffers)}
    for value in plan.boundaries:
        assert list(value.consumers) == sorted(set(value.consumers))
        assert value.producer < value.consumers[0]
