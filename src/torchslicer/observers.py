"""Who hears of a run: the run's log, the progress bar; and what a user is warned of before it starts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from torchslicer.config import RunConfig
from torchslicer.events import EventBus, Observer
from torchslicer.pipeline.batchnorm import training_batch_norms
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.progress import ProgressBar
from torchslicer.runlog import RunLog


@contextlib.contextmanager
def observers(
    config: RunConfig,
    run_dir: str | Path | bool | None,
    loader: Iterable[Any],
    options: TrainingOptions,
    *,
    verbose: bool,
) -> Iterator[EventBus]:
    """Yield the bus of a run, with its log (in *run_dir*, by default where the configuration says) and progress bar."""
    log = _open_log(config, run_dir)
    listening: list[Observer] = [] if log is None else [log]
    if verbose:
        listening.append(ProgressBar(_steps_per_epoch(loader, options.accumulate)))
    try:
        yield EventBus(listening)
    finally:
        if log is not None:
            log.close()


def _open_log(config: RunConfig, run_dir: str | Path | bool | None) -> RunLog | None:
    if run_dir is False or (run_dir in (None, True) and not config.logging.enabled):
        return None
    directory = Path(config.logging.dir) / config.run_id if run_dir in (None, True) else Path(str(run_dir))
    log = RunLog(directory)
    log.write_config(config.to_yaml_text())
    return log


def _steps_per_epoch(loader: Iterable[Any], accumulate: int) -> int | None:
    try:
        return -(-len(loader) // accumulate)  # type: ignore[arg-type]
    except TypeError:  # a dataset without a length
        return None


def warn_about_modes(model: nn.Module, options: TrainingOptions) -> None:
    """Say what users often overlook: a model in evaluation mode, BatchNorm under micro-batches."""
    if not model.training:
        warnings.warn(
            "the model is in evaluation mode: dropout is off and BatchNorm frozen while training; call model.train() "
            "before if that is not meant",
            stacklevel=4,
        )
    names = list(training_batch_norms(model))
    if names and options.num_microbatches > 1 and options.batch_norm == "per_microbatch":
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"BatchNorm normalises each of the {options.num_microbatches} micro-batches by itself, so results differ "
            f"from the whole batch's, in: {shown}. batch_norm='deferred' updates running statistics once a step",
            stacklevel=4,
        )
