"""Workers as processes of this machine, started, watched and stopped for the user."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from typing_extensions import Self

from torchslicer.api import SlicedModel, slice  # noqa: A004 - the library's main function
from torchslicer.callbacks import Metrics
from torchslicer.discovery import CoordinatorDiscovery
from torchslicer.executors.distributed import DistributedExecutor

_STOP_TIMEOUT_S = 10.0
_KEPT_LINES = 50


class LocalWorkers:
    """Worker processes on this machine, connected to one coordinator.

    They end with the ``with`` block, and also when this process dies: their standard input is then closed.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        count: How many to start.
        threads: Threads of torch in each; by default the cores are shared.
        trust: Packages that models may use.
        device: Where they compute.
    """

    def __init__(
        self, address: str, count: int, *, threads: int | None = None, trust: Sequence[str] = (), device: str = "cpu"
    ) -> None:
        options = ["--device", device, "--log-level", "WARNING", "--exit-with-stdin", "--once"]
        options += ["--threads", str(threads)] if threads else []
        options += [part for package in trust for part in ("--trust", package)]
        self._processes = [
            subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    sys.executable, "-m", "torchslicer.cli", "worker", "--coordinator", address,
                    "--name", f"worker-{index:03d}", *options,
                ],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]  # fmt: skip
        self._said: list[deque[str]] = [deque(maxlen=_KEPT_LINES) for _ in self._processes]
        self._threads = [
            threading.Thread(target=self._listen, args=(index,), name="torchslicer-worker-log", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, index: int) -> None:
        stream = self._processes[index].stderr
        for line in stream or ():
            self._said[index].append(line.rstrip())

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(process.pid for process in self._processes)

    def last_words(self) -> str:
        """Return what the workers last wrote to stderr, for messages."""
        lines = [f"worker-{index:03d}: {line}" for index, said in enumerate(self._said) for line in list(said)[-5:]]
        return "\n".join(lines)

    def stop(self) -> None:
        """End the workers: politely, then firmly."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)
        for thread in self._threads:
            thread.join(timeout=1.0)
        for process in self._processes:
            if process.stderr is not None:
                process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def simulated(
    n: int,
    *,
    transport: str = "tcp",
    threads: int | None = None,
    trust: Sequence[str] = (),
    run_config: Any = None,
) -> Iterator[DistributedExecutor]:
    """Start *n* workers on this machine and yield an executor that uses them; all end with the block.

    Args:
        n: Number of workers.
        transport: ``"tcp"`` or ``"grpc"``; on one host tensors go through UNIX sockets either way.
        threads: Threads of torch in each worker; by default the cores are shared.
        trust: Packages that models may use.
        run_config: Configuration of the executor.
    """
    executor = DistributedExecutor(CoordinatorDiscovery(), "127.0.0.1:0", run_config, transport=transport)
    try:
        with LocalWorkers(executor.address, n, threads=threads, trust=trust):
            yield executor
            executor.close(shut_workers=True)
    finally:
        executor.close()


def simulate(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Any = None,
    criterion: Any = None,
    *,
    n: int = 2,
    transport: str = "tcp",
    threads: int | None = None,
    trust: Sequence[str] = (),
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
        n: Number of stages and workers.
        transport: As for `simulated`.
        threads: As for `simulated`.
        trust: As for `simulated`.
        strategy: As for `slice`.
        pack: As for `slice`.
        cuts: As for `slice`.
        example: As for `slice`.
        run_config: As for `SlicedModel.train`.
        training: Further arguments of `SlicedModel.train`.
    """
    with simulated(n, transport=transport, threads=threads, trust=trust, run_config=run_config) as executor:
        sliced: SlicedModel = slice(
            model, strategy, n if cuts is None else None, executor, pack, cuts=cuts, example=example
        )
        return sliced.train(loader, optimizer, criterion, run_config=run_config, **training)
