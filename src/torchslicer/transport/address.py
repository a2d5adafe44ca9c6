"""Addresses: how they are written, which host they are on, and which of several to use."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from torchslicer.errors import TransportError

_UNIX, _MEMORY = "unix:", "memory:"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS = secrets.token_hex(8)


@dataclass(frozen=True)
class Endpoint:
    """One way to reach a listener. With a ``host_id`` it serves only processes of that host and user."""

    address: str
    host_id: str = ""


def local_path(address: str) -> str | None:
    """Return the path of a UNIX socket's address, None for any other.

    >>> local_path("unix:/run/a.sock"), local_path("127.0.0.1:80")
    ('/run/a.sock', None)
    """
    return address[len(_UNIX) :] if address.startswith(_UNIX) else None


def local_peer(process: int) -> str:
    """Return what stands for the address of a peer that came through a UNIX socket: it has none of its own.

    >>> local_peer(4242), local_peer(0)
    ('unix:process 4242', 'unix:a process')
    """
    return f"{_UNIX}process {process}" if process else f"{_UNIX}a process"


def in_words(peer: str) -> str:
    """Say for messages who or where a peer is.

    >>> in_words(local_peer(4242)), in_words("memory:left")
    ('process 4242 of this host', 'this process')
    >>> in_words("10.0.0.7:50051"), in_words("unix:/run/a.sock")
    ('10.0.0.7:50051', 'unix:/run/a.sock')
    """
    if peer.startswith(_MEMORY):
        return "this process"
    if peer.startswith(_UNIX) and not peer.startswith(f"{_UNIX}/"):
        return f"{peer.removeprefix(_UNIX)} of this host"
    return peer


def split_address(address: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        TransportError: It is neither.

    >>> split_address("[::1]:50054"), split_address("gpu-7:0")
    (('::1', 50054), ('gpu-7', 0))
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in host and bare == host) or not (port.isascii() and port.isdigit()):
        raise TransportError(f"address {address!r}: expected HOST:PORT, [IPV6]:PORT or unix:/path")
    if int(port) > 65535:
        raise TransportError(f"address {address!r}: expected a port from 0 to 65535, got {port}")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """Write a host and a port as one address.

    >>> join_address("::1", 80), join_address("gpu-7", 80)
    ('[::1]:80', 'gpu-7:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@lru_cache(maxsize=1)
def host_id() -> str:
    """Return a text that two processes share only if they are of one user on one running host.

    Containers on one host may share it without sharing files, so :func:`choose_endpoint` looks for the socket too.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        boot = ""
    return sha256(f"{boot}\0{socket.gethostname()}\0{_user()}".encode()).hexdigest()[:32]


def process_id() -> str:
    """Return a text that no other process has, on whichever host: numbers of processes repeat, a fork copies the rest.

    >>> process_id() == process_id()
    True
    """
    return f"{_PROCESS}-{os.getpid()}"


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


def choose_endpoint(endpoints: Sequence[Endpoint], own_host_id: str | None = None) -> Endpoint:
    """Choose how to reach a listener: its UNIX socket if this process can open it, else its network address.

    Raises:
        TransportError: None of the endpoints can be used from here.

    >>> tcp = Endpoint("10.0.0.7:4000")
    >>> choose_endpoint([Endpoint("unix:/nowhere.sock", host_id="of another host"), tcp]) == tcp
    True
    """
    own = host_id() if own_host_id is None else own_host_id
    for endpoint in endpoints:
        path = local_path(endpoint.address)
        if endpoint.host_id == own and path is not None and _can_open(Path(path)):
            return endpoint
    for endpoint in endpoints:
        if not endpoint.host_id:
            return endpoint
    offered = ", ".join(endpoint.address for endpoint in endpoints) or "none"
    raise TransportError(f"no endpoint can be reached from this host; offered: {offered}")


def _can_open(path: Path) -> bool:
    try:
        return path.is_socket() and os.access(path, os.R_OK | os.W_OK)
    except OSError:
        return False
