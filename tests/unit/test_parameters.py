"""Tied parameters: one alias a use, gradients added in reverse order of use."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.nets_values import TiedThrice, TiedTwice
from torchslicer.graph.fx import trace_fx
from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.parameters import ParameterTable, place

CPU = torch.device("cpu")


def thrice() -> tuple[ModelGraph, ParameterTable]:
    graph = trace_fx(TiedThrice(), ["x"])
    stage_of = range(len(graph.units))
    return graph, ParameterTable(graph, stage_of, [CPU] * len(graph.units))


def test_every_use_has_an_alias_on_the_same_memory() -> None:
    graph, table = thrice()
    aliases = table.aliases["a.weight"]
    assert tuple(aliases) == graph.shared["a.weight"]
    assert len(aliases) == 3
    main = graph.parameters["a.weight"]
    assert all(alias.data_ptr() == main.data_ptr() and alias is not main for alias in aliases.values())


def test_gradients_are_added_last_use_first() -> None:
    """1e8 and its negative cancel only if they meet before the small one is added."""
    graph, table = thrice()
    for alias, value in zip(table.aliases["a.weight"].values(), (1.0, 1e8, -1e8), strict=True):
        alias.grad = torch.full_like(alias, value)
    table.combine_gradients()
    main = graph.parameters["a.weight"]
    assert torch.equal(main.grad, torch.ones_like(main))  # type: ignore[arg-type]
    assert (torch.tensor(1.0) + 1e8) - 1e8 == 0.0  # the other order
    assert all(alias.grad is None for alias in table.aliases["a.weight"].values())


def test_gradients_of_other_ranks_take_their_place_in_the_order() -> None:
    graph, whole = thrice()
    first, middle, last = whole.aliases["a.weight"]
    table = ParameterTable(graph, range(len(graph.units)), [CPU] * len(graph.units), held=[first, last])
    assert set(table.aliases["a.weight"]) == {first, last}
    main = graph.parameters["a.weight"]
    for unit, value in ((first, 1.0), (last, -1e8)):
        table.aliases["a.weight"][unit].grad = torch.full_like(main, value)
    table.combine_gradients({"a.weight": {middle: torch.full_like(main, 1e8)}})
    assert torch.equal(main.grad, torch.ones_like(main))  # type: ignore[arg-type]


def test_uses_without_a_gradient_are_left_out() -> None:
    graph, table = thrice()
    table.combine_gradients()
    assert graph.parameters["a.weight"].grad is None


def test_owned_and_updated_parameters() -> None:
    graph = trace_fx(TiedTwice(), ["x"])  # a and c share a weight; stages 0: a, 1: b c, 2: d
    stage_of = [0, 1, 1, 2]
    whole = ParameterTable(graph, stage_of, [CPU] * 3)
    assert list(whole.updated_by(0)) == ["a.weight", "a.bias"]
    assert list(whole.updated_by(1)) == ["b.weight", "b.bias", "c.bias"]
    later = ParameterTable(graph, stage_of, [CPU] * 3, held=[1, 2])
    assert list(later.updated_by(1)) == ["a.weight", "b.weight", "b.bias", "c.bias"]
    assert list(later.owned()) == ["b.weight", "b.bias", "c.bias", "d.weight", "d.bias"]
    assert list(whole.owned()) == list(graph.parameters)


def test_a_module_is_called_with_its_alias_and_given_back() -> None:
    graph, table = thrice()
    unit = next(u for u in graph.units if u.name == "b")
    node = next(n for n in graph.nodes if n.target == "b")
    call = table.bind(node, unit.index)
    module = graph.modules["b"]
    call(torch.ones(1, 16)).sum().backward()
    assert module.weight is graph.parameters["a.weight"]
    assert table.aliases["a.weight"][unit.index].grad is not None
    assert graph.parameters["a.weight"].grad is None


def test_a_module_that_fails_is_given_back_too() -> None:
    graph, table = thrice()
    node = next(n for n in graph.nodes if n.target == "b")
    unit = next(u for u in graph.units if u.name == "b")
    try:
        table.bind(node, unit.index)(torch.ones(1, 3))
    except RuntimeError:
        assert graph.modules["b"].weight is graph.parameters["a.weight"]


def test_frozen_parameters_have_frozen_aliases() -> None:
    model = TiedThrice()
    model.a.weight.requires_grad_(False)
    graph = trace_fx(model, ["x"])
    table = ParameterTable(graph, range(len(graph.units)), [CPU] * len(graph.units))
    assert not any(alias.requires_grad for alias in table.aliases["a.weight"].values())


def test_clearing_and_placing() -> None:
    graph, table = thrice()
    for parameter in (*graph.parameters.values(), *table.aliases["a.weight"].values()):
        parameter.grad = torch.ones_like(parameter)
    table.clear_gradients()
    assert all(p.grad is None for p in (*graph.parameters.values(), *table.aliases["a.weight"].values()))
    before = [p.data_ptr() for p in graph.parameters.values()]
    place(graph, range(len(graph.units)), [CPU] * len(graph.units))
    assert [p.data_ptr() for p in graph.parameters.values()] == before
    assert isinstance(graph.model, nn.Module)
