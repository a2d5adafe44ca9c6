"""Channels over TCP and UNIX sockets, plain or with TLS.

>>> listener = TcpListener("127.0.0.1:0")
>>> client = connect(listener.address, timeout_s=5)
>>> server = listener.accept(timeout_s=5)
>>> client.send(Frame.of_message({"op": "hello"}), timeout_s=5)
>>> server.receive(timeout_s=5).message()
{'op': 'hello'}
>>> for each in (client, server, listener):
...     each.close()
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

from torchslicer.errors import DeadlineError, PeerClosedError, TransportError
from torchslicer.transport.address import Endpoint, host_id, join_address, local_path, split_address
from torchslicer.transport.base import Channel, ChannelOptions, ChannelStats, Deadline
from torchslicer.transport.frame import HEADER_BYTES, Expect, Frame
from torchslicer.transport.queue import ByteQueue, again
from torchslicer.transport.reader import FrameReader
from torchslicer.transport.sockets import PrivateFolder, configure, connect_tcp, connect_unix, polled
from torchslicer.transport.stream import TICK_S, PlainStream, Stream, TlsStream
from torchslicer.transport.writer import FrameWriter


class SocketChannel:
    """One end of a socket; see :class:`~torchslicer.transport.base.Channel`."""

    def __init__(self, stream: Stream, *, peer: str, options: ChannelOptions) -> None:
        self.limits = options.limits
        self.expect: Expect | None = None
        self.stats = ChannelStats()
        self.peer = peer
        self._stream, self._options = stream, options
        self._reader = FrameReader(stream, self, self.stats, peer=peer, options=options)
        self._writer = FrameWriter(stream, self.stats, peer=peer, options=options)
        self._receiving, self._starting = threading.Lock(), threading.Lock()
        self._error: TransportError | None = None
        self._ready = self._released = False
        self._ahead: ByteQueue[Frame] | None = None
        self._reading_thread: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether the channel has ended, on either side."""
        return self._error is not None or self._writer.error is not None

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The names in the peer's certificate, once a frame has passed; empty without TLS."""
        return self._stream.peer_names()

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Send or queue *frame*; see :class:`~torchslicer.transport.base.Channel`."""
        if not self._ready:
            self.start(timeout_s=timeout_s)
        self._writer.send(frame, timeout_s)

    def receive(self, *, timeout_s: float) -> Frame:
        """Return the next frame; see :class:`~torchslicer.transport.base.Channel`."""
        if not self._ready:
            self.start(timeout_s=timeout_s)
        deadline = Deadline(timeout_s)
        if self._ahead is not None:
            return self._ahead.get(deadline)
        if not self._receiving.acquire(timeout=timeout_s):
            raise DeadlineError(f"another thread has been receiving from {self.peer} for {timeout_s:g} s")
        try:
            return self._read(deadline)
        finally:
            self._receiving.release()

    def start(self, *, timeout_s: float) -> None:
        """Do the TLS handshake; the first call of ``send`` or ``receive`` does it otherwise.

        So a listener never waits for a stranger's handshake.

        Raises:
            TransportError: The peer failed it.
        """
        with self._starting:
            if self._error is not None:
                raise again(self._error)
            if self._ready:
                return
            try:
                self._stream.handshake(Deadline(min(timeout_s, self._options.header_timeout_s)))
            except TransportError as error:
                self._fail(error)
                raise
            if self._options.read_ahead_bytes:
                self._ahead = ByteQueue[Frame](self._options.read_ahead_bytes)
                self._reading_thread = threading.Thread(
                    target=self._read_ahead, args=(self._ahead,), name=f"receive from {self.peer}", daemon=True
                )
                self._reading_thread.start()
            self._ready = True

    @property
    def is_local(self) -> bool:
        """Whether the peer came through a UNIX socket: a process of this host and user."""
        return self.peer.startswith("unix:")

    def hand_over(self) -> ssl.SSLSocket:
        """Give up the TLS connection, of which nothing was read yet, to whoever speaks another protocol on it.

        Raises:
            TransportError: The channel has ended, or speaks no TLS.
        """
        with self._starting:
            if self._error is not None or not isinstance(self._stream, TlsStream):
                raise PeerClosedError(f"the connection to {self.peer} cannot be handed over")
            self._error = PeerClosedError(f"the connection to {self.peer} was handed over")
            self._writer.end(self._error)
            self._released = True
            return self._stream.hand_over()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End the channel; queued frames get *timeout_s* to leave."""
        if self._error is None and self._writer.error is None:
            self._writer.flush(Deadline(timeout_s))
        self._fail(PeerClosedError(f"the channel to {self.peer} was closed on this side"))
        self._writer.join()
        if self._reading_thread is not None and self._reading_thread is not threading.current_thread():
            self._reading_thread.join(timeout=5)
        with self._receiving:  # whoever still reads has been woken
            self._reader.close()
            if not self._released:
                self._released = True
                self._stream.close()

    def _read(self, deadline: Deadline) -> Frame:
        if self._error is not None:
            raise again(self._error)
        try:
            return self._reader.read(deadline)
        except DeadlineError:
            raise
        except TransportError as error:
            raise again(self._fail(error)) from error.__cause__

    def _fail(self, error: TransportError) -> TransportError:
        """End both directions; return the error that counts, the first."""
        if self._error is None:
            self._error = error
        self._writer.end(self._error)
        self._stream.shut(reading=True)
        if self._ahead is not None:
            self._ahead.end(self._error)
        return self._error

    def _read_ahead(self, queue: ByteQueue[Frame]) -> None:
        while self._error is None:
            try:
                frame = self._reader.read(Deadline(10 * TICK_S))
            except DeadlineError:
                continue
            except TransportError as error:
                self._fail(error)
                return
            self._put_ahead(queue, frame)

    def _put_ahead(self, queue: ByteQueue[Frame], frame: Frame) -> None:
        while True:
            try:
                queue.put(frame, HEADER_BYTES + frame.header.payload_bytes, Deadline(10 * TICK_S))
            except DeadlineError:
                continue
            except TransportError:  # the channel has ended
                pass
            return


