"""A coordinator that listens beyond loopback: who gets in, who does not, and what attackers achieve (nothing)."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from torch import nn

import torchslicer as ts
from tests.support.attacks import Watch, under_attack
from tests.support.cluster import Program, travelling_by, worker_program
from torchslicer.cluster.hub import HANDSHAKE_TIMEOUT_S, dial, open_link
from torchslicer.cluster.messages import Attach
from torchslicer.cluster.security import (
    Authority,
    Identity,
    JoinClient,
    JoinString,
    Protection,
    join_run,
    write_deployment,
)
from torchslicer.cluster.security.exchange import receive, send
from torchslicer.cluster.security.tls import joining_context
from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import SecurityError, TransportError
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.serving import run_worker
from torchslicer.transport.tcp import connect

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

RUN = "secured-1"
_LONG = 12
DATA = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 3) for i in range(10)]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def trained(
    executor: DistributedExecutor | None = None, *, epochs: int = 2, **options: object
) -> dict[str, torch.Tensor]:
    net = copy.deepcopy(model())
    options = {"run_dir": False, **options}
    ts.slice(net, n=2, executor=executor).train(
        DATA, {"name": "AdamW", "params": {"lr": 0.01}}, "cross_entropy", epochs=epochs, num_microbatches=2, **options
    )
    return net.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    state = trained()
    torch.set_num_threads(before)
    return state


@dataclass(frozen=True)
class Secured:
    """A coordinator on all interfaces with an authority of its own, and two workers that have joined."""

    executor: DistributedExecutor
    token: str
    workers: tuple[Program, ...]

    @property
    def joining(self) -> JoinString:
        return JoinString.parse(self.token, now=time.time())

    @property
    def port(self) -> int:
        return int(self.executor.address.rpartition(":")[2])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def endpoints(self, worker: int) -> dict[str, str]:
        return {one.transport: one.address for one in self.executor.coordinator.live()[worker].hello.endpoints}


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with DistributedExecutor(CoordinatorDiscovery(run_id=RUN), "0.0.0.0:0", same_host=False) as executor:
        words = executor.join_command.split()
        where, token = words[words.index("--coordinator") + 1], words[words.index("--join") + 1]
        bare = {key: value for key, value in os.environ.items() if key != "TORCHSLICER_JOIN"}
        with (
            worker_program("--coordinator", where, "--join", "-", "--name", "w-0", env=bare) as first,
            worker_program("--coordinator", where, "--name", "w-1", env={**bare, "TORCHSLICER_JOIN": token}) as second,
        ):
            assert first.process.stdin is not None
            first.process.stdin.write(f"{token}\n")
            first.process.stdin.flush()
            for worker in (first, second):
                worker.wait_for("registered with the coordinator", timeout_s=120)
            executor.coordinator.wait_for(2, timeout_s=60)
            yield Secured(executor, token, (first, second))


# -- good nodes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_training_over_mutual_tls_gives_the_bits_of_local_training(secured, expected, transport):
    with travelling_by(secured.executor, transport) as executor:
        assert same(trained(executor), expected)
    assert not executor.insecure
    names = [set(member.control.channel.peer_names) for member in executor.coordinator.live()]
    assert [f"torchslicer:{RUN}/w-{index}" in found for index, found in enumerate(names)] == [True, True]


def test_the_advertised_addresses_can_be_reached_by_others(secured):
    for worker in (0, 1):
        hosts = {address.rpartition(":")[0] for kind, address in secured.endpoints(worker).items() if kind != "unix"}
        assert len(hosts) == 1
        assert not hosts & {"0.0.0.0", "127.0.0.1", "[::]", "[::1]"}


def test_the_token_is_in_no_output_no_log_no_file_and_no_argument(secured, tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        config = RunConfig.create(run_id="canary", logging__dir=str(tmp_path))
        trained(secured.executor, run_config=config, run_dir=None)
    secret = secured.token[-40:]
    written = [path.read_text(encoding="utf-8", errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 2
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            commands.append(path.read_bytes().decode("utf-8", "replace"))
    everywhere = [*written, *commands, *(worker.output for worker in secured.workers), caplog.text]
    everywhere += [repr(vars(secured.executor)), repr(secured.executor.coordinator.gate.joining)]
    shown = [text for text in everywhere[:-2] if secret in text]
    assert shown == []
    assert secret not in everywhere[-1]


# -- others --------------------------------------------------------------------------------------------------


def test_plain_text_is_refused(secured):
    channel = connect(secured.address, timeout_s=5)
    with pytest.raises(TransportError):
        channel.receive(timeout_s=10)
    channel.close()
    with pytest.raises(SecurityError, match="--join STRING"):
        run_worker(secured.address, name="plain", once=True)
    assert "plain" not in {member.node for member in secured.executor.coordinator.live()}


def ask_to_join(secured: Secured, source: str, talk) -> dict:
    """Speak the join protocol from an address of its own, so that failures of one test do not count for others."""
    with (
        socket.create_connection(("127.0.0.1", secured.port), 5, source_address=(source, 0)) as raw,
        joining_context().wrap_socket(raw) as connection,
    ):
        return talk(connection, time.monotonic() + 5)


def test_a_replayed_request_is_refused(secured):
    said: list[bytes] = []

    def record(connection: ssl.SSLSocket, deadline: float) -> None:
        client = JoinClient(secured.joining, "recorded", leaf=connection.getpeercert(binary_form=True))
        said.append(client.hello())
        send(connection, said[0], deadline)
        said.append(client.request(receive(connection, deadline)))  # never sent, so that the name is free

    def replay(connection: ssl.SSLSocket, deadline: float) -> bytes:
        send(connection, said[0], deadline)
        receive(connection, deadline)
        send(connection, said[1], deadline)
        return receive(connection, deadline)

    ask_to_join(secured, "127.0.0.11", record)
    assert ask_to_join(secured, "127.0.0.11", replay) == b'{"type": "refused", "code": "token"}'


def test_another_token_and_another_authority_are_refused(secured):
    genuine = secured.joining
    wrong = JoinString.create(RUN, genuine.fingerprint, expires_at=genuine.expires_at)

    def talk(connection: ssl.SSLSocket, deadline: float) -> bytes:
        client = JoinClient(wrong, "thief", leaf=connection.getpeercert(binary_form=True))
        send(connection, client.hello(), deadline)
        send(connection, client.request(receive(connection, deadline)), deadline)
        return receive(connection, deadline)

    assert b"token" in ask_to_join(secured, "127.0.0.12", talk)
    stranger = JoinString.create(RUN, Authority.create(RUN).fingerprint, expires_at=genuine.expires_at)
    with pytest.raises(SecurityError, match="fingerprint is not the one in the join string"):
        join_run(secured.address, stranger, "thief")


def test_after_five_failures_an_address_must_wait_and_others_need_not(secured):
    def junk(connection: ssl.SSLSocket, deadline: float) -> bytes:
        send(connection, b"junk", deadline)
        return receive(connection, deadline)

    answers = [ask_to_join(secured, "127.0.0.13", junk) for _ in range(6)]
    assert [b"malformed" in answer for answer in answers] == [True] * 5 + [False]
    assert b"rate" in answers[-1]
    assert b"malformed" in ask_to_join(secured, "127.0.0.14", junk)


def test_certificates_of_another_authority_and_expired_ones_are_refused(secured):
    past = datetime.now(timezone.utc) - timedelta(days=30)
    old = Authority.create(RUN, lifetime=timedelta(days=7), now=past)
    for authority, now in ((Authority.create(RUN), None), (old, past)):
        material = authority.issue(Identity(RUN, "w-9"), now=now)
        gate = secured.executor.coordinator.protection.material
        mixed = Protection(type(material)(material.certificate, material.key, gate.authority), RUN, "w-9")
        with pytest.raises((TransportError, SecurityError)):
            run_connected(secured, mixed, "w-9")
        own = Protection(material, RUN, "w-9")  # this one does not trust the coordinator either
        with pytest.raises(TransportError, match="certificate"):
            connect(secured.address, timeout_s=5, tls=own.client, server_hostname=own.server_name("coordinator", "x:1"))


def run_connected(secured: Secured, protection: Protection, node: str) -> None:
    """Connect with certificates and wait for the coordinator's word."""
    name = protection.server_name("coordinator", secured.address)
    channel = connect(secured.address, timeout_s=5, tls=protection.client, server_hostname=name)
    try:
        channel.receive(timeout_s=10)
    finally:
        channel.close()


