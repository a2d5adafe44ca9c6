"""A stage that was shipped computes bit for bit what the stage it was made from computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torchslicer as ts
from tests.support import models
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.stage_codec import ShippedStage, StageGraph, encode_stage
from torchslicer.cluster.shipping.stage_restore import ReceivedStage, decode_stage
from torchslicer.cluster.shipping.values import dump, load
from torchslicer.errors import ShippingError
from torchslicer.executors.base import Cut
from torchslicer.graph.modes import evaluation_mode
from torchslicer.graph.trace import trace
from torchslicer.pipeline.stage import Stage, StageOptions, Work, find_routes

TRUSTED = Allowed(["tests.support"])


class Sum:
    """A loss of any output: the sum of all its floating tensors."""

    def weighted_loss(self, output: Any, target: Any, share: float) -> torch.Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        return sum(leaf.pow(2).sum() for leaf in leaves if leaf.is_floating_point())


def cut_of(sliced: ts.SlicedModel) -> Cut:
    return sliced._cutter.cut


def ship(cut: Cut, stage: int) -> ShippedStage:
    graph, evaluation = cut.graphs.training, cut.graphs.evaluation
    routes = find_routes(evaluation, cut.evaluation_stage_of)
    return encode_stage(
        graph,
        stage,
        cut.stage_of,
        find_routes(graph, cut.stage_of),
        evaluation=(evaluation, cut.evaluation_stage_of, routes),
    )


def receive(shipped: ShippedStage, allowed: Allowed = TRUSTED) -> ReceivedStage:
    """Through the wire's text, onto tensors of their own."""
    tensors = {name: tensor.clone() for name, tensor in shipped.tensors.items()}
    return decode_stage(load(dump(shipped.description)), tensors, allowed)


def stage_on(index: int, part: StageGraph, *, training: bool) -> Stage:
    options = StageOptions(loss=Sum()) if training else StageOptions()
    return Stage(index, part.graph, part.stage_of, part.routes, options=options)


def same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def gradients_for(stage: Stage, packets: dict[int, Any]) -> dict[int, Any]:
    """What later stages would send back."""
    generator = torch.Generator().manual_seed(3)
    return {
        node: tuple(
            torch.randn(leaf.shape, generator=generator) if wanted else None
            for leaf, wanted in zip(packet.leaves, packet.wants_gradient, strict=True)
        )
        for node, packet in packets.items()
    }


def compare(sliced: ts.SlicedModel, inputs: dict[str, Any]) -> list[ReceivedStage]:
    """Run every stage beside its shipped copy, forward and backward, then in evaluation mode."""
    cut = cut_of(sliced)
    graph = cut.graphs.training
    local = StageGraph(graph, cut.stage_of, find_routes(graph, cut.stage_of))
    received = [receive(ship(cut, index)) for index in range(cut.num_stages)]
    work, packets = Work(0, inputs, key=7), {}
    for index, arrived in enumerate(received):
        for parameter in graph.parameters.values():
            parameter.grad = None
        here, there = stage_on(index, local, training=True), stage_on(index, arrived.training, training=True)
        taken = {route.node: packets[route.node] for route in here.imports}
        results = [each.forward(work, {k: p.copy() for k, p in taken.items()}) for each in (here, there)]
        assert same(results[0].loss, results[1].loss)
        for node, packet in results[0].packets.items():
            assert same(packet.leaves, results[1].packets[node].leaves)
        back = gradients_for(here, results[0].packets)
        sent = [each.backward(0, back) for each in (here, there)]
        assert same(sent[0], sent[1])
        shipped = arrived.training.graph
        assert list(shipped.parameters) == [n for n in graph.parameters if n in shipped.parameters]
        for name, parameter in shipped.parameters.items():
            assert same(graph.parameters[name].grad, parameter.grad), name
        for name, buffer in shipped.buffers.items():
            owner, _, attribute = name.rpartition(".")
            assert torch.equal(buffer, cut.graphs.training.model.get_submodule(owner)._buffers[attribute]), name
        packets.update(results[0].packets)
    compare_evaluation(cut, received, inputs)
    return received


