"""One stage's part of a model that the worker builds itself: the builder's name, where the cuts are, and tensors.

The worker builds, traces and cuts the model by its own code, as the caller did, and compares `digest`s. What it cannot
find out without a batch, the order in which operations that work in place are to be seen, comes as numbers of its own
nodes. Then it takes the tensors of its stage and lets go of all others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.builder import Builder, build_from_reference
from torchslicer.cluster.shipping.digest import first_difference, structure_digests
from torchslicer.cluster.shipping.names import name_of, shorten
from torchslicer.cluster.shipping.stage_codec import ShippedStage, StageGraph
from torchslicer.cluster.shipping.stage_restore import ReceivedStage
from torchslicer.cluster.shipping.tensors import TensorReader, TensorWriter
from torchslicer.cluster.shipping.values import ValueReader, ValueWriter, integer, listed, pairs, record, text
from torchslicer.errors import ShippingError, TorchSlicerError
from torchslicer.graph.fx import tensor_names
from torchslicer.graph.model import SOURCES, ModelGraph, Node, Ref, iter_refs, map_refs
from torchslicer.graph.modes import trace_modes
from torchslicer.graph.trace import trace
from torchslicer.pipeline.stage import find_routes

logger = logging.getLogger("torchslicer.shipping")

_KEYS = (
    "builder", "arguments", "pack", "given", "stage", "stages_of", "evaluating", "frozen", "wiring", "digests",
    "names", "constants", "tensors",
)  # fmt: skip
_MAX_STAGES = 100_000

Modes = tuple[StageGraph, StageGraph]
"""Training and evaluation."""


class BuiltStages:
    """Writes the stages of a model that workers build themselves.

    Args:
        builder: What makes the model, there as here.
        modes: The cut graphs of training and of evaluation.

    Raises:
        ShippingError: Workers could not find the pack function; the message says why.
    """

    def __init__(self, builder: Builder, modes: Modes) -> None:
        graph = modes[0].graph
        self.modes = modes
        self.allowed = tuple(filter(None, (builder.reference, _pack_name(builder) if graph.source == "pack" else "")))
        """What a worker must allow: the builder, and the pack function if there is one."""
        self._common = {
            "builder": builder.reference,
            "arguments": ValueWriter()(dict(builder.arguments)),
            "pack": self.allowed[1] if len(self.allowed) > 1 else None,
            "given": [entry.name for entry in graph.inputs],
            "stages_of": [list(part.stage_of) for part in modes],
            "evaluating": [path for path, module in graph.model.named_modules() if not module.training],
            "frozen": [name for name, p in graph.parameters.items() if not p.requires_grad],
            "wiring": [_wiring(part.graph) for part in modes],
            "digests": [structure_digests(part.graph) for part in modes],
        }

    def encode(self, stage: int) -> ShippedStage:
        """Write the part of *stage*.

        Raises:
            ShippingError: A tensor of it cannot be carried; the message says what to do.
        """
        names = _held(self.modes, stage)
        constants = [_constants(part, stage) for part in self.modes]
        known = {
            id(t): f"(constant)/{mode}/{name}" for mode, table in enumerate(constants) for name, t in table.items()
        }
        named = {**known, **{id(tensor): name for name, tensor in names.items()}}
        writer = TensorWriter(named, has_hooks_there=True)
        description = {
            **self._common,
            "stage": stage,
            "names": [[name, writer.key(tensor)] for name, tensor in names.items()],
            "constants": [[[name, writer.key(t)] for name, t in table.items()] for table in constants],
            "tensors": writer.entries,
        }
        writer.check_memory()
        return ShippedStage(description, writer.tensors, ())


def is_built_stage(description: Any) -> bool:
    """Whether a description was written by `BuiltStages`."""
    return type(description) is dict and "builder" in description


def _pack_name(builder: Builder) -> str:
    try:
        name = name_of(builder.pack)
        Allowed(allow_builders=[name]).builder(name)
    except ShippingError as error:
        raise ShippingError(
            f"pack: {error}; workers that build the model call it, too, so define it in a module beside the builder "
            f"'{builder.reference}'"
        ) from error
    return name


def _own_nodes(part: StageGraph, stage: int) -> list[Node]:
    graph = part.graph
    own = {index for unit in graph.units if part.stage_of[unit.index] == stage for index in unit.nodes}
    if stage == part.stage_of[-1]:
        own |= {ref.index for ref in iter_refs(graph.output) if graph.nodes[ref.index].op in SOURCES}
    return [graph.nodes[index] for index in sorted(own)]


def _held(modes: Modes, stage: int) -> dict[str, Tensor]:
    """Return the parameters and buffers that the stage needs in any mode: those of its units, nodes and modules."""
    model = modes[0].graph.model
    names, wanted = tensor_names(model), set[str]()
    for part in modes:
        graph, nodes = part.graph, _own_nodes(part, stage)
        for unit in graph.units:
            if part.stage_of[unit.index] == stage:
                wanted.update((*unit.parameters, *unit.buffers))
        wanted |= {node.target for node in nodes if node.op in ("parameter", "buffer")}
        modules = [graph.modules[node.target] for node in nodes if node.op == "module"]
        inside = (t for module in modules for t in itertools.chain(module.parameters(), module.buffers()))
        wanted |= {names[id(tensor)] for tensor in inside if id(tensor) in names}
    current = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in current if name in wanted}


def _constants(part: StageGraph, stage: int) -> dict[str, Tensor]:
    used = dict.fromkeys(node.target for node in _own_nodes(part, stage) if node.op == "constant")
    return {name: part.graph.constants[name] for name in used}


def _wiring(graph: ModelGraph) -> dict[str, Any]:
    """Return which nodes each node and the output use, in the order in which their arguments name them."""
    return {
        "nodes": [_refs((node.args, dict(node.kwargs))) for node in graph.nodes],
        "output": _refs(graph.output),
        "mutated": sorted(graph.mutated),
    }


def _refs(structure: Any) -> list[int]:
    return [ref.index for ref in iter_refs(structure)]


# --------------------------------------------------------------------------------------------------------- the worker


def decode_built_stage(description: Any, tensors: Mapping[str, Tensor], allowed: Allowed) -> ReceivedStage:
    """Build the model by this machine's own code, cut it, and keep one stage of it.

    Args:
        description: What `BuiltStages` wrote.
        tensors: What arrived.
        allowed: What this worker accepts.

    Raises:
        ShippingError: The builder is not allowed, is not here, or makes another model than on the caller's side.
    """
    found = dict(zip(_KEYS, record(description, _KEYS, "stage"), strict=True))
    stage = integer(found["stage"], 0, _MAX_STAGES)
    reader = TensorReader(found["tensors"], tensors)
    modes = _Rebuilding(found, allowed).modes()
    kept = {name: reader(key) for name, key in pairs(found["names"])}
    constants = [{name: reader(key) for name, key in pairs(table)} for table in listed(found["constants"], 2)]
    training, evaluation = keep_stage(modes, stage, kept)
    training = _with_constants(training, constants[0])
    evaluation = _with_constants(evaluation, constants[1])
    return ReceivedStage(stage, training, evaluation)


class _Rebuilding:
    """Builds and cuts the model as it was on the caller's side."""

    def __init__(self, found: Mapping[str, Any], allowed: Allowed) -> None:
        self.reference = found["builder"]
        self.arguments = ValueReader()(found["arguments"])
        self.given = [text(name) for name in listed(found["given"])]
        self.evaluating = {text(path) for path in listed(found["evaluating"])}
        self.frozen = {text(name) for name in listed(found["frozen"])}
        self.stages_of = listed(found["stages_of"], 2)
        self.wiring = listed(found["wiring"], 2)
        self.digests = listed(found["digests"], 2)
        self.allowed = allowed
        self.pack = None if found["pack"] is None else allowed.builder(found["pack"])

    def modes(self) -> Modes:
        """Return the cut graphs.

        Raises:
            ShippingError: They differ from those of the caller.
        """
        for with_values in (False, True):
            model = build_from_reference(self.reference, self.arguments, self.allowed, with_values=with_values)
            light = any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))
            try:
                return self._cut(model)
            except Exception as error:
                if not light:
                    raise
                logger.info("builder '%s': without memory: %s; building on the CPU", self.reference, error)
        raise AssertionError("unreachable: the second model has values")

    def _cut(self, model: nn.Module) -> Modes:
        for path, module in model.named_modules():
            module.training = path not in self.evaluating
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        try:
            graphs = trace_modes(model, lambda: trace(model, pack=self.pack, given=self.given))
        except TorchSlicerError as error:
            raise ShippingError(f"builder '{self.reference}': its model cannot be cut here: {error}") from error
        made = [self._mode(graph, mode) for mode, graph in enumerate((graphs.training, graphs.evaluation))]
        return made[0], made[1]

    def _mode(self, graph: ModelGraph, mode: int) -> StageGraph:
        graph = _wired(graph, self.wiring[mode])
        digests = self.digests[mode]
        if type(digests) is not dict:
            raise ShippingError(f"the digests of a model are a dictionary, got {shorten(digests)}")
        different = first_difference(structure_digests(graph), digests)
        if different is not None:
            raise ShippingError(
                f"builder '{self.reference}' makes another model here than on the caller's side: {shorten(different)} "
                "differs. Install the same versions of its packages on both sides; what is changed in a model after it "
                "was built, or is random in it beside parameters and buffers, must be moved into the builder"
            )
        stages = tuple(integer(s, 0, _MAX_STAGES) for s in listed(self.stages_of[mode], len(graph.units)))
        return StageGraph(graph, stages, find_routes(graph, stages))


