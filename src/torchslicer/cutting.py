"""From a model and what the user asked for to a verified cut.

A cut is made when `slice` is called, from the model alone or with example inputs. The first batch of a run is looked
at before anything is trained: if it brings other inputs than the cut was made for, or the model has changed,
the cut is made again; then graph and model are compared on it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchslicer.cluster.shipping.builder import Builder
from torchslicer.errors import ConfigError, SliceError, TraceError, VerificationError
from torchslicer.executors.base import Cut
from torchslicer.graph.fx import input_names, required_inputs
from torchslicer.graph.model import ModelGraph
from torchslicer.graph.modes import ModeGraphs, evaluation_mode, stages_of_evaluation, trace_modes
from torchslicer.graph.pack import Pack, packed_inputs
from torchslicer.graph.trace import trace
from torchslicer.partition import Plan, UnitCosts, build_plan, cuts_from_names, resolve_strategy, static_costs
from torchslicer.pipeline.batch import Batch, BatchReader
from torchslicer.pipeline.criterion import Criterion
from torchslicer.pipeline.effects import analyse
from torchslicer.pipeline.measure import Measured, measure
from torchslicer.pipeline.microbatch import split_batch
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.stage import move
from torchslicer.pipeline.verify import verify

logger = logging.getLogger("torchslicer.cutting")

SAMPLES_TO_VERIFY = 4
"""At least that many samples of the first batch are compared (all, if it has fewer)."""
_NEEDS_MEASUREMENT = ("time", "memory")


@dataclass(frozen=True)
class CutRequest:
    """How the user wants the model cut (see `torchslicer.slice`)."""

    strategy: Any = "uniform"
    num_stages: int | None = None
    cuts: tuple[str, ...] | None = None
    pack: Pack | None = None
    devices: tuple[str, ...] = ()
    verify: bool = True
    builder: Builder | None = None
    criterion: Criterion | None = None


def built(model: Any, arguments: Mapping[str, Any] | None, pack: Pack | None) -> tuple[nn.Module, Builder | None]:
    """Return the model, and what makes it if it is given by name.

    Raises:
        ConfigError: It is neither a name nor a model.
        ShippingError: The name leads nowhere, or no worker could call it.
    """
    if not isinstance(arguments, Mapping | None):
        raise ConfigError(f"slice: builder_args: expected a dictionary of keyword arguments, got {arguments!r:.80}")
    if isinstance(model, str):
        builder = Builder(model, dict(arguments or {}), pack)
        return builder.build(), builder
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"slice: expected a torch.nn.Module, or the name of a function that makes one, got {type(model).__name__}"
        )
    if arguments is not None:
        raise ConfigError('slice: builder_args are for a model given by name: slice("my_package.models:make", ...)')
    return model, None


class Cutter:
    """Holds the current cut of a model and renews it when a batch asks for that."""

    def __init__(self, model: nn.Module, request: CutRequest, example: Any = None) -> None:
        _check_ready(model)
        self.model = unwrapped(model)
        self.request = request
        self.strategy, self.strategy_name = resolve_strategy(request.strategy)
        self.given: tuple[str, ...] | None = None
        self.checked = False
        self.measured: Measured | None = None
        self._target: Any = None
        inputs = self._example_inputs(example)
        if inputs is not None:
            self.given = tuple(inputs)
        self._make(inputs)

    def _example_inputs(self, example: Any) -> dict[str, Any] | None:
        reader = self.reader(None)
        if example is None:
            if self.request.criterion is not None:
                raise ConfigError("slice: criterion lets the loss be measured; that needs example=(inputs, target)")
            return None
        batch = reader.read_inputs(example) if self.request.criterion is None else reader.read(example)
        self._target = batch.target
        return on_device_of(self.model, batch.inputs)

    @property
    def graphs(self) -> ModeGraphs:
        """The graphs of both modes."""
        return self.cut.graphs

    def reader(self, target_key: str | None) -> BatchReader:
        """Return a reader for batches of this model."""
        if self.request.pack is None:
            return BatchReader(input_names(self.model), required_inputs(self.model), target_key=target_key)
        names = packed_inputs(list(self.request.pack(self.model)), None)
        return _PackedReader(self.model, names, target_key)

    def look_at(self, inputs: Mapping[str, Any]) -> None:
        """Make sure, on the inputs of a first batch, that the cut fits them and computes what the model computes.

        Raises:
            SliceError: It does not.
        """
        if set(inputs) != {entry.name for entry in self.graphs.training.inputs}:
            logger.info("cutting again for the inputs %s", list(inputs))
            self.given, self.checked = tuple(inputs), False
            self._make(inputs)
        elif not self.graphs.is_current():
            logger.info("cutting again, since modules, training flags or other attributes have changed")
            self._make(inputs)
        elif not self.checked:
            self._check(inputs)

    def renew(self) -> None:
        """Make the cut again if the model has changed since, other than in its training flags."""
        if not self.graphs.is_current(with_flags=False):
            logger.info("cutting again, since the model has changed")
            self.checked = False
            self._make(None)

    def _check(self, inputs: Mapping[str, Any]) -> None:
        try:
            graphs = self._checked_graphs(self.graphs, inputs)
        except VerificationError as error:
            logger.info("cutting again, since the graph differs from the model: %s", error)
            self._make(inputs)
        else:
            self._set(graphs, self._kept_starts(graphs.training, inputs))

    def _kept_starts(self, graph: ModelGraph, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the cuts as they are, or new ones if the batch has shown that one of them cannot be."""
        starts = self.plan.unit_starts[1:]
        reasons = [graph.forbidden[unit] for unit in starts if unit in graph.forbidden]
        if not reasons:
            return starts
        logger.info("cutting elsewhere: %s", reasons[0])
        return self._starts(graph, inputs)

    def _make(self, inputs: Mapping[str, Any] | None) -> None:
        graphs = trace_modes(self.model, lambda: self._trace(inputs))
        if inputs is not None:
            try:
                graphs = self._checked_graphs(graphs, inputs)
            except VerificationError as error:
                graphs = self._second_choice(graphs, inputs, error)
        self._set(graphs, self._starts(graphs.training, inputs))

    def _trace(self, inputs: Mapping[str, Any] | None, skip_fx: str = "") -> ModelGraph:
        return trace(self.model, pack=self.request.pack, example=inputs, given=self.given, skip_fx=skip_fx)

    def _second_choice(self, graphs: ModeGraphs, inputs: Mapping[str, Any], error: VerificationError) -> ModeGraphs:
        """Try the ways in that come after the one whose graph differs from the model."""
        if graphs.training.source not in ("fx", "sequential"):
            raise error
        others = trace_modes(self.model, lambda: self._trace(inputs, skip_fx=str(error)))
        if others.training.source == "whole":
            raise error
        return self._checked_graphs(others, inputs)

    def _checked_graphs(self, graphs: ModeGraphs, inputs: Mapping[str, Any]) -> ModeGraphs:
        """Verify both graphs and take account of what they change in place."""
        comparable = self.request.verify and graphs.training.source not in ("pack", "whole")
        if comparable:
            verify(graphs.training, inputs, gradients=True)
        training = analyse(graphs.training, inputs)
        with evaluation_mode(self.model):
            if comparable:
                verify(graphs.evaluation, inputs, gradients=False)
            evaluation = analyse(graphs.evaluation, inputs)
        self.checked = True
        return ModeGraphs(training, evaluation, graphs.settings)

    def _starts(self, graph: ModelGraph, inputs: Mapping[str, Any] | None) -> tuple[int, ...]:
        if self.request.cuts is not None:
            self.strategy_name = "cuts"
            return cuts_from_names(graph, self.request.cuts, self.request.num_stages)
        num_stages = 2 if self.request.num_stages is None else self.request.num_stages
        if graph.source == "whole" and num_stages > 1:
            raise TraceError(_untraceable(graph, num_stages))
        self.measured = None
        if inputs is not None and self._wants_measurement():
            loss, target = self.request.criterion, self._target
            self._target = None  # of the example only: later cuts are made for other inputs
            self.measured = measure(graph, inputs, loss=loss if target is not None else None, target=target)
        return self.strategy(graph, num_stages, self._costs(graph))

    def _wants_measurement(self) -> bool:
        return self.strategy_name in _NEEDS_MEASUREMENT or callable(self.request.strategy)

    def _costs(self, graph: ModelGraph) -> UnitCosts:
        costs = static_costs(graph)
        if self.measured is None:
            return costs
        return UnitCosts(self.measured.time_s, costs.parameter_bytes, self.measured.activation_bytes)

    def _set(self, graphs: ModeGraphs, starts: Sequence[int]) -> None:
        measured = self.measured
        if measured is not None and len(measured.time_s) != len(graphs.training.units):
            measured = None
        self.plan: Plan = build_plan(
            graphs.training,
            starts,
            strategy=self.strategy_name,
            costs=None if measured is None else self._costs(graphs.training),
            devices=_checked_devices(self.request.devices),
            value_bytes=measured.value_bytes if measured else {},
        )
        stage_of = tuple(
            stage.index for stage in self.plan.stages for _ in range(stage.first_unit, stage.last_unit + 1)
        )
        devices = tuple(stage.device for stage in self.plan.stages)
        evaluated = stages_of_evaluation(graphs, stage_of)
        self.cut = Cut(graphs, stage_of, evaluated, devices, self.request.builder)


