"""Three workers that outlive the tests, each test with a coordinator of its own on the port that they know.

So every test also shows that workers come back.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import torchslicer as ts
from tests.support.cluster import Program
from tests.support.saboteur import NUM_STAGES, batches, model_with
from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery
from torchslicer.errors import WorkerFailureError
from torchslicer.executors.distributed import DistributedExecutor

INTERVAL_S, TIMEOUT_S = 0.3, 1.7
GIVEN_UP_S = 2 * (INTERVAL_S + TIMEOUT_S)
CONFIG = RunConfig.create(fault_tolerance={"heartbeat_interval_s": INTERVAL_S, "ping_timeout_s": TIMEOUT_S})
SLACK_S = 2.0
"""What a busy machine adds to a stated time."""
SGD = {"name": "SGD", "params": {"lr": 0.1}}


@dataclass
class Crew:
    """Workers that know one port, kept running by a process of their own, and the executor of the test."""

    address: str
    keeper: Program
    executor: DistributedExecutor = None  # type: ignore[assignment]

    @property
    def pids(self) -> dict[str, int]:
        """The worker processes that there are, or were until a moment ago."""
        matches = [re.fullmatch(r"(worker-\d) (\d+)", line) for line in self.keeper.lines]
        return {match[1]: int(match[2]) for match in matches if match is not None}

    def signal(self, stage: int, number: int) -> None:
        """Send a signal to the worker of a stage."""
        os.kill(self.pids[f"worker-{stage}"], number)

    def wait_for(self, count: int = NUM_STAGES) -> None:
        """Wait until the workers are registered."""
        try:
            self.executor.coordinator.wait_for(count, timeout_s=100.0)
        except WorkerFailureError as error:
            pytest.fail(f"{error}\n{self.keeper.output}")


def _lasting_address() -> str:
    """Return an address that nobody is given while no test listens there: its port is none of the automatic ones."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
    raise RuntimeError("no port is free")


@pytest.fixture(scope="session")
def hired() -> Iterator[Crew]:
    """The workers; started with the first test that needs them."""
    address = _lasting_address()
    names = [f"worker-{index}" for index in range(NUM_STAGES)]
    with Program(["-m", "tests.support.supervisor", address, *names]) as keeper:
        yield Crew(address, keeper)
        keeper.process.stdin.close()  # type: ignore[union-attr]
        keeper.wait()


@pytest.fixture
def crew(hired: Crew) -> Iterator[Crew]:
    """The workers, registered with an executor of this test."""
    hired.executor = executor_at(hired.address)
    try:
        hired.wait_for()
        yield hired
    finally:
        hired.executor.close()


def executor_at(address: str, **options: Any) -> DistributedExecutor:
    """Return a coordinator that gives silent workers up soon."""
    return DistributedExecutor(CoordinatorDiscovery(run_id="failures"), address, CONFIG, **options)


def train(crew: Crew, model: torch.nn.Module, data: Any = None, *, optimizer: Any = SGD, **options: Any) -> Any:
    """Train on the workers."""
    sliced = ts.slice(model, n=NUM_STAGES, executor=crew.executor)
    options = {"epochs": 1, "run_dir": False, "num_microbatches": 2, **options}
    return sliced.train(batches() if data is None else data, optimizer, "mse", **options)


def assert_usable(crew: Crew) -> None:
    """Fail unless the same workers train in the same executor, to the same bits as without them."""
    model = model_with()
    alone = copy.deepcopy(model)
    data = batches(2)
    got = train(crew, model, data)
    want = ts.slice(alone, n=NUM_STAGES).train(data, SGD, "mse", epochs=1, run_dir=False, num_microbatches=2)
    assert got[0]["loss"] == want[0]["loss"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"took {took:.1f} s, allowed are {seconds:.1f} s"


@contextlib.contextmanager
def fails(error: type[BaseException], pattern: str = "", *, seconds: float = 10.0) -> Iterator[Any]:
    """Fail unless the block raises *error*, with a text like *pattern*, in time."""
    with within(seconds), pytest.raises(error, match=f"(?s){pattern}") as caught:
        yield caught
