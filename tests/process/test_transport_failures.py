"""Strangers, slow peers, dead peers and wrong certificates, with real sockets and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from tests.support.cluster import Program
from torchslicer.errors import DeadlineError, FrameError, PeerClosedError, TransportError
from torchslicer.transport import (
    ChannelOptions,
    Frame,
    FrameKind,
    TcpListener,
    choose_endpoint,
    connect,
    local_path,
)
from torchslicer.transport import grpc as channels
from torchslicer.transport.base import Channel
from torchslicer.transport.frame import encode_header
from torchslicer.transport.sockets import PrivateFolder

pytestmark = pytest.mark.process
WAIT_S = 10.0
QUICK = ChannelOptions(header_timeout_s=0.2, stall_timeout_s=0.3)


@contextlib.contextmanager
def stranger(options: ChannelOptions, tls: ssl.SSLContext | None = None) -> Iterator[tuple[socket.socket, Channel]]:
    """A raw socket at one end, a channel at the other."""
    listener = TcpListener("127.0.0.1:0", tls=tls, options=options)
    host, port = listener.address.split(":")
    with socket.create_connection((host, int(port))) as raw:
        channel = listener.accept(timeout_s=WAIT_S)
        yield raw, channel
        channel.close()
    listener.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n" + b"\r\n" * 100, b"\x16\x03\x01" * 100, b"\0" * 192])
def test_garbage_is_refused(data: bytes) -> None:
    with stranger(QUICK) as (raw, channel):
        raw.sendall(data)
        with pytest.raises(FrameError, match="not a TorchSlicer frame"):
            channel.receive(timeout_s=WAIT_S)
        assert channel.closed


def test_half_open_connection_ends_at_the_deadline() -> None:
    with stranger(QUICK) as (_, channel), pytest.raises(DeadlineError):
        channel.receive(timeout_s=0.05)


def test_header_that_stops_is_given_up() -> None:
    with stranger(QUICK) as (raw, channel):
        raw.sendall(b"TSLF")
        start = time.monotonic()
        with pytest.raises(FrameError, match="sent 4 of 192 bytes of a header"):
            channel.receive(timeout_s=WAIT_S)
        assert time.monotonic() - start < 3


def test_header_that_trickles_is_given_up() -> None:
    with stranger(QUICK) as (raw, channel):
        done = threading.Event()

        def trickle() -> None:
            while not done.wait(0.02):
                with contextlib.suppress(OSError):
                    raw.send(b"T")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(FrameError, match="bytes of a header and nothing more"):
                channel.receive(timeout_s=WAIT_S)
        finally:
            done.set()
            thread.join()


def test_payload_that_stops_is_given_up() -> None:
    header = encode_header(Frame.of_tensor(FrameKind.FORWARD, torch.ones(1000), value=8).header)
    with stranger(QUICK) as (raw, channel):
        raw.sendall(header + bytes(10))
        with pytest.raises(
            PeerClosedError, match=r"sent 10 of 4000 bytes of FORWARD .*value 8.* nothing more for 0.3 s"
        ):
            channel.receive(timeout_s=WAIT_S)


def test_deadline_within_a_payload_keeps_what_has_come() -> None:
    tensor = torch.arange(1000.0)
    frame = Frame.of_tensor(FrameKind.FORWARD, tensor)
    data = encode_header(frame.header) + bytes(frame.wire())
    with stranger(ChannelOptions()) as (raw, channel):
        raw.sendall(data[:1500])
        with pytest.raises(DeadlineError, match="1308 of 4000 bytes"):
            channel.receive(timeout_s=0.15)
        raw.sendall(data[1500:])
        assert torch.equal(channel.receive(timeout_s=WAIT_S).tensor(), tensor)


def test_announced_size_takes_no_memory_before_it_comes() -> None:
    header = encode_header(Frame.of_tensor(FrameKind.FORWARD, torch.zeros(1).expand(1)).header._replace())
    huge = Frame.of_tensor(FrameKind.FORWARD, torch.empty(1 << 31, dtype=torch.uint8))
    with stranger(QUICK) as (raw, channel):
        raw.sendall(encode_header(huge.header) + header)
        before = _resident_bytes()
        with pytest.raises(PeerClosedError):
            channel.receive(timeout_s=WAIT_S)
        assert _resident_bytes() - before < 64 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


PEER = """
import os, signal, sys, torch
from torchslicer.transport import Frame, FrameKind, connect
from torchslicer.transport import grpc as channels
kind, address = sys.argv[1:]
channel = (channels.connect if kind == "grpc" else connect)(address, timeout_s=20)
channel.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(3)), timeout_s=5)
channel.receive(timeout_s=20)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["tcp", "unix", "grpc"])
def test_killed_peer_is_noticed_at_once(kind: str) -> None:
    listener: Any = channels.GrpcListener("127.0.0.1:0") if kind == "grpc" else TcpListener("127.0.0.1:0", local=True)
    address = choose_endpoint(listener.endpoints).address if kind == "unix" else listener.address
    process = subprocess.Popen([sys.executable, "-c", PEER, kind, address])
    channel = listener.accept(timeout_s=60)
    assert channel.receive(timeout_s=WAIT_S).tensor().sum() == 3
    channel.send(Frame.of_message({"op": "die"}), timeout_s=WAIT_S)
    start = time.monotonic()
    with pytest.raises(PeerClosedError):
        channel.receive(timeout_s=WAIT_S)
    assert time.monotonic() - start < 5
    with pytest.raises(PeerClosedError):
        channel.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(1 << 20)), timeout_s=WAIT_S)
    assert process.wait(10) == -signal.SIGKILL
    channel.close()
    listener.close()


