"""Who a certificate is for."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from torchslicer.errors import SecurityError

COORDINATOR = "coordinator"
FIXED = "fixed"

_SCOPE = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NODE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUFFIX = "torchslicer.internal"


@dataclass(frozen=True)
class Identity:
    """A node of a run. ``scope`` is the run's id, or ``fixed`` for certificates that outlive runs.

    >>> Identity("run-1", "worker-a").uri
    'torchslicer:run-1/worker-a'
    """

    scope: str
    node: str

    def __post_init__(self) -> None:
        """Refuse names that could mean something else in a certificate, a path or a log.

        Raises:
            SecurityError: A name has another form.
        """
        if not _SCOPE.fullmatch(self.scope):
            raise SecurityError(
                "run id: expected 1-64 letters, digits, '.', '_' or '-', starting with a letter or digit, "
                f"got {self.scope[:80]!r}"
            )
        if not _NODE.fullmatch(self.node):
            raise SecurityError(
                f"node name: expected 1-63 lower-case letters, digits or inner '-', got {self.node[:80]!r}"
            )

    @property
    def uri(self) -> str:
        """The name in the certificate that says who the node is."""
        return f"torchslicer:{self.scope}/{self.node}"

    @property
    def dns_name(self) -> str:
        """The name to check on connecting (``server_hostname``): the same whatever address the node has.

        A run's id may be longer than a DNS label and hold other characters, hence the digest.
        """
        return f"{self.node}.{hashlib.sha256(self.scope.encode()).hexdigest()[:32]}.{_SUFFIX}"
