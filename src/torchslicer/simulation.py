"""Workers as processes of this machine, started, watched and stopped for the user."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from torchslicer.api import SlicedModel, slice  # noqa: A004 - the library's main function
from torchslicer.callbacks import Metrics
from torchslicer.discovery import CoordinatorDiscovery
from torchslicer.errors import ConfigError, WorkerFailureError
from torchslicer.executors import arguments
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.executors.processes import LocalWorkers
from torchslicer.settings import names_checked
from torchslicer.transport.sockets import PrivateFolder

__all__ = ["LocalWorkers", "simulate", "simulated"]

_START_TIMEOUT_S = 120.0
_arguments_checked = arguments.checked(
    n=arguments.whole,
    transport=arguments.one_of("grpc", "tcp"),
    threads=arguments.count,
    trust=arguments.names("my_package"),
    allow_builder=arguments.names("my_package.models:make"),
    run_config=arguments.run_config,
    same_host=arguments.flag,
)
_NEVER_TRUSTED = frozenset({*sys.stdlib_module_names, "__main__", "numpy", "torch", "torchslicer"})


@_arguments_checked
@contextlib.contextmanager
def simulated(
    n: int,
    *,
    transport: str = "tcp",
    threads: int | None = None,
    trust: Sequence[str] = (),
    allow_builder: Sequence[str] = (),
    run_config: Any = None,
    same_host: bool = True,
) -> Iterator[DistributedExecutor]:
    """Start *n* workers on this machine and yield an executor that uses them; all end with the block.

    Args:
        n: Number of workers.
        transport: ``"tcp"`` or ``"grpc"``; on one host tensors go through UNIX sockets either way.
        threads: Threads of torch in each worker; by default the cores are shared.
        trust: Packages that models may use.
        allow_builder: Functions that may be called to build models, as for `run_worker`.
        run_config: Configuration of the executor.
        same_host: Use UNIX sockets; False lets tensors take *transport*, as between machines.

    Raises:
        ConfigError: *n* is no positive number, or another argument is of another kind.
        WorkerFailureError: A worker died; the message holds its last words.
    """
    if n < 1:
        raise ConfigError(f"simulate: expected at least one worker, got n={n}")
    names = [f"worker-{index:03d}" for index in range(n)]
    folder = PrivateFolder()  # no other user of this machine can register, or connect to a worker's socket
    try:
        with (
            DistributedExecutor(
                CoordinatorDiscovery(),
                f"unix:{folder.path}/coordinator",
                run_config,
                transport=transport,
                same_host=same_host,
                tls={},  # certificates of a configuration are for other machines
            ) as executor,
            LocalWorkers(
                executor.address, names, threads=threads, trust=trust, allow_builder=allow_builder, folder=folder.path
            ) as workers,
        ):
            executor.at_most = n
            workers.wait_for(lambda: len(executor.coordinator.live()), timeout_s=_START_TIMEOUT_S)
            try:
                with _last_words(workers):
                    yield executor
            finally:
                executor.close(shut_workers=True)
    finally:
        folder.remove()


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


@names_checked("simulate", further=SlicedModel.train)
@_arguments_checked
def simulate(
    model: nn.Module | str,
    loader: Iterable[Any],
    optimizer: Any = None,
    criterion: Any = None,
    *,
    n: int = 2,
    transport: str = "tcp",
    threads: int | None = None,
    trust: Sequence[str] | None = None,
    allow_builder: Sequence[str] | None = None,
    strategy: Any = "uniform",
    pack: Any = None,
    cuts: Sequence[str] | None = None,
    example: Any = None,
    builder_args: Mapping[str, Any] | None = None,
    run_config: Any = None,
    **training: Any,
) -> list[Metrics]:
    """Train *model* on *n* worker processes of this machine, and return the history; the model is trained in place.

    Args:
        model: The model, or the name of a function that makes it, as for `slice`.
        loader: Yields batches.
        optimizer: As for `SlicedModel.train`.
        criterion: As for `SlicedModel.train`.
        n: Number of stages and workers; with *cuts*, there are as many as those make.
        transport: As for `simulated`.
        threads: As for `simulated`.
        trust: As for `simulated`; by default the packages that the classes of *model* and *criterion* come from.
        allow_builder: As for `simulated`; by default what *model* and *pack* name, if *model* is a name.
        strategy: As for `slice`.
        pack: As for `slice`.
        cuts: As for `slice`.
        example: As for `slice`.
        builder_args: As for `slice`.
        run_config: As for `SlicedModel.train`.
        training: Further arguments of `SlicedModel.train`.

    Raises:
        ConfigError: A keyword or setting is unknown, impossible or contradictory.
        SliceError: The model cannot be cut like that.
        RunError: A stage, worker or callback failed, or the loss is not finite.
    """
    # Cut first: what is wrong with that is said before any process starts.
    sliced: SlicedModel = slice(
        model, strategy, n if cuts is None else None, None, pack, cuts=cuts, example=example, builder_args=builder_args
    )
    trusted = _packages(sliced.model, criterion) if trust is None else trust
    builders = _builders(model, pack) if allow_builder is None else allow_builder
    with simulated(
        sliced.plan.num_stages,
        transport=transport,
        threads=threads,
        trust=trusted,
        allow_builder=builders,
        run_config=run_config,
    ) as sliced.executor:
        return sliced.train(loader, optimizer, criterion, run_config=run_config, **training)


def _builders(model: Any, pack: Any) -> list[str]:
    """Return the user's own functions that make a model given by name: the workers run the user's code anyway."""
    if not isinstance(model, str):
        return []
    module, name = getattr(pack, "__module__", None), getattr(pack, "__qualname__", "<")
    usable = module is not None and "<" not in name and module.split(".", maxsplit=1)[0] not in _NEVER_TRUSTED
    return [model, f"{module}:{name}"] if usable else [model]


def _packages(model: nn.Module, criterion: Any) -> list[str]:
    """Return the user's own packages that objects of a model come from: the workers run the user's code anyway."""
    objects = [*model.modules(), criterion]
    modules = {getattr(item if callable(item) and not isinstance(item, nn.Module) else type(item), "__module__", None)
               for item in objects if item is not None}  # fmt: skip
    roots = {module.split(".")[0] for module in modules if module}
    return sorted(roots - _NEVER_TRUSTED)
