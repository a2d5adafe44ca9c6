"""Opening a data connection at a node that drops some."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from torchslicer.cluster.hub import PLAIN, Hub, open_link, send_message
from torchslicer.cluster.messages import Attach, Attached, Endpoint
from torchslicer.errors import PeerClosedError
from torchslicer.transport.address import host_id
from torchslicer.transport.tcp import TcpListener

ATTACH = Attach(run_id="run", generation=1, rank=0, secret="s" * 32)


@pytest.fixture
def listener() -> Iterator[TcpListener]:
    found = TcpListener("127.0.0.1:0")
    yield found
    found.close()


def serve(listener: TcpListener, dropped: int) -> threading.Thread:
    """Drop so many connections, and take the next one."""

    def run() -> None:
        for _ in range(dropped):
            listener.accept(timeout_s=10).close()
        channel = listener.accept(timeout_s=10)
        channel.receive(timeout_s=10)
        send_message(channel, Attached())
        channel.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def open_at(listener: TcpListener) -> str:
    endpoints = [Endpoint(transport="tcp", address=listener.address)]
    channel, kind = open_link(
        endpoints, host_id(), ATTACH, node="worker", transport="tcp", protection=PLAIN, timeout_s=10
    )
    channel.close()
    return kind


def test_a_connection_that_was_dropped_before_it_was_known_is_made_again(listener: TcpListener) -> None:
    thread = serve(listener, dropped=2)
    assert open_at(listener) == "tcp"
    thread.join()


def test_a_node_that_drops_all_is_given_up(listener: TcpListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchslicer.cluster.hub._ATTEMPTS", 2)
    thread = serve(listener, dropped=2)
    with pytest.raises(PeerClosedError):
        open_at(listener)
    assert open_at(listener) == "tcp"  # the third is taken again
    thread.join()


def test_a_hub_takes_it_at_once() -> None:
    hub = Hub("127.0.0.1:0", with_grpc=False)
    try:
        channel, kind = open_link(
            hub.endpoints, host_id(), ATTACH, node="worker", transport="tcp", protection=PLAIN, timeout_s=10
        )
        channel.close()
    finally:
        hub.close()
    assert kind == "unix"
