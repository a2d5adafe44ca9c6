"""Hooks into a run, for users."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torchslicer.errors import CallbackError, ConfigError

Metrics = dict[str, Any]


class TrainingCallback:
    """Subclass it and override what you need; every method does nothing by default.

    Epochs count from 1, steps from 0. An exception in a callback stops the run and names the callback.

    Example:
        >>> class Stop(TrainingCallback):
        ...     def on_epoch_end(self, epoch, metrics):
        ...         return {"half_loss": metrics["loss"] / 2}
    """

    def on_train_begin(self, run_id: str, config: dict[str, Any]) -> None:
        """Training begins; *config* is the resolved configuration."""

    def on_epoch_begin(self, epoch: int) -> None:
        """A pass over the data begins."""

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """The parameters were updated; *metrics* holds loss, samples, lr and, with clipping, grad_norm."""

    def on_batch_end(self, epoch: int, batch: int, metrics: Metrics) -> Metrics | None:
        """Like `on_step_end`, with the number of the step within its epoch (from 0)."""

    def on_epoch_end(self, epoch: int, metrics: Metrics) -> Metrics | None:
        """A pass over the data is done. What is returned is added to the epoch's record."""

    def on_evaluate(self, metrics: Metrics) -> None:
        """The model was evaluated on ``eval_loader``."""

    def on_train_end(self, history: list[Metrics]) -> None:
        """Training is over; *history* holds the epochs' records. Not called when the run fails."""


class CallbackList:
    """Calls callbacks in order."""

    def __init__(self, callbacks: Sequence[TrainingCallback]) -> None:
        if isinstance(callbacks, TrainingCallback):
            raise ConfigError(f"callbacks: expected a list of callbacks, got one; write callbacks=[{callbacks!r}]")
        for callback in callbacks:
            if not isinstance(callback, TrainingCallback):
                raise ConfigError(
                    f"callbacks: expected instances of torchslicer.TrainingCallback, got {callback!r}"
                    + ("; pass an instance, not the class" if isinstance(callback, type) else "")
                )
        self._callbacks = tuple(callbacks)

    def call(self, method: str, *args: Any) -> None:
        """Call *method* of each."""
        for callback in self._callbacks:
            with _named(callback, method):
                getattr(callback, method)(*args)

    def epoch_end(self, epoch: int, metrics: Metrics) -> Metrics:
        """Call ``on_epoch_end`` of each, and merge what they return."""
        for callback in self._callbacks:
            with _named(callback, "on_epoch_end"):
                metrics = {**metrics, **(callback.on_epoch_end(epoch, dict(metrics)) or {})}
        return metrics


@contextlib.contextmanager
def _named(callback: TrainingCallback, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # user code may raise anything; it goes on with the callback's name
        raise CallbackError(f"callback {type(callback).__name__}.{method}: {type(error).__name__}: {error}") from error
