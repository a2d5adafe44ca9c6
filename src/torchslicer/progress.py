"""A progress bar an epoch, for terminals; plain lines where there is no terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from torchslicer.events import EpochEnded, EpochStarted, Evaluated, Event, RunEnded, RunStarted, StepEnded


class ProgressBar:
    """Shows loss and samples per second.

    Args:
        steps_per_epoch: Length of the bar, or None when the loader has no length.
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._epochs = 0
        self._bar: Any = None
        self._samples = 0
        self._loss = 0.0

    def on_event(self, event: Event, /) -> None:
        """Show one event."""
        if isinstance(event, RunStarted):
            self._epochs = event.epochs
        elif isinstance(event, EpochStarted):
            self._open(event.epoch)
        elif isinstance(event, StepEnded):
            self._advance(event)
        elif isinstance(event, EpochEnded):
            self._close_with(event)
        elif isinstance(event, Evaluated):
            tqdm.write("  evaluation: " + ", ".join(f"{k} {v:.4f}" for k, v in event.metrics.items()), file=sys.stderr)
        elif isinstance(event, RunEnded):
            self._give_up()

    def _open(self, epoch: int) -> None:
        self._samples, self._loss = 0, 0.0
        self._bar = tqdm(
            total=self.steps_per_epoch,
            desc=f"epoch {epoch}/{self._epochs}",
            unit="step",
            leave=False,
            disable=not sys.stderr.isatty(),
        )

    def _advance(self, event: StepEnded) -> None:
        self._samples += event.samples
        self._loss += event.loss * event.samples
        rate = event.samples / event.duration_s if event.duration_s else 0.0
        self._bar.set_postfix(loss=f"{self._loss / self._samples:.4f}", samples_per_s=f"{rate:.0f}", refresh=False)
        self._bar.update()

    def _give_up(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _close_with(self, event: EpochEnded) -> None:
        self._bar.close()
        self._bar = None
        tqdm.write(
            f"epoch {event.epoch}/{self._epochs}  loss {event.loss:.4f}  {event.samples_per_s:.0f} samples/s  "
            f"lr {event.lr:.3g}  {event.duration_s:.1f} s",
            file=sys.stderr,
        )