def connect(
    address: str,
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    options: ChannelOptions | None = None,
) -> Channel:
    """Connect to a :class:`TcpListener`.

    Args:
        address: ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:/path``.
        timeout_s: How long connecting may take, handshake included.
        tls: A client's context; None for no encryption.
        server_hostname: The name that the listener's certificate must have; by default the host of *address*.
        options: The channel's options.

    Raises:
        TransportError: The address is malformed, nobody listens there, or the handshake failed.
        DeadlineError: The listener did not answer in time.
    """
    deadline, options = Deadline(timeout_s), options or ChannelOptions()
    path = local_path(address)
    try:
        sock = connect_unix(path, timeout_s) if path is not None else connect_tcp(address, deadline)
    except TimeoutError as error:
        raise DeadlineError(f"{address} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise TransportError(f"cannot connect to {address}: {error.strerror or error}; is it running?") from error
    stream: Stream
    if tls is None:
        stream = PlainStream(sock, peer=address)
    else:
        name = server_hostname or (split_address(address)[0] if path is None else None)
        sock.setblocking(False)
        wrapped = tls.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        stream = TlsStream(wrapped, peer=address)
    channel = SocketChannel(stream, peer=address, options=options)
    try:
        channel.start(timeout_s=deadline.remaining_s)
    except TransportError:
        channel.close()
        raise
    return channel


class TcpListener:
    """Listens on a TCP port or a UNIX socket, and beside a port on a UNIX socket for peers on this host.

    Args:
        bind: ``HOST:PORT`` (port 0: any free one), ``[IPV6]:PORT`` or ``unix:/path``.
        tls: A server's context for the port; a UNIX socket needs none, only this user can open it.
        local: Open a UNIX socket beside the port too, in a folder of its own; :attr:`endpoints` tells of both. A path
            says where that folder is made, by default where temporary files go.
        options: The options of accepted channels.

    Raises:
        TransportError: The address is malformed, in use, or not this host's.
    """

    def __init__(
        self,
        bind: str,
        *,
        tls: ssl.SSLContext | None = None,
        local: bool | Path = False,
        options: ChannelOptions | None = None,
    ) -> None:
        self._tls, self._options = tls, options or ChannelOptions()
        self._folder: PrivateFolder | None = None
        self._path: Path | None = None
        self._sockets: list[socket.socket] = []
        path = local_path(bind)
        try:
            if path is not None:
                self._listen_unix(Path(path))
                self.address = bind
            else:
                self.address = self._listen_tcp(bind)
                if local:
                    self._folder = PrivateFolder(local if isinstance(local, Path) else None)
                    self._listen_unix(self._folder.path / "socket")
        except OSError as error:
            self.close()
            raise TransportError(
                f"cannot listen on {bind}: {error.strerror or error}; free the port or choose another (0: any)"
            ) from error

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All ways to reach this listener, to be told to peers; see ``choose_endpoint``."""
        network = () if self.address.startswith("unix:") else (Endpoint(self.address),)
        local = () if self._path is None else (Endpoint(f"unix:{self._path}", host_id=host_id()),)
        return network + local

    def accept(self, *, timeout_s: float) -> Channel:
        """Return the next connection. It waits for no handshake: that belongs to the channel's first call.

        Raises:
            DeadlineError: Nobody came within *timeout_s*.
            PeerClosedError: The listener was closed.
        """
        deadline = Deadline(timeout_s)
        while True:
            if not self._sockets:
                raise PeerClosedError(f"the listener on {self.address} was closed")
            for listening in self._ready(min(deadline.remaining_s, TICK_S)):
                with contextlib.suppress(OSError):  # gone again before it was accepted
                    sock, _ = listening.accept()
                    try:
                        return self._channel(sock)
                    except OSError:
                        sock.close()
                        raise
            if deadline.passed:
                raise DeadlineError(f"nobody connected to {self.address} within {timeout_s:g} s")

    def close(self) -> None:
        """Stop listening and remove the UNIX socket; accepted channels stay open."""
        sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # forked processes have copies, which would keep the port
            sock.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _ready(self, timeout_s: float) -> list[socket.socket]:
        sockets = list(self._sockets)
        try:
            return polled(sockets, timeout_s)
        except (OSError, ValueError):  # closed meanwhile
            return []

    def _channel(self, sock: socket.socket) -> Channel:
        peer = configure(sock)
        stream: Stream
        if self._tls is None or sock.family == socket.AF_UNIX:
            stream = PlainStream(sock, peer=peer)
        else:
            sock.setblocking(False)
            stream = TlsStream(self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), peer=peer)
        return SocketChannel(stream, peer=peer, options=self._options)

    def _listen_tcp(self, bind: str) -> str:
        host, port = split_address(bind)
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        self._sockets.append(sock)
        # A port left by a run that has just ended may be taken again; one that is in use may not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(128)
        sock.setblocking(False)
        return join_address(host, sock.getsockname()[1])

    def _listen_unix(self, path: Path) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(sock)
        sock.bind(str(path))
        self._path = path
        path.chmod(0o600)
        sock.listen(128)
        sock.setblocking(False)
