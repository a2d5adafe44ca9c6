"""Whatever goes wrong: an error in time that says where, and workers that serve the next run. With real processes.

The workers outlive the tests: see `tests.support.crew`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchslicer as ts
from tests.support.cluster import Peers, Program, free_address, travelling_by, worker_program, write_script
from tests.support.crew import (
    CONFIG,
    GIVEN_UP_S,
    SGD,
    SLACK_S,
    Crew,
    assert_usable,
    executor_at,
    fails,
    train,
    within,
)
from tests.support.saboteur import NUM_STAGES, Saboteur, batches, model_with
from torchslicer.callbacks import TrainingCallback
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import (
    CallbackError,
    NonFiniteLossError,
    StageError,
    TransportError,
    WorkerFailureError,
)
from torchslicer.executors.distributed import DistributedExecutor

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]

# A stage raises


@pytest.mark.parametrize("stage", range(NUM_STAGES))
@pytest.mark.parametrize("harm", ["raise", "backward"])
def test_a_stage_raises(crew: Crew, harm: str, stage: int) -> None:
    before = crew.pids
    with fails(StageError) as caught:
        train(crew, model_with(Saboteur(harm), stage))
    doing = "backward" if harm == "backward" else "forward"
    head, text = str(caught.value).split("\n", 1)
    where = rf"stage {stage} on worker 'worker-{stage}' \(127\.0\.0\.1:\d+\)"
    assert re.match(rf"{where}: {doing} of .*ValueError: boom", head)
    assert "Traceback on the worker:" in text
    assert 'raise ValueError("boom")' in text
    assert "tests/support/saboteur.py" in text
    assert_usable(crew)
    assert crew.pids == before


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("width", "shapes|size"),
        ("exit", "SystemExit: 3"),
        ("unprintable", "UnprintableError"),
        ("surrogate", r"half a character \?"),
    ],
)
def test_other_errors_of_a_stage(crew: Crew, harm: str, words: str) -> None:
    with fails(StageError, rf"stage 1 on worker 'worker-1' .*({words})"):
        train(crew, model_with(Saboteur(harm)))
    assert_usable(crew)


def test_an_optimizer_step_raises(crew: Crew) -> None:
    with fails(StageError, r"stage \d on worker 'worker-\d' .*RuntimeError: SparseAdam does not"):
        train(crew, model_with(), optimizer={"name": "SparseAdam", "params": {"lr": 0.1}})
    assert_usable(crew)


def test_the_loss_is_not_finite(crew: Crew) -> None:
    with fails(NonFiniteLossError, r"step 1: the loss is nan; no parameter was updated"):
        train(crew, model_with(Saboteur("nan")))
    assert_usable(crew)


def test_a_stage_raises_in_evaluation(crew: Crew) -> None:
    with fails(StageError, "stage 1 on worker 'worker-1' .*boom"):
        train(crew, model_with(Saboteur("raise", at=5)), batches(2), eval_loader=batches(2))
    assert_usable(crew)


# The driver's own errors


class _Raises(TrainingCallback):
    def on_step_end(self, *_: Any) -> None:
        raise KeyError("mine")


def test_a_callback_raises(crew: Crew) -> None:
    with fails(CallbackError):
        train(crew, model_with(), callbacks=[_Raises()])
    assert_usable(crew)


class _Broken:
    def __iter__(self) -> Iterator[Any]:
        yield from batches(3)
        raise OSError("the disk is gone")


def test_the_loader_raises(crew: Crew) -> None:
    with fails(OSError, "the disk is gone"):
        train(crew, model_with(), _Broken())
    assert_usable(crew)


# Workers that die


ANYWHERE = [(0, "unix"), (1, "unix"), (2, "unix"), (1, "tcp"), (1, "grpc")]


@pytest.mark.parametrize(("stage", "transport"), ANYWHERE)
def test_a_worker_is_killed_in_a_step(crew: Crew, stage: int, transport: str) -> None:
    with travelling_by(crew.executor, transport), fails(WorkerFailureError, seconds=GIVEN_UP_S + SLACK_S) as caught:
        train(crew, model_with(Saboteur("SIGKILL"), stage))
    assert f"stage {stage} on worker 'worker-{stage}' (127.0.0.1:" in str(caught.value)
    assert [member.node for member in crew.executor.coordinator.wait_for(2, timeout_s=5.0)] == [
        f"worker-{index}" for index in range(NUM_STAGES) if index != stage
    ]
    assert_usable(crew)


class _Kills(TrainingCallback):
    """Sends a signal to a worker after a step."""

    def __init__(self, crew: Crew, stage: int, number: int) -> None:
        self.crew, self.stage, self.number = crew, stage, number
        self.done_at = 0.0

    def on_step_end(self, step: int, *_: Any) -> None:
        if step == 1:
            self.crew.signal(self.stage, self.number)
            self.done_at = time.monotonic()


def test_a_worker_is_killed_while_idle(crew: Crew) -> None:
    before = crew.pids
    crew.signal(2, signal.SIGKILL)
    crew.keeper.wait_for("worker-2 ended -9")
    with crew.executor.coordinator._condition:  # a run that begins before this would take it for alive
        assert crew.executor.coordinator._condition.wait_for(lambda: len(crew.executor.coordinator.members) < 3, 5.0)
    assert_usable(crew)  # a new one of the same name has taken its place
    assert crew.pids["worker-2"] != before["worker-2"]


def test_a_worker_is_killed_between_steps(crew: Crew) -> None:
    killer = _Kills(crew, 1, signal.SIGKILL)
    with fails(WorkerFailureError, "stage 1 on worker 'worker-1' .* failed", seconds=60):
        train(crew, model_with(), batches(50), callbacks=[killer])
    assert time.monotonic() - killer.done_at < GIVEN_UP_S + SLACK_S
    assert_usable(crew)


def test_a_worker_is_killed_while_it_is_set_up(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchslicer.cluster.run import ClusterRun

    link = ClusterRun._link

    def killing(run: ClusterRun, rank: int, member: Any) -> None:
        if rank == 1:
            crew.signal(0, signal.SIGKILL)
            crew.keeper.wait_for("worker-0 ended")
        link(run, rank, member)

    monkeypatch.setattr(ClusterRun, "_link", killing)
    with fails(WorkerFailureError, "stage 0 on worker 'worker-0'"):
        train(crew, model_with())
    monkeypatch.undo()
    with within(30):
        assert_usable(crew)


def test_a_worker_is_told_to_stop_during_a_run(crew: Crew) -> None:
    killer = _Kills(crew, 1, signal.SIGTERM)
    with fails(WorkerFailureError, r"stage 1 on worker 'worker-1' .*was told to stop"):
        train(crew, model_with(), batches(50), callbacks=[killer])
    crew.keeper.wait_for("worker-1 ended 0", timeout_s=10.0)
    assert_usable(crew)


# Workers that go silent, are slow, or are cut off


@pytest.mark.parametrize(("stage", "transport"), ANYWHERE)
def test_a_worker_goes_silent_and_comes_back(crew: Crew, stage: int, transport: str) -> None:
    killer = _Kills(crew, stage, signal.SIGSTOP)
    with (
        travelling_by(crew.executor, transport),
        fails(WorkerFailureError, f"stage {stage} on worker 'worker-{stage}' .* no sign of life", seconds=60),
    ):
        train(crew, model_with(), batches(50), callbacks=[killer])
    assert time.monotonic() - killer.done_at < GIVEN_UP_S + SLACK_S
    crew.executor.coordinator.wait_for(2, timeout_s=5.0)
    crew.signal(stage, signal.SIGCONT)  # what it sends now belongs to a run that is over
    assert_usable(crew)


def test_a_worker_goes_silent_while_much_is_sent_to_it(crew: Crew) -> None:
    """The driver waits for room in a queue then, not for a message."""
    killer = _Kills(crew, 0, signal.SIGSTOP)
    wide = torch.nn.Sequential(torch.nn.Linear(1 << 20, 1), torch.nn.Tanh(), torch.nn.Linear(1, 1))
    data = [(torch.zeros(32, 1 << 20), torch.zeros(32, 1)) for _ in range(3)]  # 128 MB each
    with fails(WorkerFailureError, "stage 0 on worker 'worker-0' .* no sign of life", seconds=60):
        train(crew, wide, data, callbacks=[killer], epochs=5)
    assert time.monotonic() - killer.done_at < GIVEN_UP_S + SLACK_S
    crew.signal(0, signal.SIGCONT)
    assert_usable(crew)


def test_a_worker_goes_silent_while_it_is_set_up(crew: Crew) -> None:
    crew.signal(1, signal.SIGSTOP)
    with fails(WorkerFailureError, "stage 1 on worker 'worker-1' .* no sign", seconds=GIVEN_UP_S + SLACK_S):
        train(crew, model_with())
    crew.signal(1, signal.SIGCONT)
    with within(10):
        assert_usable(crew)


def test_a_slow_worker_is_not_given_up(crew: Crew) -> None:
    history = train(crew, model_with(Saboteur("sleep", seconds=2 * GIVEN_UP_S)))
    assert len(history) == 1
    assert len(crew.executor.coordinator.live()) == NUM_STAGES


def test_the_connection_between_workers_breaks(crew: Crew) -> None:
    before = crew.pids
    with fails(WorkerFailureError, r"stage \d on worker .* the connection to stage \d .*broke"):
        train(crew, model_with(Saboteur("links")))
    assert_usable(crew)
    assert crew.pids == before


def test_a_stage_that_never_returns(crew: Crew) -> None:
    crew.executor.stall_timeout_s = 1.5
    with fails(WorkerFailureError, seconds=1.5 + 3 + SLACK_S) as caught:
        train(crew, model_with(Saboteur("sleep", seconds=7.0)))
    text = str(caught.value)
    assert re.match(r"stage 1 on worker 'worker-1' \(127\.0\.0\.1:\d+\): nothing came from any worker for 1.5 s", text)
    assert re.search(r"stage 1 on worker 'worker-1' .* computes: step 1", text)
    assert re.search(r"stage 2 on worker 'worker-2' .* waits for an activation of stage 2", text)
    assert len(crew.executor.coordinator.live()) == NUM_STAGES  # it is there yet, and given nothing until it is through
    assert_usable(crew)


# Who may register


def test_too_few_workers(crew: Crew) -> None:
    crew.executor.discovery = CoordinatorDiscovery(run_id="failures", timeout_s=0.3)
    deep = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    with fails(WorkerFailureError, seconds=5) as caught:
        ts.slice(deep, n=4, executor=crew.executor).train(batches(1), SGD, "mse", epochs=1, run_dir=False)
    text = str(caught.value)
    assert f"4 workers are needed, 3 registered at {crew.address} within 0.3 s: worker 'worker-0'" in text
    assert f"torchslicer worker --coordinator {crew.address}" in text
    crew.executor.discovery = CoordinatorDiscovery(run_id="failures")
    assert_usable(crew)


OTHER_VERSION = """
import sys
import torchslicer.cluster.worker as worker
worker.__version__ = "0.0.1"
import torchslicer as ts
ts.run_worker(sys.argv[1], name="old")
"""


def test_a_worker_of_another_version(crew: Crew, tmp_path: Any) -> None:
    with Program([write_script(tmp_path, OTHER_VERSION), crew.address]) as program:
        assert program.wait() != 0
        assert re.search(r"refused this worker: it has torchslicer 0\.0\.1, the coordinator \d", program.output)
    [reason] = crew.executor.coordinator.refused
    assert "it has torchslicer 0.0.1" in reason
    assert_usable(crew)


def test_a_second_worker_of_the_same_name_is_refused(crew: Crew) -> None:
    with worker_program("--coordinator", crew.address, "--name", "worker-1") as program:
        assert program.wait() != 0
        assert "a worker of the name 'worker-1' is registered already" in program.output
    assert_usable(crew)


def test_the_port_is_in_use(crew: Crew) -> None:
    with fails(TransportError, f"cannot listen on {crew.address}: .*choose another", seconds=5):
        executor_at(crew.address)
    assert_usable(crew)


# The driver ends

DRIVER = """
import sys, torch
import torchslicer as ts
from tests.support.crew import executor_at
from tests.support.saboteur import batches, model_with

