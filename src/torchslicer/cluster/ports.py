"""The ports that a worker takes data connections on, where a firewall must know them: one for TCP and one for gRPC."""

from __future__ import annotations

import re

from torchslicer.errors import ConfigError

PortPair = tuple[int, int]
"""A port for TCP and one for gRPC; 0 is any free one."""

ANY: tuple[PortPair, ...] = ((0, 0),)

_FORMS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_LAST = 65535


def port_pairs(setting: int | str, *, offset: int = 1) -> tuple[PortPair, ...]:
    """Return the pairs of ports that a setting allows, in the order in which they are tried.

    Args:
        setting: A port for TCP, gRPC taking the one *offset* above it; or ``"FIRST-LAST"``, of which a worker takes the
            first two that are free together: FIRST and the next one, or the two after them, and so on.
        offset: See *setting*.

    Raises:
        ConfigError: It is neither, or leaves no room for two ports.

    Example:
        >>> port_pairs(50061), port_pairs("50061-50064"), port_pairs(0)
        (((50061, 50062),), ((50061, 50062), (50063, 50064)), ((0, 0),))
    """
    match = _FORMS.fullmatch(str(setting).strip())
    if match is None:
        raise ConfigError(f"data port: expected a port such as 50061 or a range such as 50061-50068, got {setting!r}")
    first = int(match[1])
    if match[2] is None:
        return ANY if first == 0 else (_pair(first, first + offset, setting),)
    last = int(match[2])
    if first == 0 or last <= first:
        raise ConfigError(f"data port: expected FIRST-LAST with room for two ports (TCP and gRPC), got {setting!r}")
    return tuple(_pair(port, port + 1, setting) for port in range(first, last, 2))


def _pair(tcp: int, grpc: int, setting: int | str) -> PortPair:
    if max(tcp, grpc) > _LAST:
        raise ConfigError(f"data port: expected ports up to {_LAST}, got {setting!r}, which gives {tcp} and {grpc}")
    return tcp, grpc
