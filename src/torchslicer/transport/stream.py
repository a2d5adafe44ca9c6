"""Bytes over one connected socket, plain or TLS, read by one thread and written by another.

A wait never lasts longer than :data:`TICK_S`: the callers look at their deadlines and ask again. Errors of the system
come out as :class:`~torchslicer.errors.PeerClosedError`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from torchslicer.errors import PeerClosedError, TransportError
from torchslicer.transport.base import Deadline
from torchslicer.transport.shared import AVAILABLE as SHARED_MEMORY

TICK_S = 0.1
# How long a write waits for a receiver that takes nothing. While it does take, writing on in the caller's own thread is
# quickest; when it does not, the caller has other things to do, and a thread goes on.
_WRITE_TICK_S = 0.004
# How long a read stays awake for what is likely to come soon, because it came within this time the last time.
_AWAKE_S, _SOON_S = 100e-6, 200e-6
_INT_BYTES = struct.calcsize("i")
_ONE_DESCRIPTOR = socket.CMSG_LEN(_INT_BYTES) if hasattr(socket, "CMSG_LEN") else 0  # the kernel drops any further one
# A TLS record holds at most this much; what fits is joined, so that header and payload share one.
_RECORD_BYTES = 16 << 10

_Receive: TypeAlias = "Callable[[memoryview, int, int], int]"


class Stream(Protocol):
    """What readers and writers need of a connection."""

    def write(self, buffers: Sequence[bytes | memoryview], *, wait: bool, descriptor: int | None = None) -> int:
        """Write some of *buffers*; 0 if none could be written now, or within a tick if *wait*.

        The peer gets a copy of *descriptor* with the first byte, where the stream `shares`.
        """

    @property
    def shares(self) -> bool:
        """Whether both ends may use the same memory, by descriptors that they send each other."""

    def take_descriptor(self) -> int | None:
        """Return the descriptor that has come, whose owner is the caller from now on."""

    def read(self, view: memoryview, *, wait: bool, fill: bool = False) -> int | None:
        """Read into *view*, if *fill* and possible all of it; 0 at the end of the stream, None if nothing is there."""

    def wait_readable(self, timeout_s: float) -> None:
        """Wait until there is something to read."""

    def handshake(self, deadline: Deadline) -> None:
        """Agree on keys, where there are any."""

    def peer_names(self) -> tuple[str, ...]:
        """Return the names in the peer's certificate."""

    def shut(self, *, reading: bool) -> None:
        """Tell the peer that nothing more comes; with *reading*, wake whoever reads here."""

    def close(self) -> None:
        """Give the socket back."""


