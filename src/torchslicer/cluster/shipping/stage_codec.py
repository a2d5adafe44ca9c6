"""One stage's part of a cut model as plain data and tensors.

What travels of a graph: the nodes of the stage's units in full, of all others only the names, so that indices, messages
and random numbers are the same everywhere. What travels of the model: the modules and tensors that those nodes use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchslicer.cluster.shipping.allow import Importable
from torchslicer.cluster.shipping.functions import ZEROED_METHODS, check_call
from torchslicer.cluster.shipping.modules import ModuleWriter, located
from torchslicer.cluster.shipping.names import REMEDY, name_of
from torchslicer.cluster.shipping.tensors import TensorWriter
from torchslicer.cluster.shipping.values import ValueWriter
from torchslicer.errors import ShippingError
from torchslicer.graph.fx import tensor_names
from torchslicer.graph.model import DEFAULT_AMBIENT, SOURCES, ModelGraph, Node, iter_refs
from torchslicer.pipeline.stage import Route

FORMAT = 1


@dataclass(frozen=True)
class StageGraph:
    """A graph of one mode and where it is cut: what `torchslicer.pipeline.stage.Stage` takes."""

    graph: ModelGraph
    stage_of: tuple[int, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class ShippedStage:
    """What travels of one stage.

    Attributes:
        description: Plain data, to be written by `values.dump`.
        tensors: Tensors by name, on the caller's memory: send or copy them before they change.
        required: Modules that the worker must trust (`allow.untrusted` compares).
    """

    description: dict[str, Any]
    tensors: dict[str, Tensor]
    required: tuple[str, ...]


def encode_stage(
    graph: ModelGraph,
    stage: int,
    stage_of: Sequence[int],
    routes: Sequence[Route],
    *,
    evaluation: tuple[ModelGraph, Sequence[int], Sequence[Route]] | None = None,
) -> ShippedStage:
    """Write the part of *stage*.

    Args:
        graph: The graph of the model in training mode.
        stage: Number of the stage.
        stage_of: Stage of each unit.
        routes: All values that cross cuts.
        evaluation: The same three of the graph in evaluation mode; None if it is the graph of training.

    Raises:
        ShippingError: A part cannot be carried; the message names it and what to do.

    Example:
        >>> from torchslicer.graph.trace import trace
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> sorted(encode_stage(trace(model), 1, (0, 1), ()).tensors)
        ['1.bias', '1.weight']
    """
    return _StageWriter(stage, StageGraph(graph, tuple(stage_of), tuple(routes)), evaluation).write()


class _StageWriter:
    """Writes one stage: its graphs, then what they use of the model."""

    def __init__(self, stage: int, training: StageGraph, evaluation: Any) -> None:
        self.stage = stage
        self.training = training
        self.evaluation = None if evaluation is None else StageGraph(*evaluation)
        self.model = training.graph.model
        names = {id(tensor): name for name, tensor in _constants(training, self.evaluation)}
        names |= tensor_names(self.model)
        names |= {id(parameter): name for name, parameter in training.graph.parameters.items()}
        self.tensors = TensorWriter(names)
        self.allowed = Importable()
        self.modules = ModuleWriter(self.tensors, self.allowed)
        self.value = ValueWriter(_refuse_argument)

    def write(self) -> ShippedStage:
        graphs = [self._graph(each) for each in (self.training, self.evaluation) if each is not None]
        description = {
            "format": FORMAT,
            "stage": self.stage,
            "source": self.training.graph.source,
            "training": graphs[0],
            "evaluation": graphs[1] if len(graphs) > 1 else None,
            "model": self._model(graphs),
            "modules": self.modules.records,
            "tensors": self.tensors.entries,
        }
        self.tensors.check_memory()
        return ShippedStage(description, self.tensors.tensors, tuple(sorted(self.allowed.required)))

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _graph(self, part: StageGraph) -> dict[str, Any]:
        graph = part.graph
        own = [unit for unit in graph.units if part.stage_of[unit.index] == self.stage]
        used = {index for unit in own for index in unit.nodes}
        if self.stage == part.stage_of[-1]:
            used |= {ref.index for ref in iter_refs(graph.output) if graph.nodes[ref.index].op in SOURCES}
        nodes = [graph.nodes[index] for index in sorted(used)]
        return {
            "stage_of": list(part.stage_of),
            "routes": [[route.node, route.name, route.producer, list(route.consumers)] for route in part.routes],
            "names": [node.name for node in graph.nodes],
            "nodes": [self._node(node) for node in nodes],
            "units": [
                [u.name, u.kind, list(u.nodes) if u in own else None, list(u.parameters), list(u.buffers)]
                for u in graph.units
            ],
            "inputs": [[entry.name, entry.node] for entry in graph.inputs],
            "output": self.value(graph.output),
            "mutated": sorted(graph.mutated),
            "modules": self._modules_of(graph, nodes),
            "parameters": self._names(graph.parameters, own, nodes, "parameter"),
            "buffers": self._names(graph.buffers, own, nodes, "buffer"),
            "constants": [
                [name, self.tensors.key(graph.constants[name])]
                for name in dict.fromkeys(node.target for node in nodes if node.op == "constant")
            ],
        }

    def _modules_of(self, graph: ModelGraph, nodes: Sequence[Node]) -> list[list[Any]]:
        paths = dict.fromkeys(node.target for node in nodes if node.op == "module")
        return [[path, self.modules.number(graph.modules[path], path)] for path in paths]

    def _names(self, table: Mapping[str, Any], units: Iterable[Any], nodes: Sequence[Node], op: Any) -> list[str]:
        """Names of the tensors that the stage holds, in the model's order."""
        held = {name for unit in units for name in (unit.parameters if op == "parameter" else unit.buffers)}
        held |= {node.target for node in nodes if node.op == op}
        return [name for name in table if name in held]

    def _node(self, node: Node) -> dict[str, Any]:
        try:
            ambient = node.ambient
            return {
                "index": node.index,
                "op": node.op,
                "target": self._target(node),
                "args": self.value(node.args),
                "kwargs": self.value(dict(node.kwargs)),
                "scope": node.scope,
                "ambient": None if ambient == DEFAULT_AMBIENT else self.value([ambient.grad_enabled, ambient.autocast]),
            }
        except ShippingError as error:
            place = f"operation '{node.name}'" + (f" of module '{node.scope}'" if node.scope else "")
            raise ShippingError(f"{place}: {error}. {REMEDY}") from error

    def _target(self, node: Node) -> str:
        if node.op == "function":
            return self._function(node)
        if node.op == "method":
            return self.allowed.method(ZEROED_METHODS.get(node.target, node.target))
        return str(node.target)

    def _function(self, node: Node) -> str:
        target = node.target
        owner = getattr(target, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            self.allowed.autograd_function(name := name_of(owner))
            return f"apply {name}"
        if isinstance(target, type):
            return self._class(target)
        name = self.allowed.name_of_function(target)
        check_call(name, node.args, node.kwargs)
        return name

    def _class(self, target: type) -> str:
        builtin = f"builtins.{target.__name__}"
        if target.__module__ == "builtins":
            self.allowed.function(builtin)
            return builtin
        return f"make {self.allowed.name_of_output_class(target)}"

    # -- the model -------------------------------------------------------------------------------------------------

    def _model(self, graphs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Where modules and tensors sit in the model, under its own names."""
        known = self.modules.numbers
        places = [[path, known[id(module)]] for path, module in self.model.named_modules() if id(module) in known]
        tops = _topmost(places)
        parameters: dict[str, str] = {}
        buffers: dict[str, list[Any]] = {}
        for part, data in zip((self.training, self.evaluation), graphs, strict=False):
            for name in data["parameters"]:
                parameters[name] = self._key(name, part.graph.parameters[name])  # type: ignore[union-attr]
            for name in data["buffers"]:
                buffers[name] = self._buffer(name)
        paths = {*(path for path, _ in tops), *parameters, *buffers}
        containers = sorted({ancestor for path in paths for ancestor in _ancestors(path)})
        return {
            "modules": tops,
            "parameters": [[name, key] for name, key in parameters.items()],
            "buffers": [[name, *rest] for name, rest in buffers.items()],
            "containers": [[path, self._flag(path)] for path in containers],
        }

    def _buffer(self, name: str) -> list[Any]:
        """Key of the buffer that is there now (modules may replace theirs), and whether it is in the state."""
        owner, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(owner)
        return [self._key(name, module._buffers[attribute]), attribute not in module._non_persistent_buffers_set]

    def _key(self, name: str, tensor: Any) -> str:
        with located(name.rpartition(".")[0], self.model, name):
            return self.tensors.key(tensor)

    def _flag(self, path: str) -> bool:
        try:
            return self.model.get_submodule(path).training
        except AttributeError:
            return self.model.training


def _constants(*parts: StageGraph | None) -> list[tuple[str, Tensor]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for part in filter(None, parts):
        for name, tensor in part.graph.constants.items():
            found.setdefault(id(tensor), (f"(constant)/{len(found)}/{name}", tensor))
    return list(found.values())


def _topmost(places: list[list[Any]]) -> list[list[Any]]:
    """Leave out modules that come with one above them."""
    kept: list[list[Any]] = []
    paths = {path for path, _ in places}
    for path, number in places:
        if not any(ancestor in paths for ancestor in _ancestors(path)):
            kept.append([path, number])
    return kept


def _ancestors(path: str) -> list[str]:
    """Paths of the modules around *path*, the model (the empty path) first."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))] if path else []


def _refuse_argument(value: Any, _: Callable[[Any], Any]) -> Any:
    raise ShippingError(f"its arguments hold a {type(value).__module__}.{type(value).__qualname__}")