@pytest.mark.parametrize("listen", [TcpListener, channels.GrpcListener])
def test_port_in_use_is_named(listen: Callable[[str], Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TransportError, match=f"cannot listen on {address}"):
            listen(address)


@pytest.mark.parametrize("listen", [TcpListener, channels.GrpcListener])
def test_port_is_free_again_after_close(listen: Callable[[str], Any]) -> None:
    first = listen("127.0.0.1:0")
    with pytest.raises(TransportError, match="cannot listen"):
        listen(first.address)
    first.close()
    listen(first.address).close()


@pytest.mark.parametrize("open_channel", [connect, channels.connect])
def test_nobody_there_is_an_error_that_names_the_address(open_channel: Callable[..., Channel]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(TransportError, match=address):
        open_channel(address, timeout_s=3)


@pytest.mark.parametrize("listen", [TcpListener, channels.GrpcListener])
def test_accept_ends_at_its_deadline(listen: Callable[[str], Any]) -> None:
    listener = listen("127.0.0.1:0")
    with pytest.raises(DeadlineError, match="nobody connected"):
        listener.accept(timeout_s=0.05)
    listener.close()
    with pytest.raises(PeerClosedError):
        listener.accept(timeout_s=0.05)


def test_s38_proxy_variables_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    listener = channels.GrpcListener("127.0.0.1:0")
    channel = channels.connect(listener.address, timeout_s=5)
    channel.close()
    listener.close()


def test_s39_frequent_pings_of_an_idle_client_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was not told of them says "too_many_pings" after three, and ends the connection."""
    others = [option for option in channels._CLIENT_OPTIONS if option[0] != "grpc.keepalive_time_ms"]
    monkeypatch.setattr(channels, "_CLIENT_OPTIONS", (*others, ("grpc.keepalive_time_ms", 200)))
    listener = channels.GrpcListener("127.0.0.1:0")
    client = channels.connect(listener.address, timeout_s=WAIT_S)
    server = listener.accept(timeout_s=WAIT_S)
    with pytest.raises(DeadlineError):
        client.receive(timeout_s=4.5)
    server.send(Frame.of_bytes(FrameKind.PING), timeout_s=WAIT_S)
    assert client.receive(timeout_s=WAIT_S).header.kind is FrameKind.PING
    for each in (client, server, listener):
        each.close()


def test_socket_for_peers_on_this_host_is_private_and_removed() -> None:
    listener = TcpListener("127.0.0.1:0", local=True)
    network, local = listener.endpoints
    path = Path(local_path(local.address) or "")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert choose_endpoint([network, local]) == local
    listener.close()
    assert not path.parent.exists()
    assert choose_endpoint([network, local]) == network


FOLDERS = """
import sys
from pathlib import Path
from torchslicer.transport.sockets import PrivateFolder
outer = PrivateFolder(Path(sys.argv[1]))
inner = PrivateFolder(outer.path)
print("made", outer.path.name, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_s_folder_of_sockets_is_removed_with_the_next_and_no_other(tmp_path: Path) -> None:
    mine = PrivateFolder(tmp_path)
    notes = tmp_path / "torchslicer-notes"
    (notes / "torchslicer-more").mkdir(parents=True)  # without a lock: nothing is known of it
    (tmp_path / "torchslicer-link").symlink_to(mine.path)
    with Program(["-c", FOLDERS, str(tmp_path)]) as program:
        left = tmp_path / program.wait_for(r"made (\S+)")[1]
        PrivateFolder(tmp_path).remove()
        assert len(list(left.iterdir())) == 2  # it lives, and so do the locks
        program.process.kill()
        program.process.wait()
        assert left.exists()
        PrivateFolder(tmp_path).remove()
    assert not left.exists()
    assert list(mine.path.iterdir())
    assert notes.exists()
    mine.remove()
    assert not mine.path.exists()


def test_what_processes_that_live_have_in_a_killed_one_s_folder_stays(tmp_path: Path) -> None:
    """A simulated worker whose driver was killed ends, too, but not in the same moment."""
    with Program(["-c", FOLDERS, str(tmp_path)]) as program:
        left = tmp_path / program.wait_for(r"made (\S+)")[1]
        worker = PrivateFolder(left)
        program.process.kill()
        program.process.wait()
        PrivateFolder(tmp_path).remove()
        assert [path.parent for path in left.rglob("in-use-*")] == [left, worker.path]
        worker.remove()
        PrivateFolder(tmp_path).remove()
    assert not left.exists()


def server_context(ca: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(*names).configure_cert(context)
    ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(trusted: trustme.CA, own: trustme.CA | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.configure_trust(context)
    if own is not None:
        own.issue_cert("client").configure_cert(context)
    return context


@pytest.mark.parametrize("case", ["wrong authority", "wrong name", "no client certificate", "no TLS at the client"])
def test_tls_refuses(case: str) -> None:
    ca, other = trustme.CA(), trustme.CA()
    name = "elsewhere.example" if case == "wrong name" else "127.0.0.1"
    tls = client_context(other if case == "wrong authority" else ca, None if case == "no client certificate" else ca)
    listener = TcpListener("127.0.0.1:0", tls=server_context(ca, name))
    errors: list[TransportError] = []

    def use() -> None:
        try:
            client = connect(listener.address, timeout_s=WAIT_S, tls=None if case == "no TLS at the client" else tls)
        except TransportError as error:
            errors.append(error)
            return
        try:
            client.send(Frame.of_bytes(FrameKind.PING), timeout_s=WAIT_S)
            client.receive(timeout_s=WAIT_S)
        except TransportError as error:
            errors.append(error)
        client.close()

    thread = threading.Thread(target=use)
    thread.start()
    server = listener.accept(timeout_s=WAIT_S)
    with pytest.raises(TransportError, match="TLS handshake"):
        server.receive(timeout_s=WAIT_S)
    server.close()
    thread.join()
    listener.close()
    assert len(errors) == 1


def test_stranger_without_handshake_holds_nobody_up() -> None:
    options = ChannelOptions(header_timeout_s=0.2)
    with stranger(options, server_context(trustme.CA(), "127.0.0.1")) as (_, channel):
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"took longer than 0\.2 s"):
            channel.receive(timeout_s=WAIT_S)
        assert time.monotonic() - start < 3
