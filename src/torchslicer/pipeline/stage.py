"""A stage: consecutive units of a model that compute forward and backward on one device.

It knows no peers, no sockets and no schedule. Values come in and go out as packets, gradients as tuples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from torchslicer.errors import StageError, UserError
from torchslicer.graph.auxloss import collect_aux_losses
from torchslicer.graph.model import SOURCES, ModelGraph, iter_refs, map_refs
from torchslicer.pipeline.boundary import Export, Gradients, Import, Packet, Root, run_backward
from torchslicer.pipeline.buffers import BufferSnapshot
from torchslicer.pipeline.interpreter import Environment, Program, buffer_owner, default_call
from torchslicer.pipeline.rng import seed_unit

CPU = torch.device("cpu")


class Loss(Protocol):
    """What the last stage calls to turn its output into a loss."""

    def weighted_loss(self, output: Any, target: Any, share: float) -> torch.Tensor:
        """Return the loss of a micro-batch times its share, a scalar."""


@dataclass(frozen=True)
class Route:
    """A value that crosses cuts: made in stage ``producer``, used in the later stages ``consumers``."""

    node: int
    name: str
    producer: int
    consumers: tuple[int, ...]

    def previous(self, stage: int) -> int:
        """The stage that *stage* sends this value's gradient to: the consumer before it, or the producer."""
        position = self.consumers.index(stage)
        return self.consumers[position - 1] if position else self.producer

    def next(self, stage: int) -> int | None:
        """The stage that *stage* receives this value's gradient from: the consumer after it; None for the last."""
        later = [consumer for consumer in self.consumers if consumer > stage]
        return later[0] if later else None


def find_routes(graph: ModelGraph, stage_of: Sequence[int]) -> tuple[Route, ...]:
    """Return every value of *graph* that crosses a cut. The model's output is used in the last stage."""
    last = stage_of[-1]
    users: dict[int, set[int]] = {ref.index: {last} for ref in iter_refs(graph.output)}
    for unit in graph.units:
        for index in unit.nodes:
            for ref in graph.nodes[index].refs:
                users.setdefault(ref, set()).add(stage_of[unit.index])
    routes = []
    for node, stages in sorted(users.items()):
        if node in graph.unit_of:
            producer = stage_of[graph.unit_of[node]]
            consumers = tuple(sorted(stages - {producer}))
            if consumers:
                routes.append(Route(node, graph.nodes[node].name, producer, consumers))
    return tuple(routes)


def inputs_of_stage(graph: ModelGraph, stage_of: Sequence[int], stage: int) -> tuple[str, ...]:
    """Return the names of the model's inputs that *stage* uses; what the model returns is used in the last stage."""
    used = {
        ref
        for unit in graph.units
        if stage_of[unit.index] == stage
        for node in unit.nodes
        for ref in graph.nodes[node].refs
    }
    if stage == stage_of[-1]:
        used |= {ref.index for ref in iter_refs(graph.output)}
    return tuple(entry.name for entry in graph.inputs if entry.node in used)


@dataclass(frozen=True)
class Work:
    """One micro-batch of one step, as far as a stage needs to know it.

    Attributes:
        microbatch: Its number within the step.
        inputs: Inputs of the model by name.
        target: What the criterion compares the output with.
        share: Weight of its loss in the loss of the step.
        aux_share: Weight of its auxiliary losses (its share of the samples).
        key: Key of its random numbers.
        position: What messages add to its number: of how many, with how many samples.
    """

    microbatch: int
    inputs: Mapping[str, Any]
    target: Any = None
    share: float = 1.0
    aux_share: float = 1.0
    key: int = 0
    position: str = ""

    def __str__(self) -> str:
        return f"micro-batch {self.microbatch}{self.position}"


@dataclass
class _Live:
    """What a stage keeps of a micro-batch between forward and backward."""

    imports: dict[int, Import] = field(default_factory=dict)
    exports: dict[int, Export] = field(default_factory=dict)
    roots: list[Root] = field(default_factory=list)
    again: tuple[Work, dict[int, Packet], BufferSnapshot] | None = None


@dataclass
class Result:
    """What the forward pass of a stage gives: packets for later stages and, from the last stage, output and loss."""

    packets: dict[int, Packet]
    output: Any = None
    loss: torch.Tensor | None = None
    aux_losses: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class StageOptions:
    """How a stage computes: ``autocast`` is None or the lower precision; ``loss`` is only set while training."""

    device: torch.device = CPU
    autocast: torch.dtype | None = None
    loss: Loss | None = None


