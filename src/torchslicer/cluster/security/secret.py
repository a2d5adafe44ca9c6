"""Bytes that must never be printed, logged or written by accident."""

from __future__ import annotations

import hmac
from typing import Any, NoReturn

MASK = "***"


class SecretBytes:
    """A token or a private key whose ``repr`` and ``str`` are ``***``, compared in constant time.

    >>> token = SecretBytes(b"hunter2")
    >>> print(token, [token], f"{token}")
    *** [***] ***
    >>> token.reveal()
    b'hunter2'
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        """Keep *value* out of sight."""
        self._value = bytes(value)

    def reveal(self) -> bytes:
        """Return the value itself; the only way to get it."""
        return self._value

    def mac(self, message: bytes) -> bytes:
        """Return HMAC-SHA256 of *message*: shows that one knows the secret without telling it."""
        return hmac.digest(self._value, message, "sha256")

    def __repr__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretBytes):
            return NotImplemented
        return hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash((SecretBytes, self._value))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretBytes cannot be serialised; pass on what reveal() gives, if that is meant")

    def __copy__(self) -> SecretBytes:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SecretBytes:
        return self
