"""Runs that a configuration alone describes, data ports for firewalls, and hints where one side speaks TLS."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import free_address, until, worker_thread
from tests.support.driver import train_case
from tests.support.models import MLP
from tests.support.oracle import SGD, assert_same_bits
from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import ConfigError, SecurityError, TransportError
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.serving import run_worker

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]


def assert_trains(executor: DistributedExecutor) -> None:
    """Fail unless one worker gives the bits of local training."""
    got = train_case(MLP, SGD, n=1, steps=2, slice_options={"executor": executor})
    assert_same_bits(got, train_case(MLP, SGD, n=1, steps=2))


PEERS = StaticDiscovery(peers=["127.0.0.1:1"])

# A configuration alone


def test_a_configuration_describes_a_coordinator_and_its_workers() -> None:
    address = free_address()
    config = RunConfig.create(coordinator_bind_address=address, coordinator_address=address, keep_alive=False)
    with DistributedExecutor(run_config=config) as executor, worker_thread(run_config=config) as errors:
        assert executor.address == address
        assert_trains(executor)
        assert not errors


def test_a_configuration_describes_peers_and_their_driver() -> None:
    address = free_address()
    config = RunConfig.create(
        discovery={"backend": "static", "peers": [address]}, worker_port=int(address.rpartition(":")[2])
    )
    with worker_thread(run_config=config) as errors, DistributedExecutor(run_config=config) as executor:
        assert isinstance(executor.discovery, StaticDiscovery)
        assert executor.address == ""
        assert_trains(executor)
        assert not errors


def test_arguments_go_before_the_configuration(caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig.create(
        coordinator_bind_address="192.0.2.1:1", discovery={"backend": "static", "peers": ["127.0.0.1:1"], "timeout": 1}
    )
    with DistributedExecutor(CoordinatorDiscovery(timeout_s=7), "127.0.0.1:0", config) as executor:
        assert executor.address.startswith("127.0.0.1:")
        assert executor._discovery_timeout_s() == 7
    with DistributedExecutor(CoordinatorDiscovery(), "127.0.0.1:0", config) as executor:
        assert executor._discovery_timeout_s() == 1
    config.discovery.backend = "coordinator"
    with DistributedExecutor(coordinator_addr="127.0.0.1:0", run_config=config):
        assert "discovery.peers is not used" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"discovery": "127.0.0.1:0"}, r"discovery: expected CoordinatorDiscovery\(\.\.\.\) or .*got '127.0.0.1:0'"),
        ({"coordinator_addr": 50054}, "coordinator_addr: expected HOST:PORT, got 50054"),
        ({"run_config": "run.yaml"}, r"run_config: expected a RunConfig, such as RunConfig\.load.*got 'run.yaml'"),
        ({"stall_timeout_s": "60"}, "stall_timeout_s: expected a number of seconds above 0, got '60'"),
        ({"stall_timeout_s": float("nan")}, "stall_timeout_s: expected a number of seconds above 0, got nan"),
        ({"stall_timeout_s": True}, "stall_timeout_s: expected a number of seconds above 0, got True"),
        ({"host_threads": "x"}, "host_threads: expected a whole number above 0, got 'x'"),
        ({"host_threads": 0}, "host_threads: expected a whole number above 0, got 0"),
        ({"host_threads": -1}, "host_threads: expected a whole number above 0, got -1"),
        ({"host_threads": True}, "host_threads: expected a whole number above 0, got True"),
        ({"host_stage": False, "discovery": PEERS}, "host_stage: expected 0, got False"),
        ({"host_stage": 0.0, "discovery": PEERS}, "host_stage: expected 0, got 0.0"),
        ({"transport": "gprc"}, "transport: expected 'grpc' or 'tcp', got 'gprc'; did you mean 'grpc'"),
        ({"transport": ""}, "transport: expected 'grpc' or 'tcp', got ''"),
        ({"same_host": "no"}, "same_host: expected True or False, got 'no'"),
        ({"insecure": "false"}, "insecure: expected True or False, got 'false'"),
        ({"free_local_weights": None}, "free_local_weights: expected True or False, got None"),
        ({"tls": "ca.pem"}, r"tls: expected the files {'ca': ..., 'cert': ..., 'key': ...}, got 'ca.pem'"),
        ({"tls": {"crt": "a"}}, r"tls.crt: unknown key; did you mean 'cert'\? \(known here: ca, cert, key, names\)"),
        ({"tls": {"ca": 3}}, "tls.ca: expected a valid string, got 3"),
        ({"tls": {"ca": "a", "cert": "b"}}, "tls: expected the files ca, cert and key, key missing"),
        ({"discovery": StaticDiscovery("127.0.0.1:1")}, r"discovery.peers: expected a list .* got '127.0.0.1:1'"),
        (
            {"discovery": CoordinatorDiscovery(tag_filter="gpu")},
            r"discovery.tag_filter: expected .*\['gpu'\], got 'gpu'",
        ),
        ({"discovery": CoordinatorDiscovery(timeout_s="9")}, "discovery.timeout_s: expected a number"),  # type: ignore[arg-type]
        ({"discovery": CoordinatorDiscovery(run_id=3)}, "discovery.run_id: expected the name"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        DistributedExecutor(**given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"coordinator": 50054}, "coordinator: expected HOST:PORT, got 50054"),
        ({"listen": ("127.0.0.1", 1)}, "listen: expected HOST:PORT, got"),
        ({"bind": 7000}, "bind: expected HOST:PORT, got 7000"),
        ({"data_port": 50061.5}, "data_port: expected a port such as 50061 or a range .*, got 50061.5"),
        ({"data_port": True}, "data_port: expected a port"),
        ({"advertise": 1}, "advertise: expected a host"),
        ({"device": "gpu0"}, "device: expected 'auto', 'cpu' or 'cuda:0', got 'gpu0'"),
        ({"device": 0}, "device: expected 'auto', 'cpu' or 'cuda:0', got 0"),
        ({"threads": 0}, "threads: expected a whole number above 0, got 0"),
        ({"threads": "2"}, "threads: expected a whole number above 0, got '2'"),
        ({"tags": "gpu"}, r"tags: expected a list of texts such as \['gpu'\], got 'gpu'"),
        ({"name": 3}, "name: expected a name, got 3"),
        ({"trust": "my_package"}, "trust: expected a list of texts"),
        ({"trust": [3]}, r"trust: expected a list of texts such as .*, got \[3\]"),
        ({"allow_builder": "my_package:make"}, "allow_builder: expected a list of texts"),
        ({"join": b"ts1.secret"}, "join: expected the join string .*, got <class 'bytes'>$"),
        ({"join_file": 3}, "join_file: expected a path, got 3"),
        ({"tls": "ca.pem"}, "tls: expected the files"),
        ({"insecure": 1}, "insecure: expected True or False, got 1"),
        ({"once": "yes"}, "once: expected True or False, got 'yes'"),
        ({"stop": True}, "stop: expected a threading.Event, got True"),
        ({"exit_after_s": "5"}, "exit_after_s: expected a number of seconds above 0, got '5'"),
        ({"socket_folder": 3}, "socket_folder: expected a path, got 3"),
        ({"run_config": "run.yaml"}, "run_config: expected a RunConfig"),
    ],
)
def test_arguments_of_a_worker_that_are_of_another_kind_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        run_worker(**{"coordinator": "127.0.0.1:1", **given})


def test_a_static_configuration_without_peers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"discovery\.peers is empty"):
        DistributedExecutor(run_config=RunConfig.create(discovery__backend="static"))


# Data ports


def free_pair() -> int:
    """Return a port that is free, and so is the next one."""
    while True:
        port = int(free_address().rpartition(":")[2])
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def data_ports(executor: DistributedExecutor) -> dict[str, int]:
    [member] = until(executor.coordinator.live)
    return {
        one.transport: int(one.address.rpartition(":")[2]) for one in member.hello.endpoints if one.transport != "unix"
    }


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_worker_takes_the_data_ports_that_it_is_given(transport: str) -> None:
    port = free_pair()
    with (
        DistributedExecutor(coordinator_addr="127.0.0.1:0", transport=transport, same_host=False) as executor,
        worker_thread(coordinator=executor.address, data_port=port) as errors,
    ):
        assert data_ports(executor) == {"tcp": port, "grpc": port + 1}
        assert_trains(executor)
        assert not errors


@pytest.mark.parametrize("taken", [0, 1])
def test_a_data_port_in_use_is_said_at_once(taken: int) -> None:
    port = free_pair()
    with socket.create_server(("127.0.0.1", port + taken)):
        with pytest.raises(TransportError, match=rf"(?s)--data-port.*{port} \(TCP\) and {port + 1} \(gRPC\): cannot"):
            run_worker("127.0.0.1:1", data_port=port, device="cpu")
        config = RunConfig.create(data_port=port)
        with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{port + taken}"):
            run_worker("127.0.0.1:1", run_config=config, device="cpu")


def test_of_a_range_the_free_ports_are_taken() -> None:
    port = free_pair()
    with (
        socket.create_server(("127.0.0.1", port)),
        DistributedExecutor(coordinator_addr="127.0.0.1:0") as executor,
        worker_thread(coordinator=executor.address, data_port=f"{port}-{port + 40}"),
    ):
        found = data_ports(executor)
        assert found["grpc"] == found["tcp"] + 1
        assert found["tcp"] in range(port + 2, port + 40, 2)


def test_two_places_that_give_a_port_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--bind 127\.0\.0\.1:7000 and --data-port both give a port"):
        run_worker("127.0.0.1:1", bind="127.0.0.1:7000", data_port=7001, device="cpu")


# One side speaks TLS, the other does not


@pytest.fixture
def secured() -> Iterator[DistributedExecutor]:
    """A coordinator that makes certificates of its own."""
    with DistributedExecutor(coordinator_addr="0.0.0.0:0") as executor:
        yield executor


def test_a_plain_worker_is_told_to_join(secured: DistributedExecutor, caplog: pytest.LogCaptureFixture) -> None:
    address = secured.address.replace("0.0.0.0", "127.0.0.1")
    with pytest.raises(SecurityError, match=rf"--coordinator {address} --join STRING.*--tls-ca"):
        run_worker(address, device="cpu")
    until(lambda: "a worker starts with: torchslicer worker --coordinator" in caplog.text)
    assert secured.join_command.split()[-1] not in caplog.text.split("start workers with")[-1].partition("\n")[2]


def test_a_worker_that_would_join_is_told_that_there_is_nothing_to_join(
    secured: DistributedExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    joining = secured.join_command.split()[-1]
    with caplog.at_level(logging.WARNING), DistributedExecutor(coordinator_addr="127.0.0.1:0") as plain:
        with pytest.raises(SecurityError, match="takes plain connections prints no join string"):
            run_worker(plain.address, join=joining, device="cpu")
        until(lambda: "it speaks TLS, and this side takes plain connections" in caplog.text)
