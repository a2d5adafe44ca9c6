"""``torchslicer demo``: a sliced network learns real handwritten digits, and is compared with itself unsliced."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import nn

from torchslicer.api import SlicedModel
from torchslicer.api import slice as slice_model
from torchslicer.cli.digits import (
    OPTIMIZER,
    Digits,
    Loader,
    ResidualDigits,
    largest_difference,
    load_digits,
    train_unsliced,
)
from torchslicer.cli.schedule import described, named_schedule
from torchslicer.config import RunConfig
from torchslicer.errors import ConfigError
from torchslicer.executors.base import Executor
from torchslicer.executors.local import LocalExecutor
from torchslicer.simulation import simulated

_BATCH_SIZE = 64


@dataclass(frozen=True)
class Settings:
    """What the demo was asked for."""

    n: int
    schedule: str
    microbatches: int
    epochs: int
    seed: int
    runs: Path
    mode: str = "local"


@click.command()
@click.option("--n", "-n", "n", type=int, default=3, show_default=True, help="Number of stages.")
@click.option(
    "--schedule",
    type=click.Choice(["gpipe", "1f1b", "eager-1f1b", "plain"]),
    default="gpipe",
    show_default=True,
    help="Order of work.",
)
@click.option(
    "--mode",
    type=click.Choice(["local", "simulate"]),
    default="local",
    show_default=True,
    help="Stages in this process, or each in a worker process of its own.",
)
@click.option("--microbatches", "-m", type=int, help="Pieces of a batch.  [default: 4; 1 for plain]")
@click.option("--epochs", type=int, default=8, show_default=True, help="Passes over the data.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights, the split and the order.")
@click.option(
    "--runs",
    type=click.Path(file_okay=False, path_type=Path),
    default="runs",
    show_default=True,
    help="Where the run's folder goes.",
)
def demo(*, n: int, schedule: str, mode: str, microbatches: int | None, epochs: int, seed: int, runs: Path) -> None:
    """Train a sliced residual network on real handwritten digits, and compare it with the same training unsliced."""
    if schedule == "plain" and microbatches not in (None, 1):
        raise ConfigError(f"--schedule plain has no micro-batches, got --microbatches {microbatches}; leave one out")
    pieces = microbatches if microbatches is not None else 1 if schedule == "plain" else 4
    with _one_thread():
        run(Settings(n, schedule, pieces, epochs, seed, runs, mode))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Micro-batches this small are not worth sharing among cores, least of all where other programs use them too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(settings: Settings) -> None:
    """Tell the whole story, from the plan to the comparison.

    Raises:
        UserError: scikit-learn is missing, or a setting is impossible.
    """
    config = _config(settings)
    train, test = load_digits(settings.seed)
    torch.manual_seed(settings.seed)
    model = ResidualDigits()
    twin = copy.deepcopy(model)
    sliced = slice_model(model, "time", settings.n, example=train.images[:_BATCH_SIZE])
    _title("Plan")
    click.echo(sliced.plan)
    _title("Schedule of a step")
    click.echo(described(named_schedule(settings.schedule, settings.n, settings.microbatches)), nl=False)
    _title(
        f"Training on {len(train.labels)} handwritten digits; epochs: {settings.epochs}, batch size: {_BATCH_SIZE}, "
        f"micro-batches: {settings.microbatches}"
    )
    with _executor(settings) as sliced.executor:
        seconds = _train_sliced(sliced, train, config, settings)
    accuracy = sliced.evaluate(Loader(test, _BATCH_SIZE), metrics=["accuracy"])["accuracy"]
    click.echo(f"test accuracy       {accuracy:.2%} of {len(test.labels)} digits that were held out")
    _compare(model, twin, train, test, settings=settings, sliced_seconds=seconds)
    click.echo(f"run folder          {settings.runs / config.run_id}")


@contextlib.contextmanager
def _executor(settings: Settings) -> Iterator[Executor]:
    """Yield what runs the stages: this process, or workers of one thread each, as many as stages."""
    if settings.mode == "local":
        yield LocalExecutor()
        return
    with simulated(settings.n, threads=1) as executor:
        click.echo(f"workers             {settings.n} processes of this machine, connected to {executor.address}")
        yield executor


def _title(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


def _config(settings: Settings) -> RunConfig:
    config = RunConfig.create(epochs=settings.epochs, seed=settings.seed, logging__dir=str(settings.runs))
    config.pipeline.n_micro = settings.microbatches
    config.pipeline.schedule = None if settings.schedule == "plain" else settings.schedule
    return config


def _train_sliced(sliced: SlicedModel, train: Digits, config: RunConfig, settings: Settings) -> float:
    started = time.perf_counter()
    with warnings.catch_warnings():
        # That BatchNorm sees micro-batches is said below, and holds for the unsliced training as well.
        warnings.simplefilter("ignore", UserWarning)
        history = sliced.train(
            Loader(train, _BATCH_SIZE, settings.seed),
            OPTIMIZER,
            "cross_entropy",
            scheduler={"name": "CosineAnnealingLR", "params": {"T_max": settings.epochs}},
            run_config=config,
            verbose=True,
        )
    seconds = time.perf_counter() - started
    samples = sum(record["samples"] for record in history)
    click.echo(f"training            loss {history[-1]['loss']:.4f}, {samples / seconds:.0f} samples/s")
    return seconds


def _compare(
    model: nn.Module, twin: nn.Module, train: Digits, test: Digits, *, settings: Settings, sliced_seconds: float
) -> None:
    """Train *twin* whole by a loop written by hand, on the same micro-batches in the same order, and compare."""
    started = time.perf_counter()
    loader = Loader(train, _BATCH_SIZE, settings.seed)
    train_unsliced(twin, loader, epochs=settings.epochs, num_microbatches=settings.microbatches)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        accuracy = float((twin.eval()(test.images).argmax(1) == test.labels).float().mean())
    pieces = ", on the same micro-batches, each normalised by itself" if settings.microbatches > 1 else ""
    click.echo(f"unsliced            test accuracy {accuracy:.2%}, by a loop written by hand{pieces}")
    click.echo(f"time                sliced {sliced_seconds:.1f} s, unsliced {seconds:.1f} s")
    click.echo(f"largest difference  {largest_difference(model, twin):g}, of all parameters and buffers")
