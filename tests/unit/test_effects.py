"""In-place operations and shared memory, found by running the graph once."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.nets_buffers import averaged, averaged_twice
from tests.support.nets_values import Functional, InPlaceAdd, Net
from torchslicer.graph.fx import trace_fx
from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.effects import analyse

X = {"x": torch.ones(4, 16)}


def by_name(graph: ModelGraph) -> dict[str, int]:
    return {node.name: node.index for node in graph.nodes}


def test_a_graph_without_in_place_operations_stays_the_same() -> None:
    graph = trace_fx(Functional(), ["x"])
    found = analyse(graph, X)
    assert (found.nodes, found.forbidden, found.mutated) == (graph.nodes, {}, frozenset())


def test_uses_after_an_in_place_operation_take_its_result() -> None:
    class Doubles(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            before = self.b(h)
            h.mul_(2)
            return self.d(self.c(h) + before)

    graph = trace_fx(Doubles(), ["x"])
    index = by_name(graph)
    found = analyse(graph, X)
    assert found.nodes[index["c"]].refs == (index["mul_"],)
    assert found.nodes[index["b"]].refs == (index["a"],)
    assert index["a"] in found.mutated
    assert found.forbidden == {}


def test_operator_assignment_is_followed_too() -> None:
    graph = trace_fx(InPlaceAdd(), ["x"])
    index = by_name(graph)
    assert analyse(graph, X).nodes[index["c"]].refs == (index["add"],) or "iadd" in index


def test_no_cut_between_a_view_of_changed_memory_and_its_last_use() -> None:
    class ThroughView(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            view = h.view(-1, 4, 4)
            view.mul_(2)
            return self.d(torch.tanh(self.c(torch.tanh(self.b(x)))) + h)

    found = analyse(trace_fx(ThroughView(), ["x"]), X)
    assert set(found.forbidden) == {1, 2}  # the sum is in the unit of c
    assert "'mul_' changes memory in place that 'a' shares" in found.forbidden[1]


def test_the_model_and_the_inputs_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = torch.randn(4, 16)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, kept = torch.get_rng_state(), x.clone()
    analyse(trace_fx(model, ["input"]), {"input": x})
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, kept)


def test_buffers_that_change_are_noted_with_all_units_that_use_them() -> None:
    once, twice = (
        analyse(trace_fx(make(replaces=True), ["input"]), {"input": X["x"]}) for make in (averaged, averaged_twice)
    )
    assert once.changing == {"1.mean": (1,)}
    names = [unit.name for unit in twice.units]
    assert [names[unit] for unit in twice.changing["1.mean"]] == ["1", "1"]
    assert (
        analyse(
            trace_fx(nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4)).eval(), ["input"]), {"input": X["x"]}
        ).changing
        == {}
    )


def test_no_cut_between_a_change_of_a_buffer_and_its_uses() -> None:
    graph = analyse(trace_fx(averaged(replaces=False), ["input"]), {"input": X["x"]})
    [unit] = graph.forbidden
    assert graph.units[unit].name == "1.linear"
    assert "memory of a buffer that changes" in graph.forbidden[unit]
