"""Channels over gRPC: the same frames, as raw bytes in pieces over one bidirectional stream each.

No protobuf and no generated code; no message ever grows with a tensor, so there is no size to configure.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from torchslicer.errors import DeadlineError, FrameError, PeerClosedError, TransportError
from torchslicer.transport.base import Channel, ChannelOptions, ChannelStats, Deadline
from torchslicer.transport.frame import (
    HEADER_BYTES,
    Expect,
    Frame,
    FrameHeader,
    arrival_of,
    decode_header,
    encode_header,
)
from torchslicer.transport.payload import Arrival
from torchslicer.transport.queue import ByteQueue

try:
    import grpc  # type: ignore[import-untyped]  # grpcio ships no type information
except ImportError as error:
    raise TransportError(
        "transport 'grpc' needs the package grpcio: pip install 'torchslicer[grpc]', or choose transport 'tcp'"
    ) from error

PIECE_BYTES = 1 << 20
_METHOD, _SERVICE = "Frames", "torchslicer.Channel"
_TICK_S = 0.5
# Both sides agree, or a server ends the connection over "too many pings" (its default allows one in five minutes).
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_COMMON = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", PIECE_BYTES + HEADER_BYTES),
    ("grpc.max_send_message_length", PIECE_BYTES + HEADER_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)
_CLIENT_OPTIONS = (*_COMMON, ("grpc.use_local_subchannel_pool", 1))
_SERVER_OPTIONS = (
    *_COMMON,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Against those who only fill the port: half-open handshakes end, and connections and streams are counted.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_allowed_incoming_connections", 512),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
)


class GrpcChannel:
    """One end of a stream; see :class:`~torchslicer.transport.base.Channel`."""

    def __init__(self, *, peer: str, options: ChannelOptions, hang_up: Callable[[], None]) -> None:
        self.limits = options.limits
        self.expect: Expect | None = None
        self.stats = ChannelStats()
        self.peer = peer
        self.peer_names: tuple[str, ...] = ()
        self.connected = threading.Event()
        self._options, self._hang_up = options, hang_up
        self._outgoing = ByteQueue[Frame](options.send_queue_bytes)
        self._incoming = ByteQueue[Frame](options.read_ahead_bytes or options.send_queue_bytes)
        self._error: TransportError | None = None
        self._failing = threading.Lock()
        self._header: FrameHeader | None = None
        self._arrival: Arrival | None = None
        self._filled = 0
        self._stall: Deadline | None = None
        self._reading: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether the channel has ended, on either side."""
        return self._error is not None

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Queue *frame*; see :class:`~torchslicer.transport.base.Channel`."""
        encode_header(frame.header)  # what does not fit is the caller's error, not the stream's
        size = HEADER_BYTES + frame.header.payload_bytes
        self._outgoing.put(frame, size, Deadline(timeout_s))
        self.stats.frames_sent += 1
        self.stats.bytes_sent += size

    def receive(self, *, timeout_s: float) -> Frame:
        """Return the next frame; see :class:`~torchslicer.transport.base.Channel`."""
        deadline = Deadline(timeout_s)
        while True:
            try:
                frame = self._incoming.get(Deadline(min(deadline.remaining_s, _TICK_S)))
            except DeadlineError:
                self._check_stall()
                if deadline.passed:
                    raise DeadlineError(f"nothing came from {self.peer} within {timeout_s:g} s") from None
                continue
            self.stats.frames_received += 1
            self.stats.bytes_received += HEADER_BYTES + frame.header.payload_bytes
            return frame

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End the channel; queued frames get *timeout_s* to leave."""
        error = PeerClosedError(f"the channel to {self.peer} was closed on this side")
        with self._failing:
            orderly = self._error is None
            self._error = self._error or error
        self._outgoing.end(error)  # what is queued still goes, then the stream ends, and the peer ends it too
        self._incoming.end(error, clear=True)
        if orderly and self._reading is not None:
            self._reading.join(timeout=Deadline(timeout_s).remaining_s)
        self._hang_up()
        if self._reading is not None:
            self._reading.join(timeout=5)

    def pieces(self) -> Iterator[bytes]:
        """Cut what is queued into messages; gRPC's thread asks for one after another."""
        while True:
            try:
                frame = self._next_outgoing()
            except TransportError:
                return
            payload = frame.wire()
            yield b"".join((encode_header(frame.header), payload[:PIECE_BYTES]))
            for start in range(PIECE_BYTES, len(payload), PIECE_BYTES):
                yield bytes(payload[start : start + PIECE_BYTES])

    def _next_outgoing(self) -> Frame:
        while True:
            try:
                return self._outgoing.get(Deadline(_TICK_S))
            except DeadlineError:
                continue

    def read_from(self, pieces: Iterator[bytes]) -> None:
        """Start the thread that puts pieces together; the stream's own calls know no deadline."""
        self._reading = threading.Thread(
            target=self._read, args=(pieces,), name=f"receive from {self.peer}", daemon=True
        )
        self._reading.start()

    def _read(self, pieces: Iterator[bytes]) -> None:
        try:
            for piece in pieces:
                self.connected.set()
                if piece and self._error is None:  # else only the end of the stream is waited for
                    self._land(memoryview(piece))
        except grpc.RpcError as error:
            self._fail(PeerClosedError(f"lost the connection to {self.peer}: {_details(error)}{self._progress()}"))
        except TransportError as error:
            self._fail(error)
        else:
            self._fail(PeerClosedError(f"{self.peer} closed the connection{self._progress()}"))
        self.connected.set()

    def _land(self, piece: memoryview) -> None:
        if self._header is None:
            self._header = decode_header(piece[:HEADER_BYTES], self.limits, self.expect)
            self._arrival, self._filled = arrival_of(self._header), 0
            piece = piece[HEADER_BYTES:]
        header, arrival = self._header, self._arrival
        assert arrival is not None
        end = self._filled + len(piece)
        if end > header.payload_bytes:
            raise FrameError(f"{header.describe()}: {end} bytes came, expected {header.payload_bytes}")
        arrival.view[self._filled : end] = piece
        self._filled = end
        self._stall = Deadline(self._options.stall_timeout_s)
        if end == header.payload_bytes:
            self._header = self._arrival = self._stall = None
            self._deliver(Frame(header, arrival.finish()))

    def _deliver(self, frame: Frame) -> None:
        """Put the frame before the receiver; not reading on meanwhile is what holds the sender back."""
        while self._error is None:
            try:
                return self._incoming.put(frame, HEADER_BYTES + frame.header.payload_bytes, Deadline(_TICK_S))
            except DeadlineError:
                continue
            except PeerClosedError:  # closed on this side
                return None
        return None

    def _check_stall(self) -> None:
        stall = self._stall
        if stall is not None and stall.passed:
            limit = self._options.stall_timeout_s
            self._fail(PeerClosedError(f"{self.peer} sent nothing more for {limit:g} s{self._progress()}"))

    def _progress(self) -> str:
        header = self._header
        return f" after {self._filled} of {header.payload_bytes} bytes of {header.describe()}" if header else ""

    def _fail(self, error: TransportError) -> None:
        with self._failing:
            if self._error is None:
                self._error = error
        self._outgoing.end(self._error, clear=True)
        self._incoming.end(self._error)
        self._hang_up()


