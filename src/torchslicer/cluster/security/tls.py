"""Mutual TLS 1.3 from one set of bytes, for plain sockets (``ssl``) and for gRPC."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchslicer.cluster.security.files import read_private, read_public
from torchslicer.cluster.security.secret import SecretBytes
from torchslicer.errors import ConfigError, SecurityError

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True)
class Material:
    """What a node needs to speak TLS: its certificate, the key to it, and the authority whose nodes it trusts; PEM."""

    certificate: bytes
    key: SecretBytes
    authority: bytes

    @classmethod
    def from_files(
        cls,
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        authority: str | os.PathLike[str],
    ) -> Material:
        """Read the three files; only the owner may be able to read the key.

        Raises:
            SecurityError: A file cannot be read, or others can read the key.
        """
        return cls(
            certificate=read_public(certificate, what="certificate"),
            key=SecretBytes(read_private(key, what="private key")),
            authority=read_public(authority, what="authority certificate"),
        )


def server_context(material: Material, *, require_client: bool = True) -> ssl.SSLContext:
    """Return the context of a listening socket: TLS 1.3, and a client must show a certificate of the authority.

    Args:
        material: The node's certificate, key and authority.
        require_client: False for a port where nodes join: a client without a certificate gets in, and must be given
            nothing but the join protocol. A certificate that is shown must be good all the same.

    Raises:
        SecurityError: Certificate, key and authority are not PEM or do not belong together.
    """
    context = _new_context(ssl.PROTOCOL_TLS_SERVER, material)
    context.verify_mode = ssl.CERT_REQUIRED if require_client else ssl.CERT_OPTIONAL
    # A resumed session would skip the check of the client's certificate.
    context.num_tickets = 0
    return context


def client_context(material: Material) -> ssl.SSLContext:
    """Return the context of a connecting socket: TLS 1.3, own certificate, server's authority and name checked.

    Wrap with ``server_hostname=identity.dns_name``, so that exactly the node that was meant can answer.

    Raises:
        SecurityError: Certificate, key and authority are not PEM or do not belong together.
    """
    context = _new_context(ssl.PROTOCOL_TLS_CLIENT, material)
    context.verify_mode = ssl.CERT_REQUIRED
    context.check_hostname = True
    context.hostname_checks_common_name = False
    return context


def speaks_tls(host: str, port: int, *, timeout_s: float = 5.0) -> bool:
    """Whether what listens there answers to a TLS handshake. Nothing is checked, and nothing else said to it."""
    try:
        with socket.create_connection((host, port), timeout_s) as raw:
            joining_context().wrap_socket(raw).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    return True


def joining_context() -> ssl.SSLContext:
    """Return the context of a node that has nothing but a join string.

    It checks nothing: :class:`~torchslicer.cluster.security.handshake.JoinClient` checks what the server shows against
    the fingerprint in the string, before anything about the string is sent.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the URI, DNS and IP names in what ``SSLSocket.getpeercert()`` gives.

    >>> sorted(names_of({"subjectAltName": (("URI", "torchslicer:fixed/a"), ("DNS", "host-a"))}))
    ['host-a', 'torchslicer:fixed/a']
    """
    return frozenset(value for _kind, value in (certificate or {}).get("subjectAltName", ()))


def names_of_auth_context(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """Return the same names from gRPC's ``context.auth_context()``."""
    found = auth_context.get("x509_subject_alternative_name", ())
    return frozenset(name.decode("utf-8", "replace") for name in found)


def check_pinned(names: Iterable[str], pinned: Iterable[str]) -> str:
    """Return the one of the pinned names that a certificate has.

    Raises:
        SecurityError: It has none: the node has a certificate of the right authority, but is not one of those expected.

    >>> check_pinned({"torchslicer:fixed/a", "host-a"}, ["torchslicer:fixed/a", "torchslicer:fixed/b"])
    'torchslicer:fixed/a'
    """
    shown, wanted = set(names), list(pinned)
    for name in wanted:
        if name in shown:
            return name
    raise SecurityError(
        f"certificate: expected a node of {', '.join(sorted(wanted))}, got {', '.join(sorted(shown)) or 'no name'}"
    )


def grpc_server_credentials(material: Material) -> Any:
    """Return ``grpc.ServerCredentials``: a client must show a certificate of the authority.

    gRPC for Python offers no setting for the lowest TLS version (it accepts 1.2 from others; our own peers speak 1.3).

    Raises:
        ConfigError: grpcio is not installed.
    """
    pair = (material.key.reveal(), material.certificate)
    return _grpc().ssl_server_credentials([pair], root_certificates=material.authority, require_client_auth=True)


def grpc_channel_credentials(material: Material) -> Any:
    """Return ``grpc.ChannelCredentials``; open the channel with :func:`grpc_channel_options`.

    Raises:
        ConfigError: grpcio is not installed.
    """
    return _grpc().ssl_channel_credentials(
        root_certificates=material.authority,
        private_key=material.key.reveal(),
        certificate_chain=material.certificate,
    )


def grpc_channel_options(dns_name: str) -> list[tuple[str, str]]:
    """Return the options by which a channel checks for *dns_name*, whatever address it connects to.

    >>> grpc_channel_options("worker-a")
    [('grpc.ssl_target_name_override', 'worker-a')]
    """
    return [("grpc.ssl_target_name_override", dns_name)]


def _new_context(protocol: int, material: Material) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=material.authority.decode("ascii"))
        with _private_file(material) as path:
            # A password of ours keeps OpenSSL from asking the terminal for that of an encrypted key.
            context.load_cert_chain(path, password=b"")
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise SecurityError(
            f"TLS: certificate, key and authority must be PEM, not encrypted, and belong together (OpenSSL: {reason})"
        ) from None
    return context


@contextmanager
def _private_file(material: Material) -> Iterator[str]:
    """Give ``ssl``, which reads only files, one that never leaves memory, or one that nobody else can open."""
    chain = material.key.reveal().rstrip() + b"\n" + material.certificate
    descriptor = _memory_file()
    if descriptor is not None:
        with os.fdopen(descriptor, "wb") as file:
            file.write(chain)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"
        return
    with tempfile.TemporaryDirectory(prefix="torchslicer-") as folder:  # made with mode 0700
        path = Path(folder, "chain.pem")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(chain)
        yield str(path)


def _memory_file() -> int | None:
    """Return a descriptor of a file in memory that can be opened by its path, or None where there is no such thing."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("torchslicer", os.MFD_CLOEXEC)
    except OSError:
        return None
    if os.access(f"/proc/self/fd/{descriptor}", os.R_OK):
        return descriptor
    os.close(descriptor)
    return None


def _grpc() -> ModuleType:
    try:
        return import_module("grpc")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"transport: grpc needs a library that is not installed ({error.name}); "
            "run `pip install 'torchslicer[grpc]'`, or use `transport.tensor: tcp`"
        ) from error
