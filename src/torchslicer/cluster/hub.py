"""Where a node takes data connections, and how it makes them."""

from __future__ import annotations

import hmac
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from torchslicer.cluster.door import KNOWN, STRANGER, Complaints, Door
from torchslicer.cluster.messages import Attach, Attached, Endpoint, Reach, decode, encode
from torchslicer.cluster.security import Protection, advertised_address, parse_address
from torchslicer.errors import DeadlineError, PeerClosedError, ProtocolError, TorchSlicerError, TransportError
from torchslicer.transport.address import Endpoint as HostEndpoint
from torchslicer.transport.address import choose_endpoint, host_id, join_address, split_address
from torchslicer.transport.base import Channel, ChannelOptions, Deadline, Listener
from torchslicer.transport.frame import Frame, FrameKind
from torchslicer.transport.tcp import TcpListener, connect

logger = logging.getLogger("torchslicer.cluster")

HANDSHAKE_TIMEOUT_S = 5.0
REACH_TIMEOUT_S = 15.0
"""Longer than strangers get: a worker that does not answer is turned away for good, and its machine may be slow."""
_MAX_ARRIVED = 128  # fewer than a gRPC server takes: where it is full, nobody could come to push the oldest out
_ATTEMPTS, _RETRY_S = 10, 0.2
_POLL_S = 0.2
PLAIN = Protection()
"""No certificates: loopback only."""


@dataclass(frozen=True)
class _Arrival:
    """A data channel that has said for which run it is, and waits for that run to take it."""

    channel: Channel
    run_id: str
    generation: int
    rank: int
    secret: str


def run_number(run_id: str, secret: str) -> int:
    """Return the number that every frame of a run carries; without the secret it cannot be guessed."""
    return int.from_bytes(sha256(f"{run_id}\0{secret}".encode()).digest()[:8], "little")


class Attachments(Protocol):
    """Where a worker finds the data connections that others have made to it."""

    endpoints: list[Endpoint]

    def take(self, run_id: str, generation: int, rank: int, *, node: str, secret: str, timeout_s: float) -> Channel:
        """Return the connection of *rank*, which is the node of this name, for a run."""

    def forget(self, run_id: str) -> None:
        """Drop connections for a run that nobody took."""


