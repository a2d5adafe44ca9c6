"""A short-lived certificate authority: one a run makes for itself, or one that `torchslicer certs init` makes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from torchslicer.cluster.security import certificates
from torchslicer.cluster.security.files import write_private
from torchslicer.cluster.security.identity import COORDINATOR, FIXED, Identity
from torchslicer.cluster.security.secret import SecretBytes
from torchslicer.cluster.security.tls import Material
from torchslicer.errors import SecurityError

AUTOMATIC_LIFETIME = timedelta(days=7)


class Authority:
    """Signs the certificates of the nodes that trust each other. Its key is only ever in memory.

    >>> authority = Authority.create("run-1")
    >>> material = authority.issue(Identity("run-1", "worker-a"), hosts=["10.0.0.7"])
    >>> material.key, material.authority == authority.certificate
    (***, True)
    """

    def __init__(self, certificate: bytes, key: certificates.Key) -> None:
        """Keep an authority's certificate (PEM) and key."""
        self.certificate = certificate
        self._key = key

    @classmethod
    def create(cls, name: str, *, lifetime: timedelta = AUTOMATIC_LIFETIME, now: datetime | None = None) -> Authority:
        """Make a new authority.

        Args:
            name: What it is called; only for people.
            lifetime: How long its certificate, and so all that it signs, is good; at most 90 days.
            now: The time, in UTC; replaced in tests.

        Raises:
            SecurityError: The lifetime is not between 0 and 90 days.
        """
        if not timedelta(0) < lifetime <= certificates.MAX_LIFETIME:
            raise SecurityError(
                f"authority: expected a lifetime of at most {certificates.MAX_LIFETIME.days} days, got {lifetime}"
            )
        begin = now or datetime.now(timezone.utc)
        key = certificates.new_key()
        certificate = certificates.make_authority(
            key, f"TorchSlicer {name}"[:64], not_before=begin - certificates.CLOCK_SKEW, not_after=begin + lifetime
        )
        return cls(certificate, key)

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 digest of the authority's certificate."""
        return certificates.fingerprint(self.certificate)

    def issue(self, identity: Identity, hosts: Iterable[str] = (), *, now: datetime | None = None) -> Material:
        """Make a key and a certificate for a node, good as long as the authority.

        Args:
            identity: Who the node is.
            hosts: DNS names and IP addresses at which it can be found, besides ``identity.dns_name``.
            now: The time, in UTC; replaced in tests.

        Raises:
            SecurityError: A host is neither a DNS name nor an IP address.
        """
        key = certificates.new_key()
        certificate = self._sign(key.public_key(), identity, hosts, now)
        return Material(certificate, SecretBytes(certificates.key_pem(key)), self.certificate)

    def sign(self, request: bytes, identity: Identity, *, now: datetime | None = None) -> bytes:
        """Sign the key of a certificate request (PEM) for a node. What the request says about names is ignored.

        Raises:
            SecurityError: The request is malformed, not signed by its own key, or its key is not on P-256.
        """
        return self._sign(certificates.requested_key(request), identity, (), now)

    def _sign(
        self,
        public: certificates.PublicKey,
        identity: Identity,
        hosts: Iterable[str],
        now: datetime | None,
    ) -> bytes:
        return certificates.sign_node(
            public,
            identity,
            hosts,
            authority=self.certificate,
            key=self._key,
            not_before=(now or datetime.now(timezone.utc)) - certificates.CLOCK_SKEW,
            not_after=certificates.expires_at(self.certificate),
        )


def write_deployment(
    directory: str | os.PathLike[str],
    workers: Sequence[str],
    *,
    hosts: Mapping[str, Sequence[str]] | None = None,
    lifetime: timedelta = certificates.MAX_LIFETIME,
) -> list[Path]:
    """Write ``ca.pem`` and a certificate and a key for the coordinator and each worker. The authority's key is dropped.

    Args:
        directory: The folder; made with mode 0700. Nothing in it is overwritten.
        workers: The workers' names; each is also a DNS name of its worker.
        hosts: By node, further DNS names and IP addresses.
        lifetime: How long the certificates are good; at most 90 days.

    Raises:
        SecurityError: A name is malformed, twice there or unknown, a file exists, or the folder is open to others.
    """
    nodes = [COORDINATOR, *workers]
    if len(workers) == 0 or len(set(nodes)) < len(nodes) or "ca" in nodes:
        raise SecurityError(
            "workers: expected one or more names, each once and none of them 'ca' or 'coordinator', "
            f"got {list(workers)}"
        )
    unknown = sorted(set(hosts or {}) - set(nodes))
    if unknown:
        raise SecurityError(f"hosts: {unknown[0]!r} is no node; expected one of {', '.join(nodes)}")
    identities = [Identity(FIXED, node) for node in nodes]
    authority = Authority.create("certs init", lifetime=lifetime)
    files = {"ca.pem": authority.certificate}
    for identity in identities:
        material = authority.issue(identity, [identity.node, *(hosts or {}).get(identity.node, ())])
        files[f"{identity.node}.pem"] = material.certificate
        files[f"{identity.node}.key"] = material.key.reveal()
    return write_private(directory, files)
