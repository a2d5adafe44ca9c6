"""Training in worker processes gives the bits of training in this process, whatever carries the tensors."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support.cluster import TRANSPORTS, Peers, travelling_by
from tests.support.driver import train_case
from tests.support.models import MAIN, Case
from tests.support.oracle import ADAM, ADAMW, SGD, Result, assert_same_bits
from torchslicer.executors.distributed import DistributedExecutor

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning"),
]

PLAIN: dict[str, Any] = {}
GPIPE: dict[str, Any] = {"schedule": "gpipe", "n_micro_batches": 4}
ONE_F_ONE_B: dict[str, Any] = {"schedule": "1f1b", "n_micro_batches": 4}
EAGER: dict[str, Any] = {"schedule": "eager-1f1b", "n_micro_batches": 4}
SCHEDULES = {"plain": PLAIN, "gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "eager-1f1b": EAGER}
SPECS = {"mlp": SGD, "resnet18": SGD, "unet": ADAM, "gpt": ADAMW, "lstm": ADAM, "moe": SGD}
CASES = {case.name: case for case in MAIN}
QUICK_STEPS, FULL_STEPS = 4, 20

# Every model with plain, GPipe and 1F1B; n and transport vary along, so that each pair of values comes up somewhere.
QUICK = [
    ("mlp", "plain", 2, "unix"), ("mlp", "gpipe", 3, "tcp"), ("mlp", "1f1b", 4, "grpc"),
    ("mlp", "eager-1f1b", 3, "unix"), ("gpt", "eager-1f1b", 2, "tcp"),
    ("unet", "plain", 3, "grpc"), ("unet", "gpipe", 4, "unix"), ("unet", "1f1b", 2, "tcp"),
    ("gpt", "plain", 4, "tcp"), ("gpt", "gpipe", 2, "grpc"), ("gpt", "1f1b", 3, "unix"),
    ("lstm", "plain", 2, "grpc"), ("lstm", "gpipe", 3, "unix"), ("lstm", "1f1b", 4, "tcp"),
    ("moe", "plain", 3, "unix"), ("moe", "gpipe", 4, "tcp"), ("moe", "1f1b", 2, "grpc"),
]  # fmt: skip
FULL = [
    (case, schedule, n, transport)
    for case in CASES
    for schedule in SCHEDULES
    for n in (2, 3, 4)
    for transport in TRANSPORTS
]
PEER_TO_PEER = [("mlp", "1f1b", "tcp"), ("gpt", "gpipe", "unix"), ("unet", "plain", "grpc")]


def train(case: Case, executor: Any, *, n: int, steps: int, **options: Any) -> Result:
    """Train with dropout on the executor (here, if it is None)."""
    extra = {} if executor is None else {"executor": executor}
    return train_case(case, SPECS[case.name], n=n, steps=steps, dropout=0.1, slice_options=extra, **options)


@pytest.fixture
def repeats(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--repeats"))


@functools.cache
def expected(name: str, schedule: str, steps: int) -> Result:
    """Return what two stages in this process make of it; that their number changes no bit is tested elsewhere."""
    return train(CASES[name], None, n=2, steps=steps, **SCHEDULES[schedule])


def assert_exact(name: str, schedule: str, executor: DistributedExecutor, *, n: int, steps: int) -> None:
    """Fail unless the executor's run gives the bits of a local one."""
    want = expected(name, schedule, steps)
    got = train(CASES[name], executor, n=n, steps=steps, **SCHEDULES[schedule])
    assert_same_bits(got, want, where=f"{name}, {schedule}, n={n}")
    assert [record["loss"] for record in got.history] == [record["loss"] for record in want.history]
    assert [record["lr"] for record in got.history] == [record["lr"] for record in want.history]


@pytest.mark.parametrize(("name", "schedule", "n", "transport"), QUICK)
def test_workers_give_the_bits_of_local_training(
    pool: DistributedExecutor, name: str, schedule: str, n: int, transport: str
) -> None:
    with travelling_by(pool, transport):
        assert_exact(name, schedule, pool, n=n, steps=QUICK_STEPS)


def test_resnet_on_workers_gives_the_bits_of_local_training(pool: DistributedExecutor) -> None:
    with travelling_by(pool, "tcp"):
        assert_exact("resnet18", "plain", pool, n=3, steps=1)


@pytest.mark.parametrize(("name", "schedule", "transport"), PEER_TO_PEER)
def test_peers_give_the_bits_of_local_training(peers: Peers, name: str, schedule: str, transport: str) -> None:
    with peers.driver() as executor, travelling_by(executor, transport):
        assert_exact(name, schedule, executor, n=2, steps=QUICK_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", FULL, ids=lambda run: "-".join(map(str, run)))
def test_full_matrix_on_workers(pool: DistributedExecutor, repeats: int, run: tuple[str, str, int, str]) -> None:
    name, schedule, n, transport = run
    with travelling_by(pool, transport):
        for _ in range(repeats):
            assert_exact(name, schedule, pool, n=n, steps=FULL_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_full_matrix_on_peers(peers: Peers, repeats: int, name: str, schedule: str, transport: str) -> None:
    with peers.driver() as executor, travelling_by(executor, transport):
        for _ in range(repeats):
            assert_exact(name, schedule, executor, n=2, steps=FULL_STEPS)
