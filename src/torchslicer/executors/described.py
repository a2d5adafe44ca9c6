"""What a configuration says of the workers and where they are found; what a program says goes before it."""

from __future__ import annotations

import logging
from typing import Any

from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import ConfigError

logger = logging.getLogger("torchslicer.distributed")

Discovery = CoordinatorDiscovery | StaticDiscovery

_HERE = "127.0.0.1:0"


def check_arguments(discovery: Any, coordinator_addr: Any, run_config: Any, stall_timeout_s: Any) -> None:
    """Check the kinds of what a program gives to an executor.

    Raises:
        ConfigError: One is of another kind.

    Example:
        >>> check_arguments("127.0.0.1:50054", None, None, 600.0)
        Traceback (most recent call last):
        torchslicer.errors.ConfigError: discovery: expected CoordinatorDiscovery(...) or StaticDiscovery(...), got ...
    """
    _check("discovery", discovery, Discovery | None, "CoordinatorDiscovery(...) or StaticDiscovery(...)")
    _check("coordinator_addr", coordinator_addr, str | None, "HOST:PORT")
    _check("run_config", run_config, RunConfig | None, "a RunConfig, such as RunConfig.load('run.yaml')")
    _check("stall_timeout_s", stall_timeout_s, int | float, "a number of seconds above 0")
    if not stall_timeout_s > 0:
        raise ConfigError(f"stall_timeout_s: expected a number of seconds above 0, got {stall_timeout_s}")


def _check(name: str, value: Any, kinds: Any, expected: str) -> None:
    if not isinstance(value, kinds):
        raise ConfigError(f"{name}: expected {expected}, got {value!r:.80}")


def choose_discovery(given: Discovery | None, config: RunConfig) -> Discovery:
    """Return the discovery that was *given*, else the one that *config* describes.

    Raises:
        ConfigError: The backend is ``static``, and there are no peers.

    Example:
        >>> choose_discovery(None, RunConfig.create(discovery={"backend": "static", "peers": ["10.0.0.7:50051"]}))
        StaticDiscovery(peers=('10.0.0.7:50051',), run_id=None, timeout_s=None)
    """
    if given is not None:
        return given
    section = config.discovery
    if section.backend == "static":
        if not section.peers:
            raise ConfigError("discovery.backend is 'static', but discovery.peers is empty; list the peers' addresses")
        return StaticDiscovery(peers=tuple(section.peers))
    if section.peers:
        logger.warning("discovery.peers is not used, since discovery.backend is 'coordinator' and not 'static'")
    return CoordinatorDiscovery()


def choose_address(given: str | None, config: RunConfig | None) -> str:
    """Return where a coordinator listens: as *given*, as configured, or else on a free port of loopback.

    Example:
        >>> choose_address(None, None), choose_address(None, RunConfig())
        ('127.0.0.1:0', '0.0.0.0:50054')
    """
    if given is not None:
        return given
    return _HERE if config is None else config.network.coordinator_bind_address


def discovery_timeout_s(discovery: Discovery, config: RunConfig) -> float:
    """Return how long to wait for workers.

    Example:
        >>> config = RunConfig.create(discovery__timeout=5)
        >>> discovery_timeout_s(CoordinatorDiscovery(), config)
        5.0
        >>> discovery_timeout_s(CoordinatorDiscovery(timeout_s=9), config)
        9
    """
    return config.discovery.timeout if discovery.timeout_s is None else discovery.timeout_s
