from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.graphs import chain_graph
from torchslicer.errors import ConfigError, SliceError
from torchslicer.graph.model import ModelGraph, Node, Ref, Unit
from torchslicer.partition import BoundaryValue, Plan, UnitCosts, build_plan


def example_plan() -> Plan:
    graph = chain_graph([256, 2, 0, 3], tied={3: [0]}, skips=[(0, 2), (0, 3)], buffers={1: 6})
    return build_plan(
        graph,
        [1, 3],
        strategy="uniform",
        costs=UnitCosts((0.5, 0.1, 0.15, 0.25), (1024, 8, 0, 1036), None),
        devices=["cuda:0", "cuda:1", "cpu"],
        value_bytes={"v0": 65536},
    )


def test_a_stage_lists_what_it_holds() -> None:
    stage = example_plan().stages[1]
    assert (stage.index, stage.units, stage.first_unit, stage.last_unit) == (1, ("layer1", "layer2"), 1, 2)
    assert (stage.parameters, stage.buffers) == (("layer1.weight",), ("layer1.stat",))
    assert (stage.num_parameters, stage.parameter_bytes, stage.buffer_bytes) == (2, 8, 24)
    assert stage.time_share == pytest.approx(0.25)
    assert stage.device == "cuda:1"


def test_unit_starts_are_those_of_all_stages() -> None:
    assert example_plan().unit_starts == (0, 1, 3)


def test_a_value_goes_directly_to_every_later_stage_that_uses_it() -> None:
    assert example_plan().boundaries == (
        BoundaryValue("v0", producer=0, consumers=(1, 2), size_bytes=65536),
        BoundaryValue("v2", producer=1, consumers=(2,), size_bytes=None),
    )


def test_a_tied_parameter_is_held_by_each_stage_that_uses_it_and_counted_once_there() -> None:
    plan = example_plan()
    assert plan.shared == {"layer0.weight": (0, 2)}
    assert plan.stages[2].parameters == ("layer3.weight", "layer0.weight")
    together = build_plan(chain_graph([5, 0, 1], tied={1: [0]}), [2], strategy="x")
    assert together.stages[0].parameters == ("layer0.weight",)
    assert together.stages[0].num_parameters == 5
    assert together.shared == {"layer0.weight": (0,)}


def test_what_the_model_returns_is_needed_by_the_last_stage() -> None:
    plan = build_plan(chain_graph([1] * 4, outputs=[0, 2]), [1, 2], strategy="x")
    assert [(value.name, value.producer, value.consumers) for value in plan.boundaries] == [
        ("v0", 0, (1, 2)),
        ("v1", 1, (2,)),
    ]


def test_the_model_returning_its_input_needs_no_boundary() -> None:
    graph = chain_graph([1, 1])
    graph.output = {"y": Ref(2), "x": Ref(0)}
    assert [value.name for value in build_plan(graph, [1], strategy="x").boundaries] == ["v0"]


def test_parameters_as_values_never_cross() -> None:
    weight = nn.Parameter(torch.zeros(2))
    nodes = (
        Node(0, "x", "input", "x"),
        Node(1, "w", "parameter", "w"),
        Node(2, "a", "function", torch.add, (Ref(0), Ref(1))),
        Node(3, "b", "function", torch.mul, (Ref(2), Ref(1))),
    )
    units = (Unit(0, "(model)", "functions", (1, 2), ("w",)), Unit(1, "(model)", "functions", (1, 3), ("w",)))
    graph = ModelGraph("fx", nn.Module(), {}, {"w": weight}, {}, {}, nodes, units, (), Ref(3))
    plan = build_plan(graph, [1], strategy="x")
    assert [value.name for value in plan.boundaries] == ["a"]
    assert plan.stages[0].units == ("(model)",)


def test_one_stage_has_no_boundaries() -> None:
    plan = build_plan(chain_graph([1, 1], outputs=[0]), [], strategy="x")
    assert (plan.num_stages, plan.boundaries, plan.stages[0].last_unit) == (1, (), 1)


@pytest.mark.parametrize(
    ("devices", "expected"), [([], ["cpu"] * 2), (["meta"], ["meta"] * 2), (["cpu", "meta"], ["cpu", "meta"])]
)
def test_devices_are_one_for_all_or_one_a_stage(devices: list[str], expected: list[str]) -> None:
    plan = build_plan(chain_graph([1, 0]), [1], strategy="x", devices=devices)
    assert [stage.device for stage in plan.stages] == expected


