"""Sockets: made, connected, set up alike on both ends."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import stat
import struct
import tempfile
from pathlib import Path

from torchslicer.transport.address import host_id, join_address, local_peer, split_address
from torchslicer.transport.base import Deadline
from torchslicer.transport.posix import FCNTL

# A UNIX socket's default buffer (208 KiB) makes the sender of a larger tensor wait until the receiver has time for it;
# buffers much beyond the caches make both slower.
_UNIX_BUFFER_BYTES = 2 << 20
_KEEPALIVE_S = 20
_PREFIX = "torchslicer-"
_MAX_FOLDER_BYTES = 60  # the path of a UNIX socket has room for about 100, and folders and names come below


def polled(sockets: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Return those of *sockets* that have something to read, within *timeout_s*."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    ready = {number for number, _ in poll.poll(timeout_s * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


class PrivateFolder:
    """A folder for UNIX sockets that only this user can enter.

    A lock in it tells others that it is in use, and goes with the process, however that ends: what a process that was
    killed has left is removed when the next folder is made beside it.

    Args:
        within: Where it lies; by default where temporary files go, unless that path is too long for sockets.

    Attributes:
        path: The folder.
    """

    def __init__(self, within: Path | None = None) -> None:
        if within is None:
            within = Path(tempfile.gettempdir())
            if len(os.fsencode(within)) > _MAX_FOLDER_BYTES:
                within = Path("/tmp")  # noqa: S108 - mkdtemp makes a new folder of mode 0700 in it
        _remove_left(within)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=within))
        self._lock: int | None = None
        try:
            self._lock = _locked(self.path)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock_name() -> str:
    """Return the name of a folder's lock; the locks of other hosts cannot be seen on every shared file system."""
    return f"in-use-on-{host_id()}"


def _locked(folder: Path) -> int:
    """Lock a file in *folder*, and give it its name only then: whoever finds a lock that is free finds nobody there."""
    new = folder / "lock"
    lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if FCNTL is None:
        return lock
    with contextlib.suppress(OSError):  # a file system without locks: then nobody takes the folder away
        FCNTL.flock(lock, FCNTL.LOCK_EX | FCNTL.LOCK_NB)
        new.rename(folder / _lock_name())
    return lock


def _remove_left(within: Path) -> None:
    """Remove the folders in *within* that processes of this user have left when they were killed."""
    for folder in within.glob(f"{_PREFIX}*") if FCNTL is not None else ():
        with contextlib.suppress(OSError):  # in use, without a lock that says so, or gone meanwhile
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    lock = os.open(folder / _lock_name(), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        FCNTL.flock(lock, FCNTL.LOCK_EX | FCNTL.LOCK_NB)
        _remove_left(folder)
        if not any(folder.glob(f"{_PREFIX}*")):  # else workers live that were started by the one that is gone
            shutil.rmtree(folder)
    finally:
        os.close(lock)


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


def _process_at(sock: socket.socket) -> int:
    """Return which process has opened the other end of a UNIX socket; 0 where that cannot be known."""
    if not hasattr(socket, "SO_PEERCRED"):  # not Linux
        return 0
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])


def configure(sock: socket.socket) -> str:
    """Set the options that both ends need, and return who is at the other end."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return local_peer(_process_at(sock))
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
