"""Joining over a socket: frames of at most 16 KiB, everything done within one deadline."""

from __future__ import annotations

import socket
import ssl
import time

from torchslicer.cluster.security.addresses import Address, parse_address
from torchslicer.cluster.security.handshake import JoinClient, JoinServer, JoinSession
from torchslicer.cluster.security.join import JoinString
from torchslicer.cluster.security.messages import MAX_MESSAGE
from torchslicer.cluster.security.tls import Material, joining_context
from torchslicer.errors import SecurityError

DEADLINE_S = 5.0

_PREFIX = 4


def join_run(
    address: Address | str,
    joining: JoinString,
    node: str,
    *,
    role: str = "worker",
    timeout_s: float = DEADLINE_S,
) -> Material:
    """Join a run at the coordinator's address and return what this node speaks TLS with from now on.

    Raises:
        SecurityError: The coordinator is not the one that the join string names, or it refuses.
        OSError: There is nobody at the address, or the time is over.
    """
    where = parse_address(address) if isinstance(address, str) else address
    deadline = time.monotonic() + timeout_s
    with _connect(where, timeout_s) as raw:
        raw.settimeout(_left(deadline))
        try:
            with joining_context().wrap_socket(raw) as connection:
                return _ask(connection, joining, node, role, deadline)
        except ssl.SSLError as error:
            raise SecurityError(
                f"join: {where} does not speak TLS 1.3 as a coordinator does ({error.reason}). Is it a coordinator? "
                "One that takes plain connections prints no join string: leave out --join, --join-file and "
                "TORCHSLICER_JOIN then"
            ) from error


def serve(
    raw: socket.socket,
    context: ssl.SSLContext,
    server: JoinServer,
    source: str,
    *,
    deadline_s: float = DEADLINE_S,
) -> str | None:
    """Serve one accepted connection to the join port and close it.

    Args:
        raw: The connection.
        context: From ``server_context(material, require_client=False)``.
        server: Whom to ask.
        source: The address that the connection came from, without the port.
        deadline_s: How long the whole may take, the TLS handshake included.

    Returns:
        The name of the node that joined, or None.
    """
    deadline = time.monotonic() + deadline_s
    with raw:
        raw.settimeout(deadline_s)
        try:
            with context.wrap_socket(raw, server_side=True) as connection:
                return serve_session(connection, server.session(source), deadline=deadline)
        except OSError:  # of the peer's making: no TLS, gone, or too slow
            return None


def serve_session(connection: ssl.SSLSocket, session: JoinSession, *, deadline: float) -> str | None:
    """Talk to one node over a connection that is made already, until *deadline* of ``time.monotonic()``.

    Returns:
        The name of the node that joined, or None.

    Raises:
        OSError: The connection broke, or the time is over.
    """
    while True:
        reply = session.handle(receive(connection, deadline))
        try:
            send(connection, reply.message, deadline)
        except OSError:
            session.undo()
            raise
        if reply.final:
            return reply.granted


def send(connection: socket.socket, message: bytes, deadline: float) -> None:
    """Send one message.

    Raises:
        OSError: The connection broke, or the time is over.
    """
    connection.settimeout(_left(deadline))
    connection.sendall(len(message).to_bytes(_PREFIX, "big") + message)


def receive(connection: socket.socket, deadline: float) -> bytes:
    """Receive one message; nothing is allocated for a length out of bounds.

    Raises:
        OSError: The connection broke, the length is out of bounds, or the time is over.
    """
    size = int.from_bytes(_receive_exactly(connection, _PREFIX, deadline), "big")
    if not 0 < size <= MAX_MESSAGE:
        raise ConnectionAbortedError(f"join: expected a message of at most {MAX_MESSAGE} bytes, got {size}")
    return _receive_exactly(connection, size, deadline)


def _ask(connection: ssl.SSLSocket, joining: JoinString, node: str, role: str, deadline: float) -> Material:
    leaf = connection.getpeercert(binary_form=True)
    if leaf is None:
        raise SecurityError("join: the other side shows no certificate")
    client = JoinClient(joining, node, leaf=leaf, role=role)
    challenge = _exchange(connection, client.hello(), deadline)
    return client.finish(_exchange(connection, client.request(challenge), deadline))


def _exchange(connection: socket.socket, message: bytes, deadline: float) -> bytes:
    send(connection, message, deadline)
    return receive(connection, deadline)


def _connect(where: Address, timeout_s: float) -> socket.socket:
    if not where.is_unix:
        return socket.create_connection((where.host or "localhost", where.port), timeout_s)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.settimeout(timeout_s)
        raw.connect(where.path)
    except OSError:
        raw.close()
        raise
    return raw


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(_left(deadline))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("join: the other side closed the connection")
        data += piece
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("join: not done within its time")
    return left
