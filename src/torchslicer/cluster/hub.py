"""Where a node takes data connections, and how it makes them."""

from __future__ import annotations

import hmac
import importlib.util
import logging
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torchslicer.cluster.messages import Attach, Attached, Endpoint, Reach, decode, encode
from torchslicer.errors import DeadlineError, PeerClosedError, ProtocolError, TorchSlicerError, TransportError
from torchslicer.transport.address import Endpoint as HostEndpoint
from torchslicer.transport.address import choose_endpoint, host_id, join_address, split_address
from torchslicer.transport.base import Channel, Listener
from torchslicer.transport.frame import Frame, FrameKind, FrameLimits
from torchslicer.transport.tcp import TcpListener, connect

logger = logging.getLogger("torchslicer.cluster")

HANDSHAKE_TIMEOUT_S = 5.0
_MAX_HANDSHAKES = 32
_STRANGER = FrameLimits(max_payload_bytes=0, max_control_bytes=64 << 10)
_KNOWN = FrameLimits()


@dataclass(frozen=True)
class TlsMaterial:
    """Contexts for both directions, and the names that peers may have (empty: any that the authority has signed)."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    grpc_server: Any = None
    grpc_client: Any = None
    names: tuple[str, ...] = ()


def run_number(run_id: str, secret: str) -> int:
    """Return the number that every frame of a run carries; without the secret it cannot be guessed."""
    return int.from_bytes(sha256(f"{run_id}\0{secret}".encode()).digest()[:8], "little")


class Hub:
    """Listens on a network address, for nodes of the same host also on a UNIX socket, and for gRPC on another port.

    Args:
        bind: ``HOST:PORT``; port 0 takes a free one. gRPC takes a free port of the same host.
        advertise: Host that others are told; by default that of *bind*.
        tls: For the network addresses; the UNIX socket is guarded by the file system.
        with_grpc: Also take gRPC streams, where grpcio is installed.
    """

    def __init__(
        self, bind: str, *, advertise: str | None = None, tls: TlsMaterial | None = None, with_grpc: bool = True
    ) -> None:
        self.tls = tls
        tcp = TcpListener(bind, tls=None if tls is None else tls.server, local=True)
        self._listeners: list[Listener] = [tcp]
        self.endpoints = [_endpoint(found, advertise) for found in tcp.endpoints]
        if with_grpc and importlib.util.find_spec("grpc") is not None:
            listener = _grpc_listener(bind, tls)
            self._listeners.append(listener)
            self.endpoints.append(Endpoint(transport="grpc", address=_advertised(listener.address, advertise)))
        self._arrived: dict[tuple[str, int, int], tuple[Channel, str]] = {}
        self._condition = threading.Condition()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._accept, args=(listener,), name="torchslicer-hub", daemon=True)
            for listener in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    def _accept(self, listener: Listener) -> None:
        while not self._closed:
            try:
                channel = listener.accept(timeout_s=1.0)
            except DeadlineError:
                continue
            except PeerClosedError:
                return
            except TransportError as error:
                if not self._closed:
                    logger.warning("data listener %s: %s", listener.address, error)
                    time.sleep(0.05)
                continue
            if not self._handshakes.acquire(blocking=False):
                logger.warning("too many connections at once; one from %s was dropped", channel.peer)
                channel.close()
                continue
            threading.Thread(target=self._greet, args=(channel,), name="torchslicer-greet", daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            channel.limits = _STRANGER
            frame = channel.receive(timeout_s=HANDSHAKE_TIMEOUT_S)
            message = decode(frame.payload) if isinstance(frame.payload, bytes) else None
            if isinstance(message, Attach):
                self._check_name(channel)
                channel.limits = _KNOWN
                send_message(channel, Attached())  # at once: whoever takes it may be waiting for somebody else
                with self._condition:
                    self._arrived[message.run_id, message.generation, message.rank] = (channel, message.secret)
                    self._condition.notify_all()
                return
            if isinstance(message, Reach):
                send_message(channel, Attached())
            channel.close()
        except TorchSlicerError as error:
            logger.warning("a data connection from %s was refused: %s", channel.peer, error)
            channel.close()
        finally:
            self._handshakes.release()

    def _check_name(self, channel: Channel) -> None:
        if self.tls is not None and self.tls.names and not set(self.tls.names) & set(channel.peer_names):
            if not channel.peer_names and "unix" in channel.peer:
                return
            raise ProtocolError(
                f"the certificate is for {list(channel.peer_names)}, expected one of {list(self.tls.names)}"
            )

    def take(self, run_id: str, generation: int, rank: int, *, secret: str, timeout_s: float) -> Channel:
        """Return the data channel that *rank* has opened to here for a run.

        Raises:
            DeadlineError: It did not come.
        """
        deadline = time.monotonic() + timeout_s
        key = (run_id, generation, rank)
        with self._condition:
            while True:
                channel, offered = self._arrived.pop(key, (None, ""))
                if channel is not None and hmac.compare_digest(offered, secret):
                    return channel
                if channel is not None:
                    logger.warning("a data connection from %s did not know the run's secret", channel.peer)
                    channel.close()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"rank {rank} did not connect within {timeout_s:.0f} s")
                self._condition.wait(left)

    def forget(self, run_id: str) -> None:
        """Drop connections for a run that nobody took."""
        with self._condition:
            for key in [key for key in self._arrived if key[0] == run_id]:
                self._arrived.pop(key)[0].close()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(timeout=3.0)
        with self._condition:
            for channel, _ in self._arrived.values():
                channel.close()
            self._arrived.clear()


def _grpc_listener(bind: str, tls: TlsMaterial | None) -> Listener:
    from torchslicer.transport.grpc import GrpcListener  # noqa: PLC0415 - needs grpcio

    host, _ = split_address(bind)
    return GrpcListener(join_address(host, 0), credentials=None if tls is None else tls.grpc_server)


def _endpoint(found: HostEndpoint, advertise: str | None) -> Endpoint:
    kind: Any = "unix" if found.address.startswith("unix:") else "tcp"
    return Endpoint(transport=kind, address=_advertised(found.address, advertise))


def _advertised(address: str, advertise: str | None) -> str:
    if advertise is None or address.startswith("unix:"):
        return address
    return join_address(advertise, split_address(address)[1])


def send_message(channel: Channel, message: object, *, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
    """Send one control message on a data channel."""
    channel.send(Frame.of_bytes(FrameKind.CONTROL, encode(message)), timeout_s=timeout_s)  # type: ignore[arg-type]


def open_link(
    endpoints: Sequence[Endpoint],
    host: str,
    attach: Attach,
    *,
    transport: str,
    tls: TlsMaterial | None,
    timeout_s: float,
) -> tuple[Channel, str]:
    """Connect to a node's hub for a run, by the best way there is; return the channel and how it goes.

    Raises:
        TransportError: The node cannot be reached, or does not take the connection.
    """
    channel, kind = dial(endpoints, host, transport=transport, tls=tls, timeout_s=timeout_s)
    try:
        send_message(channel, attach)
        frame = channel.receive(timeout_s=timeout_s)
        if not isinstance(frame.payload, bytes) or not isinstance(decode(frame.payload), Attached):
            raise ProtocolError(f"{channel.peer} did not take the connection")
    except TorchSlicerError:
        channel.close()
        raise
    return channel, kind


def dial(
    endpoints: Sequence[Endpoint], host: str, *, transport: str, tls: TlsMaterial | None, timeout_s: float
) -> tuple[Channel, str]:
    """Connect to one of a node's endpoints: its UNIX socket on the same host, else *transport*."""
    by_kind = {endpoint.transport: endpoint.address for endpoint in endpoints}
    if "unix" in by_kind and _is_here(by_kind["unix"], host):
        return connect(by_kind["unix"], timeout_s=timeout_s), "unix"
    if transport == "grpc" and "grpc" in by_kind:
        from torchslicer.transport.grpc import connect as connect_grpc  # noqa: PLC0415 - needs grpcio

        credentials = None if tls is None else tls.grpc_client
        return connect_grpc(by_kind["grpc"], timeout_s=timeout_s, credentials=credentials), "grpc"
    context = None if tls is None else tls.client
    name = None if tls is None else split_address(by_kind["tcp"])[0]
    return connect(by_kind["tcp"], timeout_s=timeout_s, tls=context, server_hostname=name), "tcp"


def _is_here(address: str, host: str) -> bool:
    """Whether a UNIX socket that a node on *host* offers can be opened from here."""
    elsewhere = HostEndpoint("elsewhere:0")
    return choose_endpoint([HostEndpoint(address, host_id=host), elsewhere], host_id()) is not elsewhere


def check_reachable(endpoints: Sequence[Endpoint], host: str, run_id: str, *, tls: TlsMaterial | None) -> None:
    """Connect to a node's hub and say hello, to find out at once whether it can be reached.

    Raises:
        TransportError: It cannot.
    """
    channel, _ = dial(endpoints, host, transport="tcp", tls=tls, timeout_s=HANDSHAKE_TIMEOUT_S)
    try:
        send_message(channel, Reach(run_id=run_id))
        channel.receive(timeout_s=HANDSHAKE_TIMEOUT_S)
    finally:
        channel.close()
