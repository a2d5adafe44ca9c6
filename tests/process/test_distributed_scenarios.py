"""SCENARIOS S30 and S36 to S58 as far as they need workers: membership, ports, start orders, refusals, what is left."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.cluster import Peers, Program, free_address, travelling_by, until, worker_thread, write_script
from tests.support.driver import sliced_train, train_case
from tests.support.models import MLP, mlp4
from tests.support.oracle import SGD, assert_same_bits
from torchslicer.cluster.run import ClusterRun
from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import ProtocolError, ShippingError, TransportError, WorkerFailureError
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.serving import run_worker
from torchslicer.simulation import simulated
from torchslicer.transport.frame import Frame, FrameKind
from torchslicer.transport.sockets import connect_unix
from torchslicer.transport.tcp import connect

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]


def assert_still_works(pool: DistributedExecutor, n: int = 2) -> None:
    """Fail unless the workers still give the bits of local training."""
    want = train_case(MLP, SGD, n=2, steps=2)
    assert_same_bits(train_case(MLP, SGD, n=n, steps=2, slice_options={"executor": pool}), want)


# S30: each worker holds its stages only


def test_s30_a_worker_gets_its_own_stages_and_nothing_else(
    pool: DistributedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[set[str]] = []
    start = ClusterRun.start

    def watched(run: ClusterRun, parts: Any) -> None:
        received.extend({name.removeprefix("stage/") for name in part.tensors} for part in parts)
        start(run, parts)

    monkeypatch.setattr(ClusterRun, "start", watched)
    before = [member.control.channel.stats.bytes_sent for member in pool.coordinator.live()]
    model = nn.Sequential(*(nn.Linear(width, width // 2) for width in (512, 256, 128, 64)))
    batches = [(torch.randn(4, 512), torch.randint(32, (4,)))]
    sliced = ts.slice(model, n=4, executor=pool)
    sliced.train(batches, SGD, "cross_entropy", epochs=1, run_dir=False)
    sent = [member.control.channel.stats.bytes_sent for member in pool.coordinator.live()]
    for stage, layer in enumerate(model):
        assert (
            received[stage] == {f"parameters/{stage}.weight", f"parameters/{stage}.bias"} or len(received[stage]) == 2
        )
        size = sum(parameter.numel() for parameter in layer.parameters()) * 4
        # Nothing of the size of another stage's weights went there: the rest is a description and a few commands.
        assert size < sent[stage] - before[stage] < size + 24_000
        assert sliced.plan.stages[stage].num_parameters * 4 == size


# S36, S37: ports


def test_s36_a_port_in_use_is_said_at_once(pool: DistributedExecutor, peers: Peers) -> None:
    with pytest.raises(TransportError, match=pool.address):
        DistributedExecutor(coordinator_addr=pool.address)
    with pytest.raises((TransportError, OSError), match=peers.addresses[0].rpartition(":")[2]):
        run_worker(listen=peers.addresses[0], device="cpu")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises((TransportError, OSError), match=str(port)):
            DistributedExecutor(coordinator_addr=f"127.0.0.1:{port}")
    assert_still_works(pool)


def test_s37_workers_take_ports_of_their_own(pool: DistributedExecutor) -> None:
    members = pool.coordinator.live()
    addresses = [entry.address for member in members for entry in member.hello.endpoints]
    assert len(set(addresses)) == len(addresses)
    assert not any(address.endswith(":0") for address in addresses)
    with travelling_by(pool, "tcp"):
        assert_still_works(pool, n=4)


# S38, S40, S44: scripts of users

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import torchslicer as ts
from torchslicer.simulation import simulated

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]

class Watch(ts.TrainingCallback):
    def on_step_end(self, step, metrics):
        print("step", step, flush=True)
        if "slow" in sys.argv:
            time.sleep(0.05)
        if "fail" in sys.argv:
            raise ValueError("on purpose")
        if "kill" in sys.argv:
            os.kill(pids[0], signal.SIGKILL)

with simulated(2, transport="grpc", threads=1, same_host=False) as executor:
    pids = [int(word) for word in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
    print("pids", executor.address, *pids, flush=True)
    sliced = ts.slice(model, n=2, executor=executor)
    sliced.train(batches, {"name": "SGD", "params": {"lr": 0.1}}, "cross_entropy", run_dir=False,
                 epochs=10_000 if "slow" in sys.argv else 1, callbacks=[Watch()])
print("done", flush=True)
"""


def started(folder: Path, *arguments: str, **options: Any) -> tuple[Program, Path, list[int]]:
    """Start the script; return it, the folder of its sockets and the workers' process ids."""
    program = Program([write_script(folder, SCRIPT), *arguments], cwd=folder, **options)
    words = program.wait_for(r"^pids (.*)$")[1].split()
    sockets = Path(words[0].removeprefix("unix:")).parent
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert len(list(sockets.rglob("socket"))) == 2
    return program, sockets, [int(word) for word in words[1:]]