class _PackedReader(BatchReader):
    """Reads batches for packed stages, whose inputs are known only when a batch names them."""

    def __init__(self, model: nn.Module, names: Sequence[str], target_key: str | None) -> None:
        known = dict.fromkeys((*names, *input_names(model)))
        super().__init__(tuple(known), tuple(names[:1]), target_key=target_key)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that only drive it (DataParallel, torch.compile)."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def on_device_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return *inputs* on the device of the model's first tensor."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    device = torch.device("cpu") if first is None else first.device
    return {name: move(value, device) for name, value in inputs.items()}


def _check_ready(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise SliceError(f"parameter '{name}' has no shape yet (a lazy module); run the model on a batch first")
        if parameter.is_meta:
            raise SliceError(
                f"parameter '{name}' has no values (device meta); give it some first: model.to_empty(device=...)"
            )


def _untraceable(graph: ModelGraph, num_stages: int) -> str:
    attempts = "\n".join(f"  - {attempt}" for attempt in graph.attempts)
    hint = "pass example= (a batch) so that torch.export can try; " if "pass example=" in attempts else ""
    return (
        f"{type(graph.model).__name__} cannot be cut into {num_stages} stages, since its forward pass cannot be "
        f"traced:\n{attempts}\nWays out: {hint}move what cannot be traced into a submodule, which is then kept whole; "
        "or give the stages yourself with pack=lambda model: [...]"
    )


def _checked_devices(devices: Sequence[str]) -> tuple[str, ...]:
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"devices: {name!r} is no device ({error})") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"devices: {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA device(s)"
            )
    return tuple(str(name) for name in devices)


def check_shared(shared: Sequence[str], batch: Batch) -> None:
    """Check that the inputs that go to every micro-batch whole are there.

    Raises:
        ConfigError: One is not.
    """
    for name in shared:
        if name not in batch.inputs:
            raise ConfigError(f"shared_inputs: '{name}' is not an input of the batch, which has {list(batch.inputs)}")


def sample_of(batch: Batch, options: TrainingOptions) -> Batch:
    """Return a few samples of *batch*: enough to compare graph and model, too few to raise the peak of memory."""
    return split_batch(batch, max(batch.size // SAMPLES_TO_VERIFY, 1), options.shared_inputs)[0]