def test_a_member_cannot_take_the_place_of_another(secured):
    """Neither at the coordinator, nor at a worker, nor by listening in another's place."""
    material = join_run(secured.address, secured.joining, "mallory")
    mallory = Protection(material, RUN, "mallory")
    endpoints = secured.executor.coordinator.live()[1].hello.endpoints
    attach = Attach(run_id=RUN, generation=10_000, rank=0, secret="guessed")
    for transport in ("tcp", "grpc"):
        network = [one for one in endpoints if one.transport == transport]
        channel, how = open_link(
            network, "elsewhere", attach, node="w-1", transport=transport, protection=mallory, timeout_s=10
        )
        assert how == transport  # taken in, but no run will ever take it
        channel.close()
        with pytest.raises(TransportError):  # a worker that is not the one that was meant
            dial(network, "elsewhere", node="w-0", transport=transport, protection=mallory, timeout_s=10)
    with pytest.raises(SecurityError, match=r"expected a node of .*w-0"):
        secured.executor.coordinator.protection.check_peer([Identity(RUN, "mallory").uri], "w-0")


def test_a_join_of_a_name_that_is_taken_is_refused(secured):
    with pytest.raises(SecurityError, match="a node of this name has joined already"):
        join_run(secured.address, secured.joining, "w-0")