class GrpcListener:
    """Listens for channels on a port of its own.

    Args:
        bind: ``HOST:PORT`` (port 0: any free one), ``[IPV6]:PORT`` or ``unix:/path``.
        credentials: What ``grpc.ssl_server_credentials`` makes; None for no encryption.
        options: The options of accepted channels.
        max_channels: Connections at one time; more are refused.

    Raises:
        TransportError: The address is in use or malformed.
    """

    def __init__(
        self,
        bind: str,
        *,
        credentials: Any = None,
        options: ChannelOptions | None = None,
        max_channels: int = 256,
    ) -> None:
        self._options = options or ChannelOptions()
        self._accepted = ByteQueue[GrpcChannel](max_channels)
        self._server = grpc.server(_DaemonThreads(), options=_SERVER_OPTIONS, maximum_concurrent_rpcs=max_channels)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        try:
            if credentials is None:
                port = self._server.add_insecure_port(bind)
            else:
                port = self._server.add_secure_port(bind, credentials)
        except RuntimeError as error:
            raise TransportError(
                f"cannot listen on {bind}: {error}; free the port or choose another (0: any)"
            ) from error
        self.address = bind if bind.startswith("unix:") else f"{bind.rpartition(':')[0]}:{port}"
        self._server.start()

    def accept(self, *, timeout_s: float) -> Channel:
        """Return the next connection.

        Raises:
            DeadlineError: Nobody came within *timeout_s*.
            PeerClosedError: The listener was closed.
        """
        try:
            return self._accepted.get(Deadline(timeout_s))
        except DeadlineError:
            raise DeadlineError(f"nobody connected to {self.address} within {timeout_s:g} s") from None

    def close(self) -> None:
        """Stop listening. gRPC's connections belong to the server, so accepted channels end too."""
        self._accepted.end(PeerClosedError(f"the listener on {self.address} was closed"), clear=True)
        self._server.stop(grace=0).wait(timeout=5)

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        channel = GrpcChannel(peer=context.peer(), options=self._options, hang_up=context.cancel)
        channel.peer_names = tuple(
            name.decode(errors="replace") for name in context.auth_context().get("x509_subject_alternative_name", ())
        )
        gone = PeerClosedError(f"{channel.peer} closed the connection")
        # The end of the stream stops the sending side at once; the reading side first takes in what has come.
        if not context.add_callback(lambda: channel._outgoing.end(gone, clear=True)):
            return
        channel.read_from(requests)
        self._accepted.put(channel, 1, Deadline(_TICK_S))
        yield b""  # tells the client that it has been let in
        yield from channel.pieces()


