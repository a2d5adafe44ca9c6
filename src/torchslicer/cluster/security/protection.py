"""How a node protects its connections: with certificates, or not at all where that is allowed."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchslicer.cluster.security.addresses import parse_address
from torchslicer.cluster.security.identity import COORDINATOR, Identity
from torchslicer.cluster.security.rule import Decision, Role, Transport, decide, decide_connect
from torchslicer.cluster.security.tls import (
    Material,
    check_pinned,
    client_context,
    grpc_channel_credentials,
    grpc_server_credentials,
    server_context,
)


@dataclass(frozen=True)
class Protection:
    """What a node shows to others, whom it lets in, and whether it may do without.

    Attributes:
        material: Certificate, key and authority; None for plain text.
        scope: The run, or ``fixed``, whose nodes have certificates of ours: each side then checks that the other is
            exactly the node it means. Empty for certificates of others.
        node: The name in the own certificate, if it is one of ours.
        names: If there are any, a peer's certificate must have one of them, besides.
        joins: Whether a node without a certificate may connect, to join.
        insecure_argument: The code says that plain text may leave this machine.
        insecure_environment: So does the environment; only both together count.

    Example:
        >>> Protection().check_connect("127.0.0.1:50054").insecure
        False
        >>> Protection().server_name("worker-0", "10.0.0.7:4000") is None
        True
    """

    material: Material | None = None
    scope: str = ""
    node: str = ""
    names: tuple[str, ...] = ()
    joins: bool = False
    insecure_argument: bool = False
    insecure_environment: bool = False

    @property
    def allows_others(self) -> bool:
        """Whether this node may talk to other machines at all: with certificates, or by the double opt-in."""
        return self.material is not None or (self.insecure_argument and self.insecure_environment)

    @cached_property
    def server(self) -> ssl.SSLContext | None:
        """The context of listening sockets; None for plain text."""
        return None if self.material is None else server_context(self.material, require_client=not self.joins)

    @cached_property
    def client(self) -> ssl.SSLContext | None:
        """The context of connecting sockets; None for plain text."""
        return None if self.material is None else client_context(self.material)

    @cached_property
    def grpc_server(self) -> Any:
        """The credentials of a gRPC server; None for plain text."""
        return None if self.material is None else grpc_server_credentials(self.material)

    @cached_property
    def grpc_client(self) -> Any:
        """The credentials of a gRPC channel; None for plain text."""
        return None if self.material is None else grpc_channel_credentials(self.material)

    def server_name(self, node: str, address: str) -> str | None:
        """Return the name that the certificate of *node*, which listens at *address*, must have."""
        if self.material is None:
            return None
        where = parse_address(address)
        return Identity(self.scope, node).dns_name if self.scope else where.host or None

    def check_peer(self, names: Iterable[str], node: str) -> None:
        """Check that a connection comes from *node*, or from the coordinator, which may stand for any.

        Raises:
            SecurityError: The names in the peer's certificate are those of another node.
        """
        if self.material is None:
            return
        shown = tuple(names)
        if self.names:
            check_pinned(shown, self.names)
        if self.scope:
            check_pinned(shown, [Identity(self.scope, one).uri for one in dict.fromkeys((node, COORDINATOR))])

    def check_bind(self, address: str, role: Role, transport: Transport = "tcp") -> Decision:
        """Say whether *role* may listen at *address*, by the start-up rule.

        Raises:
            SecurityError: It may not; the message names the ways out.
        """
        return decide(
            address,
            tls=self.material is not None,
            token=False,
            pinned_names=bool(self.scope or self.names),
            insecure_argument=self.insecure_argument,
            insecure_environment=self.insecure_environment,
            role=role,
            transport=transport,
        ).check()

    def check_connect(self, address: str) -> Decision:
        """Say whether one may connect to *address*, by the start-up rule.

        Raises:
            SecurityError: One may not; the message names the ways out.
        """
        return decide_connect(
            address,
            tls=self.material is not None,
            insecure_argument=self.insecure_argument,
            insecure_environment=self.insecure_environment,
        ).check()

    def without_joining(self) -> Protection:
        """Return the same for ports where nobody joins."""
        return replace(self, joins=False)


def protection_from_files(authority: str, certificate: str, key: str, *, names: Iterable[str] = ()) -> Protection:
    """Read the three PEM files of a node.

    Raises:
        SecurityError: A file cannot be read, others can read the key, they do not belong together, or are out of date.
        ConfigError: The package that reads certificates is not installed.
    """
    from torchslicer.cluster.security.certificates import identity_of  # noqa: PLC0415 - an extra

    material = Material.from_files(certificate, key, authority)
    identity = identity_of(material.certificate)
    scope, node = ("", "") if identity is None else (identity.scope, identity.node)
    server_context(material)  # so that files that do not fit each other are told of now
    return Protection(material, scope, node, tuple(names))
