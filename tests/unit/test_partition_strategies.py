from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.graphs import chain_graph
from torchslicer.errors import ConfigError, SliceError
from torchslicer.graph.model import ModelGraph
from torchslicer.partition import UnitCosts, register_strategy, resolve_strategy, strategies, strategy_names


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))


def cut(spec: Any, graph: ModelGraph, n: int, costs: UnitCosts | None = None) -> tuple[int, ...]:
    return resolve_strategy(spec)[0](graph, n, costs)


@pytest.mark.parametrize(("units", "n", "starts"), [(7, 3, (3, 5)), (8, 4, (2, 4, 6)), (5, 1, ()), (3, 3, (1, 2))])
def test_uniform_puts_the_larger_stages_first(units: int, n: int, starts: tuple[int, ...]) -> None:
    assert cut("uniform", chain_graph([1] * units), n) == starts


def test_uniform_moves_as_little_as_possible_around_forbidden_cuts() -> None:
    assert cut("uniform", chain_graph([1] * 8, forbidden={4: "r", 5: "r"}), 2) == (3,)


@pytest.mark.parametrize("name", ["parameters", "param_balanced"])
def test_parameters_balances_bytes(name: str) -> None:
    assert cut(name, chain_graph([9, 1, 1, 1]), 2) == (1,)


def test_parameters_counts_a_tied_parameter_once_a_stage() -> None:
    # Cutting before the last unit would hold the 10 floats twice; together they are held once.
    assert cut("parameters", chain_graph([1, 10, 0, 9], tied={2: [1]}), 2) == (3,)


def test_memory_counts_activations_if_measured() -> None:
    graph = chain_graph([4, 1, 1, 4])
    assert cut("memory", graph, 2) == (2,)
    assert cut("memory", graph, 2, UnitCosts(None, (16, 4, 4, 16), (10_000, 0, 0, 0))) == (1,)


def test_time_balances_what_was_measured() -> None:
    graph = chain_graph([9, 1, 1, 1])
    assert cut("time", graph, 2, UnitCosts((1.0, 1.0, 1.0, 3.0), (36, 4, 4, 4), None)) == (3,)
    with pytest.raises(SliceError, match="needs example="):
        cut("time", graph, 2)


@pytest.mark.parametrize("name", ["parameters", "memory", "time"])
def test_with_nothing_to_balance_stages_are_uniform(name: str) -> None:
    assert cut(name, chain_graph([0] * 7), 3, UnitCosts((0.0,) * 7, (0,) * 7, None)) == (3, 5)


@pytest.mark.parametrize("name", ["uniform", "parameters", "memory", "time"])
def test_every_strategy_refuses_impossible_numbers(name: str) -> None:
    graph = chain_graph([1] * 4, forbidden={2: "in-place"})
    costs = UnitCosts((1.0,) * 4, (4,) * 4, None)
    with pytest.raises(ValueError, match="Net has 4 units and cannot be cut into 5"):
        cut(name, graph, 5, costs)
    with pytest.raises(ValueError, match="Net has 4 units and cannot be cut into 0"):
        cut(name, graph, 0, costs)
    with pytest.raises(ValueError, match=r"at most 3 are possible.*before unit 2 \(in-place\)"):
        cut(name, graph, 4, costs)


