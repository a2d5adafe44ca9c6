"""Joining a run, as two state machines over bytes: no sockets, no clock of their own.

::

    worker                                                             coordinator
      | -- TLS 1.3, no client certificate; the coordinator shows its leaf -> |
      | -- hello: a nonce -------------------------------------------------> |
      | <- challenge: the authority's certificate, a nonce ----------------- |
      | 1 SHA-256 of the authority = the fingerprint in the join string      |
      | 2 the leaf is signed by it, in date, for this run's coordinator      |
      | -- request: run, token id, role, name, key to sign, proof ---------> |
      |                                  3 run, token and proof, then the rest
      | <- grant: certificate, proof (or refused: a code) ------------------ |
      | 4 proof, signature, name and key of the certificate                  |

A proof is HMAC-SHA256 with the token's secret over everything said before and over the leaf that the worker saw, so it
is of no use on another connection, against another coordinator, or in another run. The secret itself is never sent, and
until step 2 has passed nothing about the token is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from torchslicer.cluster.security import certificates
from torchslicer.cluster.security.authority import Authority
from torchslicer.cluster.security.identity import COORDINATOR, Identity
from torchslicer.cluster.security.join import JoinString
from torchslicer.cluster.security.messages import (
    PROTOCOL,
    ROLES,
    JoinRefusedError,
    decode,
    encode,
    transcript,
    unhex,
)
from torchslicer.cluster.security.secret import SecretBytes
from torchslicer.cluster.security.tls import Material
from torchslicer.errors import SecurityError

NONCE = 32
MAX_FAILURES = 5
FAILURE_WINDOW_S = 60.0

_MAX_SOURCES = 1024

RandomBytes = Callable[[int], bytes]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Reply:
    """What to send back; after a final one the connection is closed. ``granted`` is the name of a node that joined."""

    message: bytes
    final: bool = False
    granted: str | None = None
    refused: str | None = None


class JoinServer:
    """The coordinator's side: takes in as many nodes as there are slots, each name once. Safe to use from threads.

    >>> authority = Authority.create("run-1")
    >>> leaf = authority.issue(Identity("run-1", "coordinator")).certificate
    >>> joining = JoinString.create("run-1", authority.fingerprint, expires_at=2_000_000_000)
    >>> server = JoinServer(authority, joining, leaf=leaf, slots=2)
    >>> server.session("10.0.0.7").handle(b"GET / HTTP/1.1").refused
    'malformed'
    """

    def __init__(
        self,
        authority: Authority,
        joining: JoinString,
        *,
        leaf: bytes,
        slots: int,
        clock: Clock = time.time,
        random_bytes: RandomBytes = os.urandom,
    ) -> None:
        """Take nodes in.

        Args:
            authority: Signs their keys.
            joining: The join string that they were given.
            leaf: The certificate that this side shows in TLS.
            slots: How many nodes may be in at a time.
            clock: Seconds since 1970; replaced in tests.
            random_bytes: Makes nonces; replaced in tests.
        """
        self.authority = authority
        self.joining = joining
        self.leaf_fingerprint = certificates.fingerprint(leaf)
        self.clock = clock
        self.random_bytes = random_bytes
        self._slots = slots
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    @property
    def joined(self) -> frozenset[str]:
        """The names of the nodes that have joined."""
        with self._lock:
            return frozenset(self._names)

    def session(self, source: str) -> JoinSession:
        """Begin with a new connection from *source*, its address without the port."""
        return JoinSession(self, source)

    def release(self, node: str) -> None:
        """Give back the slot of a node that is gone, so that it or another can join in its place."""
        with self._lock:
            self._names.discard(node)

    def reserve(self, node: str) -> None:
        """Take a slot for a node.

        Raises:
            JoinRefusedError: The name is taken, or there is no slot left.
        """
        with self._lock:
            if node in self._names or node == COORDINATOR:
                raise JoinRefusedError("name")
            if len(self._names) >= self._slots:
                raise JoinRefusedError("full")
            self._names.add(node)

    def check_rate(self, source: str) -> None:
        """Refuse a source of which too many attempts failed lately.

        Raises:
            JoinRefusedError: So many did.
        """
        with self._lock:
            failures = self._failures.get(source, deque())
            while failures and failures[0] <= self.clock() - FAILURE_WINDOW_S:
                failures.popleft()
            if len(failures) >= MAX_FAILURES:
                raise JoinRefusedError("rate")

    def count_failure(self, source: str) -> None:
        """Remember that an attempt failed; the least recent sources are forgotten first."""
        with self._lock:
            self._failures.setdefault(source, deque(maxlen=MAX_FAILURES)).append(self.clock())
            self._failures.move_to_end(source)
            if len(self._failures) > _MAX_SOURCES:
                self._failures.popitem(last=False)


class JoinSession:
    """One connection to a :class:`JoinServer`: its nonce is good for one attempt, so nothing can be replayed."""

    def __init__(self, server: JoinServer, source: str) -> None:
        self._server = server
        self._source = source
        self._nonce = server.random_bytes(NONCE)
        self._client_nonce = b""
        self._granted = ""
        self._over = False

    def undo(self) -> None:
        """Give back the slot that was granted, when the last reply did not reach the node."""
        self._server.release(self._granted)

    def handle(self, message: bytes) -> Reply:
        """Answer a message. Whatever is wrong with it, the answer is a refusal, never an exception."""
        try:
            if self._over:
                raise JoinRefusedError("malformed")
            self._server.check_rate(self._source)
            return self._request(message) if self._client_nonce else self._hello(message)
        except SecurityError as error:
            code = error.code if isinstance(error, JoinRefusedError) else "malformed"
            if not self._over and code != "rate":
                self._server.count_failure(self._source)
            self._over = True
            return Reply(encode("refused", code=code), final=True, refused=code)

    def _hello(self, message: bytes) -> Reply:
        hello = decode(message, "hello")
        if hello["protocol"] != PROTOCOL:
            raise JoinRefusedError("protocol")
        self._client_nonce = unhex(hello["nonce"], NONCE)
        authority = self._server.authority.certificate.decode("ascii")
        return Reply(encode("challenge", authority=authority, nonce=self._nonce.hex()))

    def _request(self, message: bytes) -> Reply:
        request = decode(message, "request")
        said = self._authenticate(request)
        if request["role"] not in ROLES:
            raise JoinRefusedError("role")
        identity = Identity(request["run"], request["node"])
        csr, now = request["csr"].encode("ascii"), _utc(self._server.clock())
        certificate = self._server.authority.sign(csr, identity, now=now)  # may refuse, so before it takes a slot
        self._server.reserve(identity.node)
        self._granted, self._over = identity.node, True
        proof = self._server.joining.secret.mac(transcript("coordinator", said, certificate))
        answer = encode("grant", certificate=certificate.decode("ascii"), proof=proof.hex())
        return Reply(answer, final=True, granted=identity.node)

    def _authenticate(self, request: dict[str, str]) -> bytes:
        """Check run, token and proof, before anything else in the request is looked at; return what was said."""
        joining = self._server.joining
        if request["run"] != joining.run_id:
            raise JoinRefusedError("run")
        said = _said(joining, self._server.leaf_fingerprint, self._client_nonce, self._nonce, request)
        right_token = hmac.compare_digest(unhex(request["token"], 8), joining.token_id)
        right_proof = hmac.compare_digest(unhex(request["proof"], 32), joining.secret.mac(transcript("worker", said)))
        if not (right_token and right_proof):
            raise JoinRefusedError("token")
        if self._server.clock() >= joining.expires_at:
            raise JoinRefusedError("expired")
        return said


class JoinClient:
    """The worker's side: :meth:`hello`, :meth:`request`, :meth:`finish`, in this order, on one connection."""

    def __init__(
        self,
        joining: JoinString,
        node: str,
        *,
        leaf: bytes,
        role: str = "worker",
        clock: Clock = time.time,
        random_bytes: RandomBytes = os.urandom,
    ) -> None:
        """Ask to join.

        Args:
            joining: The join string.
            node: The name that this node wants.
            leaf: The certificate (DER) that the other side showed in TLS.
            role: ``worker`` or ``peer``.
            clock: Seconds since 1970; replaced in tests.
            random_bytes: Makes the nonce; replaced in tests.

        Raises:
            SecurityError: The name is malformed.
        """
        self.identity = Identity(joining.run_id, node)
        self._joining = joining
        self._leaf = leaf
        self._role = role
        self._clock = clock
        self._nonce = random_bytes(NONCE)
        self._key = certificates.new_key()
        self._authority = b""
        self._said = b""

    def hello(self) -> bytes:
        """Return the first message. It says nothing about the join string."""
        return encode("hello", protocol=PROTOCOL, nonce=self._nonce.hex())

    def request(self, challenge: bytes) -> bytes:
        """Check who the other side is and return the second message.

        Raises:
            SecurityError: It is not the coordinator that the join string names, or it refuses.
        """
        message = _expect(challenge, "challenge")
        authority, now = message["authority"].encode("ascii"), _utc(self._clock())
        certificates.check_authority(authority, pin=self._joining.fingerprint, now=now)
        certificates.check_node(self._leaf, self._joining.coordinator, authority=authority, now=now)
        self._authority = authority
        fields = {
            "run": self._joining.run_id,
            "token": self._joining.token_id.hex(),
            "role": self._role,
            "node": self.identity.node,
            "csr": certificates.make_request(self._key).decode("ascii"),
        }
        leaf = certificates.fingerprint(self._leaf)
        self._said = _said(self._joining, leaf, self._nonce, unhex(message["nonce"], NONCE), fields)
        proof = self._joining.secret.mac(transcript("worker", self._said))
        return encode("request", **fields, proof=proof.hex())

    def finish(self, answer: bytes) -> Material:
        """Check the last message and return what this node speaks TLS with from now on.

        Raises:
            SecurityError: The other side refuses, or what it grants is not what was asked for.
        """
        message = _expect(answer, "grant")
        certificate = message["certificate"].encode("ascii")
        expected = self._joining.secret.mac(transcript("coordinator", self._said, certificate))
        if not self._authority or not hmac.compare_digest(unhex(message["proof"], 32), expected):
            raise SecurityError("join: the other side does not know the token in the join string")
        certificates.check_node(certificate, self.identity, authority=self._authority, now=_utc(self._clock()))
        if not certificates.holds_key(certificate, self._key):
            raise SecurityError("join: the certificate that came back is for another key")
        return Material(certificate, SecretBytes(certificates.key_pem(self._key)), self._authority)


def _expect(message: bytes, kind: str) -> dict[str, str]:
    found = decode(message, kind, "refused")
    if found["type"] == "refused":
        raise JoinRefusedError(found["code"], "the coordinator refuses: ")
    return found


def _said(joining: JoinString, leaf_fingerprint: bytes, client: bytes, server: bytes, request: dict[str, str]) -> bytes:
    """Return the digest of all that both sides have said, and of the connection that they said it on."""
    csr = hashlib.sha256(request["csr"].encode("utf-8")).digest()
    names = (request["run"], request["token"], request["role"], request["node"])
    return transcript("said", joining.fingerprint, leaf_fingerprint, client, server, *names, csr)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