def test_without_devices_a_stage_is_where_its_tensors_are() -> None:
    graph = chain_graph([1, 0])
    graph.parameters["layer0.weight"] = nn.Parameter(torch.zeros(1, device="meta"))
    assert [stage.device for stage in build_plan(graph, [1], strategy="x").stages] == ["meta", "meta"]


def test_another_number_of_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 1 or 3, one a stage, got 2"):
        build_plan(chain_graph([1] * 3), [1, 2], strategy="x", devices=["cpu", "cpu"])


def test_impossible_cuts_and_costs_are_refused() -> None:
    with pytest.raises(SliceError, match="cannot start at unit 3"):
        build_plan(chain_graph([1] * 3), [3], strategy="x")
    with pytest.raises(SliceError, match="for 1 units but the model has 3"):
        build_plan(chain_graph([1] * 3), [1], strategy="x", costs=UnitCosts(None, (1,), None))


@pytest.mark.parametrize("time_s", [None, (0.0, 0.0)])
def test_the_share_of_time_is_known_only_if_measured(time_s: tuple[float, ...] | None) -> None:
    plan = build_plan(chain_graph([1, 1]), [1], strategy="x", costs=UnitCosts(time_s, (4, 4), None))
    assert [stage.time_share for stage in plan.stages] == [None, None]


def test_the_table() -> None:
    plan = example_plan()
    assert str(plan) == plan.table()
    assert plan.table().splitlines() == [
        "Net: 3 stages by 'uniform', graph from fx",
        "stage  modules         units  parameters    bytes   time  device",
        "    0  layer0              1         256  1.0 KiB  50.0%  cuda:0",
        "    1  layer1..layer2      2           2     32 B  25.0%  cuda:1",
        "    2  layer3              1         259  1.0 KiB  25.0%  cpu",
        "boundary 0->1,2: v0 64.0 KiB",
        "boundary 1->2: v2",
        "tied layer0.weight: stages 0, 2",
    ]


def test_json_round_trip() -> None:
    plan = example_plan()
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["version"] == 1
    unmeasured = build_plan(chain_graph([1, 1]), [1], strategy="x")
    assert Plan.from_json(unmeasured.to_json()) == unmeasured


def changed(path: tuple[Any, ...], value: Any) -> str:
    data = json.loads(example_plan().to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), 2, "version 2 cannot be read, this TorchSlicer reads version 1"),
        (("version",), True, "version True cannot be read"),
        (("strategi",), "x", "plan: unknown key 'strategi'; did you mean 'strategy'"),
        (("stages", 1, "devise"), "x", r"plan\.stages\[1\]: unknown key 'devise'; did you mean 'device'"),
        (("stages", 1, "first_unit"), "1", r"plan\.stages\[1\]\.first_unit: expected an integer"),
        (("stages", 1, "first_unit"), -1, r"plan\.stages\[1\]\.first_unit: expected an integer"),
        (("stages", 1, "first_unit"), True, r"expected an integer that is not negative, got True"),
        (("stages", 1, "time_share"), 1.5, "expected a number from 0 to 1, or null, got 1.5"),
        (("stages", 1, "time_share"), float("nan"), "expected a number from 0 to 1, or null"),
        (("stages", 1, "units"), "layer1", r"stages\[1\]\.units: expected a list"),
        (("stages", 1, "units", 0), 3, r"stages\[1\]\.units\[0\]: expected a text, got 3"),
        (("stages", 1, "units"), ["layer1"], r"stages\[1\] names 1 units"),
        (("stages", 1, "first_unit"), 2, r"stages\[1\] must have index 1 and start at unit 1"),
        (("stages", 1), None, r"stages\[1\]: expected an object, got None"),
        (("stages",), [], "num_stages is 3 but 0 stages are listed"),
        (("shared",), [], r"plan\.shared: expected an object"),
        (("shared", "layer0.weight"), 3, r"plan\.shared\['layer0.weight'\]: expected a list"),
        (("boundaries", 0, "consumers"), [0], "does not go from a stage to later ones of 3"),
        (("boundaries", 0, "consumers"), [3], "does not go from a stage to later ones of 3"),
    ],
)
def test_a_damaged_file_is_refused_by_name(path: tuple[Any, ...], value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Plan.from_json(changed(path, value))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"not JSON \(line 1, column 2"),
        ("[1]", r"plan: expected an object, got \[1\]"),
        ("{}", "version None cannot be read"),
        ('{"version": 1, "model": "Net"}', "plan: missing 'source', 'strategy'"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Plan.from_json(text)


def test_a_plan_cannot_be_changed_by_accident() -> None:
    plan = example_plan()
    with pytest.raises(AttributeError):
        plan.model = "Other"  # type: ignore[misc]
    assert replace(plan, model="Other") != plan