class Stage:
    """See the module's docstring.

    Args:
        index: Number of the stage.
        graph: The graph of the mode that the stage runs in (training or evaluation).
        stage_of: Stage of each unit of *graph*.
        routes: All values that cross cuts (`find_routes`).
        bind: What to call for a node (`ParameterTable.bind`), or None for the graph's own modules.
        options: Device, precision, loss.
    """

    def __init__(
        self,
        index: int,
        graph: ModelGraph,
        stage_of: Sequence[int],
        routes: Sequence[Route],
        *,
        bind: Any = None,
        options: StageOptions | None = None,
    ) -> None:
        self.index = index
        self.graph = graph
        self.options = options or StageOptions()
        self.is_last = index == stage_of[-1]
        self.imports = tuple(route for route in routes if index in route.consumers)
        self.exports = tuple(route for route in routes if route.producer == index)
        self._awaited = frozenset(route.node for route in self.imports if route.next(index) is not None)
        self.units = tuple(unit for unit, stage in enumerate(stage_of) if stage == index)
        self._outputs = tuple(dict.fromkeys(ref.index for ref in iter_refs(graph.output))) if self.is_last else ()
        keep = {route.node for route in self.exports} | set(self._outputs)
        self.program = Program(graph, self.units, keep=keep, bind=bind)
        names = inputs_of_stage(graph, stage_of, index)
        self._inputs = tuple((entry.node, entry.name) for entry in graph.inputs if entry.name in names)
        self._live: dict[int, _Live] = {}
        self.peak_in_flight = 0
        self.during_recomputation: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs of the model that this stage needs."""
        return tuple(name for _, name in self._inputs)

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, work: Work, packets: Mapping[int, Packet], *, recompute: bool = False) -> Result:
        """Run the units on one micro-batch and keep what the backward pass needs.

        Raises:
            StageError: A unit raised; the message names stage, unit and micro-batch.
        """
        if recompute:
            again = (work, dict(packets), BufferSnapshot.take(self._modules()))
            _, result = self._compute(*self._protected(work, packets))
            live = _Live(again=again)
        else:
            live, result = self._compute(work, packets)
        self._live[work.microbatch] = live
        self.peak_in_flight = max(self.peak_in_flight, len(self._live))
        return result

    def _protected(self, work: Work, packets: Mapping[int, Packet]) -> tuple[Work, dict[int, Packet]]:
        """Copy what the stage changes in place, so that it is still there for the recomputation."""
        mutated = self.graph.mutated
        changed = {name for node, name in self._inputs if node in mutated}
        inputs = {name: _copy(value) if name in changed else value for name, value in work.inputs.items()}
        kept = {node: packet.copy() if node in mutated else packet for node, packet in packets.items()}
        return replace(work, inputs=inputs) if changed else work, kept

    def evaluate(self, work: Work, packets: Mapping[int, Packet]) -> Result:
        """Run the units on one micro-batch without keeping anything."""
        with torch.no_grad():
            return self._compute(work, packets, training=False)[1]

    def _compute(self, work: Work, packets: Mapping[int, Packet], *, training: bool = True) -> tuple[_Live, Result]:
        device, awaited = self.options.device, self._awaited
        live = _Live({node: Import(packet, device, awaits=node in awaited) for node, packet in packets.items()})
        with _Named(self.index, "forward", work), collect_aux_losses() as collected:
            environment = self._environment(work, live)
            with self._autocast():
                self.program.run(environment, seed_unit=functools.partial(seed_unit, work.key, device=device))
            live.exports = {route.node: Export(environment[route.node]) for route in self.exports}
            result = Result({node: export.take() for node, export in live.exports.items()})
            if self.is_last:
                self._conclude(work, environment, live, result, training=training)
            self._add_aux_losses(collected, work, live, result)
        return live, result

    def _environment(self, work: Work, live: _Live) -> Environment:
        environment: Environment = {node: entry.value for node, entry in live.imports.items()}
        for entry in live.imports.values():
            entry.forget_value()
        for node, name in self._inputs:
            environment[node] = move(work.inputs[name], self.options.device)
        return environment

    def _conclude(self, work: Work, environment: Environment, live: _Live, result: Result, *, training: bool) -> None:
        """Form the model's output and, while training, its loss."""
        for index in self._outputs:
            if self.graph.nodes[index].op in SOURCES:
                environment[index] = default_call(self.graph, self.graph.nodes[index])()
        output = map_refs(self.graph.output, lambda ref: environment[ref.index])
        if self.options.loss is None:
            result.output = output
            return
        loss = self.options.loss.weighted_loss(output, move(work.target, self.options.device), work.share)
        result.loss = loss.detach()
        if not training:
            return
        if not loss.requires_grad:
            raise StageError(
                "the loss depends on no parameter that requires a gradient, so nothing would be trained: is the output "
                "detached, or train() called under torch.no_grad()?"
            )
        live.roots.append((get_gradient_edge(loss), torch.ones_like(loss)))

    def _add_aux_losses(
        self, collected: Sequence[tuple[torch.Tensor, float]], work: Work, live: _Live, result: Result
    ) -> None:
        for loss, weight in collected:
            if loss.requires_grad:
                live.roots.append((get_gradient_edge(loss), loss.new_tensor(weight * work.aux_share)))
            result.aux_losses.append(loss.detach().float() * (weight * work.aux_share))

    # -- backward --------------------------------------------------------------------------------------------

    def backward(self, microbatch: int, received: Mapping[int, Gradients]) -> dict[int, Gradients]:
        """Run the backward pass of one micro-batch.

        Args:
            microbatch: Its number.
            received: By value: what the first consumer sent (for exports) or the next one (for imports).

        Returns:
            By imported value: the gradient to send to the stage before (`Route.previous`).
        """
        live = self._live.pop(microbatch)
        if live.again is not None:
            live = self._recompute(*live.again)
        roots: list[Root] = list(live.roots)
        for node, gradients in received.items():
            side: Export | Import = live.exports[node] if node in live.exports else live.imports[node]
            roots.extend(side.roots(_move_gradients(gradients, self.options.device)))
        if roots:
            with _Named(self.index, "backward", f"micro-batch {microbatch}"):
                run_backward(roots)
        return {node: entry.gradients() for node, entry in live.imports.items()}

    def _recompute(self, work: Work, packets: dict[int, Packet], snapshot: BufferSnapshot) -> _Live:
        """Repeat the forward pass with the same random numbers and on copies of the buffers as they were."""
        with snapshot.in_place(), self.during_recomputation():
            return self._compute(work, packets)[0]

    def forget(self) -> None:
        """Drop whatever is in flight (after a failure)."""
        self._live.clear()

    # -- helpers ---------------------------------------------------------------------------------------------

    def _modules(self) -> list[nn.Module]:
        """Modules whose buffers a forward pass may change."""
        found: dict[int, nn.Module] = {}
        for instruction in self.program.instructions:
            node = instruction.node
            if node.op in ("module", "buffer"):
                module = (
                    self.graph.modules[node.target] if node.op == "module" else buffer_owner(self.graph, node.target)
                )
                found[id(module)] = module
        return list(found.values())

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.options.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.options.device.type, dtype=self.options.autocast)


class _Named:
    """Names the stage and what it does in what is raised inside.

    A class, and the text made only when needed: a generator would take four times as long in every action.
    """

    __slots__ = ("doing", "of", "stage")

    def __init__(self, stage: int, doing: str, of: object) -> None:
        self.stage, self.doing, self.of = stage, doing, of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            text = str(error) if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
            cause = error.__cause__ if isinstance(error, StageError) else error
            raise StageError(f"stage {self.stage}, {self.doing} of {self.of}: {text}") from cause


def _copy(structure: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, structure)


def move(structure: Any, device: torch.device) -> Any:
    """Move the tensors of nested containers; the very same object where nothing is to move."""
    if isinstance(structure, torch.Tensor):
        return structure if structure.device == device else structure.to(device)
    if isinstance(structure, tuple) and not hasattr(structure, "_fields"):
        return tuple(move(item, device) for item in structure)
    if isinstance(structure, list):
        return [move(item, device) for item in structure]
    if isinstance(structure, dict):
        return {key: move(item, device) for key, item in structure.items()}
    return structure


def _move_gradients(gradients: Gradients, device: torch.device) -> Gradients:
    return tuple(None if gradient is None else gradient.to(device) for gradient in gradients)
