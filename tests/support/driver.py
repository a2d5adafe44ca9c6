"""Trains cases with TorchSlicer and returns the same kind of result as the hand-written loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import torchslicer as ts
from tests.support.models import Batch, Case
from tests.support.oracle import Result, Spec, reference_train, snapshot


class Recorder(ts.TrainingCallback):
    """Keeps what the trainer reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.calls: list[str] = []

    def on_train_begin(self, run_id: str, config: Any) -> None:
        """Note the call."""
        self.calls.append("train_begin")

    def on_epoch_begin(self, epoch: int) -> None:
        """Note the call."""
        self.calls.append(f"epoch_begin {epoch}")

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of the step."""
        self.calls.append("step_end")
        self.steps.append({**metrics, "_step": step})

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of the evaluation."""
        self.calls.append("evaluate")
        self.evaluations.append(dict(metrics))

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Note the call."""
        self.calls.append(f"epoch_end {epoch}")

    def on_train_end(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Note the call."""
        self.calls.append("train_end")

    def losses(self) -> list[float]:
        """Return the loss of each step."""
        return [step["loss"] for step in self.steps]


def sliced_train(
    model: nn.Module,
    batches: Iterable[Any],
    optimizer: Any,
    criterion: Any,
    *,
    n: int = 2,
    slice_options: Mapping[str, Any] | None = None,
    train_mode: bool = True,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Result:
    """Slice a deep copy of *model*, train it and return what came out; *options* go to ``train``."""
    model = copy.deepcopy(model)
    if train_mode:
        model.train()
    sliced = ts.slice(model, n=n, **(slice_options or {}))
    recorder = Recorder()
    options.setdefault("epochs", 1)
    options.setdefault("run_dir", False)
    history = sliced.train(batches, optimizer, criterion, callbacks=[recorder, *callbacks], **options)
    norms = [step["grad_norm"] for step in recorder.steps if step.get("grad_norm") is not None]
    extra = {"sliced": sliced, "recorder": recorder}
    return Result(snapshot(model), recorder.losses(), norms, model, history, extra)


def slice_options(case: Case, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return what `ts.slice` needs for the case: its pack function, example inputs."""
    options: dict[str, Any] = {}
    if case.pack is not None:
        options["pack"] = case.pack
    if case.needs_example:
        options["example"] = case.example(dtype=dtype)
    return options


def train_case(
    case: Case,
    optimizer: Any,
    *,
    n: int,
    steps: int,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    batches: list[Batch] | None = None,
    **options: Any,
) -> Result:
    """Train the case with TorchSlicer."""
    model = case.model(dropout=dropout, dtype=dtype)
    data = case.batches(steps, dtype=dtype) if batches is None else batches
    criterion = options.pop("criterion", None) or case.criterion()
    extra = {**slice_options(case, dtype=dtype), **options.pop("slice_options", {})}
    return sliced_train(model, data, optimizer, criterion, n=n, slice_options=extra, **options)


def reference_case(
    case: Case,
    optimizer: Spec,
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    batches: list[Batch] | None = None,
    **options: Any,
) -> Result:
    """Train the case by hand."""
    data = case.batches(steps, dtype=dtype) if batches is None else batches
    criterion = options.pop("criterion", None) or case.criterion()
    return reference_train(case.model(dtype=dtype), data, optimizer, criterion, loss=case.loss, **options)
