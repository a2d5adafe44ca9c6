"""Certificates that outlive a run (``torchslicer certs init``): they serve every mode, and bad ones serve nobody."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import Watch, under_attack
from tests.support.cluster import Program, free_address, travelling_by, worker_program, write_script
from tests.support.driver import train_case
from tests.support.models import MLP
from tests.support.oracle import SGD, assert_same_bits
from torchslicer.cluster.hub import dial, send_message
from torchslicer.cluster.messages import Endpoint, Reach
from torchslicer.cluster.security import Authority, Identity, Material, Protection, certificates, write_deployment
from torchslicer.config import RunConfig
from torchslicer.discovery import StaticDiscovery
from torchslicer.errors import SecurityError, TransportError, WorkerFailureError
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.serving import run_worker
from torchslicer.transport.tcp import connect

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

NODES = ("coordinator", "worker-0", "worker-1")
HERE = {"worker-0": ["127.0.0.1"], "worker-1": ["127.0.0.1"]}
PATIENT = {"fault_tolerance__ping_timeout_s": 60.0}


@dataclass(frozen=True)
class Certificates:
    """A deployment as `torchslicer certs init` makes it, and what others might come with."""

    folder: Path
    others: Path
    """The same nodes, by another authority."""
    expired: Path
    """The same nodes, by this authority, a month too late."""

    def files(self, node: str, folder: str = "folder") -> dict[str, str]:
        """Return a node's files."""
        path: Path = getattr(self, folder)
        return {"ca": str(self.folder / "ca.pem"), "cert": str(path / f"{node}.pem"), "key": str(path / f"{node}.key")}

    def options(self, node: str) -> list[str]:
        """Return them as options of a worker."""
        return [part for name, path in self.files(node).items() for part in (f"--tls-{name}", path)]

    def protection(self, node: str, folder: str) -> Protection:
        """Return what a node shows, whatever its dates are."""
        files = self.files(node, folder)
        return Protection(Material.from_files(files["cert"], files["key"], files["ca"]), "fixed", node)


def write_expired(folder: Path, authority: Authority) -> None:
    """Write certificates of which the last day was a month ago."""
    folder.mkdir()
    end = datetime.now(timezone.utc) - timedelta(days=30)
    for node in NODES:
        key = certificates.new_key()
        signed = certificates.sign_node(
            key.public_key(), Identity("fixed", node), [node, "127.0.0.1"],
            authority=authority.certificate, key=authority._key, not_before=end - timedelta(days=7), not_after=end,
        )  # fmt: skip
        (folder / f"{node}.pem").write_bytes(signed)
        (folder / f"{node}.key").write_bytes(certificates.key_pem(key))
        (folder / f"{node}.key").chmod(0o600)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    base = tmp_path_factory.mktemp("deployment")
    found = Certificates(base / "certs", base / "others", base / "expired")
    authority = Authority.create("certs init")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Authority, "create", lambda *_, **__: authority)  # its key is thrown away otherwise
        write_deployment(found.folder, NODES[1:], hosts=HERE)
    write_expired(found.expired, authority)
    write_deployment(found.others, NODES[1:], hosts=HERE)
    return found


def trained(executor: DistributedExecutor | None = None, *, n: int = 2) -> Any:
    """Train a small model for some steps."""
    options = {} if executor is None else {"slice_options": {"executor": executor}}
    return train_case(MLP, SGD, n=n, steps=20, n_micro_batches=2, **options)


@pytest.fixture(scope="module")
def expected() -> Any:
    return trained()


@dataclass(frozen=True)
class Deployed:
    """A coordinator with fixed certificates, and its workers."""

    executor: DistributedExecutor
    workers: tuple[Program, Program]

    @property
    def address(self) -> str:
        """Where workers register."""
        return self.executor.address.replace("0.0.0.0", "127.0.0.1")


