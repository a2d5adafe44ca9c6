"""Where workers join: an authority of the run's own, and the join protocol on the coordinator's port."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from torchslicer.cluster.door import Complaints
from torchslicer.cluster.security.addresses import advertised_address
from torchslicer.cluster.security.authority import AUTOMATIC_LIFETIME, Authority
from torchslicer.cluster.security.exchange import DEADLINE_S, serve_session
from torchslicer.cluster.security.handshake import JoinServer
from torchslicer.cluster.security.identity import COORDINATOR, Identity
from torchslicer.cluster.security.join import JoinString
from torchslicer.cluster.security.protection import Protection
from torchslicer.errors import SecurityError
from torchslicer.transport.base import Channel
from torchslicer.transport.tcp import SocketChannel

logger = logging.getLogger("torchslicer.cluster")

MAX_NODES = 256
_TIME_TO_REGISTER_S = 30.0


class JoinGate:
    """Makes an authority for a run, and lets those in who have its join string.

    Args:
        run_id: The run.
        max_nodes: How many nodes may be in at a time.

    Example:
        >>> gate = JoinGate("run-1")
        >>> gate.command("0.0.0.0:50054").startswith("torchslicer worker --coordinator ")
        True
    """

    def __init__(self, run_id: str, *, max_nodes: int = MAX_NODES) -> None:
        identity = Identity(run_id, COORDINATOR)
        authority = Authority.create(run_id)
        material = authority.issue(identity)
        expires_at = int(time.time() + AUTOMATIC_LIFETIME.total_seconds())
        self.joining = JoinString.create(run_id, authority.fingerprint, expires_at=expires_at)
        self.protection = Protection(material, run_id, COORDINATOR, joins=True)
        self.live: Callable[[], Collection[str]] = frozenset
        self._server = JoinServer(authority, self.joining, leaf=material.certificate, slots=max_nodes)
        self._granted: dict[str, float] = {}
        self._complaints = Complaints(logger)

    def command(self, address: str) -> str:
        """Return the line that starts a worker of the run; it holds the token."""
        where = advertised_address(address)
        return f"torchslicer worker --coordinator {where} --join {self.joining.reveal()}"

    def admit(self, channel: Channel) -> bool:
        """Serve the join protocol to a peer that showed no certificate; say whether it was such a one.

        Raises:
            TransportError: The TLS handshake failed.
        """
        if not isinstance(channel, SocketChannel) or channel.is_local:
            return False
        deadline = time.monotonic() + DEADLINE_S
        channel.start(timeout_s=DEADLINE_S)
        if channel.peer_names:
            return False
        self._reclaim()
        try:
            with channel.hand_over() as connection:
                node = serve_session(connection, self._server.session(_host(channel.peer)), deadline=deadline)
        except OSError as error:  # of the peer's making: gone, or too slow
            self._complaints.warn("join: %s did not finish: %s", channel.peer, error)
            return True
        if node is None:
            self._complaints.warn("join: %s was refused", channel.peer)
        else:
            self._granted[node] = time.monotonic()
            logger.info("join: %s is now %s of the run", channel.peer, node)
        return True

    def _reclaim(self) -> None:
        """Give back the slots of nodes that are gone, or never registered."""
        live, now = self.live(), time.monotonic()
        for node in self._server.joined:
            if node not in live and now - self._granted.get(node, now) > _TIME_TO_REGISTER_S:
                self._server.release(node)


def _host(peer: str) -> str:
    host, colon, _ = peer.rpartition(":")
    if not colon:
        raise SecurityError("join: the peer has left")
    return host
