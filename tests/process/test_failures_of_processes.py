"""Processes that die at an odd moment, and stages that compute for long: who is given up, and who is not."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

import torchslicer as ts
from tests.support.cluster import Peers, Program, free_address, worker_program, worker_thread, write_script
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
from tests.support.driver import train_case
from tests.support.models import MLP
from tests.support.oracle import assert_same_bits
from tests.support.saboteur import NUM_STAGES, Saboteur, batches, model_with
from torchslicer.cluster.control import Control
from torchslicer.cluster.hub import Hub
from torchslicer.discovery import StaticDiscovery
from torchslicer.errors import ProtocolError, TransportError, WorkerFailureError
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.serving import run_worker
from torchslicer.transport.frame import Frame, FrameKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]


# While parts are shipped


def test_a_worker_is_killed_while_its_part_is_shipped(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of its tensors: the one before has its part, and waits for it; the one after has nothing."""
    send, [victim] = Control._send, [member for member in crew.executor.coordinator.live() if member.node == "worker-1"]

    def killing(control: Control, frame: Frame, timeout_s: float) -> None:
        if control is victim.control and frame.header.kind is FrameKind.STATE and frame.header.value == 1:
            crew.signal(1, signal.SIGKILL)
            crew.keeper.wait_for("worker-1 ended -9")
        send(control, frame, timeout_s)

    before = crew.pids
    monkeypatch.setattr(Control, "_send", killing)
    with fails(WorkerFailureError, r"stage 1 on worker 'worker-1' \(127\.0\.0\.1:\d+\)", seconds=GIVEN_UP_S + SLACK_S):
        train(crew, model_with())
    monkeypatch.undo()
    with within(30):
        assert_usable(crew)
    assert [crew.pids[name] == before[name] for name in sorted(before)] == [True, False, True]


DRIVER = """
import os, signal, sys
import torchslicer as ts
from tests.support.crew import executor_at
from tests.support.saboteur import batches, model_with
from torchslicer.cluster.control import Control
from torchslicer.transport.frame import FrameKind

executor, send, seen = executor_at(sys.argv[1]), Control._send, []
[second] = [member for member in executor.coordinator.wait_for(3, timeout_s=60.0) if member.node == "worker-1"]

def dying(control, frame, timeout_s):
    if control is second.control and frame.header.kind is FrameKind.STATE and frame.header.value == 1:
        print("half of it is shipped", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    send(control, frame, timeout_s)

Control._send = dying
ts.slice(model_with(), n=3, executor=executor).train(
    batches(), {"name": "SGD", "params": {"lr": 0.1}}, "mse", epochs=1, run_dir=False)
"""


def here() -> dict[str, str]:
    """Return an environment in which scripts find what this process finds in its folder."""
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


def test_the_driver_is_killed_while_it_ships_the_parts(crew: Crew, tmp_path: Path) -> None:
    """One worker then waits for connections, one for the rest of its tensors, one for anything."""
    before = crew.pids
    crew.executor.close()
    with Program([write_script(tmp_path, DRIVER), crew.address], env=here()) as driver:
        driver.wait_for("half of it is shipped")
        assert driver.wait() == -signal.SIGKILL
    crew.executor = executor_at(crew.address)
    with within(10):
        crew.wait_for()
    assert_usable(crew)
    assert crew.pids == before


HOSTING = """
import os, sys
import torchslicer as ts
from tests.support.crew import CONFIG
from tests.support.saboteur import batches, model_with
from torchslicer.discovery import StaticDiscovery
from torchslicer.executors.distributed import DistributedExecutor

class Tells(ts.TrainingCallback):
    def on_step_end(self, step, metrics):
        print("step", step, flush=True)

executor = DistributedExecutor(StaticDiscovery(peers=sys.argv[1:]), run_config=CONFIG, host_stage=0, host_threads=1)
ts.slice(model_with(), n=3, executor=executor).train(
    batches(100000), {"name": "SGD", "params": {"lr": 0.1}}, "mse", epochs=1, run_dir=False, callbacks=[Tells()])
"""


def test_a_driver_that_holds_a_stage_is_killed(peers: Peers, tmp_path: Path) -> None:
    """Its peers serve the next driver."""
    with Program([write_script(tmp_path, HOSTING), *peers.addresses], env=here()) as driver:
        driver.wait_for(r"^step 3$")
        driver.process.kill()
        driver.wait()
    with peers.driver(run_config=CONFIG) as executor:
        got = train_case(MLP, SGD, n=2, steps=2, slice_options={"executor": executor})
    assert_same_bits(got, train_case(MLP, SGD, n=2, steps=2))


