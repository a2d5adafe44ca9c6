"""``torchslicer selftest``: do these workers give the bits of local training, and how fast is every link?"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import nn

from torchslicer.api import slice as slice_model
from torchslicer.callbacks import TrainingCallback
from torchslicer.cli.digits import largest_difference
from torchslicer.discovery import CoordinatorDiscovery
from torchslicer.errors import WorkerFailureError
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.simulation import simulated

_SMALL, _LARGE = 256, 4 << 20  # floats: 1 KiB for the latency, 16 MiB for the bandwidth
_SMALL_TRIES, _LARGE_TRIES = 20, 5
_TOLERANCE = 1e-5
_OPTIMIZER: dict[str, Any] = {"name": "AdamW", "params": {"lr": 0.01}}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpipe": {"schedule": "gpipe", "num_microbatches": 4, "batch_norm": "deferred"},
    "1f1b": {"schedule": "1f1b", "num_microbatches": 4, "batch_norm": "deferred"},
}


@click.command()
@click.option("--coordinator", metavar="HOST:PORT", help="Listen here for your workers (default: start some here).")
@click.option("--n", "-n", "n", type=click.IntRange(1), default=2, show_default=True, help="Number of workers.")
@click.option("--transport", type=click.Choice(["tcp", "grpc"]), default="grpc", show_default=True, help="For tensors.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds to wait for the workers.")
def selftest(*, coordinator: str | None, n: int, transport: str, timeout: float) -> None:
    """Train small models on the workers and here, compare them, and measure every link.

    The exit code is 0 if the results agree.
    """
    with _one_thread(), _executor(coordinator, n, transport, timeout) as executor:
        names = [member.node for member in executor.coordinator.wait_for(n, timeout_s=timeout)]
        click.echo(f"workers   {', '.join(names)}")
        worst = max(_check_parity(executor, n, name, case) for name, case in _models(n).items())
        for line in _Links(executor, names).lines():
            click.echo(line)
    if worst > _TOLERANCE:
        raise WorkerFailureError(f"the workers' results differ from local training by up to {worst:g}")
    click.echo("passed" if worst == 0 else f"passed, with differences up to {worst:g}: {_WHY}")


_WHY = "other processors or numbers of threads add up in another order"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _executor(address: str | None, n: int, transport: str, timeout_s: float) -> Iterator[DistributedExecutor]:
    if address is None:
        with simulated(n, transport=transport, threads=1) as executor:
            yield executor
        return
    with DistributedExecutor(CoordinatorDiscovery(timeout_s=timeout_s), address, transport=transport) as executor:
        click.echo(f"waiting for {n} workers at {executor.address}")
        yield executor


def _models(n: int) -> dict[str, tuple[nn.Module, list[Any]]]:
    """Models long enough for *n* stages, and batches for each: dropout and BatchNorm; tied weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [
            layer
            for _ in range(n)
            for layer in (nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        ]
        convolved = nn.Sequential(*blocks, nn.Linear(16, 4))
        tied = nn.Sequential(
            nn.Embedding(32, 16), *(nn.Linear(16, 16) for _ in range(n)), nn.Linear(16, 32, bias=False)
        )
    tied[-1].weight = tied[0].weight
    vectors = [
        (torch.randn(16, 16, generator=generator), torch.randint(4, (16,), generator=generator)) for _ in range(4)
    ]
    words = [tuple(torch.randint(32, (2, 16), generator=generator)) for _ in range(4)]
    return {"dropout and BatchNorm": (convolved, vectors), "tied weights": (tied, words)}


def _check_parity(executor: DistributedExecutor, n: int, name: str, case: tuple[nn.Module, list[Any]]) -> float:
    """Train on the workers and here; say and return the largest difference of any parameter or buffer."""
    worst = 0.0
    for schedule, options in _SCHEDULES.items():
        here, there = copy.deepcopy(case[0]), copy.deepcopy(case[0])
        for model, runs_it in ((here, None), (there, executor)):
            sliced = slice_model(model, n=n, executor=runs_it)
            sliced.train(case[1], _OPTIMIZER, "cross_entropy", epochs=2, max_grad_norm=1.0, run_dir=False, **options)
        difference = largest_difference(here, there)
        click.echo(
            f"parity    {name}, {schedule}: {'exact' if difference == 0 else f'largest difference {difference:g}'}"
        )
        worst = max(worst, difference)
    return worst


@dataclass(frozen=True)
class _Times:
    """Seconds for a small and a large tensor through a chain of workers and back."""

    small: float
    large: float


class _Links:
    """Measures the links between this process and the workers, and the way over each worker to the next."""

    def __init__(self, executor: DistributedExecutor, names: list[str]) -> None:
        self._executor = executor
        self._names = names

    def lines(self) -> Iterator[str]:
        """Measure, and yield one line a link."""
        alone = {name: self._measure([name]) for name in self._names}
        for name, times in alone.items():
            yield _line(f"here - {name}", times.small, times.large / 2)
        for first, second in zip(self._names, self._names[1:], strict=False):
            both = self._measure([first, second])
            yield _line(f"here - {first} - {second} - here", both.small, both.large / 3)

    def _measure(self, names: list[str]) -> _Times:
        """Send tensors through the workers *names*, in a run of theirs, and take the time."""
        self._executor.workers = names
        model = nn.Sequential(*(nn.Identity() for _ in names[1:]), nn.PReLU())
        sliced = slice_model(model, n=len(names), executor=self._executor)
        found: list[_Times] = []
        small, large = torch.zeros(1, _SMALL), torch.zeros(1, _LARGE)

        class Probe(TrainingCallback):
            def on_epoch_begin(self, epoch: int) -> None:  # noqa: ARG002 - the name is given
                found.append(
                    _Times(
                        statistics.median(_seconds(lambda: sliced.predict([small]), _SMALL_TRIES)),
                        min(_seconds(lambda: sliced.predict([large]), _LARGE_TRIES)),
                    )
                )

        batch = (torch.zeros(1, 1), torch.zeros(1, 1))
        try:
            sliced.train([batch], "SGD", "mse", epochs=1, callbacks=[Probe()], run_dir=False)
        finally:
            self._executor.workers = None
        return found[0]


def _seconds(work: Callable[[], object], tries: int) -> list[float]:
    taken = []
    for _ in range(tries):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


def _line(link: str, round_trip_s: float, large_s: float) -> str:
    return (
        f"link      {link}: {_LARGE * 4 / 2**20 / large_s:.0f} MiB/s, round trip of 1 KiB {round_trip_s * 1e3:.2f} ms"
    )
