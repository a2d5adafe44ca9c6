"""Where a model is cut: pure data that prints as a table and goes through JSON unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from torchslicer.errors import ConfigError
from torchslicer.graph.model import ModelGraph, iter_refs
from torchslicer.partition.cost import UnitCosts
from torchslicer.partition.cuts import format_bytes, model_name, validate_cuts
from torchslicer.partition.decode import decode_plan

PLAN_VERSION = 1
_NO_BYTES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class StagePlan:
    """One stage: a run of units, and what they hold.

    ``last_unit`` is inclusive. A tensor that several units of the stage use is listed and counted once.
    ``time_share`` is the stage's part of the measured time of the whole model, or None.
    """

    index: int
    units: tuple[str, ...]
    first_unit: int
    last_unit: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    time_share: float | None
    device: str


@dataclass(frozen=True)
class BoundaryValue:
    """A value that stage ``producer`` sends directly to each of the stages ``consumers``, all of them later.

    >>> print(BoundaryValue("relu_3", producer=0, consumers=(1, 2), size_bytes=65536))
    boundary 0->1,2: relu_3 64.0 KiB
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    size_bytes: int | None

    def __str__(self) -> str:
        size = "" if self.size_bytes is None else f" {format_bytes(self.size_bytes)}"
        return f"boundary {self.producer}->{','.join(map(str, self.consumers))}: {self.name}{size}"


