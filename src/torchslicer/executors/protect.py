"""From what the user gave to how a node protects its connections: the start-up rule, applied."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchslicer.cluster.security import Action, Protection, advertised_address, protection_from_files
from torchslicer.cluster.security.tls import speaks_tls
from torchslicer.config import RunConfig
from torchslicer.config.environment import insecure_opt_in
from torchslicer.config.sections import NetworkSection, TlsSection, assign
from torchslicer.errors import ConfigError, SecurityError
from torchslicer.transport.address import split_address

if TYPE_CHECKING:
    from torchslicer.cluster.security import JoinGate  # needs cryptography, an extra

logger = logging.getLogger("torchslicer.distributed")

Tls = TlsSection | Mapping[str, Any]


def given_protection(config: RunConfig, *, tls: Tls | None = None, insecure: bool = False) -> Protection:
    """Return what certificates and opt-ins were given.

    Args:
        config: Its section ``network`` is used where an argument is not given.
        tls: The files ``ca``, ``cert``, ``key``, and the ``names`` that peers may have.
        insecure: The code's half of the opt-in to plain text.

    Raises:
        ConfigError: Only some of the files are given, or *tls* is something else.
        SecurityError: A file cannot be used.

    Example:
        >>> given_protection(RunConfig()).material is None
        True
    """
    section = _section(config, tls)
    files = section.files_of("network.tls" if tls is None else "tls")
    found = Protection() if files is None else protection_from_files(*files, names=section.names)
    return replace(
        found,
        insecure_argument=insecure or config.network.insecure,
        insecure_environment=insecure_opt_in(),
    )


def protect_coordinator(address: str, run_id: str, protection: Protection) -> tuple[Protection, JoinGate | None, bool]:
    """Apply the start-up rule to a coordinator that listens at *address*.

    Returns:
        How it protects its connections, where workers join if it makes certificates of its own, and whether it speaks
        plain text with other machines.

    Raises:
        SecurityError: It may not listen there.
        ConfigError: It needs certificates of its own, and the package that makes them is not installed.
    """
    decision = protection.check_bind(address, "coordinator")
    for warning in decision.warnings:
        logger.warning("%s", warning)
    if decision.action is not Action.MAKE_OWN_CA:
        return protection, None, decision.insecure
    from torchslicer.cluster.security import JoinGate  # noqa: PLC0415 - needs cryptography, an extra

    gate = JoinGate(run_id)
    return gate.protection, gate, False


def how_to_start(address: str, gate: JoinGate | None, protection: Protection) -> tuple[str, str]:
    """Return the command that starts a worker for a coordinator at *address*, and the same for errors and logs.

    If it holds a join string, it is said here, once.
    """
    if gate is not None:
        command = gate.command(address)
        logger.warning("start workers with: %s", command)
        return command, command.replace(gate.joining.reveal(), "STRING (printed when the coordinator started)")
    files = " --tls-ca ca.pem --tls-cert NAME.pem --tls-key NAME.key" if protection.material is not None else ""
    command = f"torchslicer worker --coordinator {advertised_address(address)}{files}"
    return command, command


def check_trust(error: BaseException, who: str, protection: Protection, *, hint: str = "") -> None:
    """Give up where waiting cannot help: one side does not accept the other's certificate.

    Raises:
        SecurityError: So it is.
    """
    cause = error.__cause__
    alert = isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "")
    if protection.material is not None and (isinstance(cause, ssl.SSLCertVerificationError) or alert):
        raise SecurityError(f"{who} do not accept each other's certificates: {error}{hint}") from error


def check_plain(address: str, protection: Protection) -> None:
    """Tell why a peer does not answer, if that is because only it uses TLS.

    Raises:
        SecurityError: So it is.
    """
    if protection.material is None and not address.startswith("unix:") and speaks_tls(*split_address(address)):
        raise SecurityError(
            f"the peer at {address} takes only TLS connections, and this driver has no certificate; give it one of the "
            "same authority: tls={'ca': ..., 'cert': ..., 'key': ...}, or network.tls in the configuration"
        )


def _section(config: RunConfig, tls: Tls | None) -> TlsSection:
    if tls is None:
        return config.network.tls
    if not isinstance(tls, TlsSection | Mapping):
        raise ConfigError(f"tls: expected the files {{'ca': ..., 'cert': ..., 'key': ...}}, got {tls!r:.80}")
    network = NetworkSection()
    assign(network, "tls", tls if isinstance(tls, TlsSection) else dict(tls), argument="tls")
    return network.tls