def _wired(graph: ModelGraph, wiring: Any) -> ModelGraph:
    """Let the nodes use what the caller's analysis found that they use."""
    nodes, output, mutated = record(wiring, ("nodes", "output", "mutated"), "wiring")
    if len(listed(nodes)) != len(graph.nodes):
        return graph  # the digests differ, and say where
    last = len(graph.nodes) - 1
    wired = tuple(_node_wired(node, refs, last) for node, refs in zip(graph.nodes, nodes, strict=True))
    return replace(
        graph,
        nodes=wired,
        output=_using(graph.output, output, last),
        mutated=frozenset(integer(index, 0, last) for index in listed(mutated)),
    )


def _node_wired(node: Node, refs: Any, last: int) -> Node:
    args, kwargs = _using((node.args, dict(node.kwargs)), refs, last)
    return replace(node, args=args, kwargs=kwargs)


def _using(structure: Any, refs: Any, last: int) -> Any:
    numbers = [integer(index, 0, last) for index in listed(refs)]
    if len(numbers) != len(_refs(structure)):
        return structure  # as above
    following: Iterator[int] = iter(numbers)
    return map_refs(structure, lambda _: Ref(next(following)))


# ----------------------------------------------------------------------------------------------------- only one stage


def keep_stage(modes: Modes, stage: int, kept: Mapping[str, Tensor]) -> Modes:
    """Put the tensors that arrived into the model that was built here, and let go of everything else in it.

    Args:
        modes: The cut graphs of the whole model.
        stage: The stage to keep.
        kept: Its parameters and buffers by name.

    Raises:
        ShippingError: A tensor is unknown, missing, or of another shape or dtype.
    """
    _check_names(modes, stage, kept)
    graph = modes[0].graph
    old: dict[str, Tensor] = {**graph.buffers, **graph.parameters}
    new = {id(old[name]): _filled(name, old[name], tensor) for name, tensor in kept.items()}
    whole = {id(tensor) for tensor in old.values()}
    for module in _modules(modes):
        for table in (module._parameters, module._buffers):
            for attribute, tensor in table.items():
                if tensor is not None and id(tensor) in new:
                    table[attribute] = new[id(tensor)]  # type: ignore[assignment]
                elif tensor is not None and id(tensor) in whole:
                    table[attribute] = None
    for name, tensor in old.items():
        if name not in kept and not tensor.is_meta:
            tensor.data = torch.empty(0, dtype=tensor.dtype)  # also for whoever else holds it
    current = {name: new[id(old[name])] for name in kept}
    training, evaluation = (_only(part, stage, current) for part in modes)
    return training, evaluation