@pytest.fixture(scope="module")
def deployed(made: Certificates) -> Iterator[Deployed]:
    config = RunConfig.create(network__tls=made.files("coordinator"), **PATIENT)
    with (
        DistributedExecutor(coordinator_addr="0.0.0.0:0", run_config=config, same_host=False) as executor,
        contextlib.ExitStack() as stack,
    ):
        where = executor.address.replace("0.0.0.0", "127.0.0.1")
        workers = [
            stack.enter_context(worker_program("--coordinator", where, "--bind", "0.0.0.0:0", *made.options(node)))
            for node in NODES[1:]
        ]
        executor.coordinator.wait_for(2, timeout_s=120.0)
        yield Deployed(executor, (workers[0], workers[1]))


@pytest.fixture(scope="module")
def peer(made: Certificates) -> Iterator[tuple[Program, str]]:
    """A worker that listens for a driver, and its address."""
    options = made.options("worker-0")
    with worker_program("--listen", "0.0.0.0:0", "--bind", "0.0.0.0:0", *options) as program:
        port = program.wait_for(r"listening for a driver on \S+:(\d+)")[1]
        yield program, f"127.0.0.1:{port}"


# Good ones


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_coordinator_and_its_workers(deployed: Deployed, expected: Any, transport: str) -> None:
    assert "--join" not in deployed.executor.join_command
    with travelling_by(deployed.executor, transport) as executor:
        assert_same_bits(trained(executor), expected)
        assert [member.node for member in executor.coordinator.live()] == ["worker-0", "worker-1"]


def test_a_driver_that_holds_a_stage(made: Certificates, peer: tuple[Program, str], expected: Any) -> None:
    """Over both transports, from the first connection on with strangers at all ports of the peer."""
    program, address = peer
    config = RunConfig.create(network__tls=made.files("coordinator"), **PATIENT)
    discovery = StaticDiscovery(peers=[address])
    with DistributedExecutor(
        discovery, run_config=config, host_stage=0, host_threads=1, same_host=False, transport="tcp"
    ) as executor:
        with under_attack([address]):
            assert_same_bits(trained(executor), expected)
        watch = Watch(program.process.pid)
        [member] = [member for member in executor.coordinator.live() if member.dialled is not None]
        data = [entry.address for entry in member.hello.endpoints]
        for transport in ("tcp", "grpc"):
            with travelling_by(executor, transport), under_attack([address, *data]):
                assert_same_bits(trained(executor), expected)
        assert watch.growth_mb < 50


# Bad ones


WRONG = [("worker-1", "others"), ("worker-1", "expired")]
"""A member's name, but by another authority, or out of date."""


def test_expired_files_are_refused_before_anything_starts(made: Certificates) -> None:
    tls = made.files("worker-1", "expired")
    with pytest.raises(SecurityError, match=r"certificate: good from .* now it is .* make new"):
        run_worker("127.0.0.1:1", tls=tls)
    with pytest.raises(SecurityError, match=r"certificate: good from .* now it is .* make new"):
        DistributedExecutor(coordinator_addr="127.0.0.1:0", tls=tls)


def endpoints(deployed: Deployed, transport: str) -> list[Endpoint]:
    """Return where the first worker takes data."""
    member = deployed.executor.coordinator.live()[0]
    return [entry for entry in member.hello.endpoints if entry.transport == transport]


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
@pytest.mark.parametrize(("node", "folder"), WRONG)
def test_at_the_data_ports_of_a_worker(
    made: Certificates, deployed: Deployed, node: str, folder: str, transport: str
) -> None:
    """Whom the worker does not know cannot say a word; whom it knows can, which shows that the test can fail."""
    for protection in (made.protection(node, folder), made.protection(node, "folder")):
        with contextlib.ExitStack() as stack:
            if protection.material != made.protection(node, "folder").material:
                stack.enter_context(pytest.raises(TransportError))
            channel, _ = dial(
                endpoints(deployed, transport), "elsewhere", node="worker-0", transport=transport,
                protection=protection, timeout_s=10.0,
            )  # fmt: skip
            stack.callback(channel.close, timeout_s=0)
            send_message(channel, Reach(run_id="x"))
            channel.receive(timeout_s=10.0)


def wait_for_a_word(address: str, protection: Protection) -> None:
    """Connect to a coordinator and wait until it says something."""
    name = protection.server_name("coordinator", address)
    channel = connect(address, timeout_s=5.0, tls=protection.client, server_hostname=name)
    try:
        channel.receive(timeout_s=10.0)
    finally:
        channel.close()


