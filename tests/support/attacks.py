"""Strangers at a port: what they send, and what a process looks like meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import torch

from torchslicer.transport.dtypes import code_of
from torchslicer.transport.frame import FrameHeader, FrameKind, encode_header
from torchslicer.transport.geometry import geometry_of

Connect = Callable[[], socket.socket]


def connector(address: str) -> Connect:
    """Return what connects to ``HOST:PORT`` or ``unix:/path``."""

    def connect() -> socket.socket:
        if address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(2)
                sock.connect(address.removeprefix("unix:"))
            except OSError:
                sock.close()
                raise
            return sock
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), 2)

    return connect


def garbage(connect: Connect, over: threading.Event) -> None:
    """Send random bytes."""
    noise = os.urandom(4096)
    while not over.is_set():
        with contextlib.suppress(OSError), connect() as sock:
            sock.sendall(noise)
            sock.recv(64)
        over.wait(0.02)


def half_open(connect: Connect, over: threading.Event) -> None:
    """Open connections and say nothing."""
    held: list[socket.socket] = []
    while not over.is_set():
        with contextlib.suppress(OSError):
            held.append(connect())
        if len(held) > 100:
            held.pop(0).close()
        over.wait(0.01)
    for sock in held:
        sock.close()


def slow(connect: Connect, over: threading.Event) -> None:
    """Send the beginning of a TLS record, byte by byte."""
    while not over.is_set():
        with contextlib.suppress(OSError), connect() as sock:
            for byte in bytes.fromhex("16030102000100"):
                sock.sendall(bytes([byte]))
                if over.wait(0.2):
                    return


def huge(connect: Connect, over: threading.Event) -> None:
    """Announce a tensor of a gigabyte, and send as much of it as is taken."""
    wire, block = _huge_header(), bytes(1 << 20)
    while not over.is_set():
        with contextlib.suppress(OSError), connect() as sock:
            sock.sendall(wire)
            for _ in range(64):
                if over.is_set():
                    break
                sock.sendall(block)
        over.wait(0.05)


def huge_in_tls(connect: Connect, over: threading.Event) -> None:
    """Do the same within TLS, without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    while not over.is_set():
        with contextlib.suppress(OSError), connect() as raw, context.wrap_socket(raw) as sock:
            sock.sendall((0x7FFFFFFF).to_bytes(4, "big"))
            for _ in range(64):
                sock.sendall(bytes(1 << 20))
        over.wait(0.05)


ATTACKS = (garbage, half_open, slow, huge, huge_in_tls)


def _huge_header() -> bytes:
    geometry = geometry_of((1 << 28,), (1,), code_of(torch.float32))
    return encode_header(FrameHeader(FrameKind.FORWARD, payload_bytes=geometry.payload_bytes, geometry=geometry))


def _pieces(over: threading.Event, kind: int) -> Iterator[bytes]:
    """Yield what one stream of a gRPC attacker sends: garbage, nothing, half a header, or a gigabyte."""
    if kind == 0:
        yield os.urandom(4096)
    if kind == 2:
        yield b"TSLF"
    if kind == 3:
        yield _huge_header()
        for _ in range(64):
            if over.is_set():
                return
            yield bytes(1 << 20)
    over.wait(1.0)


def streams(address: str, over: threading.Event) -> None:
    """Open gRPC streams, four a connection, and send all that in them."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    while not over.is_set():
        with grpc.insecure_channel(address, options=options) as channel:
            method = channel.stream_stream("/torchslicer.Channel/Frames")
            calls = [method(_pieces(over, kind), timeout=1.0) for kind in range(4)]
            for call in calls:
                with contextlib.suppress(grpc.RpcError):
                    for _ in call:
                        pass


@contextlib.contextmanager
def under_attack(addresses: Sequence[str], *, grpc_addresses: Sequence[str] = ()) -> Iterator[None]:
    """Let all attacks go on at all addresses during the block; those with gRPC streams at *grpc_addresses*."""
    over = threading.Event()
    threads = [
        threading.Thread(target=attack, args=(connector(address), over), name=attack.__name__)
        for address in addresses
        for attack in ATTACKS
    ]
    threads += [threading.Thread(target=streams, args=(address, over), name="streams") for address in grpc_addresses]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Watch:
    """How much memory and how many threads a process has."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc", str(pid))
        (self._folder / "clear_refs").write_text("5", encoding="ascii")  # the peak counts from now on
        self._before_kib = self._status("VmRSS")

    def _status(self, name: str) -> int:
        lines = (self._folder / "status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    @property
    def growth_mb(self) -> float:
        """The peak of memory since the start of the watch, over what it was then."""
        return (self._status("VmHWM") - self._before_kib) / 1024

    @property
    def threads(self) -> int:
        """Threads that there are now."""
        return self._status("Threads")
