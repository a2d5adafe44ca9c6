"""Walking the nodes of a graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchslicer.errors import DataError, StageError
from torchslicer.graph.fx import trace_fx
from torchslicer.graph.model import Ambient, GraphInput, ModelGraph, Node, Ref, Unit
from torchslicer.pipeline.draws import may_draw
from torchslicer.pipeline.interpreter import Program


def graph(*nodes: Node, units: tuple[tuple[int, ...], ...], model: nn.Module | None = None) -> ModelGraph:
    """Return a graph of function nodes; node 0 is the input x."""
    model = model or nn.Module()
    return ModelGraph(
        source="fx",
        model=model,
        modules=dict(model.named_modules()),
        parameters=dict(model.named_parameters()),
        buffers=dict(model.named_buffers()),
        constants={"c": torch.tensor(10.0)},
        nodes=(Node(0, "x", "input", "x"), *nodes),
        units=tuple(Unit(i, f"u{i}", "functions", members) for i, members in enumerate(units)),
        inputs=(GraphInput("x", 0),),
        output=Ref(len(nodes)),
    )


CHAIN = graph(
    Node(1, "double", "function", operator.mul, (Ref(0), 2)),
    Node(2, "plus", "function", torch.add, (Ref(1), Ref(0)), {"alpha": 3}),
    Node(3, "sum", "method", "sum", (Ref(2),)),
    units=((1,), (2, 3)),
)


def test_values_and_what_is_freed() -> None:
    environment = Program(CHAIN, [0, 1], keep=[3]).run({0: torch.tensor([1.0, 2.0])})
    assert list(environment) == [3]
    assert environment[3].item() == 15.0  # (2x + 3x) summed over 1, 2


def test_a_value_is_freed_at_its_last_use_and_not_before() -> None:
    seen: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def observe(instruction: Any, environment: dict[int, Any]) -> Iterator[None]:
        seen[instruction.node.name] = sorted(environment)
        yield

    Program(CHAIN, [0, 1]).run({0: torch.ones(1)}, observe=observe)
    assert seen == {"double": [0], "plus": [0, 1], "sum": [2]}


DRAWING = graph(
    Node(1, "drop", "function", nn.functional.dropout, (Ref(0),)),
    Node(2, "double", "function", operator.mul, (Ref(1), 2)),
    Node(3, "noise", "function", torch.rand_like, (Ref(2),)),
    Node(4, "own", "function", lambda x: x, (Ref(3),)),
    units=((1,), (2,), (2, 3), (4,)),
)


def test_units_that_may_draw_are_seeded_once_each_in_order() -> None:
    seeded: list[int] = []
    Program(DRAWING, [0, 1, 2, 3]).run({0: torch.ones(1)}, seed_unit=seeded.append)
    assert seeded == [0, 2, 3]


class Noisy(nn.Linear):
    """Draws, though its base class does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(())


def hooked() -> nn.Module:
    """Return a layer with a hook that draws."""
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, inputs, output: output + torch.rand(()))
    return layer


def replaced() -> nn.Module:
    """Return a layer whose `forward` was replaced by one that draws."""
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x + torch.rand(())  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("layer", "draws"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), True),
        (nn.RReLU(), True),
        (nn.LSTM(2, 2, dropout=0.5, num_layers=2), True),
        (Noisy(2, 2), True),
        (hooked(), True),
        (replaced(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_layers_that_certainly_draw_nothing_are_taken_to(layer: nn.Module, draws: bool) -> None:
    made = graph(Node(1, "layer", "module", "0", (Ref(0),)), units=((1,),), model=nn.Sequential(layer))
    assert may_draw(made, made.nodes[1]) is draws


class Unhashable:
    """A callable as users may write them."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_callable_of_the_user_is_taken_to_draw() -> None:
    made = graph(Node(1, "own", "function", Unhashable(), (Ref(0),)), units=((1,),))
    assert may_draw(made, made.nodes[1])


def test_an_exported_operation_draws_if_it_says_so() -> None:
    targets = [torch.ops.aten.relu.default, torch.ops.aten.native_dropout.default]
    nodes = [Node(index, "op", "function", target, (Ref(0),)) for index, target in enumerate(targets, 1)]
    made = graph(*nodes, units=((1,), (2,)))
    assert [may_draw(made, node) for node in nodes] == [False, True]


def test_nested_arguments_and_sources() -> None:
    made = graph(
        Node(1, "c", "constant", "c"),
        Node(2, "stack", "function", torch.stack, ([Ref(0), Ref(1)],)),
        Node(3, "item", "function", operator.getitem, (Ref(2), slice(0, 1))),
        units=((1, 2, 3),),
    )
    assert Program(made, [0], keep=[3]).run({0: torch.tensor(1.0)})[3].tolist() == [1.0]


def test_contexts_are_entered_again() -> None:
    made = graph(
        Node(1, "free", "function", operator.mul, (Ref(0), 2), ambient=Ambient(grad_enabled=False)),
        Node(2, "low", "function", torch.mm, (Ref(0), Ref(0)), ambient=Ambient(True, ("cpu", True, torch.bfloat16))),
        units=((1,), (2,)),
    )
    environment = Program(made, [0, 1], keep=[1, 2]).run({0: torch.ones(2, 2, requires_grad=True)})
    assert not environment[1].requires_grad
    assert environment[2].dtype is torch.bfloat16
    assert environment[2].requires_grad
    assert torch.is_grad_enabled()


def test_an_error_names_unit_and_node_and_keeps_its_cause() -> None:
    made = graph(Node(1, "bad", "function", torch.mm, (Ref(0), Ref(0))), units=((1,),))
    with pytest.raises(StageError, match="unit 0 'u0', node 'bad': RuntimeError") as caught:
        Program(made, [0]).run({0: torch.ones(2, 3)})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_users_error_goes_through_as_it_is() -> None:
    def refuse(_: Any) -> None:
        raise DataError("wrong size")

    with pytest.raises(DataError, match=r"^wrong size$"):
        Program(graph(Node(1, "check", "function", refuse, (Ref(0),)), units=((1,),)), [0]).run({0: 1})


def test_a_buffer_that_was_replaced_is_looked_up_anew() -> None:
    class Shift(nn.Module):
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    model = Shift()
    made = trace_fx(model, ["x"])
    program = Program(made, range(len(made.units)), keep=[made.output.index])
    model.shift = torch.full((2,), 5.0)
    assert program.run({0: torch.zeros(2)})[made.output.index].tolist() == [5.0, 5.0]