def compare_evaluation(cut: Cut, received: list[ReceivedStage], inputs: dict[str, Any]) -> None:
    graph = cut.graphs.evaluation
    local = StageGraph(graph, cut.evaluation_stage_of, find_routes(graph, cut.evaluation_stage_of))
    work, packets = Work(0, inputs, key=7), {}
    for index, arrived in enumerate(received):
        here, there = stage_on(index, local, training=False), stage_on(index, arrived.evaluation, training=False)
        taken = {route.node: packets[route.node] for route in here.imports}
        with evaluation_mode(graph.model), evaluation_mode(arrived.evaluation.graph.model):
            results = [each.evaluate(work, {k: p.copy() for k, p in taken.items()}) for each in (here, there)]
        assert same(results[0].output, results[1].output)
        for node, packet in results[0].packets.items():
            assert same(packet.leaves, results[1].packets[node].leaves)
        packets.update(results[0].packets)


def sliced_of(model: nn.Module, n: int, *example: Any, **options: Any) -> tuple[ts.SlicedModel, dict[str, Any]]:
    given = example[0] if len(example) == 1 else example
    sliced = ts.slice(model, n=n, example=given, **options)
    names = [entry.name for entry in sliced.graph.inputs]
    return sliced, dict(zip(names, example, strict=True))


@pytest.mark.parametrize(
    "case", [models.RESNET, models.UNET, models.GPT_CASE, models.TAGGER, models.BN_MLP, models.MOE]
)
def test_every_stage_of_the_parity_models(case: models.Case) -> None:
    inputs = case.example()
    options = {"pack": case.pack} if case.pack else {}
    compare(*sliced_of(case.model(dropout=0.1), 3, inputs, **options))


@pytest.mark.parametrize(
    ("name", "options", "side"),
    [
        ("mobilenet_v3_small", {"num_classes": 5}, 64),
        ("vit_b_16", {"image_size": 32, "num_classes": 5}, 32),
        ("swin_t", {"num_classes": 5}, 64),
    ],
)
def test_torchvision_models(name: str, options: dict[str, Any], side: int) -> None:
    import torchvision

    model = torchvision.models.get_model(name, **options)
    sliced, inputs = sliced_of(model, 3, torch.randn(2, 3, side, side), verify=False)
    compare(sliced, inputs)
    for index in range(3):
        assert ship(cut_of(sliced), index).required == ()


def test_a_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=F.gelu)
    model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(8, 2))
    compare(*sliced_of(model, 3, torch.randn(2, 5, 4)))


def exported(model: nn.Module, inputs: dict[str, Any]) -> ts.SlicedModel:
    sliced = ts.slice(model, n=1, example=tuple(inputs.values()), verify=False)
    sliced._cutter._trace = lambda given, _="": trace(model, example=inputs, skip_fx="to test torch.export")  # type: ignore[method-assign]
    sliced._cutter.request = type(sliced._cutter.request)(num_stages=3, verify=True)
    sliced._cutter._make(inputs)
    assert sliced.graph.source == "export"
    return sliced


@pytest.mark.parametrize("case", [models.GPT_CASE, models.UNET, models.BN_MLP])
def test_graphs_of_torch_export(case: models.Case) -> None:
    model, example = case.model(dropout=0.1), case.example()
    names = {"gpt": "words", "unet": "x", "batchnorm_mlp": "input"}
    inputs = {names[case.name]: example}
    compare(exported(model, inputs), inputs)


def test_a_tied_parameter_is_one_tensor_under_the_models_name() -> None:
    sliced, _ = sliced_of(models.GPT(), 3, models.GPT_CASE.example())
    last = ship(cut_of(sliced), 2)
    assert "embed.weight" in last.tensors
    assert "head.weight" not in last.tensors
    graph = receive(last).training.graph
    assert graph.modules["head"].weight is graph.parameters["embed.weight"]
    assert graph.model.get_parameter("embed.weight") is graph.model.get_parameter("head.weight")
    whole = receive(ship(cut_of(sliced_of(models.GPT(), 1, models.GPT_CASE.example())[0]), 0)).training.graph
    assert whole.modules["head"].weight is whole.modules["embed"].weight


