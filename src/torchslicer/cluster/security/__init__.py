"""Who may take part in a run, and how nobody else gets in. ``docs/security-model.md`` tells the whole.

What needs ``cryptography`` (an extra) is imported when it is first used, here by name or from its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchslicer.cluster.security.addresses import Address, advertised_address, is_loopback, parse_address
from torchslicer.cluster.security.identity import COORDINATOR, FIXED, Identity
from torchslicer.cluster.security.join import JoinString, read_join_file, write_join_file
from torchslicer.cluster.security.protection import Protection, protection_from_files
from torchslicer.cluster.security.rule import Action, Decision, decide, decide_connect
from torchslicer.cluster.security.secret import SecretBytes
from torchslicer.cluster.security.tls import (
    Material,
    check_pinned,
    client_context,
    grpc_channel_credentials,
    grpc_channel_options,
    grpc_server_credentials,
    names_of,
    names_of_auth_context,
    server_context,
)

if TYPE_CHECKING:
    from torchslicer.cluster.security.authority import Authority, write_deployment
    from torchslicer.cluster.security.exchange import join_run, serve
    from torchslicer.cluster.security.gate import JoinGate
    from torchslicer.cluster.security.handshake import JoinClient, JoinServer, JoinSession, Reply

__all__ = [
    "COORDINATOR",
    "FIXED",
    "Action",
    "Address",
    "Authority",
    "Decision",
    "Identity",
    "JoinClient",
    "JoinGate",
    "JoinServer",
    "JoinSession",
    "JoinString",
    "Material",
    "Protection",
    "Reply",
    "SecretBytes",
    "advertised_address",
    "check_pinned",
    "client_context",
    "decide",
    "decide_connect",
    "grpc_channel_credentials",
    "grpc_channel_options",
    "grpc_server_credentials",
    "is_loopback",
    "join_run",
    "names_of",
    "names_of_auth_context",
    "parse_address",
    "protection_from_files",
    "read_join_file",
    "serve",
    "server_context",
    "write_deployment",
    "write_join_file",
]

_NEED_CRYPTOGRAPHY = {
    "Authority": "authority",
    "write_deployment": "authority",
    "JoinClient": "handshake",
    "JoinGate": "gate",
    "JoinServer": "handshake",
    "JoinSession": "handshake",
    "Reply": "handshake",
    "serve": "exchange",
    "join_run": "exchange",
}


def __getattr__(name: str) -> Any:
    """Import what needs ``cryptography``."""
    if name not in _NEED_CRYPTOGRAPHY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_CRYPTOGRAPHY[name]}"), name)
