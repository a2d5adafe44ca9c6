"""Events are plain values, and reach every observer in order."""

from __future__ import annotations

import dataclasses

import pytest

from torchslicer.events import (
    EpochEnded,
    EpochStarted,
    Evaluated,
    Event,
    EventBus,
    RunEnded,
    RunStarted,
    StepEnded,
    to_record,
)

RUN_STARTED = RunStarted(run_id="r", epochs=2, num_stages=3, num_microbatches=4, schedule="gpipe")
STEP = StepEnded(step=0, epoch=1, loss=0.1, samples=8, duration_s=0.5, lr=1e-3)


class Recorder:
    def __init__(self, name: str, heard: list[tuple[str, Event]]) -> None:
        self.name, self.heard = name, heard

    def on_event(self, event: Event, /) -> None:
        self.heard.append((self.name, event))


class Failing:
    def on_event(self, event: Event, /) -> None:
        raise LookupError("observer broke")


def test_events_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STEP.loss = 3.0  # type: ignore[misc]


def test_observers_hear_in_the_order_they_were_added() -> None:
    heard: list[tuple[str, Event]] = []
    bus = EventBus([Recorder("first", heard)])
    bus.emit(RUN_STARTED)
    bus.add(Recorder("second", heard))
    bus.emit(STEP)
    assert heard == [("first", RUN_STARTED), ("first", STEP), ("second", STEP)]


def test_an_exception_of_an_observer_reaches_the_caller() -> None:
    heard: list[tuple[str, Event]] = []
    bus = EventBus([Recorder("before", heard), Failing(), Recorder("after", heard)])
    with pytest.raises(LookupError, match="observer broke"):
        bus.emit(STEP)
    assert heard == [("before", STEP)]


def test_an_observer_added_during_an_event_hears_only_the_next() -> None:
    heard: list[tuple[str, Event]] = []
    bus = EventBus()

    class Adding:
        def on_event(self, event: Event, /) -> None:
            bus.add(Recorder("late", heard))

    bus.add(Adding())
    bus.emit(RUN_STARTED)
    assert heard == []
    bus.emit(STEP)
    assert heard == [("late", STEP)]


@pytest.mark.parametrize(
    ("event", "record"),
    [
        (
            RUN_STARTED,
            {
                "type": "run",
                "status": "started",
                "run_id": "r",
                "epochs": 2,
                "num_stages": 3,
                "num_microbatches": 4,
                "schedule": "gpipe",
            },
        ),
        (EpochStarted(epoch=2), {"type": "epoch_started", "epoch": 2}),
        (
            STEP,
            {
                "type": "step",
                "step": 0,
                "epoch": 1,
                "loss": 0.1,
                "samples": 8,
                "duration_s": 0.5,
                "lr": 1e-3,
                "grad_norm": None,
            },
        ),
        (
            EpochEnded(epoch=1, loss=0.2, samples=16, duration_s=2.0, samples_per_s=8.0, lr=0.1),
            {
                "type": "epoch",
                "epoch": 1,
                "loss": 0.2,
                "samples": 16,
                "duration_s": 2.0,
                "samples_per_s": 8.0,
                "lr": 0.1,
            },
        ),
        (
            Evaluated(epoch=None, samples=4, duration_s=1.0, metrics={"accuracy": 0.5}),
            {"type": "evaluation", "epoch": None, "samples": 4, "duration_s": 1.0, "metrics": {"accuracy": 0.5}},
        ),
        (
            RunEnded(status="failed", epochs=1, steps=7, duration_s=3.0, error="StageError: stage 1"),
            {
                "type": "run",
                "status": "failed",
                "epochs": 1,
                "steps": 7,
                "duration_s": 3.0,
                "error": "StageError: stage 1",
            },
        ),
    ],
)
def test_records(event: Event, record: dict[str, object]) -> None:
    assert to_record(event) == record


def test_a_record_does_not_share_the_metrics() -> None:
    metrics = {"accuracy": 0.5}
    record = to_record(Evaluated(epoch=1, samples=1, duration_s=0.1, metrics=metrics))
    metrics["accuracy"] = 0.0
    assert record["metrics"] == {"accuracy": 0.5}