def test_attackers_on_every_port_neither_change_bits_nor_cost_memory(secured):
    """Garbage, half-open, slow and huge connections, at all ports at once, during a training over both transports."""
    long = trained(epochs=_LONG)
    processes = [worker.process.pid for worker in secured.workers]
    for transport in ("tcp", "grpc"):
        with travelling_by(secured.executor, transport) as executor:
            trained(executor, epochs=1)  # what a run costs anyway
    ports = [secured.address, *(address for worker in (0, 1) for address in secured.endpoints(worker).values())]
    watches = [Watch(pid) for pid in processes]
    before = [watch.threads for watch in watches]
    for transport in ("tcp", "grpc"):
        with travelling_by(secured.executor, transport) as executor, under_attack(ports):
            assert same(trained(executor, epochs=_LONG), long)
            most = [watch.threads for watch in watches]
    assert max(watch.growth_mb for watch in watches) < 50
    assert max(now - then for now, then in zip(most, before, strict=True)) < 150
    deadline = time.monotonic() + 4 * HANDSHAKE_TIMEOUT_S
    while time.monotonic() < deadline and any(
        watch.threads > then + 4 for watch, then in zip(watches, before, strict=True)
    ):
        time.sleep(0.2)
    assert [watch.threads - then <= 4 for watch, then in zip(watches, before, strict=True)] == [True, True]


# -- the start-up rule ---------------------------------------------------------------------------------------


WAYS_OUT = r"certs init.*ssh -L.*insecure=True"


def test_a_worker_without_protection_stays_on_loopback():
    with pytest.raises(SecurityError, match="join string.*" + WAYS_OUT):
        run_worker("10.255.255.1:50054")
    with pytest.raises(SecurityError, match="--join.*" + WAYS_OUT):
        run_worker("127.0.0.1:1", bind="0.0.0.0:0")
    with pytest.raises(SecurityError, match="peer: .*" + WAYS_OUT) as caught:
        run_worker(listen="0.0.0.0:0")
    assert "--join" not in str(caught.value)  # there is nobody to join


def test_a_driver_does_not_connect_to_other_machines_in_plain_text(expected):
    with (
        DistributedExecutor(StaticDiscovery(peers=["10.255.255.1:1", "10.255.255.2:1"])) as executor,
        pytest.raises(SecurityError, match=r"10\.255\.255\.1:1, which is not on this machine"),
    ):
        trained(executor)


def test_plain_text_off_loopback_needs_both_opt_ins_and_is_recorded(monkeypatch, caplog):
    monkeypatch.delenv("TS_INSECURE", raising=False)
    with pytest.raises(SecurityError, match=r"insecure=True alone has no effect.*TS_INSECURE=1"):
        run_worker("127.0.0.1:1", bind="0.0.0.0:0", insecure=True)
    with DistributedExecutor(coordinator_addr="0.0.0.0:0", insecure=True) as executor:
        assert executor.join_command.split()[-2] == "--join"
        assert not executor.insecure
    monkeypatch.setenv("TS_INSECURE", "1")
    with DistributedExecutor(coordinator_addr="0.0.0.0:0", insecure=True) as executor:
        assert "--join" not in executor.join_command
        assert executor.insecure
        assert executor.protection.material is None
    assert "INSECURE: coordinator" in caplog.text


def test_on_loopback_nothing_is_needed():
    with DistributedExecutor(coordinator_addr="127.0.0.1:0") as executor:
        assert executor.protection.material is None
        assert executor.join_command == f"torchslicer worker --coordinator {executor.address}"


def test_a_join_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "join"
    path.write_text("ts1.x", encoding="ascii")
    path.chmod(0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        run_worker("127.0.0.1:1", join_file=path)


# -- certificates that outlive a run -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment") / "certs"
    write_deployment(folder, ["worker-0", "worker-1"], hosts={"worker-0": ["127.0.0.1"], "worker-1": ["127.0.0.1"]})
    return folder


def files_of(folder: Path, node: str) -> dict[str, str]:
    return {"ca": str(folder / "ca.pem"), "cert": str(folder / f"{node}.pem"), "key": str(folder / f"{node}.key")}


def test_wrong_files_are_refused_at_once(certificates, tmp_path):
    write_deployment(tmp_path / "others", ["worker-0"])
    with DistributedExecutor(coordinator_addr="127.0.0.1:0", tls=files_of(certificates, "coordinator")) as executor:
        with pytest.raises(SecurityError, match="do not accept each other's certificates"):
            run_worker(executor.address, tls=files_of(tmp_path / "others", "worker-0"))
        with pytest.raises(SecurityError, match="the certificate is for 'worker-0'"):
            run_worker(executor.address, name="worker-1", tls=files_of(certificates, "worker-0"))
        with pytest.raises(SecurityError, match="belong together"):
            run_worker(
                executor.address,
                tls={**files_of(certificates, "worker-0"), "key": files_of(certificates, "worker-1")["key"]},
            )
        with pytest.raises(ts.ConfigError, match=r"^tls: .* key missing"):
            run_worker(executor.address, tls={"ca": "a", "cert": "b"})
