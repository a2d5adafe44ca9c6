"""Addresses: how they are written, which of them never leave this machine, and which one others can reach."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchslicer.errors import ConfigError

FORMS = "HOST:PORT, [IPV6]:PORT, :PORT (all interfaces) or unix:/path"

_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?)\]:([0-9]{1,5})")
_PLAIN = re.compile(r"([A-Za-z0-9._-]*):([0-9]{1,5})")
_MAX_TEXT = 300
_MAX_UNIX = 103  # sun_path holds 104 bytes on macOS and the BSDs, 108 on Linux, with the final NUL
# Test networks (RFC 5737, RFC 3849): connecting a datagram socket to them sends nothing, but asks the routing table.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}

Resolve = Callable[[str], Sequence[str]]
Route = Callable[["socket.AddressFamily", str], "str | None"]


@dataclass(frozen=True)
class Address:
    """Where somebody listens: a host and a port, or the path of a UNIX socket.

    >>> str(Address("::1", 50054)), str(Address(path="/run/ts.sock"))
    ('[::1]:50054', 'unix:/run/ts.sock')
    """

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        """Whether this is a UNIX socket."""
        return bool(self.path)

    @property
    def is_wildcard(self) -> bool:
        """Whether this means every interface of the machine, as ``:PORT``, ``0.0.0.0`` and ``[::]`` do."""
        literal = _literal(self.host)
        return not self.is_unix and (not self.host or (literal is not None and literal.is_unspecified))

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        ConfigError: The text has none of the forms ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` and ``unix:/path``.

    >>> parse_address("[fe80::1]:50054")
    Address(host='fe80::1', port=50054, path='')
    """
    if text.startswith("unix:"):
        return _parse_unix(text)
    match = _BRACKETED.fullmatch(text) or _PLAIN.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise ConfigError(f"address: expected {FORMS}, got {text[:_MAX_TEXT]!r}{_advice(text)}")
    host, port = match[1], int(match[2])
    if port > 65535:
        raise ConfigError(f"address: expected a port up to 65535, got {port} in {text!r}")
    if text.startswith("[") and (":" not in host or _literal(host) is None):
        raise ConfigError(f"address: expected an IPv6 address between the brackets, got {text!r}")
    return Address(host, port)


def resolve(host: str) -> list[str]:
    """Return every numeric address of *host*, an empty list where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: Address | str, *, resolve: Resolve = resolve) -> bool:
    """Whether nothing outside this machine can be at *address*: all that it resolves to is loopback.

    A name that does not resolve is not loopback.

    Raises:
        ConfigError: *address* is a text in none of the known forms.

    >>> [is_loopback(text) for text in ("127.0.0.1:1", "[::1]:1", "unix:/run/a", "0.0.0.0:1", "[::]:1", ":1")]
    [True, True, True, False, False, False]
    """
    where = parse_address(address) if isinstance(address, str) else address
    if where.is_unix:
        return True
    if where.is_wildcard:
        return False
    literal = _literal(where.host)
    found = [literal] if literal is not None else [_literal(text) for text in resolve(where.host)]
    return bool(found) and all(one is not None and one.is_loopback for one in found)


def route(family: socket.AddressFamily, target: str) -> str | None:
    """Return the address of this machine from which *target* would be reached, or None; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def advertised_address(
    bind: Address | str,
    hint: Address | str | None = None,
    *,
    toward: Address | str | None = None,
    route: Route = route,
    resolve: Resolve = resolve,
) -> Address:
    """Return the address under which others reach what listens at *bind*; never ``0.0.0.0`` or ``[::]``.

    Args:
        bind: Where it listens, with the port that it really has.
        hint: What the user says others must use: a host, or a host and a port. Wins over everything else.
        toward: Whom we talk to (the coordinator): of several networks, the one that leads there is taken.
        route: Asks the routing table; replaced in tests.
        resolve: Asks the name service; replaced in tests.

    Raises:
        ConfigError: An address has none of the known forms, or the hint is one that nobody can connect to.

    >>> str(advertised_address("0.0.0.0:50051", "worker-a"))
    'worker-a:50051'
    """
    listening = parse_address(bind) if isinstance(bind, str) else bind
    if hint is not None:
        return _hinted(hint, listening.port)
    if not listening.is_wildcard:
        return listening
    target = parse_address(toward) if isinstance(toward, str) else toward
    for family, host in _targets(listening, target, resolve):
        found = route(family, host)
        literal = None if found is None else _literal(found)
        if literal is not None and not literal.is_unspecified:
            return Address(str(found), listening.port)
    return Address("127.0.0.1" if _reaches_ipv4(listening) else "::1", listening.port)


def _targets(listening: Address, toward: Address | None, resolve: Resolve) -> list[tuple[socket.AddressFamily, str]]:
    hosts = [] if toward is None or toward.is_unix or toward.is_wildcard else [toward.host]
    literals = [one for host in hosts for one in ([host] if _literal(host) else resolve(host))]
    wanted = [(_family(one), one) for one in literals] + list(_ELSEWHERE.items())
    # [::] listens on IPv4 as well, 0.0.0.0 does not listen on IPv6
    return [one for one in wanted if one[0] == socket.AF_INET or ":" in listening.host or not listening.host]


def _reaches_ipv4(listening: Address) -> bool:
    return ":" not in listening.host


def _hinted(hint: Address | str, port: int) -> Address:
    if isinstance(hint, str):
        bare = _literal(hint.strip("[]")) is not None or re.fullmatch(r"[A-Za-z0-9._-]+", hint) is not None
        hint = Address(hint.strip("[]"), port) if bare else parse_address(hint)
    if hint.is_wildcard:
        raise ConfigError(
            f"advertised address: {hint} means 'every interface' and nobody can connect to it; "
            "name the host or the IP address under which the others reach this machine"
        )
    return hint


def _parse_unix(text: str) -> Address:
    path = text.removeprefix("unix:")
    if not path.startswith("/") or "\0" in path or len(path.encode(errors="replace")) > _MAX_UNIX:
        raise ConfigError(
            f"address: expected unix: and an absolute path of at most {_MAX_UNIX} bytes, got {text[:_MAX_TEXT]!r}"
        )
    return Address(path=path)


def _advice(text: str) -> str:
    if "://" in text:
        return "; leave out the scheme"
    if text.count(":") > 1 and "[" not in text:
        return "; an IPv6 address stands in brackets"
    return "; the port is missing" if ":" not in text.rpartition("]")[2] else ""


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = literal.ipv4_mapped if isinstance(literal, ipaddress.IPv6Address) else None
    return literal if mapped is None else mapped


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
