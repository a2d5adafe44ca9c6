"""The trainer: epochs, batches, evaluation, callbacks, history. It knows neither stages nor devices.

One step runs like this::

    loader -> BatchReader -> Executor.train_step -> StepResult -> events, callbacks, history
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchslicer.callbacks import CallbackList, Metrics
from torchslicer.errors import DataError, SliceError
from torchslicer.events import EpochEnded, EpochStarted, Evaluated, EventBus, RunEnded, RunStarted, StepEnded
from torchslicer.executors.base import Cut, Executor, StepResult, Upcoming
from torchslicer.metrics import MetricSpec, Totals, resolve_metrics
from torchslicer.pipeline.batch import Batch, BatchReader
from torchslicer.pipeline.criterion import Criterion
from torchslicer.pipeline.options import TrainingOptions

logger = logging.getLogger("torchslicer.trainer")


@dataclass(frozen=True)
class Run:
    """Everything about a run that the trainer needs to know.

    ``config`` is the resolved configuration as plain data; ``first_epoch`` an iterator over the first epoch's
    batches that was begun already (the first batch has been looked at).
    """

    run_id: str
    config: dict[str, Any]
    epochs: int
    loader: Iterable[Any]
    first_epoch: Iterator[Any]
    reader: BatchReader
    eval_loader: Iterable[Any] | None = None
    metrics: MetricSpec = None


@dataclass
class _State:
    step: int = 0
    history: list[Metrics] = field(default_factory=list)


class Trainer:
    """Trains a cut model with an executor.

    Args:
        executor: What runs the steps.
        cut: The model and its cut.
        options: How to train.
        callbacks: The user's callbacks.
        bus: Where events go.
    """

    def __init__(
        self, executor: Executor, cut: Cut, options: TrainingOptions, callbacks: CallbackList, bus: EventBus
    ) -> None:
        self.executor = executor
        self.cut = cut
        self.options = options
        self.callbacks = callbacks
        self.bus = bus

    def fit(self, run: Run) -> list[Metrics]:
        """Train for ``run.epochs`` epochs and return one record an epoch.

        Raises:
            DataError: The loader gave nothing, or a batch has a form that cannot be used.
            RunError: A stage or a callback failed, or the loss is not finite.
        """
        state, started = _State(), time.perf_counter()
        try:
            self.executor.setup(self.cut, self.options)
            self._begin(run)
            for epoch in range(1, run.epochs + 1):
                self._epoch(run, epoch, state)
            self.executor.teardown()
            self.callbacks.call("on_train_end", [dict(record) for record in state.history])
        except BaseException as error:
            self.executor.teardown(failed=True)
            self._end(state, started, error)
            raise
        self._end(state, started, None)
        return state.history

    def _begin(self, run: Run) -> None:
        self.bus.emit(
            RunStarted(
                run_id=run.run_id,
                epochs=run.epochs,
                num_stages=self.cut.num_stages,
                num_microbatches=self.options.num_microbatches,
                schedule=self.options.schedule,
            )
        )
        self.callbacks.call("on_train_begin", run.run_id, run.config)

    def _end(self, state: _State, started: float, error: BaseException | None) -> None:
        status = "completed" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        text = None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        event = RunEnded(
            status=status,  # type: ignore[arg-type]
            epochs=len(state.history),
            steps=state.step,
            duration_s=time.perf_counter() - started,
            error=text,
        )
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.bus.emit(event)

    def _epoch(self, run: Run, epoch: int, state: _State) -> None:
        self.bus.emit(EpochStarted(epoch=epoch))
        self.callbacks.call("on_epoch_begin", epoch)
        self._check_model(epoch)
        started = time.perf_counter()
        raw = run.first_epoch if epoch == 1 else iter(run.loader)
        groups = _grouped(raw, run.reader, self.options.accumulate)
        ahead = _Ahead(groups)
        upcoming = ahead.peek if self.executor.wants_upcoming else None
        results = [
            self._step(batches, upcoming, epoch=epoch, number=number, state=state)
            for number, batches in enumerate(ahead)
        ]
        if not results:
            raise DataError(_nothing_left(epoch))
        self._check_model(epoch)
        record = _epoch_record(epoch, results, time.perf_counter() - started)
        self.bus.emit(EpochEnded(**record))
        if run.eval_loader is not None:
            record |= {f"eval_{name}": value for name, value in self._evaluate(run, epoch).items()}
        self.executor.end_epoch(record)
        state.history.append(self.callbacks.epoch_end(epoch, record))

    def _check_model(self, epoch: int) -> None:
        if not self.cut.graphs.is_current():
            raise SliceError(
                f"epoch {epoch}: a module or parameter was replaced, or an attribute that a forward pass reads was "
                "changed, during training; the stages were made from the model as it was. Change it between two calls "
                "of train()"
            )

    def _step(
        self, batches: Sequence[Batch], upcoming: Upcoming | None, *, epoch: int, number: int, state: _State
    ) -> StepResult:
        started = time.perf_counter()
        result = self.executor.train_step(batches, state.step, upcoming)
        event = StepEnded(
            step=state.step,
            epoch=epoch,
            loss=result.loss,
            samples=result.samples,
            duration_s=time.perf_counter() - started,
            lr=result.lr,
            grad_norm=result.grad_norm,
        )
        self.bus.emit(event)
        metrics = {"loss": result.loss, "samples": result.samples, "lr": result.lr}
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        self.callbacks.call("on_step_end", state.step, dict(metrics))
        self.callbacks.call("on_batch_end", epoch, number, dict(metrics))
        state.step += 1
        return result

    def _evaluate(self, run: Run, epoch: int) -> dict[str, float]:
        started = time.perf_counter()
        metrics, samples = evaluate(
            self.executor,
            self.cut,
            run.eval_loader or (),
            run.reader,
            criterion=self.options.criterion,
            metrics=run.metrics,
            mixed_precision=self.options.mixed_precision,
        )
        self.bus.emit(
            Evaluated(epoch=epoch, samples=samples, duration_s=time.perf_counter() - started, metrics=metrics)
        )
        self.callbacks.call("on_evaluate", dict(metrics))
        return metrics


def evaluate(
    executor: Executor,
    cut: Cut,
    loader: Iterable[Any],
    reader: BatchReader,
    *,
    criterion: Criterion | None,
    metrics: MetricSpec,
    mixed_precision: bool = False,
) -> tuple[dict[str, float], int]:
    """Run *loader* in evaluation mode and return the metrics and the number of samples.

    Raises:
        DataError: The loader gave nothing.
    """
    totals = Totals(resolve_metrics(metrics))
    for raw in loader:
        batch = reader.read(raw)
        result = executor.forward(cut, batch, criterion=criterion, mixed_precision=mixed_precision)
        totals.add(result.output, batch.target, batch.size)
        if criterion is not None and result.loss is not None:
            totals.add_loss(result.loss, criterion, batch.target, batch.size)
    if not totals.samples:
        raise DataError("the loader to evaluate on gave no batch; is it empty, or an iterator that was used up?")
    return totals.compute(), totals.samples


def _grouped(raw: Iterator[Any], reader: BatchReader, accumulate: int) -> Iterator[list[Batch]]:
    """Yield the batches of each step; the last step of an epoch may have fewer."""
    while group := [reader.read(item) for item in itertools.islice(raw, accumulate)]:
        yield group


class _Ahead(Iterator[list[Batch]]):
    """The batches of each step; while one runs, those of the step after it can be looked at."""

    def __init__(self, groups: Iterator[list[Batch]]) -> None:
        self._groups = groups
        self._seen: list[list[Batch]] = []

    def __next__(self) -> list[Batch]:
        return self._seen.pop() if self._seen else next(self._groups)

    def peek(self) -> list[Batch] | None:
        """Return what comes next, or None."""
        self._seen = self._seen or list(itertools.islice(self._groups, 1))
        return self._seen[0] if self._seen else None


def _nothing_left(epoch: int) -> str:
    if epoch == 1:
        return "the loader gave no batch; is the dataset empty, or smaller than the batch size with drop_last=True?"
    return (
        f"the loader gave no batch in epoch {epoch}: it can be iterated only once (a generator, an iterator); pass "
        "something that starts anew each time, such as a DataLoader or a list"
    )


def _epoch_record(epoch: int, results: Sequence[StepResult], duration_s: float) -> Metrics:
    samples = sum(result.samples for result in results)
    return {
        "epoch": epoch,
        "loss": sum(result.loss * result.samples for result in results) / samples,
        "samples": samples,
        "duration_s": duration_s,
        "samples_per_s": samples / duration_s,
        "lr": results[-1].lr,
    }