class Tells(ts.TrainingCallback):
    def on_step_end(self, step, metrics):
        print("step", step, flush=True)

with executor_at(sys.argv[1]) as executor:
    ts.slice(model_with(), n=3, executor=executor).train(batches(100000), {"name": "SGD", "params": {"lr": 0.1}}, "mse",
        epochs=1, run_dir=False, callbacks=[Tells()])
"""


def run_driver(crew: Crew, folder: Any) -> Program:
    crew.executor.close()
    return Program([write_script(folder, DRIVER), crew.address], env={**os.environ, "PYTHONPATH": str(Path.cwd())})


def test_the_driver_is_killed(crew: Crew, tmp_path: Any) -> None:
    before = crew.pids
    with run_driver(crew, tmp_path) as driver:
        driver.wait_for("^step 5")
        driver.process.kill()
        driver.wait()
    crew.executor = executor_at(crew.address)
    crew.wait_for()
    assert_usable(crew)
    assert crew.pids == before


def test_control_c_in_the_driver(crew: Crew, tmp_path: Any) -> None:
    before = crew.pids
    with run_driver(crew, tmp_path) as driver:
        driver.wait_for("^step 5")
        driver.process.send_signal(signal.SIGINT)
        with within(10):
            assert driver.wait() not in (0, None)
        assert "KeyboardInterrupt" in driver.output
    crew.executor = executor_at(crew.address)
    crew.wait_for()
    assert_usable(crew)
    assert crew.pids == before


@contextlib.contextmanager
def pressing_control_c(monkeypatch: pytest.MonkeyPatch, after_s: float) -> Iterator[None]:
    """Interrupt this process once; again only when Python swallowed it, as in a weak reference's callback."""
    swallowed, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda args: swallowed.set())

    def press() -> None:
        ended.wait(after_s)
        swallowed.set()
        while not ended.is_set():
            if swallowed.wait(0.05):
                swallowed.clear()
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        monkeypatch.undo()


