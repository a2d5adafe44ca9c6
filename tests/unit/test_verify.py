"""Comparing a graph with its model."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.nets_forward import Noise
from tests.support.nets_values import Net
from torchslicer.errors import DataError, VerificationError
from torchslicer.graph.fx import trace_fx
from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.verify import run_whole, verify


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.a(x)).detach() + torch.tanh(self.b(x)))


def graph() -> ModelGraph:
    return trace_fx(Plain(), ["x"])


def without(made: ModelGraph, name: str, target: Any) -> ModelGraph:
    """Return the graph with another function in the node called *name*."""
    return replace(
        made, nodes=tuple(replace(n, op="function", target=target) if n.name == name else n for n in made.nodes)
    )


X = {"x": torch.randn(4, 16)}


@pytest.mark.parametrize("gradients", [True, False])
def test_a_right_graph_passes(gradients: bool) -> None:
    verify(graph(), X, gradients=gradients)


def test_random_layers_draw_the_same() -> None:
    verify(trace_fx(Noise(), ["x"]), X, gradients=True)


def test_another_output_is_refused_with_its_size() -> None:
    with pytest.raises(VerificationError, match=r"output 0 of the graph \(fx\) differs from the model's: by up to"):
        verify(without(graph(), "tanh_1", torch.sigmoid), X, gradients=False)


def test_another_gradient_is_refused_with_its_name() -> None:
    """A detach that is lost changes no output."""
    wrong = without(graph(), "detach", torch.clone)
    verify(wrong, X, gradients=False)
    with pytest.raises(VerificationError, match=r"the gradient of 'a\.weight'"):
        verify(wrong, X, gradients=True)


def test_another_type_is_refused() -> None:
    made = graph()
    wrong = without(made, made.nodes[-1].name, lambda value: value[:, :4].double())
    with pytest.raises(VerificationError, match=r"torch.float64 \(4, 4\) instead of torch.float32"):
        verify(wrong, X, gradients=False)


def test_a_graph_that_fails_where_the_model_does_not() -> None:
    with pytest.raises(VerificationError, match="fails where the model does not: unit"):
        verify(without(graph(), "tanh_1", torch.linalg.inv), X, gradients=False)


def test_a_model_that_fails_by_itself() -> None:
    with pytest.raises(DataError, match=r"Plain itself fails on this batch: RuntimeError.*x: tensor of shape \(4, 3\)"):
        verify(graph(), {"x": torch.randn(4, 3)}, gradients=False)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_types_of_numbers(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 2, dtype=dtype))
    made = trace_fx(model, ["input"])
    verify(made, {"input": torch.randn(3, 4, dtype=dtype)}, gradients=True)
    with pytest.raises(VerificationError, match="by up to"):
        verify(without(made, "_1", torch.sin), {"input": torch.randn(3, 4, dtype=dtype)}, gradients=False)


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(8, 16)
    random = torch.get_rng_state()
    verify(trace_fx(model, ["input"]), {"input": x}, gradients=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())


def test_a_graph_in_one_go_gives_what_the_model_gives() -> None:
    made = graph()
    assert torch.equal(run_whole(made, X), made.model(**X))