def test_s45_a_peer_is_killed_in_a_step_and_another_takes_its_place(peers: Peers) -> None:
    options = {"epochs": 1, "run_dir": False, "num_microbatches": 2}
    with worker_program("--listen", "127.0.0.1:0", "--name", "mortal") as mortal:
        address = mortal.wait_for(r"listening for a driver on (\S+)")[1]
        addresses = [peers.addresses[0], address]
        with DistributedExecutor(StaticDiscovery(peers=addresses, timeout_s=20.0), run_config=CONFIG) as executor:
            ts.slice(model_with(), n=2, executor=executor).train(batches(), SGD, "mse", **options)  # connects
            sliced = ts.slice(model_with(Saboteur("SIGKILL"), stage=2), n=2, executor=executor)
            with fails(WorkerFailureError, f"stage 1 on worker 'mortal' .{address}.", seconds=GIVEN_UP_S + SLACK_S):
                sliced.train(batches(), SGD, "mse", **options)
            assert mortal.wait() == -signal.SIGKILL
            with worker_thread(listen=address, name="successor"):
                got = train_case(MLP, SGD, n=2, steps=2, slice_options={"executor": executor})
    assert_same_bits(got, train_case(MLP, SGD, n=2, steps=2))


def test_what_a_killed_worker_leaves_is_removed_when_another_starts() -> None:
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:  # its path is short enough for sockets
        with worker_program("--listen", "127.0.0.1:0", env={**os.environ, "TMPDIR": folder}) as worker:
            worker.wait_for("listening for a driver")
            [left] = Path(folder).glob("torchslicer-*")
            worker.process.kill()
            worker.wait()
        assert (left / "socket").is_socket()
        hub = Hub("127.0.0.1:0", folder=Path(folder))
        try:
            assert not left.exists()
            assert len(list(Path(folder).glob("torchslicer-*"))) == 1
        finally:
            hub.close()
        assert not list(Path(folder).glob("torchslicer-*"))


# S39: stages that compute for long


def test_s39_a_stage_that_computes_for_long_in_python_is_not_given_up(crew: Crew) -> None:
    before = crew.pids
    assert len(train(crew, model_with(Saboteur("busy", seconds=GIVEN_UP_S)))) == 1
    assert len(crew.executor.coordinator.live()) == NUM_STAGES
    assert crew.pids == before


def test_s39_a_stage_that_keeps_the_interpreter_to_itself_is_given_up_and_comes_back(crew: Crew) -> None:
    """A C extension that never gives the lock free cannot be told from a process that was stopped."""
    before = crew.pids
    with fails(
        WorkerFailureError,
        "stage 1 on worker 'worker-1' .*no sign of life.*ping_timeout_s",
        seconds=GIVEN_UP_S + SLACK_S,
    ):
        train(crew, model_with(Saboteur("hold", seconds=2 * GIVEN_UP_S)))
    with within(2 * GIVEN_UP_S + 10):
        assert_usable(crew)
    assert crew.pids == before


# Ports and addresses


def test_s36_a_workers_data_port_is_in_use(peers: Peers) -> None:
    taken = peers.addresses[0]
    with pytest.raises(TransportError, match=f"cannot listen on {taken}: .*choose another"):
        run_worker(free_address(), bind=taken, device="cpu")


def test_s42_a_peer_that_advertises_an_address_that_nobody_reaches(caplog: pytest.LogCaptureFixture) -> None:
    """Both sides say so, and the peer waits for another driver."""
    address = free_address()
    with (
        worker_thread(listen=address, name="lost", advertise="no-such-host.invalid") as errors,
        DistributedExecutor(StaticDiscovery(peers=[address], timeout_s=20.0)) as executor,
    ):
        for _ in range(2):
            with pytest.raises(ProtocolError, match=r"'lost' was refused: .*no-such-host\.invalid.*--advertise"):
                train_case(MLP, SGD, n=1, steps=1, slice_options={"executor": executor})
        assert errors == []
    assert "refused this worker: it advertised no-such-host.invalid" in caplog.text


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_run_over_ipv6(transport: str) -> None:
    with DistributedExecutor(coordinator_addr="[::1]:0", transport=transport, same_host=False) as executor:
        assert executor.address.startswith("[::1]:")
        with worker_thread(coordinator=executor.address, name="six", once=True):
            [member] = executor.coordinator.wait_for(1, timeout_s=20.0)
            hosts = {entry.address.rpartition(":")[0] for entry in member.hello.endpoints if entry.transport != "unix"}
            assert hosts == {"[::1]"}
            got = train_case(MLP, SGD, n=1, steps=2, slice_options={"executor": executor})
            executor.close(shut_workers=True)
    assert_same_bits(got, train_case(MLP, SGD, n=1, steps=2))


def test_a_driver_reaches_a_peer_over_ipv6() -> None:
    address = f"[::1]:{free_address().rpartition(':')[2]}"
    with (
        worker_thread(listen=address, name="six"),
        DistributedExecutor(StaticDiscovery(peers=[address], timeout_s=20.0), same_host=False) as executor,
    ):
        got = train_case(MLP, SGD, n=1, steps=2, slice_options={"executor": executor})
    assert_same_bits(got, train_case(MLP, SGD, n=1, steps=2))
