"""The join string: one line that lets a worker trust the coordinator, and the coordinator the worker, for one run."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from torchslicer.cluster.security.files import read_private, write_private
from torchslicer.cluster.security.identity import COORDINATOR, Identity
from torchslicer.cluster.security.secret import SecretBytes
from torchslicer.errors import SecurityError

PREFIX = "ts1."
MAX_LENGTH = 400

_BODY = struct.Struct(">32s8s32sQ")  # fingerprint, token id, secret, end as seconds since 1970; the run id follows
_CHECKSUM = 4
_TEXT = re.compile(r"ts1\.[A-Za-z0-9_-]+")
_MAX_END = 253_402_300_799  # the last second of the year 9999


@dataclass(frozen=True)
class JoinString:
    """What a join string says. ``str`` of it hides the token; :meth:`reveal` gives the line to print.

    Attributes:
        run_id: The only run that it is good for.
        fingerprint: SHA-256 of the certificate of the coordinator's authority.
        token_id: Which token this is; not secret.
        secret: What the worker proves to know, and never sends.
        expires_at: The end of its time, in seconds since 1970.
    """

    run_id: str
    fingerprint: bytes
    token_id: bytes
    secret: SecretBytes
    expires_at: int

    @classmethod
    def create(
        cls,
        run_id: str,
        fingerprint: bytes,
        *,
        expires_at: int,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> JoinString:
        """Make a new token for a run.

        Raises:
            SecurityError: The run id, the fingerprint or the end has a wrong form.

        >>> line = JoinString.create("run-1", bytes(32), expires_at=2_000_000_000).reveal()
        >>> line[:4], len(line), JoinString.parse(line, now=1_900_000_000.0).run_id
        ('ts1.', 123, 'run-1')
        """
        made = cls(run_id, fingerprint, random_bytes(8), SecretBytes(random_bytes(32)), expires_at)
        made._check()
        return made

    @classmethod
    def parse(cls, text: str, *, now: float) -> JoinString:
        """Read a join string. No error shows any part of it.

        Raises:
            SecurityError: It is not one, was copied in part, or its time is over.
        """
        body = _decode(text.strip())
        fixed, run_id = body[: _BODY.size], body[_BODY.size :]
        fingerprint, token_id, secret, expires_at = _BODY.unpack(fixed)
        joined = cls(run_id.decode("ascii", "replace"), fingerprint, token_id, SecretBytes(secret), expires_at)
        joined._check()
        if now >= expires_at:
            raise SecurityError(
                f"join string: its time was over {now - expires_at:.0f} s ago; "
                "use the one that the coordinator prints now"
            )
        return joined

    def reveal(self) -> str:
        """Return the line itself, token included: print it for the user, keep it out of logs and arguments."""
        fixed = _BODY.pack(self.fingerprint, self.token_id, self.secret.reveal(), self.expires_at)
        body = fixed + self.run_id.encode("ascii")
        return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode("ascii").rstrip("=")

    @property
    def coordinator(self) -> Identity:
        """Whom a worker with this string expects to meet."""
        return Identity(self.run_id, COORDINATOR)

    def __str__(self) -> str:
        return f"{PREFIX}*** (run {self.run_id})"

    def _check(self) -> None:
        Identity(self.run_id, COORDINATOR)  # refuses a malformed run id
        if len(self.fingerprint) != 32 or not 0 < self.expires_at <= _MAX_END:
            raise SecurityError("join string: expected a SHA-256 fingerprint and an end before the year 10000")


def read_join_file(path: str | os.PathLike[str], *, now: float) -> JoinString:
    """Read a join string from a file that only its owner can read.

    Raises:
        SecurityError: Others can read the file, or it does not hold a join string.
    """
    text = read_private(path, what="join file").decode("ascii", "replace")
    return JoinString.parse(text, now=now)


def write_join_file(directory: str | os.PathLike[str], joining: JoinString, *, name: str = "join") -> str:
    """Write the line into a new 0600 file in a 0700 folder, for processes that we start ourselves; return its path.

    Raises:
        SecurityError: The file exists, or the folder is open to others.
    """
    (path,) = write_private(directory, {name: joining.reveal().encode("ascii") + b"\n"})
    return str(path)


def _decode(text: str) -> bytes:
    if len(text) > MAX_LENGTH or not _TEXT.fullmatch(text):
        raise SecurityError(
            f"join string: expected {PREFIX} and letters, digits, '-' or '_', at most {MAX_LENGTH} characters, "
            f"got {len(text)} characters of another form; copy the whole line that the coordinator prints"
        )
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise _damaged() from None
    body, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    canonical = base64.urlsafe_b64encode(data).decode("ascii").rstrip("=") == encoded
    if not canonical or len(body) <= _BODY.size or checksum != _checksum(body):
        raise _damaged()
    return body


def _damaged() -> SecurityError:
    return SecurityError("join string: damaged or incomplete; copy the whole line that the coordinator prints")


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"torchslicer join string" + body).digest()[:_CHECKSUM]
