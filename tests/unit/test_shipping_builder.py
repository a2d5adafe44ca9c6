"""Models that workers build themselves."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support import models
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.builder import Builder, build_from_reference
from torchslicer.cluster.shipping.built_stage import BuiltStages, decode_built_stage
from torchslicer.cluster.shipping.digest import first_difference, structure_digests
from torchslicer.cluster.shipping.stage_codec import StageGraph
from torchslicer.errors import ShippingError
from torchslicer.graph.modes import trace_modes
from torchslicer.graph.trace import trace
from torchslicer.pipeline.stage import find_routes

ALLOWED = Allowed(allow_builders=["tests.support.models:*", "tests.support.builders"])


def encoded(builder: Builder, num_stages: int = 2) -> tuple[nn.Module, list[tuple[dict[str, Any], dict[str, Tensor]]]]:
    """Build and cut a model, and return it with the description and tensors of each stage."""
    model = builder.build()
    graphs = trace_modes(model, lambda: trace(model))
    parts = []
    for graph in (graphs.training, graphs.evaluation):
        stage_of = tuple(index * num_stages // len(graph.units) for index in range(len(graph.units)))
        parts.append(StageGraph(graph, stage_of, find_routes(graph, stage_of)))
    built = BuiltStages(builder, (parts[0], parts[1]))
    shipped = [built.encode(stage) for stage in range(num_stages)]
    return model, [(each.description, {name: t.clone() for name, t in each.tensors.items()}) for each in shipped]


def test_a_stage_gets_its_tensors_and_keeps_no_others() -> None:
    theirs, stages = encoded(Builder("tests.support.models:GPT", {"vocab": 20}))
    for description, tensors in stages:
        received = decode_built_stage(description, tensors, ALLOWED)
        mine = received.training.graph
        assert set(mine.parameters) | set(mine.buffers) == set(tensors) < {*theirs.state_dict(), "positions"}
        assert {name for name, _ in mine.model.named_parameters()} == set(mine.parameters)
        assert not any(p.is_meta for p in mine.model.parameters())
        assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in mine.parameters.items())
        assert received.evaluation.graph.parameters["embed.weight"] is mine.parameters["embed.weight"]
        assert received.training.routes


def test_memory_is_used_only_where_it_must_be() -> None:
    light = build_from_reference("tests.support.models:GPT", {"vocab": 20}, ALLOWED)
    assert all(parameter.is_meta for parameter in light.parameters())
    heavy = build_from_reference("tests.support.builders:make_unusual", {}, ALLOWED)
    assert not any(parameter.is_meta for parameter in heavy.parameters())  # a parameter in a list, hooks


def test_what_is_imported_by_a_builder_has_its_values(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules outlive the builder: a table of theirs without values would be there for every later run."""
    (tmp_path / "late_tables.py").write_text("import torch\nTABLE = torch.arange(4.0)\n")
    (tmp_path / "late_builder.py").write_text(
        "from torch import nn\ndef make():\n    import late_tables\n    return nn.Linear(4, 4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = build_from_reference("late_builder:make", {}, Allowed(allow_builders=["late_builder"]))
    assert model.weight.is_meta  # type: ignore[union-attr]
    assert sys.modules["late_tables"].TABLE.tolist() == [0.0, 1.0, 2.0, 3.0]
    for name in ("late_tables", "late_builder"):
        monkeypatch.delitem(sys.modules, name)


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
        ("tests.support.models:GPT", {"vocab": 10**30}),
        ("tests.support.models:GPT", {"vocab": ["\ud800"]}),
        ("tests.support.models:GPT", {"vocab": {"\ud800": 1}}),
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
    def digest(model: nn.Module) -> Mapping[str, str]:
        return structure_digests(trace(model))

    base = digest(models.mlp4())
    assert first_difference(base, digest(models.mlp4())) is None
    assert first_difference(base, digest(models.mlp4().double())) == "parameter '0.weight'"
    assert first_difference(base, digest(models.batchnorm_mlp())) == "module '0' (Linear)"
    assert first_difference(base, digest(models.mlp4(0.1))) == "module '2' (Dropout)"
    assert first_difference(digest(models.mlp4(0.1)), digest(models.mlp4(0.2))) == "module '2' (Dropout)"
    assert first_difference(digest(models.mlp4(0.1)), digest(models.mlp4(0.1).eval())) is None


VALUES: list[Any] = [
    1, True, 1.0, 2.0, "1", None, (1,), [1], {1}, {1: 2}, {1: 3}, torch.ones(1), torch.zeros(1), torch.ones(2),
    torch.ones(1).double(), np.ones(1), np.zeros(1), functools.partial(nn.LayerNorm, eps=1e-3),
    functools.partial(nn.LayerNorm, eps=1e-4), nn.ReLU, nn.GELU, torch.relu, torch.float32, slice(1), slice(2),
    types.SimpleNamespace(a=1), types.SimpleNamespace(a=2), [[types.SimpleNamespace(a=[2])]],
]  # fmt: skip


def test_the_digest_tells_attributes_apart() -> None:
    found = []
    for value in VALUES:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        model[1].setting = value
        digests = structure_digests(trace(model))
        assert digests == structure_digests(trace(copy.deepcopy(model)))
        found.append(digests["module '1' (ReLU)"])
    assert len(set(found)) == len(VALUES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d, t: t.pop("0.weight"), "not those that the description names"),
        (lambda d, t: d["names"].pop(0), "needs the tensor '0.weight', which did not arrive"),
        (lambda d, t: d["names"].append(["nope", "0.weight"]), "'nope' arrived, which the stage does not need"),
        (lambda d, t: d["tensors"]["0.weight"].update(parameter=False), r"'0.weight': expected torch.float32 \(32, 16"),
        (lambda d, t: d.update(builder="subprocess:run"), "not among the builders that this worker allows"),
        (lambda d, t: d.update(pack="subprocess:run"), "not among the builders that this worker allows"),
        (lambda d, t: d.update(arguments={"dict": [["dropout", {"float": "0x1p-1"}]]}), "makes another model here"),
        (lambda d, t: d.update(arguments=[1]), "its arguments are a dictionary"),
        (lambda d, t: d.update(stage=-1), "expected an integer from 0"),
        (lambda d, t: d.update(stages_of=[[0], [0]]), "expected a list of 9 items"),
        (lambda d, t: d.update(digests=[{}, {}]), "makes another model here"),
        (lambda d, t: d.update(digests=[1, 2]), "the digests of a model are a dictionary"),
        (lambda d, t: d["wiring"][0]["nodes"].__setitem__(2, [0]), "makes another model here"),
        (lambda d, t: d["wiring"][0]["nodes"].__setitem__(2, [10**9]), "expected an integer"),
        (lambda d, t: d["wiring"][0].update(mutated=["x"]), "expected an integer"),
        (lambda d, t: d.update(frozen=[3]), "expected a string"),
        (lambda d, t: d.update(more=1), "unknown keys"),
    ],
)  # fmt: skip
def test_descriptions_that_are_refused(change: Any, words: str) -> None:
    _, stages = encoded(Builder("tests.support.models:mlp4", {"dropout": 0.0}))
    description, tensors = copy.deepcopy(stages[0][0]), stages[0][1]
    change(description, tensors)
    with pytest.raises(ShippingError, match=words):
        decode_built_stage(description, tensors, ALLOWED)


def test_what_a_worker_allows() -> None:
    names = ["pkg.models:make", "pkg.models:make_big", "pkg.models.more:make", "pkg:make", "pkgs:make"]
    expected = {
        "pkg.models:make": names[:1], "pkg.models:make*": names[:2], "pkg.models": names[:3], "pkg": names[:4],
        "pkg.*:make": [names[0], names[2]],
    }  # fmt: skip
    for pattern, allowed in expected.items():
        assert [name for name in names if Allowed(allow_builders=[pattern]).allows_builder(name)] == allowed


@pytest.mark.parametrize(
    "pattern", ["os:system", "torch", "torch.hub:load", "*", "*:*", "pkg.*", "", "a b", "__main__", "p:[a]"]
)
def test_what_no_worker_allows(pattern: str) -> None:
    with pytest.raises(ShippingError, match="expected a function of a package of yours"):
        Allowed(allow_builders=[pattern])