@dataclass(frozen=True)
class Plan:
    """A cut of a model into stages.

    Attributes:
        model: Class name of the model.
        source: How its graph was found (`ModelGraph.source`).
        strategy: Name of the strategy that chose the cuts.
        num_stages: Number of stages.
        stages: The stages, in order.
        boundaries: The values that cross cuts, in order of creation.
        shared: Each tied parameter and the stages that use it, also if that is only one stage.
    """

    model: str
    source: str
    strategy: str
    num_stages: int
    stages: tuple[StagePlan, ...]
    boundaries: tuple[BoundaryValue, ...]
    shared: Mapping[str, tuple[int, ...]]

    @property
    def unit_starts(self) -> tuple[int, ...]:
        """Index of the first unit of each stage."""
        return tuple(stage.first_unit for stage in self.stages)

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` reads it back to an equal plan."""
        return json.dumps({"version": PLAN_VERSION, **asdict(self)}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: The text is not JSON, of another version, or a key is unknown, missing or of a wrong type.
        """
        fields = decode_plan(text, version=PLAN_VERSION)
        plan = cls(
            **{
                **fields,
                "stages": tuple(StagePlan(**stage) for stage in fields["stages"]),
                "boundaries": tuple(BoundaryValue(**value) for value in fields["boundaries"]),
            }
        )
        plan._check()
        return plan

    def table(self) -> str:
        """Return the plan for people: a row a stage, a line a boundary value, a line a tied parameter."""
        stages = f"{self.num_stages} {'stage' if self.num_stages == 1 else 'stages'}"
        lines = [f"{self.model}: {stages} by {self.strategy!r}, graph from {self.source}"]
        lines += _aligned([_HEADER, *(_row(stage) for stage in self.stages)])
        lines += map(str, self.boundaries)
        lines += (f"tied {name}: stages {', '.join(map(str, stages))}" for name, stages in self.shared.items())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _check(self) -> None:
        """Check what a file can get wrong although each of its fields is of the right type."""
        if len(self.stages) != self.num_stages or self.num_stages < 1:
            raise ConfigError(f"plan: num_stages is {self.num_stages} but {len(self.stages)} stages are listed")
        first = 0
        for index, stage in enumerate(self.stages):
            if (stage.index, stage.first_unit) != (index, first) or stage.last_unit < first:
                raise ConfigError(
                    f"plan: stages[{index}] must have index {index} and start at unit {first}, got index {stage.index} "
                    f"with units {stage.first_unit} to {stage.last_unit}"
                )
            first = stage.last_unit + 1
            if len(stage.units) != first - stage.first_unit:
                raise ConfigError(f"plan: stages[{index}] names {len(stage.units)} units, its range has another number")
        for value in self.boundaries:
            if not all(0 <= value.producer < consumer < self.num_stages for consumer in value.consumers):
                raise ConfigError(f"plan: {value} does not go from a stage to later ones of {self.num_stages}")


def build_plan(
    graph: ModelGraph,
    starts: Sequence[int],
    *,
    strategy: str,
    costs: UnitCosts | None = None,
    devices: Sequence[str] = (),
    value_bytes: Mapping[str, int] = _NO_BYTES,
) -> Plan:
    """Return the plan that cuts *graph* just before the units *starts*.

    Args:
        graph: The model.
        starts: First units of stages 1..n-1; the number of stages is one more.
        strategy: Name of the strategy that chose them.
        costs: Measured costs, for the share of time.
        devices: One device for all stages, or one a stage; by default where the stage's tensors are.
        value_bytes: Bytes of values by name, where known.

    Raises:
        SliceError: The cuts are not possible.
        ConfigError: The number of devices fits neither.
    """
    num_stages = len(starts) + 1
    bounds = (0, *validate_cuts(graph, starts, num_stages), len(graph.units))
    if costs is not None:
        costs.check(graph)
    if len(devices) not in (0, 1, num_stages):
        raise ConfigError(f"devices: expected 1 or {num_stages}, one a stage, got {len(devices)}: {list(devices)}")
    stages = tuple(
        _stage_plan(graph, index, bounds, costs, str(devices[index % len(devices)]) if devices else None)
        for index in range(num_stages)
    )
    stage_of = {unit: stage.index for stage in stages for unit in range(stage.first_unit, stage.last_unit + 1)}
    return Plan(
        model=model_name(graph),
        source=graph.source,
        strategy=strategy,
        num_stages=num_stages,
        stages=stages,
        boundaries=tuple(_boundaries(graph, stage_of, value_bytes)),
        shared={name: tuple(sorted({stage_of[unit] for unit in units})) for name, units in graph.shared.items()},
    )


def _stage_plan(
    graph: ModelGraph, index: int, bounds: Sequence[int], costs: UnitCosts | None, device: str | None
) -> StagePlan:
    first, stop = bounds[index], bounds[index + 1]
    units = graph.units[first:stop]
    parameters = tuple(dict.fromkeys(name for unit in units for name in unit.parameters))
    buffers = tuple(dict.fromkeys(name for unit in units for name in unit.buffers))
    return StagePlan(
        index=index,
        units=tuple(unit.name for unit in units),
        first_unit=first,
        last_unit=stop - 1,
        parameters=parameters,
        buffers=buffers,
        num_parameters=sum(graph.parameters[name].numel() for name in parameters),
        parameter_bytes=sum(map(graph.size_bytes, parameters)),
        buffer_bytes=sum(map(graph.size_bytes, buffers)),
        time_share=_time_share(costs, first, stop),
        device=device if device is not None else _device_of(graph, (*parameters, *buffers)),
    )


def _time_share(costs: UnitCosts | None, first: int, stop: int) -> float | None:
    if costs is None or costs.time_s is None:
        return None
    total = sum(costs.time_s)
    return min(1.0, sum(costs.time_s[first:stop]) / total) if total > 0 else None


def _device_of(graph: ModelGraph, names: Sequence[str]) -> str:
    """Where the stage's tensors are; a stage without any goes with the rest of the model."""
    tensors = {**graph.parameters, **graph.buffers}
    for name in (*names, *tensors):
        return str(tensors[name].device)
    return "cpu"


def _boundaries(
    graph: ModelGraph, stage_of: Mapping[int, int], value_bytes: Mapping[str, int]
) -> Iterator[BoundaryValue]:
    """Yield the values that cross a cut; the last stage needs those that the model returns.

    Parameters, buffers and constants never cross: `ModelGraph.unit_of` leaves them out, each stage has its own.
    """
    users: dict[int, set[int]] = {value.node: {stage_of[unit] for unit in value.consumers} for value in graph.values}
    last_stage = max(stage_of.values())
    for ref in iter_refs(graph.output):
        if ref.index in graph.unit_of:
            users.setdefault(ref.index, set()).add(last_stage)
    for node, stages in sorted(users.items()):
        producer = stage_of[graph.unit_of[node]]
        consumers = tuple(sorted(stages - {producer}))
        if consumers:
            name = graph.nodes[node].name
            yield BoundaryValue(name, producer, consumers, value_bytes.get(name))


_HEADER = ("stage", "modules", "units", "parameters", "bytes", "time", "device")
_LEFT = frozenset({"modules", "device"})


def _row(stage: StagePlan) -> tuple[str, ...]:
    first, last = stage.units[0], stage.units[-1]
    return (
        str(stage.index),
        first if len(stage.units) == 1 else f"{first}..{last}",
        str(len(stage.units)),
        f"{stage.num_parameters:,}",
        format_bytes(stage.parameter_bytes + stage.buffer_bytes),
        "-" if stage.time_share is None else f"{stage.time_share:.1%}",
        stage.device,
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield each row with its columns aligned: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, _HEADER, strict=True)
        texts = (cell.ljust(width) if head in _LEFT else cell.rjust(width) for cell, width, head in cells)
        yield "  ".join(texts).rstrip()