def _check_names(modes: Modes, stage: int, kept: Mapping[str, Tensor]) -> None:
    needed = _held(modes, stage)
    for name in needed:
        if name not in kept:
            raise ShippingError(f"the stage needs the tensor {shorten(name)}, which did not arrive")
    for name in kept:
        if name not in needed:
            raise ShippingError(f"a tensor called {shorten(name)} arrived, which the stage does not need")


def _filled(name: str, old: Tensor, new: Tensor) -> Tensor:
    """Return the tensor of the model with the values of *new*; without memory of its own, *new* takes its place."""
    same_kind = isinstance(old, nn.Parameter) == isinstance(new, nn.Parameter)
    if old.shape != new.shape or old.dtype != new.dtype or not same_kind:
        raise ShippingError(
            f"tensor '{name}': expected {old.dtype} {tuple(old.shape)}, got {new.dtype} {tuple(new.shape)}"
        )
    if old.is_meta:
        return new
    old.data = new.data
    return old


def _modules(modes: Modes) -> Iterable[nn.Module]:
    """The modules of the model, and those that a pack function made around them."""
    roots: Sequence[nn.Module] = [root for part in modes for root in (part.graph.model, *part.graph.modules.values())]
    return {id(module): module for root in roots for module in root.modules()}.values()


def _only(part: StageGraph, stage: int, current: Mapping[str, Any]) -> StageGraph:
    graph = part.graph
    paths = {node.target for node in _own_nodes(part, stage) if node.op == "module"}
    graph = replace(
        graph,
        modules={path: module for path, module in graph.modules.items() if path in paths},
        parameters={name: current[name] for name in graph.parameters if name in current},
        buffers={name: current[name] for name in graph.buffers if name in current},
    )
    return replace(part, graph=graph)


def _with_constants(part: StageGraph, arrived: Mapping[str, Tensor]) -> StageGraph:
    """Use the caller's values of tensors that the trace met; those of other stages go."""
    for name, tensor in arrived.items():
        known = part.graph.constants.get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            raise ShippingError(f"the constant {shorten(name)} that arrived is not that of the model here")
    return replace(part, graph=replace(part.graph, constants=dict(arrived)))
