"""Sockets: made, connected, set up alike on both ends."""

from __future__ import annotations

import os
import select
import socket
import tempfile
from pathlib import Path

from torchslicer.transport.address import join_address, split_address
from torchslicer.transport.base import Deadline

# A UNIX socket's default buffer (208 KiB) makes the sender of a larger tensor wait until the receiver has time for it;
# buffers much beyond the caches make both slower.
_UNIX_BUFFER_BYTES = 2 << 20
_KEEPALIVE_S = 20
_MAX_FOLDER_BYTES = 60  # the path of a UNIX socket has room for about 100, and folders and names come below


def polled(sockets: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Return those of *sockets* that have something to read, within *timeout_s*."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    ready = {number for number, _ in poll.poll(timeout_s * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


def private_folder(within: str | os.PathLike[str] | None = None) -> Path:
    """Make a folder that only this user can enter, for UNIX sockets; whoever makes it removes it.

    It lies in *within*, or else where temporary files go, unless that path is too long for sockets.
    """
    if within is None and len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_BYTES:
        within = "/tmp"  # noqa: S108 - mkdtemp makes a new folder of mode 0700 in it
    return Path(tempfile.mkdtemp(prefix="torchslicer-", dir=within))


def connect_tcp(address: str, deadline: Deadline) -> socket.socket:
    """Connect to a port."""
    host, port = split_address(address)
    sock = socket.create_connection((host, port), timeout=max(deadline.remaining_s, 0.001))
    configure(sock)
    return sock


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """Connect to a UNIX socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(timeout_s, 0.001))
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    configure(sock)
    return sock


def configure(sock: socket.socket) -> str:
    """Set the options that both ends need, and return who is at the other end."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return f"unix:{sock.getsockname() or sock.getpeername()}"
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S // 4),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 2 * _KEEPALIVE_S * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return join_address(host, port)
