"""What the tracer records, and that it leaves the model as it found it."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.nets_forward import AutocastBlock, CustomFunction, NoGradBlock, Noise, Triple
from tests.support.nets_values import Functional, Net, Opaque, RootTensors, Structures
from torchslicer.errors import SliceError, TraceError
from torchslicer.graph.fx import required_inputs, trace_fx
from torchslicer.graph.model import ModelGraph, Node
from torchslicer.graph.tracer import WholeModuleTracer


def trace(model: nn.Module) -> ModelGraph:
    return trace_fx(model, required_inputs(model))


def node(graph: ModelGraph, name: str) -> Node:
    return next(n for n in graph.nodes if n.name == name)


def test_functional_operations_methods_and_constants_are_nodes() -> None:
    ops = [(n.op, n.name) for n in trace(Functional()).nodes]
    assert ("function", "relu") in ops
    assert ("method", "view") in ops
    assert [name for op, name in ops if op == "module"] == ["a", "b", "d"]


def test_parameters_and_buffers_of_the_root_keep_their_names() -> None:
    graph = trace(RootTensors())
    assert {(n.op, n.target) for n in graph.nodes if n.op in {"parameter", "buffer"}} == {
        ("parameter", "scale"),
        ("buffer", "offset"),
    }
    assert graph.shared == {"scale": (0, 2)}


def test_no_grad_is_recorded() -> None:
    graph = trace(NoGradBlock())
    assert not node(graph, "b").ambient.grad_enabled
    assert not node(graph, "sigmoid").ambient.grad_enabled
    assert node(graph, "a").ambient.grad_enabled
    assert node(graph, "c").ambient.grad_enabled


def test_autocast_is_recorded_only_where_the_model_switches_it_on() -> None:
    graph = trace(AutocastBlock())
    assert node(graph, "b").ambient.autocast == ("cpu", True, torch.bfloat16)
    assert node(graph, "a").ambient.autocast is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert node(trace(AutocastBlock()), "a").ambient.autocast is None


@pytest.mark.parametrize("grad", [True, False])
def test_the_callers_own_grad_mode_is_not_recorded(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        assert all(n.ambient.grad_enabled for n in trace(Functional()).nodes)


def test_a_custom_autograd_function_is_one_node_and_keeps_its_gradient() -> None:
    graph = trace(CustomFunction())
    calls = [n for n in graph.nodes if n.op == "function" and getattr(n.target, "__self__", None) is Triple]
    assert len(calls) == 1
    x = torch.ones(2, requires_grad=True)
    calls[0].target(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]


def test_random_factories_are_nodes_and_not_constants() -> None:
    graph = trace(Noise())
    assert not graph.constants
    assert any(n.target in {torch.randn, torch.rand} or n.name.startswith("rand") for n in graph.nodes)


def test_a_submodule_that_cannot_be_traced_is_one_unit_with_the_reason() -> None:
    graph = trace(Structures())
    kinds = {unit.name: unit.kind for unit in graph.units}
    assert (kinds["make"], kinds["use"], kinds["a"]) == ("opaque", "opaque", "module")
    assert any(attempt.startswith("kept whole: make: Opaque: ") for attempt in graph.attempts)
    assert set(graph.units[1].parameters) == {"make.linear.weight", "make.linear.bias"}


def test_nothing_of_the_attempt_to_enter_it_is_left() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.linear(x))
            return h if bool(h.sum() > 0) else -h

    names = [n.name for n in trace(nn.Sequential(nn.Linear(16, 16), Late())).nodes]
    assert names == ["input_1", "_0", "_1"]


def test_the_root_cannot_be_kept_whole() -> None:
    with pytest.raises(TraceError, match=r"torch\.fx: .*\(in forward, line \d+ of "):
        trace(Opaque())


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential])
def test_modules_with_hooks_are_kept_whole_and_the_hooks_still_run(wrap: Any) -> None:
    inner = Functional()
    inner.register_forward_hook(lambda module, args, output: output * 100)
    model = nn.Sequential(nn.Linear(16, 16), wrap(inner))
    graph = trace(model)
    assert graph.modules[graph.nodes[-1].target] is inner
    assert torch.allclose(
        graph.modules[graph.nodes[-1].target](torch.ones(2, 16)) / 100, inner.forward(torch.ones(2, 16))
    )


def test_optional_inputs_keep_their_defaults_unless_given() -> None:
    class Optional(Net):
        def forward(self, x: Tensor, scale: float = 3.0, *, bias: Tensor | None = None) -> Tensor:
            y = self.a(x) * scale
            return y if bias is None else y + bias

    few, many = trace_fx(Optional(), ["x"]), trace_fx(Optional(), ["x", "bias"])
    assert [entry.name for entry in few.inputs] == ["x"]
    assert [entry.name for entry in many.inputs] == ["x", "bias"]
    assert next(n for n in few.nodes if n.name == "mul").args[1] == 3.0


def test_a_loss_hidden_in_an_attribute_is_refused() -> None:
    class Hides(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.aux_loss = h.square().mean()
            return self.d(h)

    with pytest.raises(SliceError, match=r"stores a loss in its attribute 'aux_loss'.*add_aux_loss"):
        trace(Hides())


def test_a_tensor_attribute_is_a_constant_and_the_model_gets_no_new_attribute() -> None:
    class Table(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(16.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.a(x) + self.table)

    model = Table()
    before = {m: dict(vars(m)) for m in model.modules()}
    graph = trace(model)
    assert next(iter(graph.constants.values())) is model.table
    assert {m: dict(vars(m)) for m in model.modules()} == before


def test_methods_of_torch_are_as_before_also_after_an_error() -> None:
    stock = [torch.rand, torch.randn, vars(torch.autograd.Function)["apply"], nn.Module.__call__, nn.Module.__getattr__]
    trace(Noise())
    with pytest.raises(TraceError):
        trace(Opaque())
    after = [torch.rand, torch.randn, vars(torch.autograd.Function)["apply"], nn.Module.__call__, nn.Module.__getattr__]
    assert all(a is b for a, b in zip(stock, after, strict=True))


def test_a_function_handed_to_an_operation_is_refused_at_the_root_only() -> None:
    class Maps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(lambda gradient: gradient)
            return x

    with pytest.raises(TraceError, match=r"a function .* is passed to an operation"):
        WholeModuleTracer(["x"]).trace(Maps())
    graph = trace(nn.Sequential(nn.Linear(4, 4), Maps()))
    assert graph.units[-1].kind == "opaque"


LEAK = """
import gc, weakref
from tests.support.models import GPT
from torchslicer.graph.trace import trace

model = GPT(vocab=7)
graph, alive = trace(model), weakref.ref(model)
del model, graph
gc.collect()
print("gone" if alive() is None else "kept")
"""


def test_the_first_model_of_a_process_is_not_kept_by_torch() -> None:
    """torch caches the list of its functions, which held those that record while they stood in their place."""
    done = subprocess.run([sys.executable, "-c", LEAK], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "gone"
