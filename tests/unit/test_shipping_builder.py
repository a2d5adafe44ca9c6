"""Models that workers build themselves."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import models
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.builder import build_from_reference, check_digest, load_tensors, structure_digest
from torchslicer.errors import ShippingError
from torchslicer.graph.trace import trace

ALLOWED = Allowed(allow_builders=["tests.support.models:*"])


def test_a_model_is_built_without_memory_and_filled() -> None:
    theirs = models.GPT(vocab=20)
    model = build_from_reference("tests.support.models:GPT", {"vocab": 20}, ALLOWED)
    assert all(parameter.is_meta for parameter in model.parameters())
    graph = trace(model)
    check_digest(graph, structure_digest(trace(theirs)))
    tensors = {name: t.detach().clone() for name, t in (*theirs.named_parameters(), *theirs.named_buffers())}
    names = [name for name in tensors if not name.startswith("blocks.1")]
    filled = load_tensors(graph, names, tensors)
    assert model.head.weight is model.embed.weight is filled.parameters["embed.weight"]
    assert torch.equal(model.head.weight, theirs.head.weight)
    assert torch.equal(model.positions, theirs.positions)
    assert model.blocks[1].qkv.weight.is_meta
    load_tensors(filled, tensors, tensors)
    words = torch.randint(20, (2, 5))
    assert torch.equal(model(words), theirs(words))


def test_a_model_that_needs_values_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_up_models")

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = torch.ones(1), nn.Linear(2, 2)

    def make() -> nn.Module:
        return Constant()

    make.__module__ = module.__name__
    vars(module)["make"] = make
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = build_from_reference("made_up_models:make", {}, Allowed(allow_builders=["made_up_models:make"]))
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("reference", "kwargs"),
    [
        ("os:system", {"command": "true"}),
        ("builtins:eval", {}),
        ("tests.support.models:nn.Linear", {}),
        ("tests.support.models:torch.load", {}),
        ("tests.support.models:GPT.__init__", {}),
        ("tests.support.models:MAIN", {}),
        ("tests.support.models:nope", {}),
        ("tests.support.models:call_and_compare.x", {}),
        ("tests.support.awkward:anything", {}),
        ("tests.support.models", {}),
        ("tests.support.models:GPT", {"vocab": {1, 2}}),
        ("tests.support.models:GPT", {1: 2}),
        ("tests.support.models:GPT", [1]),
        ("tests.support.models:GPT", {"vocab": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}),
    ],
)
def test_refusals(reference: str, kwargs: Any) -> None:
    with pytest.raises(ShippingError):
        build_from_reference(reference, kwargs, ALLOWED)


def test_a_builder_that_makes_no_module() -> None:
    with pytest.raises(ShippingError, match=r"must return a torch\.nn\.Module, got a function"):
        build_from_reference("tests.support.models:vectors", {}, ALLOWED)


def test_the_digest_is_of_structure_not_of_values() -> None:
    def digest(model: nn.Module) -> str:
        return structure_digest(trace(model))

    base = digest(models.mlp4())
    assert digest(models.mlp4()) == base
    assert len({base, digest(models.mlp4(0.1)), digest(models.mlp4().double()), digest(models.batchnorm_mlp())}) == 4
    with pytest.raises(ShippingError, match="install the same versions"):
        check_digest(trace(models.mlp4(0.1)), base)


def test_tensors_that_do_not_fit() -> None:
    graph = trace(models.mlp4())
    tensors = {name: p.detach() for name, p in graph.parameters.items()}
    with pytest.raises(ShippingError, match="'nope' is unknown here"):
        load_tensors(graph, ["nope"], tensors)
    with pytest.raises(ShippingError, match=r"'0\.weight' is missing"):
        load_tensors(graph, ["0.weight"], {})
    with pytest.raises(ShippingError, match=r"'0.weight': expected torch.float32 \(32, 16\), got torch.float64"):
        load_tensors(graph, ["0.weight"], {"0.weight": tensors["0.weight"].double()})