class PlainStream:
    """A socket without encryption, in blocking mode with the kernel's own time-outs: one system call a wait."""

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        sock.setblocking(True)
        tick = struct.pack("@ll", 0, int(TICK_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, int(_WRITE_TICK_S * 1e6)))
        self._socket, self._peer = sock, peer
        self.shares = SHARED_MEMORY and sock.family == socket.AF_UNIX
        self._descriptor: int | None = None
        self._soon = False

    def write(self, buffers: Sequence[bytes | memoryview], *, wait: bool, descriptor: int | None = None) -> int:
        """Write some of *buffers* straight from their memory."""
        beside = () if descriptor is None else ((socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor)),)
        try:
            return self._socket.sendmsg(buffers, beside, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _lost_connection(self._peer, error) from error

    def read(self, view: memoryview, *, wait: bool, fill: bool = False) -> int | None:
        """Read into *view*."""
        if fill:  # that is payload, with which no descriptor comes
            return self._received(self._socket.recv_into, view, socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT)
        receive = self._read_with_descriptor if self.shares else self._socket.recv_into
        return self._wait_for_next(receive, view) if wait else self._received(receive, view, socket.MSG_DONTWAIT)

    def _wait_for_next(self, receive: _Receive, view: memoryview) -> int | None:
        """Wait for what comes next, at first without sleeping if the last time it came soon.

        To fall asleep and be woken takes longer than many an answer does.
        """
        began = time.perf_counter()
        while self._soon and time.perf_counter() - began < _AWAKE_S:
            count = self._received(receive, view, socket.MSG_DONTWAIT)
            if count is not None:
                return count
        count = self._received(receive, view, 0)
        self._soon = time.perf_counter() - began < _SOON_S
        return count

    def _received(self, receive: _Receive, view: memoryview, flags: int) -> int | None:
        try:
            return receive(view, 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise _lost_connection(self._peer, error) from error

    def _read_with_descriptor(self, view: memoryview, _: int, flags: int) -> int:
        count, beside, _, _ = self._socket.recvmsg_into([view], _ONE_DESCRIPTOR, flags | socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) == _INT_BYTES:
                self._close_descriptor()
                [self._descriptor] = struct.unpack("i", data)
        return count

    def take_descriptor(self) -> int | None:
        """Return the descriptor that came last."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def _close_descriptor(self) -> None:
        descriptor = self.take_descriptor()
        if descriptor is not None:
            os.close(descriptor)

    def wait_readable(self, timeout_s: float) -> None:
        """Wait until there is something to read."""
        with _lost(self._peer):
            _wait(self._socket, select.POLLIN, timeout_s)

    def handshake(self, deadline: Deadline) -> None:
        """Do nothing: there are no keys."""

    def peer_names(self) -> tuple[str, ...]:
        """Return nothing: there is no certificate."""
        return ()

    def shut(self, *, reading: bool) -> None:
        """Tell the peer that nothing more comes."""
        _shut(self._socket, reading=reading)

    def close(self) -> None:
        """Give the socket back, having read what is there: unread bytes would make the kernel drop the sent ones."""
        _drain(self._socket)
        self._socket.close()
        self._close_descriptor()


class TlsStream:
    """A TLS connection. OpenSSL must not read and write one connection at once, hence the lock around each call."""

    def __init__(self, sock: ssl.SSLSocket, *, peer: str) -> None:
        sock.setblocking(False)
        self._socket, self._peer = sock, peer
        self._lock = threading.Lock()
        self._names: tuple[str, ...] = ()

    shares = False

    def write(self, buffers: Sequence[bytes | memoryview], *, wait: bool, descriptor: int | None = None) -> int:  # noqa: ARG002
        """Encrypt and write some of *buffers*. A retry gets the same bytes again, as OpenSSL asks for."""
        small = len(buffers) > 1 and sum(len(buffer) for buffer in buffers) <= _RECORD_BYTES
        data = memoryview(b"".join(buffers)) if small else buffers[0]
        return self._attempt(lambda: self._socket.send(data), wait=wait) or 0

    def read(self, view: memoryview, *, wait: bool, fill: bool = False) -> int | None:  # noqa: ARG002
        """Read into *view*, one record at most."""
        return self._attempt(lambda: self._socket.recv_into(view), wait=wait)

    def take_descriptor(self) -> int | None:
        """Return None: none can come."""
        return None

    def _attempt(self, operation: Callable[[], int], *, wait: bool) -> int | None:
        """Do what may have to wait for the socket, either way; None if it could not be done now, or within a tick."""
        with _lost(self._peer):
            for last in (not wait, True):
                try:
                    with self._lock:
                        return operation()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
                if last:
                    break
                _wait(self._socket, event, TICK_S)
        return None

    def wait_readable(self, timeout_s: float) -> None:
        """Wait until there is something to read."""
        with _lost(self._peer):
            if not self._socket.pending():
                _wait(self._socket, select.POLLIN, timeout_s)

    def handshake(self, deadline: Deadline) -> None:
        """Agree on keys and check the certificates.

        Raises:
            TransportError: The peer has no acceptable certificate, speaks no TLS, or took too long.
        """
        while True:
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                with _lost(self._peer):
                    _wait(self._socket, select.POLLIN, min(deadline.remaining_s, TICK_S))
            except ssl.SSLWantWriteError:
                with _lost(self._peer):
                    _wait(self._socket, select.POLLOUT, min(deadline.remaining_s, TICK_S))
            except (OSError, ValueError) as error:  # ValueError: closed meanwhile on this side
                raise TransportError(
                    f"TLS handshake with {self._peer} failed: {_reason(error)}; check that both sides use TLS, the "
                    "certificate authority, the name in the certificate and its dates"
                ) from error
            else:
                break
            if deadline.passed:
                raise TransportError(f"TLS handshake with {self._peer} took longer than {deadline.timeout_s:g} s")
        certificate = self._socket.getpeercert() or {}
        names = certificate.get("subjectAltName", ())
        self._names = tuple(str(entry[1]) for entry in names if isinstance(entry, tuple))

    def peer_names(self) -> tuple[str, ...]:
        """Return the names in the peer's certificate."""
        return self._names

    def hand_over(self) -> ssl.SSLSocket:
        """Return the connection; this stream must not be used any more, but for ending it."""
        return self._socket

    def shut(self, *, reading: bool) -> None:
        """Tell the peer that nothing more comes."""
        _shut(self._socket, reading=reading)

    def close(self) -> None:
        """Give the socket back, having read what is there, such as session tickets (see `PlainStream.close`)."""
        _drain(self._socket)
        self._socket.close()


@contextlib.contextmanager
def _lost(peer: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: the descriptor was closed under a waiting call
        raise _lost_connection(peer, error) from error


def _lost_connection(peer: str, error: Exception) -> PeerClosedError:
    return PeerClosedError(f"lost the connection to {peer}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return getattr(error, "strerror", None) or str(error)


def _wait(sock: socket.socket, event: int, timeout_s: float) -> None:
    poll = select.poll()  # one for each call: two threads may not share it
    poll.register(sock, event)
    poll.poll(max(0.0, timeout_s) * 1000)


def _shut(sock: socket.socket, *, reading: bool) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        # The plain socket's method: SSLSocket.shutdown would forget the keys under a reading thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR if reading else socket.SHUT_WR)


def _drain(sock: socket.socket) -> None:
    scrap = bytearray(64 << 10)
    with contextlib.suppress(OSError):
        for _ in range(256):
            # The plain socket's method: of TLS only the raw bytes matter here.
            if not socket.socket.recv_into(sock, scrap, 0, socket.MSG_DONTWAIT):
                break
