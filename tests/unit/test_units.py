"""How nodes are grouped into units."""

from __future__ import annotations

import torch
from torch import nn

from torchslicer.graph.model import Node, Ref
from torchslicer.graph.units import form_units


def module(index: int, path: str, *refs: int) -> Node:
    return Node(index, path, "module", path, tuple(Ref(ref) for ref in refs), scope=path.rpartition(".")[0])


def function(index: int, *refs: int, scope: str = "") -> Node:
    return Node(index, f"f{index}", "function", torch.tanh, tuple(Ref(ref) for ref in refs), scope=scope)


def groups(nodes: list[Node], calls: dict[int, str] | None = None) -> list[tuple[str, tuple[int, ...]]]:
    modules: dict[str, nn.Module] = {str(n.target): nn.Linear(2, 2) for n in nodes if n.op == "module"}
    names = {id(p): f"{path}.{name}" for path, m in modules.items() for name, p in m.named_parameters()}
    units = form_units(nodes, modules, names, lambda path: "module", calls)
    return [(unit.name, unit.nodes) for unit in units]


X = Node(0, "x", "input", "x")


def test_operations_join_the_unit_before() -> None:
    assert groups([X, module(1, "a", 0), function(2, 1), function(3, 2), module(4, "b", 3)]) == [
        ("a", (1, 2, 3)),
        ("b", (4,)),
    ]


def test_operations_before_the_first_module_belong_to_it() -> None:
    assert groups([X, function(1, 0), module(2, "a", 1)]) == [("a", (1, 2))]


def test_operations_of_a_module_that_is_entered_start_a_unit() -> None:
    nodes = [X, module(1, "block.a", 0), function(2, 1, scope="block"), function(3, 2, scope="other")]
    assert groups(nodes) == [("block.a", (1, 2)), ("other", (3,))]


def test_an_operation_with_a_parameter_of_its_own_starts_a_unit() -> None:
    weight = Node(2, "w", "parameter", "scale")
    assert groups([X, module(1, "a", 0), weight, function(3, 1, 2), function(4, 3)]) == [
        ("a", (1,)),
        ("scale", (2, 3, 4)),
    ]


def test_sources_are_in_every_unit_that_uses_them() -> None:
    constant = Node(1, "c", "constant", "c")
    nodes = [X, constant, module(2, "a", 0), function(3, 2, 1), module(4, "b", 3), function(5, 4, 1)]
    assert groups(nodes) == [("a", (1, 2, 3)), ("b", (1, 4, 5))]


def test_operations_of_one_call_stay_together() -> None:
    nodes = [X, function(1, 0, scope="a"), function(2, 1, scope="a"), function(3, 2, scope="a")]
    assert groups(nodes, {1: "a#0", 2: "a#0", 3: "a#1"}) == [("a", (1, 2)), ("a", (3,))]


def test_tied_parameters_are_named_once_under_their_first_name() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    names = {id(first.weight): "a.weight", id(first.bias): "a.bias", id(second.bias): "b.bias"}
    units = form_units([X, module(1, "a", 0), module(2, "b", 1)], {"a": first, "b": second}, names, lambda _: "module")
    assert [unit.parameters for unit in units] == [("a.weight", "a.bias"), ("a.weight", "b.bias")]
