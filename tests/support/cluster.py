"""Worker processes for the tests, started once for many runs, and other programs that are watched line by line.

Importing torch costs seconds, so the tests share the workers: a worker serves run after run, and a run with
fewer stages than workers leaves the rest idle.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import Self

import torchslicer as ts
from tests.support.leak_police import LATE_THREADS
from torchslicer.config import RunConfig
from torchslicer.discovery import StaticDiscovery
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.serving import run_worker
from torchslicer.simulation import simulated

TRANSPORTS = ("unix", "tcp", "grpc")
"""What tensors travel by: UNIX sockets on one host, and what they take between hosts."""


@contextlib.contextmanager
def travelling_by(executor: DistributedExecutor, transport: str) -> Iterator[DistributedExecutor]:
    """Let the runs of the block use a transport, and check that they did."""
    before = executor.transport, executor.same_host
    executor.transport, executor.same_host = "tcp" if transport == "unix" else transport, transport == "unix"
    try:
        yield executor
    finally:
        executor.transport, executor.same_host = before


class Program:
    """A process whose output (both streams in one) is collected while it runs."""

    grace_s = 0.1
    """How long it may take to end when its standard input is closed; then it is killed."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            **options,
        )
        self._thread = threading.Thread(target=self._collect, name="test-program", daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        for line in self.process.stdout or ():
            with self._arrived:
                self.lines.append(line.rstrip())
                self._arrived.notify_all()

    @property
    def output(self) -> str:
        """What it has written so far."""
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, *, timeout_s: float = 60.0) -> re.Match[str]:
        """Return the match of the first line that *pattern* is found in."""
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while True:
                for line in self.lines:
                    if match := re.search(pattern, line):
                        return match
                left = deadline - time.monotonic()
                ended = self.process.poll() is not None and not self._thread.is_alive()
                if ended or left <= 0:
                    pytest.fail(f"no line like {pattern!r} came:\n{self.output}")
                self._arrived.wait(min(left, 0.2))

    def wait(self, *, timeout_s: float = 60.0) -> int:
        """Return the exit code."""
        code = self.process.wait(timeout_s)
        self._thread.join(timeout=5.0)
        return code

    def close(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.grace_s)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        self._thread.join(timeout=5.0)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_program(*options: str, **popen: Any) -> Program:
    """Start ``torchslicer worker`` with one thread; it ends with its standard input."""
    fixed = ["-m", "torchslicer.cli", "worker", "--threads", "1", "--trust", "tests", "--exit-with-stdin"]
    program = Program([*fixed, *options], **popen)
    program.grace_s = 5.0  # it removes its socket
    return program


@dataclass(frozen=True)
class Peers:
    """Workers that listen for a P2P driver."""

    programs: tuple[Program, ...]
    addresses: tuple[str, ...]

    @contextlib.contextmanager
    def driver(self, count: int | None = None, **options: Any) -> Iterator[DistributedExecutor]:
        """Yield an executor for the first *count* peers."""
        executor = DistributedExecutor(StaticDiscovery(peers=self.addresses[:count]), **options)
        try:
            yield executor
        finally:
            executor.close()


@contextlib.contextmanager
def listening(count: int) -> Iterator[Peers]:
    """Start *count* workers that listen."""
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(worker_program("--listen", "127.0.0.1:0", "--name", f"peer-{index}"))
            for index in range(count)
        ]
        addresses = [program.wait_for(r"listening for a driver on (\S+)")[1] for program in programs]
        yield Peers(tuple(programs), tuple(addresses))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread here, as in the workers: bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[DistributedExecutor]:
    """An executor with four workers of one thread each, for all tests."""
    patient = RunConfig.create(fault_tolerance__ping_timeout_s=60.0)  # a test in between may hold the interpreter
    with simulated(4, threads=1, trust=["tests"], run_config=patient) as executor:
        # A control channel starts a thread when it first has to queue something large.
        late = {f"send to {member.control.peer}" for member in executor.coordinator.live()}
        LATE_THREADS.update(late)
        yield executor
        LATE_THREADS.difference_update(late)


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    """Two workers that listen, for all tests."""
    with listening(2) as found:
        yield found


def free_address() -> str:
    """Return an address of loopback that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@contextlib.contextmanager
def worker_thread(**options: Any) -> Iterator[list[BaseException]]:
    """Run a worker in a thread of this process; yields the list that an error of it is put into."""
    stop, errors = threading.Event(), list[BaseException]()

    def serve() -> None:
        try:
            run_worker(stop=stop, threads=1, device="cpu", trust=["tests"], **options)
        except (ts.TorchSlicerError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=serve, name="test-worker")
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join(timeout=20.0)


def until(condition: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
    """Wait until *condition* is true and return what it is."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def write_script(folder: Path, text: str, name: str = "driver.py") -> str:
    """Write a script and return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)
