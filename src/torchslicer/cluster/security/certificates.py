"""X.509: the only module that imports ``cryptography``. ECDSA P-256, authorities of depth one, at most 90 days."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from functools import wraps
from typing import TypeVar

from typing_extensions import ParamSpec

from torchslicer.cluster.security.identity import Identity
from torchslicer.errors import ConfigError, SecurityError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    raise ConfigError(
        f"certificates need a library that is not installed ({error.name}); run `pip install 'torchslicer[grpc]'`"
    ) from error

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

MAX_LIFETIME = timedelta(days=90)
CLOCK_SKEW = timedelta(minutes=5)

_MAX_PEM = 12 * 1024
_DNS = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*")
# What cryptography raises on bytes that are no certificate, or not of a kind that it knows.
_MALFORMED = (
    ValueError,
    TypeError,
    OverflowError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _typed(what: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Turn whatever malformed bytes make ``cryptography`` raise into one typed error."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except SecurityError:
                raise
            except _MALFORMED as error:
                raise SecurityError(f"{what}: malformed or not signed by whom it should be") from error

        return checked

    return decorate


def new_key() -> Key:
    """Make a private key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """Return a private key as PKCS #8 PEM, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_authority(key: Key, name: str, *, not_before: datetime, not_after: datetime) -> bytes:
    """Return a self-signed certificate of an authority that signs nodes, not further authorities."""
    subject = _name(name)
    builder = _builder(subject, subject, key.public_key(), not_before=not_before, not_after=not_after)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def sign_node(
    public: ec.EllipticCurvePublicKey,
    identity: Identity,
    hosts: Iterable[str],
    *,
    authority: bytes,
    key: Key,
    not_before: datetime,
    not_after: datetime,
) -> bytes:
    """Return a certificate for a node, good for both sides of a connection.

    Raises:
        SecurityError: A host is neither a DNS name nor an IP address.
    """
    issuer = _load(authority)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(usages), False),
        (x509.SubjectAlternativeName(_alternative_names(identity, hosts)), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
    ]
    builder = _builder(_name(identity.node), issuer.subject, public, not_before=not_before, not_after=not_after)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def make_request(key: Key) -> bytes:
    """Return a certificate signing request. It names nothing: who the node is, the authority says."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


@_typed("certificate request")
def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key that a request asks to have signed; all else in the request is ignored.

    Raises:
        SecurityError: The request is malformed, not signed by its key, or its key is not on P-256.
    """
    parsed = x509.load_pem_x509_csr(_bounded(request))
    public = parsed.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise SecurityError("certificate request: expected a key on P-256")
    if not parsed.is_signature_valid:
        raise SecurityError("certificate request: not signed by the key that it names")
    return public


@_typed("certificate")
def fingerprint(certificate: bytes) -> bytes:
    """Return the SHA-256 digest of a certificate, PEM or DER.

    Raises:
        SecurityError: The bytes are no certificate.
    """
    return _load(certificate).fingerprint(hashes.SHA256())


@_typed("authority certificate")
def check_authority(certificate: bytes, *, pin: bytes, now: datetime) -> None:
    """Check that a certificate is the authority with the pinned fingerprint, and that its time has come and not passed.

    Raises:
        SecurityError: It is another certificate, no authority, or out of date.
    """
    parsed = _load(certificate)
    if not hmac.compare_digest(parsed.fingerprint(hashes.SHA256()), pin):
        raise SecurityError(
            "authority certificate: its fingerprint is not the one in the join string; either the string is of another "
            "coordinator or run, or somebody is between you and it"
        )
    if not parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
        raise SecurityError("authority certificate: it is not that of an authority")
    _check_time(parsed, now, "authority certificate")


@_typed("node certificate")
def check_node(certificate: bytes, identity: Identity, *, authority: bytes, now: datetime) -> None:
    """Check that *authority* signed the certificate for exactly this node, as a server, and that it is in date.

    Raises:
        SecurityError: The certificate is of another authority, another node, or out of date.
    """
    parsed = _load(certificate)
    parsed.verify_directly_issued_by(_load(authority))
    if parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
        raise SecurityError("node certificate: it is that of an authority")
    usages = parsed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if ExtendedKeyUsageOID.SERVER_AUTH not in usages:
        raise SecurityError("node certificate: it is not for servers")
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = names.get_values_for_type(x509.UniformResourceIdentifier)
    if found != [identity.uri]:
        raise SecurityError(
            f"node certificate: expected that of {identity.uri}, got {', '.join(found)[:200] or 'none'}"
        )
    _check_time(parsed, now, "node certificate")


@_typed("certificate")
def identity_of(certificate: bytes) -> Identity | None:
    """Return the node that a certificate in date is for, None if it is not one of ours.

    Raises:
        SecurityError: The bytes are no certificate, or it is out of date.
    """
    parsed = _load(certificate)
    _check_time(parsed, datetime.now(timezone.utc), "certificate")
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    for name in names.get_values_for_type(x509.UniformResourceIdentifier):
        scheme, _, rest = name.partition(":")
        scope, slash, node = rest.partition("/")
        if scheme == "torchslicer" and slash:
            return Identity(scope, node)
    return None


@_typed("node certificate")
def holds_key(certificate: bytes, key: Key) -> bool:
    """Whether a certificate is for the public half of *key*.

    Raises:
        SecurityError: The bytes are no certificate.
    """
    return _load(certificate).public_key() == key.public_key()


@_typed("certificate")
def expires_at(certificate: bytes) -> datetime:
    """Return the end of a certificate's time, in UTC.

    Raises:
        SecurityError: The bytes are no certificate.
    """
    return _load(certificate).not_valid_after_utc


def _load(certificate: bytes) -> x509.Certificate:
    data = _bounded(certificate)
    return x509.load_pem_x509_certificate(data) if b"-----BEGIN" in data else x509.load_der_x509_certificate(data)


def _bounded(data: bytes) -> bytes:
    if len(data) > _MAX_PEM:
        raise SecurityError(f"certificate: expected at most {_MAX_PEM} bytes, got {len(data)}")
    return data


def _check_time(certificate: x509.Certificate, now: datetime, what: str) -> None:
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise SecurityError(
            f"{what}: good from {certificate.not_valid_before_utc} to {certificate.not_valid_after_utc}, "
            f"now it is {now}; make new certificates, or set the clocks"
        )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    *,
    not_before: datetime,
    not_after: datetime,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), not_before, not_after)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative_names(identity: Identity, hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(identity.uri),
        x509.DNSName(identity.dns_name),
    ]
    return names + [_host(host) for host in dict.fromkeys(hosts)]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _DNS.fullmatch(host) or len(host) > 253:
        raise SecurityError(f"certificate: expected a DNS name or an IP address, got {host[:80]!r}")
    return x509.DNSName(host)