def test_only_this_stages_tensors_travel() -> None:
    sliced, _ = sliced_of(models.mlp4(), 2, torch.randn(2, 16))
    parts = [ship(cut_of(sliced), index) for index in range(2)]
    names = [set(part.tensors) for part in parts]
    assert names[0] | names[1] == set(dict(sliced.model.named_parameters()))
    assert not names[0] & names[1]
    graph = receive(parts[1]).training.graph
    assert set(dict(graph.model.named_parameters())) == names[1] == set(graph.parameters)
    assert [node.name for node in graph.nodes] == [node.name for node in sliced.graph.nodes]
    assert [unit.name for unit in graph.units] == [unit.name for unit in sliced.graph.units]


def test_both_modes_share_modules_and_tensors() -> None:
    arrived = receive(ship(cut_of(sliced_of(models.batchnorm_mlp(), 2, torch.randn(4, 16))[0]), 0))
    for path, module in arrived.training.graph.modules.items():
        assert arrived.evaluation.graph.modules[path] is module
    assert arrived.training.graph.model is arrived.evaluation.graph.model


def test_packed_stages_name_the_users_modules_that_workers_must_trust() -> None:
    sliced, _ = sliced_of(models.MOE.model(), 3, models.MOE.example(), pack=models.pack_moe)
    shipped = ship(cut_of(sliced), 1)
    assert shipped.required == ("tests.support.models",)
    with pytest.raises(ShippingError, match="is not on this worker's list; start the worker with --trust tests"):
        receive(shipped, Allowed())
    graph = receive(shipped).training.graph
    assert all(name.startswith("blocks.") for name in graph.parameters)
    assert dict(graph.model.named_parameters()).keys() == graph.parameters.keys()


def test_memory_layout_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    shipped = ship(cut_of(sliced_of(model, 2, torch.randn(1, 3, 8, 8))[0]), 0)
    tensors = {name: tensor.contiguous().clone() for name, tensor in shipped.tensors.items()}
    weight = decode_stage(shipped.description, tensors, TRUSTED).training.graph.parameters["0.weight"]
    assert weight.stride() == model[0].weight.stride()
    assert torch.equal(weight, model[0].weight)


def test_flags_of_modules_and_frozen_parameters_are_kept() -> None:
    model = models.resnet18()
    model.layer1.eval()
    model.layer1[0].conv1.weight.requires_grad_(False)
    graph = receive(ship(cut_of(sliced_of(model, 2, torch.randn(1, 3, 16, 16))[0]), 0)).training.graph
    assert not graph.model.get_submodule("layer1").training
    assert not graph.modules["layer1.0.bn1"].training
    assert graph.model.training
    assert not graph.parameters["layer1.0.conv1.weight"].requires_grad
    assert graph.parameters["layer1.0.conv2.weight"].requires_grad


class Scratch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty_like(x)
        more = x.new_empty(x.shape)
        return self.layer(x) + scratch.fill_(1.0) + more.fill_(2.0)


def test_memory_as_it_lies_is_never_read() -> None:
    arrived = compare(*sliced_of(Scratch(), 1, torch.randn(2, 4)))[0]
    used = [node.target for node in arrived.training.graph.nodes]
    assert torch.zeros_like in used
    assert "new_zeros" in used


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.more = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        from torchvision.models.inception import InceptionOutputs

        x = self.layer(x)
        return InceptionOutputs(self.more(x), x)


def test_a_named_tuple_that_the_model_returns() -> None:
    arrived = compare(*sliced_of(Inception(), 2, torch.randn(2, 4)))
    made = [node.target for node in arrived[1].training.graph.nodes if node.op == "function"]
    assert [target.__name__ for target in made] == ["InceptionOutputs"]


class Numeric(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.layer, self.method = nn.Linear(4, 4), method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self.layer(x), self.method)()


def test_a_refusal_names_the_operation_and_the_way_out() -> None:
    graph = trace(Numeric("share_memory_"))
    with pytest.raises(ShippingError, match=r"operation 'share_memory_'.*is not on the list.*pack="):
        encode_stage(graph, 0, tuple(0 for _ in graph.units), ())


@functools.cache
def honest() -> tuple[bytes, dict[str, torch.Tensor]]:
    sliced, _ = sliced_of(models.GPT(), 2, models.GPT_CASE.example())
    shipped = ship(cut_of(sliced), 1)
    return dump(shipped.description), {name: tensor.clone() for name, tensor in shipped.tensors.items()}


