"""What is shown while a model trains."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

import torchslicer as ts
from tests.support.models import MLP, mlp4
from torchslicer.events import EpochEnded, EpochStarted, Evaluated, RunEnded, RunStarted, StepEnded
from torchslicer.progress import ProgressBar

STARTED = RunStarted(run_id="r", epochs=2, num_stages=1, num_microbatches=1, schedule="gpipe")
EPOCH = EpochEnded(epoch=1, loss=0.123456, samples=8, duration_s=0.5, samples_per_s=16.0, lr=0.05)
ENDED = RunEnded(status="completed", epochs=1, steps=1, duration_s=1.0)


def step(number: int, loss: float, samples: int) -> StepEnded:
    return StepEnded(step=number, epoch=1, loss=loss, samples=samples, duration_s=0.1, lr=0.05)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_one_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(2)
    evaluated = Evaluated(epoch=1, samples=4, duration_s=0.1, metrics={"loss": 0.5, "accuracy": 0.75})
    for event in (STARTED, EpochStarted(epoch=1), step(0, 1.0, 4), step(1, 3.0, 4), EPOCH, evaluated, ENDED):
        bar.on_event(event)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "epoch 1/2  loss 0.1235  16 samples/s  lr 0.05  0.5 s",
        "  evaluation: loss 0.5000, accuracy 0.7500",
    ]


def test_on_a_terminal_a_bar_with_the_mean_loss_and_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = ProgressBar(None)
    for event in (STARTED, EpochStarted(epoch=1), step(0, 1.0, 4), step(1, 4.0, 2)):
        bar.on_event(event)
    assert bar._bar.postfix == "loss=2.0000, samples_per_s=20"
    assert bar._bar.n == 2
    bar.on_event(ENDED)
    assert bar._bar.disable


def test_a_run_that_fails_before_its_first_epoch() -> None:
    ProgressBar(1).on_event(RunEnded(status="failed", epochs=0, steps=0, duration_s=0.1, error="x"))


def test_a_verbose_run_shows_each_epoch_and_its_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"epochs": 2, "verbose": True, "run_dir": False, "metrics": ["accuracy"]}
    history = ts.slice(mlp4(), n=2).train(
        MLP.batches(2), "sgd", "cross_entropy", eval_loader=MLP.batches(1, seed=5), **options
    )
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    assert f"loss {history[1]['loss']:.4f}" in lines[-2]
    assert f"accuracy {history[1]['eval_accuracy']:.4f}" in lines[-1]
