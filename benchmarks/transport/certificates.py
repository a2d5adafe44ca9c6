"""A private certificate authority for the TLS figures, in a folder that is deleted afterwards."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificates:
    """One authority and one identity, which both sides use."""

    folder: Path

    def server(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def grpc_server(self) -> Any:
        return grpc.ssl_server_credentials(
            [(self._read("key.pem"), self._read("node.pem"))], self._read("ca.pem"), require_client_auth=True
        )

    def grpc_client(self) -> Any:
        return grpc.ssl_channel_credentials(self._read("ca.pem"), self._read("key.pem"), self._read("node.pem"))

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.folder / "ca.pem")
        context.load_cert_chain(self.folder / "node.pem", self.folder / "key.pem")
        return context

    def _read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def make_certificates(folder: Path) -> Certificates:
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark authority")])
    node = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    ca = _certificate(authority, authority, authority_key.public_key(), authority_key, x509.BasicConstraints(True, 0))
    signed = _certificate(node, authority, key.public_key(), authority_key, address)
    for name, certificate in (("ca.pem", ca), ("node.pem", signed)):
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return Certificates(folder)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: Any,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    now = dt.datetime.now(dt.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(hours=1))
    builder = builder.not_valid_after(now + dt.timedelta(days=1))
    return builder.add_extension(extension, critical=True).sign(signer, hashes.SHA256())
