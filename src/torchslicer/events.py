"""What happens in a run, as values, and the way to hear of it.

The trainer emits one event after another; whoever wants to know (progress bar, run log, exporters) is an
:class:`Observer`. Steps are counted from 0 over the whole run, epochs from 1. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """Training begins. ``epochs`` is the number asked for."""

    run_id: str
    epochs: int
    num_stages: int
    num_microbatches: int
    schedule: str


@dataclass(frozen=True, kw_only=True)
class EpochStarted:
    """A pass over the data begins."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class StepEnded:
    """The parameters were updated once. ``lr`` is the rate that this step used, of the first parameter group."""

    step: int
    epoch: int
    loss: float
    samples: int
    duration_s: float
    lr: float
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class EpochEnded:
    """A pass over the data is done. ``loss`` is the mean over its samples."""

    epoch: int
    loss: float
    samples: int
    duration_s: float
    samples_per_s: float
    lr: float


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The model was evaluated; ``epoch`` is None outside training."""

    epoch: int | None
    samples: int
    duration_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """Training is over. ``error`` is the first line of what stopped it, if something did."""

    status: Status
    epochs: int
    steps: int
    duration_s: float
    error: str | None = None


Event: TypeAlias = RunStarted | EpochStarted | StepEnded | EpochEnded | Evaluated | RunEnded

_TYPES: Mapping[type[Any], str] = {
    RunStarted: "run",
    EpochStarted: "epoch_started",
    StepEnded: "step",
    EpochEnded: "epoch",
    Evaluated: "evaluation",
    RunEnded: "run",
}


class Observer(Protocol):
    """Whoever wants to hear of events."""

    def on_event(self, event: Event, /) -> None:
        """Hear of one event. An exception raised here stops the run."""


class EventBus:
    """Passes each event on to its observers, in the order in which they were added.

    >>> class Printer:
    ...     def on_event(self, event: Event, /) -> None:
    ...         print(event)
    >>> EventBus([Printer()]).emit(EpochStarted(epoch=1))
    EpochStarted(epoch=1)
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        """Start with these observers."""
        self._observers: tuple[Observer, ...] = tuple(observers)

    def add(self, observer: Observer) -> None:
        """Let *observer* hear of all later events, after those added before it."""
        self._observers = (*self._observers, observer)

    def emit(self, event: Event) -> None:
        """Tell every observer. The first that raises ends this, and its exception goes to the caller."""
        for observer in self._observers:
            observer.on_event(event)


def to_record(event: Event) -> dict[str, Any]:
    """Return an event as plain data with its ``type``.

    >>> to_record(EpochStarted(epoch=1))
    {'type': 'epoch_started', 'epoch': 1}
    """
    record: dict[str, Any] = {"type": _TYPES[type(event)]}
    if isinstance(event, RunStarted):
        record["status"] = "started"
    for item in fields(event):
        value = getattr(event, item.name)
        record[item.name] = dict(value) if isinstance(value, Mapping) else value
    return record