def test_control_c_in_a_notebook(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes on, and so do the executor and its workers."""
    before = crew.pids
    with pressing_control_c(monkeypatch, after_s=0.5), fails(KeyboardInterrupt):
        train(crew, model_with(), batches(100_000))
    crew.wait_for()
    assert_usable(crew)
    assert crew.pids == before


def test_the_log_of_a_worker_is_short(crew: Crew) -> None:
    start = len(crew.keeper.lines)
    assert_usable(crew)
    with pytest.raises(StageError):
        train(crew, model_with(Saboteur("raise"), 1))
    assert_usable(crew)
    said = crew.keeper.lines[start:]
    others = [line for line in said if ": holds stage " not in line]
    assert len(said) - len(others) == 3 * NUM_STAGES, said  # one a run and worker
    assert len(others) <= 6, others


# Without a coordinator


def test_peers_after_a_failure_and_after_a_driver(peers: Peers) -> None:
    data, options = batches(2), {"epochs": 1, "run_dir": False}
    with peers.driver(run_config=CONFIG) as executor:
        model = model_with(Saboteur("raise"), stage=0)
        with fails(StageError, r"stage 0 on worker 'peer-0' .*boom"):
            ts.slice(model, n=2, executor=executor).train(batches(), SGD, "mse", num_microbatches=2, **options)
        ts.slice(model_with(), n=2, executor=executor).train(data, SGD, "mse", **options)
    with peers.driver(run_config=CONFIG) as executor:
        ts.slice(model_with(), n=2, executor=executor).train(data, SGD, "mse", **options)


def test_nobody_listens() -> None:
    address = free_address()
    executor = DistributedExecutor(StaticDiscovery(peers=[address, address], timeout_s=0.3), run_config=CONFIG)
    with executor, fails(WorkerFailureError, f"no worker listens at {address}"):
        ts.slice(model_with(), n=2, executor=executor).train(batches(1), SGD, "mse", epochs=1, run_dir=False)


def test_a_port_is_free_again_though_a_forked_process_lives_on() -> None:
    """As those of a DataLoader do, which have a copy of every descriptor."""
    executor = executor_at("127.0.0.1:0")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        executor.close()
        executor_at(executor.address).close()
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)


@pytest.mark.slow
def test_nothing_accumulates(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    sizes: dict[int, list[int]] = {}

    class Measures(TrainingCallback):
        def on_step_end(self, step: int, *_: Any) -> None:
            if step % 100 == 99:
                for pid in (os.getpid(), *crew.pids.values()):
                    sizes.setdefault(pid, []).append(resident_bytes(pid))
                assert len(crew.executor.coordinator.inbox) < 10

    train(crew, model_with(), batches(600, samples=256), callbacks=[Measures()], max_grad_norm=1.0)
    for found in sizes.values():
        assert found[-1] - found[1] < 8 << 20, sizes


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
