"""Measure what each unit costs: time of forward and backward, bytes kept for the backward pass, bytes it hands on.

Every unit becomes a stage of its own, and one batch goes through; the model, its gradients, its buffers and the
caller's random state are as before afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.parameters import ParameterTable
from torchslicer.pipeline.runtime import Runtime
from torchslicer.pipeline.stage import Loss, Result, Stage, StageOptions, Work, find_routes
from torchslicer.pipeline.untouched import own_inputs, untouched
from torchslicer.schedule import Action, ActionKind

_CPU = torch.device("cpu")
_FEWEST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S = 3, 20, 0.5


@dataclass(frozen=True)
class Measured:
    """Costs by unit, and the size of every value that units hand on."""

    time_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    value_bytes: dict[str, int]


class _SumOfOutputs:
    """Stands in for a loss: every output takes a gradient."""

    def weighted_loss(self, output: Any, target: Any, share: float) -> torch.Tensor:  # noqa: ARG002
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return sum((leaf.float().mean() for leaf in leaves), torch.zeros(()))


def measure(graph: ModelGraph, inputs: Mapping[str, Any], *, loss: Loss | None = None, target: Any = None) -> Measured:
    """Run a batch through *graph*, unit by unit, and take the quickest of some repetitions (after one to warm up).

    Whatever else the machine does only ever makes a repetition longer: small models, where it matters most, get more.

    Args:
        graph: The graph in training mode.
        inputs: One batch, by input name.
        loss: What turns the output and *target* into a loss; its time is counted with the last unit.
        target: The batch's target.
    """
    count = len(graph.units)
    with untouched(graph.model), _preserved_gradients(graph):
        table = ParameterTable(graph, range(count), [_CPU] * count)
        routes = find_routes(graph, range(count))
        options = StageOptions(loss=loss or _SumOfOutputs())
        stages = {i: Stage(i, graph, range(count), routes, bind=table.bind, options=options) for i in range(count)}
        runtime = Runtime(stages)
        work = [Work(0, own_inputs(inputs), target)]
        values: dict[str, int] = {}
        activations = tuple(_forward_with_bytes(graph, runtime, work, values))
        _timed_backward(runtime, work)
        rounds = list(_rounds(runtime, work))
    return Measured(tuple(min(times) for times in zip(*rounds, strict=True)), activations, values)


@contextlib.contextmanager
def _preserved_gradients(graph: ModelGraph) -> Iterator[None]:
    gradients = {name: parameter.grad for name, parameter in graph.parameters.items()}
    for parameter in graph.parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for name, parameter in graph.parameters.items():
            parameter.grad = gradients[name]


def _rounds(runtime: Runtime, work: list[Work]) -> Iterator[list[float]]:
    started = time.perf_counter()
    for count in range(_MOST_ROUNDS):
        if count >= _FEWEST_ROUNDS and time.perf_counter() - started > _ENOUGH_S:
            return
        yield _one_round(runtime, work)


def _one_round(runtime: Runtime, work: list[Work]) -> list[float]:
    forward = [_timed(runtime, ActionKind.F, stage, work) for stage in runtime.stages]
    backward = _timed_backward(runtime, work)
    return [a + b for a, b in zip(forward, backward, strict=True)]


def _timed_backward(runtime: Runtime, work: list[Work]) -> list[float]:
    return [_timed(runtime, ActionKind.B, stage, work) for stage in sorted(runtime.stages, reverse=True)][::-1]


def _timed(runtime: Runtime, kind: ActionKind, stage: int, work: list[Work]) -> float:
    started = time.perf_counter()
    runtime.run((Action(kind, stage, 0),), work, _ignore)
    return time.perf_counter() - started


def _ignore(_: int, __: Result) -> None:
    """Take no note of a result."""


def _forward_with_bytes(graph: ModelGraph, runtime: Runtime, work: list[Work], values: dict[str, int]) -> Iterator[int]:
    """Warm up, and count the storages that autograd saves in each unit, each once and parameters not at all."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in graph.parameters.values()}
    for stage in runtime.stages:
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        def note(_: int, result: Result) -> None:
            values.update({graph.nodes[node].name: packet.size_bytes for node, packet in result.packets.items()})

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            runtime.run((Action(ActionKind.F, stage, 0),), work, note)
        seen.update(saved)
        yield sum(saved.values())
