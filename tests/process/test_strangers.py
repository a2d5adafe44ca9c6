"""Strangers at every port of processes that speak plain text on this machine, while a run goes on and before one.

`test_cluster_security` and `test_fixed_certificates` have the same with TLS.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.attacks import Watch, under_attack
from tests.support.cluster import Peers, travelling_by
from tests.support.crew import Crew, assert_usable
from tests.support.driver import train_case
from tests.support.models import MLP
from tests.support.oracle import SGD, assert_same_bits
from torchslicer.cluster.coordinator import Member
from torchslicer.cluster.hub import PLAIN, dial, send_message
from torchslicer.cluster.messages import Attach
from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.transport.base import Channel

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

PATIENT = RunConfig.create(fault_tolerance__ping_timeout_s=60.0)
STEPS = 40
GROWTH_MB, OWN_GROWTH_MB, MORE_THREADS = 50, 200, 150


def trained(executor: DistributedExecutor | None = None) -> Any:
    """Train a small model for some steps."""
    options = {} if executor is None else {"slice_options": {"executor": executor}}
    return train_case(MLP, SGD, n=2, steps=STEPS, n_micro_batches=2, **options)


def ports(member: Member, kind: str = "") -> list[str]:
    """Return where a worker takes data connections."""
    return [entry.address for entry in member.hello.endpoints if kind in ("", entry.transport)]


@contextlib.contextmanager
def watched(pids: Sequence[int], megabytes: float) -> Iterator[None]:
    """Fail if one of the processes takes much memory in the block, or many threads at its end."""
    watches = [Watch(pid) for pid in pids]
    before = [watch.threads for watch in watches]
    yield
    assert max(watch.growth_mb for watch in watches) < megabytes
    assert max(watch.threads - then for watch, then in zip(watches, before, strict=True)) < MORE_THREADS


@pytest.fixture
def patient(crew: Crew) -> Crew:
    """The workers, with a coordinator that does not mind how slow this machine is under attack."""
    crew.executor.close()
    crew.executor = DistributedExecutor(CoordinatorDiscovery(run_id="attacked"), crew.address, PATIENT)
    crew.wait_for()
    return crew


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_attacks_on_a_coordinator_and_its_workers(patient: Crew, transport: str) -> None:
    """Garbage, half-open, slow and huge, at the control port and at all data ports of the workers of the run."""
    members = patient.executor.coordinator.live()[:2]
    expected = trained()
    addresses = [patient.address, *(port for member in members for port in ports(member))]
    streams = [port for member in members for port in ports(member, "grpc")]
    pids = [patient.pids[member.node] for member in members]
    with travelling_by(patient.executor, transport) as executor:
        trained(executor)  # what a run costs anyway
        with (
            watched(pids, GROWTH_MB),
            watched([os.getpid()], OWN_GROWTH_MB),
            under_attack(addresses, grpc_addresses=streams),
        ):
            assert_same_bits(trained(executor), expected)
    assert_usable(patient)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_attacks_on_peers(peers: Peers, transport: str) -> None:
    """The same at the ports that peers listen at for a driver, and at their data ports; a driver gets in even so."""
    expected = trained()
    with peers.driver(run_config=PATIENT, transport=transport, same_host=False) as executor:
        trained(executor)
        members = executor.coordinator.live()
    addresses = [*peers.addresses, *ports(members[0])]
    pids = [program.process.pid for program in peers.programs]
    with (
        watched(pids, GROWTH_MB),
        under_attack(addresses, grpc_addresses=ports(members[0], "grpc")),
        peers.driver(run_config=PATIENT, transport=transport, same_host=False) as executor,
    ):
        assert_same_bits(trained(executor), expected)
    with peers.driver(run_config=PATIENT) as executor:
        assert_same_bits(trained(executor), expected)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_connections_that_nobody_takes_keep_nobody_out(peers: Peers, transport: str) -> None:
    """More of them than are kept, or than a gRPC server serves at a time; all for runs that there are not."""
    held: list[Channel] = []
    with peers.driver(run_config=PATIENT, transport=transport, same_host=False) as executor:
        expected, member = trained(executor), executor.coordinator.live()[0]
        attach = Attach(run_id="nobody's", generation=1, rank=0, secret="guessed")
        network = [entry for entry in member.hello.endpoints if entry.transport == transport]
        try:
            for _ in range(300):
                channel, _ = dial(
                    network, "elsewhere", node=member.node, transport=transport, protection=PLAIN, timeout_s=10.0
                )
                held.append(channel)
                send_message(channel, attach)
            assert_same_bits(trained(executor), expected)
        finally:
            for channel in held:
                channel.close(timeout_s=0)