def assert_nothing_is_left(sockets: Path, pids: list[int]) -> None:
    """Fail unless the processes have ended and the folder of their sockets is gone."""
    assert len(pids) == 2

    def ended(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(lambda: all(map(ended, pids)), timeout_s=10.0)
    assert not sockets.exists()


def with_proxy() -> dict[str, str]:
    """Return the environment with proxies that nothing answers at."""
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"), "http://127.0.0.1:9")
    return {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"} | proxy


def test_s38_s40_a_proxy_in_the_environment_and_an_interrupt_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    program, sockets, pids = started(tmp_path, "slow", env=with_proxy())
    with program:
        program.wait_for("^step 3$")
        program.process.send_signal(signal.SIGINT)
        assert program.wait(timeout_s=10.0) != 0
        assert "KeyboardInterrupt" in program.output
    assert_nothing_is_left(sockets, pids)


@pytest.mark.slow
def test_s40_a_normal_end(tmp_path: Path) -> None:
    program, sockets, pids = started(tmp_path, env=with_proxy())
    with program:
        program.wait_for("^done$")
        assert program.wait(timeout_s=10.0) == 0, program.output
    assert_nothing_is_left(sockets, pids)


@pytest.mark.slow
def test_s40_an_exception(tmp_path: Path) -> None:
    program, sockets, pids = started(tmp_path, "fail")
    with program:
        assert program.wait(timeout_s=10.0) == 1
        assert "on purpose" in program.output
    assert_nothing_is_left(sockets, pids)


@pytest.mark.slow
def test_s40_a_worker_is_killed(tmp_path: Path) -> None:
    program, sockets, pids = started(tmp_path, "kill")
    with program:
        assert program.wait(timeout_s=30.0) == 1
        assert "WorkerFailureError" in program.output
    assert_nothing_is_left(sockets, pids)


@pytest.mark.slow
def test_s40_the_driver_is_killed(tmp_path: Path) -> None:
    program, sockets, pids = started(tmp_path, "slow")
    with program:
        program.wait_for("^step 3$")
        program.process.kill()
        program.wait(timeout_s=10.0)
    assert_nothing_is_left(sockets, pids)


def test_a_worker_that_dies_at_its_start_is_told_with_its_last_words() -> None:
    with (
        pytest.raises(WorkerFailureError, match=r"(?s)worker-000 ended at its start.*trust 'torch'"),
        simulated(1, trust=["torch"]) as executor,
    ):
        sliced_train(mlp4(), MLP.batches(1), SGD, "cross_entropy", n=1, slice_options={"executor": executor})


# S39: idle links


def test_s39_idle_links_stay(peers: Peers) -> None:
    """A pause of many heartbeats between epochs, and in a stage, is no failure."""

    class Pause(ts.TrainingCallback):
        def on_epoch_end(self, epoch: int, metrics: Any) -> None:
            time.sleep(1.5)

    config = RunConfig.create(fault_tolerance__heartbeat_interval_s=0.1, fault_tolerance__ping_timeout_s=0.9)
    with peers.driver(run_config=config) as executor:
        got = train_case(
            MLP, SGD, n=2, steps=2, epochs=2, callbacks=[Pause()], slice_options={"executor": executor}
        )  # fmt: skip
        assert len(got.history) == 2
        assert [member.lost for member in executor.coordinator.members.values()] == [None, None]


# S42: advertised addresses


def test_s42_an_address_that_nobody_reaches_is_refused() -> None:
    with DistributedExecutor(CoordinatorDiscovery(timeout_s=0.3), "127.0.0.1:0") as executor:
        with worker_thread(coordinator=executor.address, name="lost", advertise="no-such-host.invalid") as errors:
            until(lambda: errors)
        assert isinstance(errors[0], ProtocolError)
        assert "no-such-host.invalid" in str(errors[0])
        assert "--advertise" in str(errors[0])
        with pytest.raises(WorkerFailureError, match=r"(?s)1 workers are needed.*lost.*refused.*no-such-host\.invalid"):
            train_case(MLP, SGD, n=1, steps=1, slice_options={"executor": executor})


# S43: start orders


def test_s43_workers_may_start_before_the_coordinator_and_in_any_order() -> None:
    address = free_address()
    with worker_thread(coordinator=address, name="b", once=True), contextlib.ExitStack() as stack:
        time.sleep(0.2)
        executor = stack.enter_context(DistributedExecutor(coordinator_addr=address))
        until(executor.coordinator.live)
        stack.enter_context(worker_thread(coordinator=address, name="a", once=True))
        members = executor.coordinator.wait_for(2, timeout_s=20.0)
        assert [member.node for member in members] == ["a", "b"]
        executor.close(shut_workers=True)


def test_s43_a_driver_may_start_before_its_peers() -> None:
    address = free_address()
    executor = DistributedExecutor(StaticDiscovery(peers=[address], timeout_s=20.0))
    with contextlib.ExitStack() as stack:
        timer = threading.Timer(0.4, lambda: stack.enter_context(worker_thread(listen=address, name="late", once=True)))
        timer.start()
        got = train_case(MLP, SGD, n=1, steps=2, slice_options={"executor": executor})
        timer.join()
        executor.close()
    assert_same_bits(got, train_case(MLP, SGD, n=1, steps=2))


def test_s43_missing_workers_are_named() -> None:
    with (
        DistributedExecutor(CoordinatorDiscovery(timeout_s=0.2), "127.0.0.1:0") as executor,
        pytest.raises(WorkerFailureError, match=r"(?s)2 workers are needed, 0 registered.*torchslicer worker"),
    ):
        train_case(MLP, SGD, n=2, steps=1, slice_options={"executor": executor})


# What cannot be shipped (S44)


class WithLambda(nn.Module):
    """Holds a lambda."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.activation: Any = lambda x: x * 2

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16) to (B, 4)."""
        if bool(x.sum() < -1e9):  # no tracer can enter this module
            return x
        out: Tensor = self.activation(self.linear(x))
        return out


class FromMain(nn.Module):
    """Stands for a class of the user's script."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what came, unless it is very negative."""
        return x if bool(x.sum() > -1e9) else -x


FromMain.__module__ = "__main__"


@pytest.mark.parametrize(
    ("layer", "said"),
    [(WithLambda, r"(?s)lambda|activation"), (FromMain, r"(?s)__main__.*FromMain|FromMain.*__main__")],
)
def test_s44_what_no_worker_can_import_is_refused_before_the_first_batch(
    pool: DistributedExecutor, layer: type[nn.Module], said: str
) -> None:
    model = nn.Sequential(nn.Linear(16, 16), layer())
    taken: list[int] = []

    class Watch(ts.TrainingCallback):
        def on_step_end(self, step: int, metrics: Any) -> None:
            taken.append(step)

    with pytest.raises(ShippingError, match=said) as caught:
        sliced_train(
            model, MLP.batches(2), SGD, "cross_entropy", n=2, callbacks=[Watch()], slice_options={"executor": pool}
        )
    assert "module" in str(caught.value)
    assert not taken
    assert_still_works(pool)


# What is logged


def test_s57_logs_go_to_one_namespace_and_nothing_is_printed(
    pool: DistributedExecutor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    root = list(logging.getLogger().handlers)
    with caplog.at_level(logging.INFO):
        train_case(MLP, SGD, n=2, steps=2, epochs=2, slice_options={"executor": pool})
    assert logging.getLogger().handlers == root
    names = [record.name for record in caplog.records]
    assert names
    assert all(name.startswith("torchslicer") for name in names)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines))
    assert capfd.readouterr() == ("", "")


def test_a_worker_logs_once_a_run_which_stage_it_holds(peers: Peers) -> None:
    with peers.driver() as executor:
        for _ in range(2):
            train_case(MLP, SGD, n=2, steps=2, epochs=2, slice_options={"executor": executor})
        plan = ts.slice(mlp4(), n=2).plan
    for stage, program in enumerate(peers.programs):
        units = plan.stages[stage].units
        holds = f"holds stage {stage} of 2, counted from 0 (units {units[0]}..{units[-1]}), 1 thread"
        said = f"INFO run {executor.run_id}: {holds}\n"
        until(lambda said=said, program=program: f"{program.output}\n".count(said) == 2)
        assert program.output.count(f"run {executor.run_id}: ") == 2


# What becomes of a pickle


class Pwn:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Return what to run."""
        return os.system, (f"touch {self.path}",)


def dialled(address: str) -> socket.socket:
    """Connect to a port or a UNIX socket."""
    if address.startswith("unix:"):
        return connect_unix(address.removeprefix("unix:"), 5.0)
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5.0)


def test_s58_a_pickle_is_never_opened(pool: DistributedExecutor, peers: Peers, tmp_path: Path) -> None:
    pwned = tmp_path / "pwned"
    payload = pickle.dumps(Pwn(pwned))
    member = pool.coordinator.live()[0]
    ports = [entry.address for entry in member.hello.endpoints if entry.transport != "unix"]
    for address in [pool.address, peers.addresses[0], *ports]:
        with dialled(address) as sock:
            sock.sendall(payload)
        with contextlib.suppress(TransportError):
            channel = connect(address, timeout_s=5.0)
            try:
                for kind in (FrameKind.CONTROL, FrameKind.INPUT, FrameKind.STATE):
                    channel.send(Frame.of_bytes(kind, payload), timeout_s=5.0)
                channel.receive(timeout_s=1.0)
            finally:
                channel.close()
    assert_still_works(pool)
    with peers.driver() as executor:
        assert_still_works(executor)
    assert not pwned.exists()
    pickle.loads(payload)
    assert pwned.exists()


def test_host_stage_needs_a_list_of_peers() -> None:
    for discovery, stage in ((CoordinatorDiscovery(), 0), (StaticDiscovery(peers=["127.0.0.1:1"]), 1)):
        with pytest.raises(ts.ConfigError, match="host_stage"):
            DistributedExecutor(discovery, host_stage=stage)
