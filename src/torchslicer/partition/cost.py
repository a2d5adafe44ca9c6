"""What a stage costs: per unit as measured or counted, and per range of units.

A tied parameter is held by every stage that uses it, but only once inside one stage, so the cost of a range is
not simply the sum over its units. `RangeCost` knows which tensors the units name and counts each of them once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchslicer.errors import SliceError
from torchslicer.graph.model import ModelGraph, Unit

# What training keeps for one trainable parameter: the weight, its gradient and two optimizer states (Adam).
TRAINING_COPIES = 4


@dataclass(frozen=True)
class UnitCosts:
    """Costs of the units of one graph, one entry a unit.

    Attributes:
        time_s: Seconds of forward and backward, or None when nothing was measured.
        parameter_bytes: Bytes of the unit's parameters; a tied one counts in each unit that uses it.
        activation_bytes: Bytes that the unit keeps for its backward, or None when nothing was measured.

    Raises:
        SliceError: The lengths differ, or an entry is negative or not finite.

    >>> UnitCosts(time_s=(0.5, 0.25), parameter_bytes=(8, 0), activation_bytes=None).num_units
    2
    """

    time_s: tuple[float, ...] | None
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for name, values in (("time_s", self.time_s), ("activation_bytes", self.activation_bytes)):
            if values is not None and len(values) != self.num_units:
                raise SliceError(f"UnitCosts.{name} must have {self.num_units} entries, one a unit, got {len(values)}")
            _check_entries(name, values or ())
        _check_entries("parameter_bytes", self.parameter_bytes)

    @property
    def num_units(self) -> int:
        """How many units the costs are for."""
        return len(self.parameter_bytes)

    def check(self, graph: ModelGraph) -> None:
        """Raise `SliceError` unless there is one entry for each unit of *graph*."""
        if self.num_units != len(graph.units):
            raise SliceError(
                f"the costs are for {self.num_units} units but the model has {len(graph.units)}: measure this model"
            )


@dataclass(frozen=True)
class RangeCost:
    """Cost of the units ``[i, j)`` as one stage: an additive part, plus tensors that count once a stage.

    Attributes:
        additive: What each unit adds.
        uses: For each unit, the named tensors that it holds and what each costs.

    >>> tied = {"weight": 10.0}
    >>> cost = RangeCost(additive=(1.0, 1.0, 1.0), uses=(tied, {}, tied))
    >>> cost(0, 1), cost(0, 3), cost(1, 3)
    (11.0, 13.0, 12.0)
    """

    additive: tuple[float, ...]
    uses: tuple[Mapping[str, float], ...] = ()

    def __call__(self, start: int, stop: int) -> float:
        """Cost of the units from *start* up to, but without, *stop*."""
        held = {name: cost for unit in self.uses[start:stop] for name, cost in unit.items()}
        return math.fsum(self.additive[start:stop]) + math.fsum(held.values())

    def matrix(self, positions: Sequence[int]) -> NDArray[np.float64]:
        """Return the cost between every two of the ascending *positions*; infinite where the range is empty."""
        size = len(positions)
        table = np.full((size, size), np.inf)
        row_of = {position: row for row, position in enumerate(positions)}
        weights, next_uses = self._first_row()
        for start in range(len(self.additive)):
            if start in row_of:
                row = row_of[start]
                # Summed afresh from `start`: a difference of prefix sums would round equal ranges differently.
                sums = np.cumsum(weights[start:])
                table[row, row + 1 :] = sums[np.asarray(positions[row + 1 :], dtype=np.intp) - start - 1]
            for unit, cost in next_uses[start]:
                weights[unit] += cost  # its earlier use falls out of all later ranges
        return table

    def _first_row(self) -> tuple[NDArray[np.float64], list[list[tuple[int, float]]]]:
        """Weights of the units when the range starts at 0, and for each unit the next uses of its tensors."""
        weights = np.array(self.additive, dtype=np.float64)
        next_uses: list[list[tuple[int, float]]] = [[] for _ in self.additive]
        last_use: dict[str, int] = {}
        for unit, held in enumerate(self.uses):
            for name, cost in held.items():
                if name in last_use:
                    next_uses[last_use[name]].append((unit, cost))
                else:
                    weights[unit] += cost
                last_use[name] = unit
        return weights, next_uses


def static_costs(graph: ModelGraph) -> UnitCosts:
    """Return what can be counted without running *graph*: the bytes of the parameters."""
    return UnitCosts(
        time_s=None,
        parameter_bytes=tuple(sum(map(graph.size_bytes, unit.parameters)) for unit in graph.units),
        activation_bytes=None,
    )


def parameter_cost(graph: ModelGraph) -> RangeCost:
    """Return the bytes of the parameters that a stage holds."""
    return RangeCost(
        additive=(0.0,) * len(graph.units),
        uses=tuple({name: float(graph.size_bytes(name)) for name in unit.parameters} for unit in graph.units),
    )


def memory_cost(graph: ModelGraph, costs: UnitCosts) -> RangeCost:
    """Return the bytes that a stage needs in training: parameters with their copies, buffers, activations.

    A trainable parameter counts `TRAINING_COPIES` times, a frozen one once, activations only if *costs* has them.
    """
    return RangeCost(
        additive=tuple(map(float, costs.activation_bytes or (0,) * len(graph.units))),
        uses=tuple(_training_bytes(graph, unit) for unit in graph.units),
    )


def time_cost(costs: UnitCosts) -> RangeCost:
    """Return the measured seconds of a stage.

    Raises:
        SliceError: Nothing was measured.
    """
    if costs.time_s is None:
        raise SliceError(
            "strategy 'time' needs measured times and none were taken: it needs example=, one batch of inputs, "
            "given to ts.slice; or use strategy 'parameters', 'memory' or 'uniform', which measure nothing"
        )
    return RangeCost(additive=costs.time_s)


def _training_bytes(graph: ModelGraph, unit: Unit) -> dict[str, float]:
    held = {
        name: float(graph.size_bytes(name) * (TRAINING_COPIES if graph.parameters[name].requires_grad else 1))
        for name in unit.parameters
    }
    return held | {name: float(graph.size_bytes(name)) for name in unit.buffers}


def _check_entries(name: str, values: Sequence[float]) -> None:
    for unit, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise SliceError(f"UnitCosts.{name}[{unit}] must be finite and not negative, got {value!r}")
