"""Workers as processes of this machine, started, watched and stopped for the user."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from torchslicer.api import SlicedModel, slice  # noqa: A004 - the library's main function
from torchslicer.callbacks import Metrics
from torchslicer.discovery import CoordinatorDiscovery
from torchslicer.errors import ConfigError, WorkerFailureError
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.executors.processes import LocalWorkers

__all__ = ["LocalWorkers", "simulate", "simulated"]

_START_TIMEOUT_S = 120.0
_NEVER_TRUSTED = frozenset({*sys.stdlib_module_names, "__main__", "numpy", "torch", "torchslicer"})


@contextlib.contextmanager
def simulated(
    n: int,
    *,
    transport: str = "tcp",
    threads: int | None = None,
    trust: Sequence[str] = (),
    run_config: Any = None,
    same_host: bool = True,
) -> Iterator[DistributedExecutor]:
    """Start *n* workers on this machine and yield an executor that uses them; all end with the block.

    Args:
        n: Number of workers.
        transport: ``"tcp"`` or ``"grpc"``; on one host tensors go through UNIX sockets either way.
        threads: Threads of torch in each worker; by default the cores are shared.
        trust: Packages that models may use.
        run_config: Configuration of the executor.
        same_host: Use UNIX sockets; False lets tensors take *transport*, as between machines.

    Raises:
        ConfigError: *n* is no positive number.
        WorkerFailureError: A worker died; the message holds its last words.
    """
    if n < 1:
        raise ConfigError(f"simulate: expected at least one worker, got n={n}")
    executor = DistributedExecutor(
        CoordinatorDiscovery(), "127.0.0.1:0", run_config, transport=transport, same_host=same_host
    )
    names = [f"worker-{index:03d}" for index in range(n)]
    try:
        with LocalWorkers(executor.address, names, threads=threads, trust=trust) as workers:
            workers.wait_for(lambda: len(executor.coordinator.live()), timeout_s=_START_TIMEOUT_S)
            try:
                with _last_words(workers):
                    yield executor
            finally:
                executor.close(shut_workers=True)
    finally:
        executor.close()


@contextlib.contextmanager
def _last_words(workers: LocalWorkers) -> Iterator[None]:
    """Add what the workers said to the error about one that died."""
    try:
        yield
    except WorkerFailureError as error:
        words = workers.last_words()
        if not words:
            raise
        raise WorkerFailureError(f"{error}\nThe last words of the workers:\n{words}") from error


def simulate(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Any = None,
    criterion: Any = None,
    *,
    n: int = 2,
    transport: str = "tcp",
    threads: int | None = None,
    trust: Sequence[str] | None = None,
    strategy: Any = "uniform",
    pack: Any = None,
    cuts: Sequence[str] | None = None,
    example: Any = None,
    run_config: Any = None,
    **training: Any,
) -> list[Metrics]:
    """Train *model* on *n* worker processes of this machine, and return the history; the model is trained in place.

    Args:
        model: The model.
        loader: Yields batches.
        optimizer: As for `SlicedModel.train`.
        criterion: As for `SlicedModel.train`.
        n: Number of stages and workers; with *cuts*, there are as many as those make.
        transport: As for `simulated`.
        threads: As for `simulated`.
        trust: As for `simulated`; by default the packages that the classes of *model* and *criterion* come from.
        strategy: As for `slice`.
        pack: As for `slice`.
        cuts: As for `slice`.
        example: As for `slice`.
        run_config: As for `SlicedModel.train`.
        training: Further arguments of `SlicedModel.train`.
    """
    # Cut first: what is wrong with that is said before any process starts.
    sliced: SlicedModel = slice(model, strategy, n if cuts is None else None, None, pack, cuts=cuts, example=example)
    trusted = _packages(model, criterion) if trust is None else trust
    with simulated(
        sliced.plan.num_stages, transport=transport, threads=threads, trust=trusted, run_config=run_config
    ) as sliced.executor:
        return sliced.train(loader, optimizer, criterion, run_config=run_config, **training)


def _packages(model: nn.Module, criterion: Any) -> list[str]:
    """Return the user's own packages that objects of a model come from: the workers run the user's code anyway."""
    objects = [*model.modules(), criterion]
    modules = {getattr(item if callable(item) and not isinstance(item, nn.Module) else type(item), "__module__", None)
               for item in objects if item is not None}  # fmt: skip
    roots = {module.split(".")[0] for module in modules if module}
    return sorted(roots - _NEVER_TRUSTED)