def test_unknown_names_are_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown strategy 'unifor'; did you mean 'uniform'\? \(known: .*time"):
        resolve_strategy("unifor")
    assert {"uniform", "parameters", "param_balanced", "memory", "time"} <= set(strategy_names())


@pytest.mark.parametrize(
    ("spec", "says"),
    [(3, "a number of stages goes to n=3"), (None, "names of modules to cut at go to cuts="), (["a"], "go to cuts=")],
)
def test_what_is_no_strategy_is_refused(spec: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_strategy(spec)


def test_names_of_strategies() -> None:
    def halves(graph: ModelGraph, n: int) -> list[int]:
        return [1]

    assert resolve_strategy("param_balanced")[1] == "parameters"
    assert resolve_strategy(strategies.uniform)[1] == "uniform"
    assert resolve_strategy(halves)[1].endswith("halves")
    strategy, name = resolve_strategy("uniform")
    assert resolve_strategy(strategy) == (strategy, name)


def test_a_function_registers() -> None:
    @register_strategy("mine")
    def mine(graph: ModelGraph, n: int, costs: UnitCosts) -> list[int]:
        assert costs.parameter_bytes == (4, 4, 4)
        return [1]

    assert mine(chain_graph([1] * 3), 2, UnitCosts(None, (4, 4, 4), None)) == [1]
    assert cut("mine", chain_graph([1] * 3), 2) == (1,)
    assert cut(mine, chain_graph([1] * 3), 2) == (1,)


def test_a_class_registers() -> None:
    @register_strategy("mine")
    class Mine:
        def __call__(self, graph: ModelGraph, n: int, costs: UnitCosts) -> list[int]:
            return [len(graph.units) - 1]

    assert cut("mine", chain_graph([1] * 3), 2) == (2,)
    assert cut(Mine, chain_graph([1] * 3), 2) == (2,)
    assert cut(Mine(), chain_graph([1] * 3), 2) == (2,)


def test_a_name_belongs_to_one_strategy() -> None:
    for taken in ("uniform", "param_balanced"):
        with pytest.raises(ConfigError, match=f"strategy '{taken}' already exists"):
            register_strategy(taken)(lambda graph, n: [1])

    def define(unit: int) -> Callable[..., Any]:
        @register_strategy("mine")
        def mine(graph: ModelGraph, n: int) -> list[int]:
            return [unit]

        return mine

    define(1)
    define(2)  # a notebook cell run again
    assert cut("mine", chain_graph([1] * 3), 2) == (2,)


@pytest.mark.parametrize("name", ["", cut, None])
def test_the_decorator_needs_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match=r'write @register_strategy\("name"\)'):
        register_strategy(name)


def test_only_callables_register() -> None:
    with pytest.raises(ConfigError, match="expected a function or a class, got 3"):
        register_strategy("mine")(3)  # type: ignore[type-var]


def keyword_costs(graph: ModelGraph, n: int, *, costs: UnitCosts) -> list[int]:
    return [costs.num_units - 1]


def own_option(graph: ModelGraph, n: int, first: int = 1) -> list[int]:
    return [first]


def third_by_position(graph: ModelGraph, n: int, weights: UnitCosts, /) -> list[int]:
    return [weights.num_units - 1]


def any_number(*arguments: Any) -> list[int]:
    return [arguments[2].num_units - 1]


@pytest.mark.parametrize(
    ("strategy", "start"), [(keyword_costs, 2), (own_option, 1), (third_by_position, 2), (any_number, 2)]
)
def test_costs_are_given_to_those_that_ask(strategy: Any, start: int) -> None:
    assert cut(strategy, chain_graph([1] * 3), 2) == (start,)


@pytest.mark.parametrize("strategy", [lambda: [1], lambda graph: [1], lambda a, b, c, d: [1]])
def test_another_signature_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"must take \(graph, n\) or \(graph, n, costs\), but takes"):
        cut(strategy, chain_graph([1] * 3), 2)


def test_an_error_inside_a_strategy_is_not_hidden() -> None:
    def broken(graph: ModelGraph, n: int) -> list[int]:
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        cut(broken, chain_graph([1] * 3), 2)


@pytest.mark.parametrize("answer", [[1, 2], (1, 2), np.array([1, 2]), range(1, 3), ["layer1", "layer2"]])
def test_answers_may_be_indices_or_names(answer: Sequence[Any]) -> None:
    assert cut(lambda graph, n: answer, chain_graph([1] * 4), 3) == (1, 2)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([1], "3 stages need 2 cuts"),
        ([2, 1], "stage 2 cannot start at unit 1"),
        (["layer1"], "n=3 stages need 2 cuts, got 1"),
        (["layer1", 2], "a cut must be the index of a unit, got 'layer1'"),
        (None, "expected the 2 first units of stages 1 to 2, as indices or names, got None"),
    ],
)
def test_wrong_answers_name_the_strategy(answer: Any, says: str) -> None:
    def mine(graph: ModelGraph, n: int) -> Any:
        return answer

    with pytest.raises(SliceError, match=f"mine': {says}"):
        cut(mine, chain_graph([1] * 4), 3)


def test_a_class_must_work_without_arguments_and_be_called() -> None:
    class NeedsMore:
        def __init__(self, size: int) -> None: ...

    class NotCalled: ...

    with pytest.raises(ConfigError, match="NeedsMore must work without arguments"):
        resolve_strategy(NeedsMore)
    with pytest.raises(ConfigError, match="NotCalled needs __call__"):
        resolve_strategy(NotCalled)


def test_costs_of_another_model_are_refused() -> None:
    with pytest.raises(SliceError, match="for 1 units but the model has 3"):
        cut("uniform", chain_graph([1] * 3), 2, UnitCosts(None, (1,), None))
