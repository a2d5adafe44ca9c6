"""Make a stage's graphs and the part of the model that they use from plain data and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.functions import check_call
from torchslicer.cluster.shipping.names import shorten
from torchslicer.cluster.shipping.restore import ModuleReader
from torchslicer.cluster.shipping.stage_codec import FORMAT, StageGraph
from torchslicer.cluster.shipping.tensors import TensorReader
from torchslicer.cluster.shipping.values import MAX_DEPTH, ValueReader, flag, integer, listed, pairs, record, text
from torchslicer.errors import ShippingError
from torchslicer.graph.model import DEFAULT_AMBIENT, Ambient, GraphInput, ModelGraph, Node, Unit, iter_refs
from torchslicer.pipeline.stage import Route

_STAGE_KEYS = ("format", "stage", "source", "training", "evaluation", "model", "modules", "tensors")
_GRAPH_KEYS = (
    "stage_of", "routes", "names", "nodes", "units", "inputs", "output", "mutated",
    "modules", "parameters", "buffers", "constants",
)  # fmt: skip
_NODE_KEYS = ("index", "op", "target", "args", "kwargs", "scope", "ambient")
_MODEL_KEYS = ("modules", "parameters", "buffers", "containers")
_OPS = ("input", "module", "function", "method", "parameter", "buffer", "constant")
_SOURCES = ("pack", "sequential", "fx", "export", "whole")
_MAX_NODES = 1_000_000
_MAX_STAGES = 100_000


class StageModel(nn.Module):
    """Holds the modules and tensors of one stage under the names that they have in the whole model."""


@dataclass(frozen=True)
class ReceivedStage:
    """A stage as it arrived: its number, and its graph in each mode, on the same modules and tensors."""

    stage: int
    training: StageGraph
    evaluation: StageGraph


def decode_stage(description: Any, tensors: Mapping[str, Tensor], allowed: Allowed) -> ReceivedStage:
    """Make what `encode_stage` wrote; the tensors that arrived become the parameters and buffers, without a copy.

    Args:
        description: Plain data, from `values.load`.
        tensors: What arrived.
        allowed: What this worker accepts.

    Raises:
        ShippingError: The description is broken, too large, or names what this worker does not accept.

    Example:
        >>> from torchslicer.cluster.shipping.stage_codec import encode_stage
        >>> from torchslicer.graph.trace import trace
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> shipped = encode_stage(trace(model), 1, (0, 1), ())
        >>> decode_stage(shipped.description, shipped.tensors, Allowed()).training.graph.modules
        {'1': Linear(in_features=2, out_features=2, bias=True)}
    """
    version, stage, source, training, evaluation, model, modules, entries = record(description, _STAGE_KEYS, "stage")
    if version != FORMAT:
        raise ShippingError(f"expected a description of format {FORMAT}, got {shorten(version)}; use equal versions")
    if text(source) not in _SOURCES:
        raise ShippingError(f"unknown source of a graph {shorten(source)}")
    reader = TensorReader(entries, tensors)
    made = ModuleReader(modules, reader, allowed)
    root = _model(model, made, reader)
    graphs = [
        _GraphReader(source, root, made, reader, allowed).read(data)
        for data in (training, evaluation)
        if data is not None
    ]
    if not graphs or training is None:
        raise ShippingError("the description holds no graph of training mode")
    return ReceivedStage(integer(stage, 0, _MAX_STAGES), graphs[0], graphs[-1])


# ---------------------------------------------------------------------------------------------------------- the model


def _model(data: Any, made: ModuleReader, tensors: TensorReader) -> nn.Module:
    modules, parameters, buffers, containers = record(data, _MODEL_KEYS, "model")
    flags = {path: flag(training) for path, training in pairs(containers)}
    attached = {path: made.module(number) for path, number in pairs(modules)}
    root = attached.pop("") if "" in attached else _container(flags, "")
    for path, module in attached.items():
        parent, name = _place(root, path, flags)
        if name in parent._modules:
            raise ShippingError(f"two modules at {shorten(path)}")
        parent._modules[name] = module
    for path, key in pairs(parameters):
        parent, name = _place(root, path, flags)
        parameter = tensors.parameter(key)
        if parent._parameters.setdefault(name, parameter) is not parameter:
            raise ShippingError(f"two parameters at {shorten(path)}")
    for path, key, persistent in (listed(item, 3) for item in listed(buffers)):
        parent, name = _place(root, path, flags)
        buffer = tensors(key)
        if isinstance(buffer, nn.Parameter) or parent._buffers.setdefault(name, buffer) is not buffer:
            raise ShippingError(f"two buffers at {shorten(path)}, or one that is a parameter")
        if not flag(persistent):
            parent._non_persistent_buffers_set.add(name)
    return root


def _container(flags: Mapping[str, bool], path: str) -> StageModel:
    made = StageModel()
    made.training = flags.get(path, True)
    return made


def _place(root: nn.Module, path: Any, flags: Mapping[str, bool]) -> tuple[nn.Module, str]:
    """Return the module that is to hold what is called *path*, made where there is none yet, and the last name."""
    *above, name = text(path).split(".")
    if not all((*above, name)) or len(above) > MAX_DEPTH or len(path) > 4096:
        raise ShippingError(f"{shorten(path)} is no path of a module or tensor")
    here = root
    for depth, part in enumerate(above):
        below = here._modules.get(part)
        if below is None:
            if not isinstance(here, StageModel):
                raise ShippingError(f"there is no module at {shorten('.'.join(above[: depth + 1]))}")
            below = here._modules[part] = _container(flags, ".".join(above[: depth + 1]))
        here = below
    return here, name


# ------------------------------------------------------------------------------------------------------------- graphs


class _GraphReader:
    """Makes one graph."""

    def __init__(
        self, source: str, root: nn.Module, made: ModuleReader, tensors: TensorReader, allowed: Allowed
    ) -> None:
        self.source = source
        self.root = root
        self.made = made
        self.tensors = tensors
        self.allowed = allowed
        self.count = 0
        self.value = ValueReader()

    def read(self, data: Any) -> StageGraph:
        fields = dict(zip(_GRAPH_KEYS, record(data, _GRAPH_KEYS, "graph"), strict=True))
        names = [text(name) for name in listed(fields["names"])]
        self.count = len(names)
        if self.count > _MAX_NODES:
            raise ShippingError(f"{self.count} nodes, the limit is {_MAX_NODES}")
        graph = ModelGraph(
            source=self.source,
            model=self.root,
            modules={path: self.made.module(number) for path, number in pairs(fields["modules"])},
            parameters={text(name): self._parameter(name) for name in listed(fields["parameters"])},
            buffers={text(name): self._buffer(name) for name in listed(fields["buffers"])},
            constants={name: self.tensors(key) for name, key in pairs(fields["constants"])},
            nodes=tuple(Node(index, name, "input", name) for index, name in enumerate(names)),
            units=tuple(self._unit(index, unit) for index, unit in enumerate(listed(fields["units"]))),
            inputs=tuple(self._input(item) for item in listed(fields["inputs"])),
            output=self._checked(self.value(fields["output"])),
            mutated=frozenset(self._index(index) for index in listed(fields["mutated"])),
        )
        graph = replace(graph, nodes=self._nodes(graph, names, fields["nodes"]))
        return StageGraph(graph, self._stage_of(graph, fields["stage_of"]), self._routes(fields["routes"]))

    def _index(self, index: Any) -> int:
        return integer(index, 0, self.count - 1)

    def _checked(self, structure: Any) -> Any:
        """Refuse references to nodes that are not there."""
        for ref in iter_refs(structure):
            self._index(ref.index)
        return structure

    def _parameter(self, name: str) -> nn.Parameter:
        owner, attribute = _place(self.root, name, {})
        found = owner._parameters.get(attribute)
        if found is None:
            raise ShippingError(f"the model has no parameter {shorten(name)}")
        return found

    def _buffer(self, name: str) -> Tensor:
        owner, attribute = _place(self.root, name, {})
        found = owner._buffers.get(attribute)
        if found is None:
            raise ShippingError(f"the model has no buffer {shorten(name)}")
        return found

    def _input(self, item: Any) -> GraphInput:
        name, node = listed(item, 2)
        return GraphInput(text(name), self._index(node))

    def _unit(self, index: int, item: Any) -> Unit:
        name, kind, nodes, parameters, buffers = listed(item, 5)
        return Unit(
            index,
            text(name),
            text(kind),
            () if nodes is None else tuple(self._index(node) for node in listed(nodes)),
            tuple(text(parameter) for parameter in listed(parameters)),
            tuple(text(buffer) for buffer in listed(buffers)),
        )

    def _nodes(self, graph: ModelGraph, names: list[str], data: Any) -> tuple[Node, ...]:
        nodes = list(graph.nodes)
        for item in listed(data):
            node = self._node(graph, names, item)
            nodes[node.index] = node
        for unit in graph.units:
            for index in unit.nodes:
                if nodes[index].op == "input":
                    raise ShippingError(f"unit {shorten(unit.name)} holds a node that is not described")
        return tuple(nodes)

    def _node(self, graph: ModelGraph, names: list[str], item: Any) -> Node:
        index, op, target, args, kwargs, scope, ambient = record(item, _NODE_KEYS, "node")
        if text(op) not in _OPS:
            raise ShippingError(f"unknown operation {shorten(op)}")
        arguments, keywords = self._checked(self.value(args)), self._checked(self.value(kwargs))
        if type(arguments) is not tuple or type(keywords) is not dict or not all(type(k) is str for k in keywords):
            raise ShippingError("the arguments of a node are a tuple and a dictionary with strings for keys")
        if op == "function":
            check_call(text(target), arguments, keywords)
        return Node(
            self._index(index),
            names[self._index(index)],
            op,
            self._target(graph, op, target),
            arguments,
            keywords,
            text(scope),
            DEFAULT_AMBIENT if ambient is None else self._ambient(ambient),
        )

    def _target(self, graph: ModelGraph, op: str, target: Any) -> Any:
        if op == "function":
            return self._function(text(target))
        if op == "method":
            return self.allowed.method(target)
        tables: dict[str, Mapping[str, Any]] = {
            "module": graph.modules,
            "parameter": graph.parameters,
            "buffer": graph.buffers,
            "constant": graph.constants,
        }
        if op in tables and text(target) not in tables[op]:
            raise ShippingError(f"there is no {op} {shorten(target)}")
        return text(target)

    def _function(self, name: str) -> Any:
        kind, _, rest = name.rpartition(" ")
        if kind == "apply":
            return self.allowed.autograd_function(rest).apply
        if kind == "make":
            return self.allowed.output_class(rest)
        return self.allowed.function(name)

    def _ambient(self, data: Any) -> Ambient:
        grad_enabled, autocast = listed(self.value(data), 2)
        if autocast is not None:
            if type(autocast) is not tuple or [type(item) for item in autocast] != [str, bool, torch.dtype]:
                raise ShippingError("the autocast of a node is a device type, a truth value and a dtype")
            if autocast[0] not in ("cpu", "cuda"):
                raise ShippingError(f"unknown device type {shorten(autocast[0])}")
        return Ambient(flag(grad_enabled), autocast)

    def _stage_of(self, graph: ModelGraph, data: Any) -> tuple[int, ...]:
        stages = tuple(integer(stage, 0, _MAX_STAGES) for stage in listed(data, len(graph.units)))
        if not stages or list(stages) != sorted(stages):
            raise ShippingError("the stages of the units must be given, in order")
        return stages

    def _routes(self, data: Any) -> tuple[Route, ...]:
        routes = []
        for node, name, producer, consumers in (listed(item, 4) for item in listed(data)):
            users = tuple(integer(stage, 0, _MAX_STAGES) for stage in listed(consumers))
            routes.append(Route(self._index(node), text(name), integer(producer, 0, _MAX_STAGES), users))
        return tuple(routes)