def hostile(change: Callable[[dict[str, Any]], None]) -> None:
    text, tensors = honest()
    description = load(text)
    change(description)
    decode_stage(description, tensors, TRUSTED)


def node_of(description: dict[str, Any], op: str) -> dict[str, Any]:
    return next(node for node in description["training"]["nodes"] if node["op"] == op)


def targeting(op: str, target: Any, **extra: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: node_of(d, op).update(target=target, **extra)


FUNCTIONS = [
    "torch:load",
    "torch.load",
    "torch.hub.load",
    "builtins:eval",
    "builtins.eval",
    "builtins.exec",
    "os:system",
    "torch.compile",
    "torch.from_file",
    "torch.save",
    "operator.call",
    "operator.attrgetter",
    "builtins.setattr",
    "torch.nn.functional.triplet_margin_with_distance_loss",
    "aten.from_file.default",
    "aten.set_.source_Storage",
    "aten.empty.memory_format",
    "torch.empty",
    "apply os:system",
    "make subprocess:Popen",
    "make argparse:Namespace",
    "make torch.nn.modules.linear:Linear",
    "tests.support.models:os.system",
    "tests.support.models:GPT.__init__",
    "make tests.support.models:GPT",
    "torch.nn.functional:relu",
    "",
    ":",
    "a:b:c",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_off_the_list(name: str) -> None:
    with pytest.raises(ShippingError):
        hostile(targeting("function", name))


@pytest.mark.parametrize(
    "name", ["apply_", "map_", "__reduce_ex__", "__class__", "register_hook", "numpy", "set_", "format"]
)
def test_methods_off_the_list(name: str) -> None:
    with pytest.raises(ShippingError, match="is not on the list of tensor methods"):
        hostile(targeting("method", name))


@pytest.mark.parametrize("name", ["__class__", "__globals__", "register_hook", "apply_", "grad_fn", "a b", ""])
def test_attributes_that_a_graph_may_not_read(name: str) -> None:
    args = {"tuple": [{"ref": 0}, name]}
    with pytest.raises(ShippingError, match="may read attributes such as 'shape'"):
        hostile(targeting("function", "builtins.getattr", args=args, kwargs={"dict": []}))


def set_in(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        here: Any = description
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value

    return change


def bomb(depth: int) -> Any:
    data: Any = 1
    for _ in range(depth):
        data = [data]
    return data


@pytest.mark.parametrize(
    "change",
    [
        set_in("format", value=99),
        set_in("extra", value=1),
        set_in("source", value="pickle"),
        set_in("stage", value=-1),
        set_in("training", value=None),
        set_in("training", "output", value={"ref": 10**9}),
        set_in("training", "output", value=bomb(5000)),
        set_in("training", "stage_of", value=[]),
        set_in("training", "mutated", value=[-1]),
        set_in("training", "inputs", value=[["x", 10**6]]),
        set_in("training", "units", 0, value=["a", "b", [0], [], []]),
        set_in("training", "nodes", 0, "index", value=10**6),
        set_in("training", "nodes", 0, "index", value=True),
        set_in("training", "nodes", 0, "op", value="call"),
        set_in("training", "nodes", 0, "args", value=[]),
        set_in("training", "nodes", 0, "ambient", value=[True, {"tuple": ["cpu", True, 3]}]),
        set_in("training", "nodes", 0, "extra", value=1),
        set_in("training", "parameters", value=["no.such"]),
        set_in("training", "modules", value=[["head", 10**9]]),
        set_in("training", "routes", value=[[0, "x", 0]]),
        set_in("model", "containers", value=[["", 1]]),
        set_in("model", "parameters", 0, 0, value="a..b"),
        set_in("model", "parameters", 0, 0, value=".".join("a" * 100)),
        set_in("model", "modules", value=[["embed", 0], ["embed", 0]]),
        set_in("modules", 0, "class", value="torch.fx.graph_module:GraphModule"),
        set_in("tensors", "embed.weight", "shape", value=[2**62]),
        set_in("tensors", "embed.weight", "dtype", value="load"),
        set_in("tensors", "embed.weight", "stride", value=[0, 0]),
        set_in("tensors", "more", value={}),
    ],
)
def test_broken_descriptions(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(ShippingError):
        hostile(change)