@pytest.mark.parametrize(("node", "folder"), WRONG)
def test_at_the_port_of_a_coordinator(made: Certificates, deployed: Deployed, node: str, folder: str) -> None:
    with pytest.raises(TransportError, match=r"(?i)alert|certificate|lost the connection|closed the connection"):
        wait_for_a_word(deployed.address, made.protection(node, folder))


def driver(address: str, protection: Protection, timeout_s: float = 30.0) -> DistributedExecutor:
    """Return a driver that shows what it is given, whatever its dates are."""
    executor = DistributedExecutor(StaticDiscovery(peers=[address], timeout_s=timeout_s), same_host=False)
    executor.protection = executor.coordinator.protection = protection
    return executor


@pytest.mark.parametrize("folder", ["others", "expired"])
def test_a_driver_at_a_peer(made: Certificates, peer: tuple[Program, str], expected: Any, folder: str) -> None:
    """It is told at once: waiting for the peer would not help. The peer waits for a good one."""
    _, address = peer
    with (
        driver(address, made.protection("coordinator", folder)) as executor,
        pytest.raises(
            SecurityError, match=rf"peer at {address} and this driver do not accept each other's certificates"
        ),
    ):
        trained(executor, n=1)
    with driver(address, made.protection("coordinator", "folder")) as executor:
        trained(executor, n=1)


def test_a_driver_with_the_certificate_of_a_worker(made: Certificates, peer: tuple[Program, str]) -> None:
    _, address = peer
    with (
        driver(address, made.protection("worker-1", "folder"), timeout_s=0.5) as executor,
        pytest.raises(WorkerFailureError, match=f"no worker listens at {address}: .* the connection"),
    ):
        trained(executor, n=1)


def test_a_driver_without_a_certificate(peer: tuple[Program, str]) -> None:
    _, address = peer
    with driver(address, Protection(), timeout_s=0.3) as executor:
        executor.coordinator.hello_timeout_s = 0.5  # both wait for the other's first word
        with pytest.raises(SecurityError, match=f"peer at {address} takes only TLS connections, and this driver has"):
            trained(executor, n=1)


CARELESS = """
import json, sys, threading
import torchslicer as ts
from torchslicer.cluster.security import certificates

certificates._check_time = lambda *_: None  # as if the clock here were slow

def serve(label, options):
    try:
        ts.run_worker(device="cpu", threads=1, **options)
    except ts.TorchSlicerError as error:
        print(f"{label} {type(error).__name__} {error}\\n", end="", flush=True)  # whole: others print too

for label, options in json.loads(sys.argv[1]):
    threading.Thread(target=serve, args=(label, options)).start()
"""


def test_workers_and_peers_of_another_process(
    made: Certificates, deployed: Deployed, expected: Any, tmp_path: Path
) -> None:
    """A worker ends and says why; a driver says at once which peer it does not believe."""
    addresses = {folder: free_address() for folder in ("others", "expired")}
    roles: list[tuple[str, dict[str, Any]]] = []
    for folder, address in addresses.items():
        tls = made.files("worker-1", folder)
        if folder == "others":
            tls["ca"] = str(made.others / "ca.pem")
        roles.append((f"worker-{folder}", {"coordinator": deployed.address, "tls": tls}))
        roles.append((f"peer-{folder}", {"listen": address, "tls": tls}))
    with Program([write_script(tmp_path, CARELESS), json.dumps(roles)]) as program:
        for folder, address in addresses.items():
            program.wait_for(rf"^worker-{folder} SecurityError the coordinator at \S+ and this worker do not accept")
            with (
                driver(address, made.protection("coordinator", "folder")) as executor,
                pytest.raises(
                    SecurityError,
                    match=rf"peer at {address} and this driver do not accept .*(expired|self-signed|unable to get)",
                ),
            ):
                trained(executor, n=1)
    assert [member.node for member in deployed.executor.coordinator.live()] == ["worker-0", "worker-1"]
    assert_same_bits(trained(deployed.executor), expected)