class _DaemonThreads(futures.Executor):
    """A thread for each stream, which lives as long: no pool to exhaust, and none that keeps a process from ending."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()
        threading.Thread(target=_run, args=(future, fn, args, kwargs), name="grpc stream", daemon=True).start()
        return future


def _run(future: futures.Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001  handed to whoever asks the future, as every executor does
        future.set_exception(error)
    else:
        future.set_result(result)


def connect(
    address: str,
    *,
    timeout_s: float,
    credentials: Any = None,
    server_hostname: str | None = None,
    options: ChannelOptions | None = None,
) -> Channel:
    """Connect to a :class:`GrpcListener`. No proxy is used, whatever the environment says.

    Args:
        address: ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:/path``.
        timeout_s: How long connecting may take.
        credentials: What ``grpc.ssl_channel_credentials`` makes; None for no encryption.
        server_hostname: The name that the listener's certificate must have; by default the host of *address*.
        options: The channel's options.

    Raises:
        TransportError: Nobody listens there, or the handshake failed.
        DeadlineError: The listener did not answer in time.
    """
    settings: list[tuple[str, Any]] = list(_CLIENT_OPTIONS)
    if server_hostname is not None:
        settings.append(("grpc.ssl_target_name_override", server_hostname))
    if credentials is None:
        connection = grpc.insecure_channel(address, options=settings)
    else:
        connection = grpc.secure_channel(address, credentials, options=settings)
    channel = _ClientChannel(connection, peer=address, options=options or ChannelOptions())
    if not channel.connected.wait(Deadline(timeout_s).remaining_s):
        channel.close(timeout_s=0)
        raise DeadlineError(f"{address} did not answer within {timeout_s:g} s")
    if channel.closed:
        error = channel._error
        channel.close(timeout_s=0)
        raise TransportError(f"cannot connect to {address}: {error}; is it running, and with the same TLS settings?")
    return channel


class _ClientChannel(GrpcChannel):
    """The end that opened the connection, and closes it."""

    def __init__(self, connection: Any, *, peer: str, options: ChannelOptions) -> None:
        self._connection = connection
        super().__init__(peer=peer, options=options, hang_up=self._cancel)
        self._call = connection.stream_stream(f"/{_SERVICE}/{_METHOD}")(self.pieces())
        self.read_from(self._call)

    def _cancel(self) -> None:
        self._call.cancel()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End the channel and its connection; queued frames get *timeout_s* to leave."""
        super().close(timeout_s=timeout_s)
        self._connection.close()


def _details(error: grpc.RpcError) -> str:
    with contextlib.suppress(AttributeError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