class Hub:
    """Listens on a network address, for nodes of the same host also on a UNIX socket, and for gRPC on another port.

    Args:
        bind: ``HOST:PORT``; port 0 takes a free one.
        grpc_port: Port for gRPC on the same host; 0 takes a free one.
        advertise: Host that others are told; by default that of *bind*, or the one that leads *toward* others.
        toward: Address of the coordinator.
        protection: Of the network addresses; the UNIX socket is guarded by the file system.
        with_grpc: Also take gRPC streams, where grpcio is installed.
        folder: Where the UNIX socket's folder is made; by default where temporary files go.

    Raises:
        SecurityError: The address can be reached from other machines and is not protected.
    """

    def __init__(
        self,
        bind: str,
        *,
        advertise: str | None = None,
        toward: str | None = None,
        protection: Protection = PLAIN,
        with_grpc: bool = True,
        folder: Path | None = None,
        grpc_port: int = 0,
    ) -> None:
        for warning in protection.check_bind(bind, "worker").warnings:
            logger.warning("%s", warning)
        self.protection = protection
        options = ChannelOptions(limits=STRANGER)
        tcp = TcpListener(bind, tls=protection.server, local=folder or True, options=options)
        self._listeners: list[Listener] = [tcp]
        addresses = [found.address for found in tcp.endpoints]
        if with_grpc and importlib.util.find_spec("grpc") is not None:
            try:
                self._listeners.append(_grpc_listener(bind, grpc_port, protection, options))
            except BaseException:
                tcp.close()
                raise
        self.endpoints = [_endpoint("tcp", address, advertise, toward) for address in addresses]
        self.endpoints += [_endpoint("grpc", found.address, advertise, toward) for found in self._listeners[1:]]
        self._arrived: list[_Arrival] = []
        self._condition = threading.Condition()
        self._door = Door()
        self._complaints = Complaints(logger)
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
            self._door.greet(channel, self._greet)

    def _greet(self, channel: Channel) -> None:
        try:
            frame = channel.receive(timeout_s=HANDSHAKE_TIMEOUT_S)
            message = decode(frame.payload) if isinstance(frame.payload, bytes) else None
            if isinstance(message, Attach):
                self._door.leave(channel)
                send_message(channel, Attached())  # at once: whoever takes it may be waiting for somebody else
                self._arrive(_Arrival(channel, message.run_id, message.generation, message.rank, message.secret))
                return
            if isinstance(message, Reach):
                send_message(channel, Attached())
            channel.close()
        except TorchSlicerError as error:
            self._complaints.warn("a data connection from %s was refused: %s", channel.peer, error)
            channel.close(timeout_s=0)

    def _arrive(self, arrival: _Arrival) -> None:
        with self._condition:
            self._arrived = [other for other in self._arrived if not other.channel.closed]
            dropped = self._arrived.pop(0) if len(self._arrived) >= _MAX_ARRIVED else None
            self._arrived.append(arrival)
            self._condition.notify_all()
        if dropped is not None:
            dropped.channel.close(timeout_s=0)

    def take(self, run_id: str, generation: int, rank: int, *, node: str, secret: str, timeout_s: float) -> Channel:
        """Return the data channel that *rank*, which is the node of this name, has opened to here for a run.

        Raises:
            DeadlineError: It did not come.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while True:
                for arrival in [one for one in self._arrived if (one.run_id, one.generation) == (run_id, generation)]:
                    if arrival.rank == rank:
                        self._arrived.remove(arrival)
                        if self._is_genuine(arrival, node, secret):
                            arrival.channel.limits = KNOWN
                            return arrival.channel
                        arrival.channel.close(timeout_s=0)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"rank {rank} ({node}) did not connect within {timeout_s:.0f} s")
                self._condition.wait(left)

    def _is_genuine(self, arrival: _Arrival, node: str, secret: str) -> bool:
        channel = arrival.channel
        if not hmac.compare_digest(arrival.secret.encode(), secret.encode()):
            logger.warning("a data connection from %s did not know the run's secret", channel.peer)
            return False
        try:
            check_peer(channel, self.protection, node)
        except TorchSlicerError as error:
            logger.warning("a data connection from %s was refused: %s", channel.peer, error)
            return False
        return True

    def forget(self, run_id: str) -> None:
        """Drop connections for a run that nobody took."""
        with self._condition:
            dropped = [arrival for arrival in self._arrived if arrival.run_id == run_id]
            self._arrived = [arrival for arrival in self._arrived if arrival.run_id != run_id]
        for arrival in dropped:
            arrival.channel.close()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(timeout=3.0)
        self._door.close()
        with self._condition:
            arrived, self._arrived = self._arrived, []
        for arrival in arrived:
            arrival.channel.close()


def check_peer(channel: Channel, protection: Protection, node: str) -> None:
    """Check that *node* is at the other end of a channel; a UNIX socket is only for this user, memory for this process.

    Raises:
        SecurityError: Another node is.
    """
    if not channel.peer.startswith(("unix:", "memory:")):
        protection.check_peer(channel.peer_names, node)


def _grpc_listener(bind: str, port: int, protection: Protection, options: ChannelOptions) -> Listener:
    from torchslicer.transport.grpc import GrpcListener  # noqa: PLC0415 - needs grpcio

    host, _ = split_address(bind)
    protection.check_bind(bind, "worker", "grpc")
    return GrpcListener(join_address(host, port), credentials=protection.grpc_server, options=options)


def _endpoint(kind: Any, address: str, advertise: str | None, toward: str | None) -> Endpoint:
    if address.startswith("unix:"):
        return Endpoint(transport="unix", address=address)
    hint = None if advertise is None else _host_of(advertise)
    return Endpoint(transport=kind, address=str(advertised_address(address, hint, toward=toward)))


def _host_of(advertise: str) -> str:
    """Return the host of ``HOST`` or ``HOST:PORT``: every port that is listened on has a number of its own."""
    if ":" not in advertise or (advertise.count(":") > 1 and not advertise.startswith("[")):
        return advertise
    return parse_address(advertise).host if not advertise.endswith("]") else advertise


def send_message(channel: Channel, message: object, *, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
    """Send one control message on a data channel."""
    channel.send(Frame.of_bytes(FrameKind.CONTROL, encode(message)), timeout_s=timeout_s)  # type: ignore[arg-type]


def open_link(
    endpoints: Sequence[Endpoint],
    host: str,
    attach: Attach,
    *,
    node: str,
    transport: str,
    protection: Protection,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> tuple[Channel, str]:
    """Connect to a node's hub for a run, by the best way there is; return the channel and how it goes.

    *check* is called from time to time and raises to give up. A node that strangers crowd may drop a connection that it
    does not know yet, so a few are tried.

    Raises:
        TransportError: The node cannot be reached, is another one, or does not take the connection.
        SecurityError: It can be reached only over the network, and there is no protection.
    """
    deadline, attempts = Deadline(timeout_s), 0
    while True:
        left_s = deadline.remaining_s
        channel, kind = dial(endpoints, host, node=node, transport=transport, protection=protection, timeout_s=left_s)
        try:
            send_message(channel, attach)
            _await_attached(channel, left_s, check)
        except PeerClosedError:
            channel.close()
            check()
            attempts += 1
            if attempts == _ATTEMPTS or deadline.passed:
                raise
            time.sleep(_RETRY_S)
        except BaseException:
            channel.close()
            raise
        else:
            return channel, kind


def _await_attached(channel: Channel, timeout_s: float, check: Callable[[], None]) -> None:
    payload = _patiently(channel, timeout_s, check).payload
    if not isinstance(payload, bytes) or not isinstance(decode(payload), Attached):
        raise ProtocolError(f"{channel.peer} did not take the connection")


def _patiently(channel: Channel, timeout_s: float, check: Callable[[], None]) -> Frame:
    deadline = Deadline(timeout_s)
    while True:
        try:
            return channel.receive(timeout_s=min(deadline.remaining_s, _POLL_S))
        except DeadlineError:
            check()
            if deadline.passed:
                raise DeadlineError(f"{channel.peer} did not answer within {timeout_s:.0f} s") from None


def dial(
    endpoints: Sequence[Endpoint],
    host: str,
    *,
    node: str,
    transport: str,
    protection: Protection,
    timeout_s: float,
) -> tuple[Channel, str]:
    """Connect to one of a node's endpoints: its UNIX socket on the same host, else *transport*."""
    by_kind = {endpoint.transport: endpoint.address for endpoint in endpoints}
    if "unix" in by_kind and _is_here(by_kind["unix"], host):
        return connect(by_kind["unix"], timeout_s=timeout_s), "unix"
    kind = "grpc" if transport == "grpc" and "grpc" in by_kind else "tcp"
    if kind not in by_kind:
        raise TransportError(f"{node} offers no {kind} address; it offers {sorted(by_kind.values())}")
    address = by_kind[kind]
    protection.check_connect(address)
    name = protection.server_name(node, address)
    if kind == "grpc":
        from torchslicer.transport.grpc import connect as connect_grpc  # noqa: PLC0415 - needs grpcio

        credentials = protection.grpc_client
        return connect_grpc(address, timeout_s=timeout_s, credentials=credentials, server_hostname=name), kind
    return connect(address, timeout_s=timeout_s, tls=protection.client, server_hostname=name), kind


def _is_here(address: str, host: str) -> bool:
    """Whether a UNIX socket that a node on *host* offers can be opened from here."""
    elsewhere = HostEndpoint("elsewhere:0")
    return choose_endpoint([HostEndpoint(address, host_id=host), elsewhere], host_id()) is not elsewhere


def check_reachable(
    endpoints: Sequence[Endpoint],
    host: str,
    run_id: str,
    *,
    node: str,
    protection: Protection,
    timeout_s: float = REACH_TIMEOUT_S,
) -> None:
    """Connect to a node's hub and say hello, to find out at once whether it can be reached over the network.

    Not by its UNIX socket: other nodes may be on other hosts.

    Raises:
        TransportError: It cannot.
    """
    network = [entry for entry in endpoints if entry.transport != "unix"]
    channel, _ = dial(network, host, node=node, transport="tcp", protection=protection, timeout_s=timeout_s)
    try:
        send_message(channel, Reach(run_id=run_id))
        channel.receive(timeout_s=timeout_s)
    finally:
        channel.close()
