"""The messages of joining: flat JSON objects of strings, bounded before they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from torchslicer.errors import SecurityError

MAX_MESSAGE = 16 * 1024
PROTOCOL = "1"
ROLES = ("worker", "peer")

_FIELDS: Mapping[str, frozenset[str]] = {
    "hello": frozenset({"protocol", "nonce"}),
    "challenge": frozenset({"authority", "nonce"}),
    "request": frozenset({"run", "token", "role", "node", "csr", "proof"}),
    "grant": frozenset({"certificate", "proof"}),
    "refused": frozenset({"code"}),
}
# What the coordinator may answer, and what the worker then tells its user. The peer's own words are never shown.
REFUSALS: Mapping[str, str] = {
    "malformed": "a message was malformed",
    "protocol": "it speaks another version of the join protocol; use the same TorchSlicer on both sides",
    "expired": "the time of the join string is over; use the one that it prints now",
    "run": "the join string is of another run",
    "token": "the token in the join string is not this run's",
    "role": "it takes no node of this role",
    "name": "a node of this name has joined already; give this one another name",
    "full": "as many nodes as it takes have joined already",
    "rate": "too many attempts from this address failed; wait a minute",
}


class JoinRefusedError(SecurityError):
    """Joining is refused, for one of the reasons in ``REFUSALS``."""

    def __init__(self, code: str, who: str = "") -> None:
        """Keep the reason's code, and say who refuses."""
        super().__init__(f"join: {who}{REFUSALS.get(code, 'for a reason that this version does not know')}")
        self.code = code


def encode(kind: str, **fields: str) -> bytes:
    """Return a message as bytes.

    >>> encode("refused", code="full")
    b'{"type": "refused", "code": "full"}'
    """
    return json.dumps({"type": kind, **fields}).encode("ascii")


def decode(message: bytes, *kinds: str) -> dict[str, str]:
    """Read a message that must be one of *kinds*, with exactly its fields, all of them strings.

    Raises:
        JoinRefusedError: It is anything else.

    >>> decode(encode("refused", code="full"), "grant", "refused")
    {'type': 'refused', 'code': 'full'}
    """
    if len(message) > MAX_MESSAGE:
        raise JoinRefusedError("malformed")
    try:
        found = json.loads(message.decode("ascii"))
    except (ValueError, RecursionError):
        raise JoinRefusedError("malformed") from None
    # ASCII escapes (backslash u) can hold what no field may: other letters, half characters
    if not isinstance(found, dict) or not all(isinstance(text, str) and text.isascii() for text in found.values()):
        raise JoinRefusedError("malformed")
    kind = found.get("type")
    if kind not in kinds or found.keys() != _FIELDS[kind] | {"type"}:
        raise JoinRefusedError("malformed")
    return found


def unhex(text: str, size: int) -> bytes:
    r"""Return *size* bytes written as lower-case hexadecimal digits.

    Raises:
        JoinRefusedError: The text is anything else.

    >>> unhex("00ff", 2)
    b'\x00\xff'
    """
    try:
        data = bytes.fromhex(text) if len(text) == 2 * size else b""
    except ValueError:
        data = b""
    if len(data) != size or data.hex() != text:
        raise JoinRefusedError("malformed")
    return data


def transcript(label: str, *parts: bytes | str) -> bytes:
    """Return what a proof is made over: every part with its length, so that no two lists give the same bytes.

    >>> transcript("worker", "ab", "c") == transcript("worker", "a", "bc")
    False
    """
    digest = hashlib.sha256()
    for part in (f"torchslicer join {PROTOCOL}", label, *parts):
        data = part.encode("utf-8") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()
