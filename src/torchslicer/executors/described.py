"""What a configuration says of the workers and where they are found; what a program says goes before it."""

from __future__ import annotations

import logging
import threading
from typing import Any

from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import ConfigError
from torchslicer.executors import arguments

logger = logging.getLogger("torchslicer.distributed")

Discovery = CoordinatorDiscovery | StaticDiscovery

_HERE = "127.0.0.1:0"
_HOST_PORT = arguments.text("HOST:PORT")


def check_discovery(name: str, value: Any) -> None:
    """Check what an executor is given as its discovery, and what is in it.

    Raises:
        ConfigError: It, or something in it, is of another kind.

    Example:
        >>> check_discovery("discovery", "127.0.0.1:50054")
        Traceback (most recent call last):
        torchslicer.errors.ConfigError: discovery: expected CoordinatorDiscovery(...) or StaticDiscovery(...), got ...
        >>> check_discovery("discovery", StaticDiscovery(peers="10.0.0.7:50051"))
        Traceback (most recent call last):
        torchslicer.errors.ConfigError: discovery.peers: expected a list of texts such as ['10.0.0.7:50051'], got ...
    """
    arguments.instance(Discovery, "CoordinatorDiscovery(...) or StaticDiscovery(...)")(name, value)
    for field, check in _IN_DISCOVERY.items():
        part = getattr(value, field, None)
        if part is not None:
            check(f"{name}.{field}", part)


_IN_DISCOVERY = {
    "run_id": arguments.text("the name of the run"),
    "timeout_s": arguments.seconds,
    "tag_filter": arguments.names("gpu"),
    "peers": arguments.names("10.0.0.7:50051"),
}

arguments_checked = arguments.checked(
    discovery=check_discovery,
    coordinator_addr=_HOST_PORT,
    run_config=arguments.run_config,
    transport=arguments.one_of("grpc", "tcp"),
    same_host=arguments.flag,
    host_stage=arguments.instance(int, "0"),
    host_threads=arguments.count,
    insecure=arguments.flag,
    free_local_weights=arguments.flag,
    stall_timeout_s=arguments.seconds,
)
"""Lets an executor's constructor refuse arguments of another kind."""

worker_arguments_checked = arguments.checked(
    coordinator=_HOST_PORT,
    listen=_HOST_PORT,
    bind=_HOST_PORT,
    data_port=arguments.instance(int | str, "a port such as 50061 or a range such as '50061-50068'"),
    advertise=arguments.text("a host that others can connect to"),
    device=arguments.text("'auto', 'cpu' or 'cuda:0'"),
    threads=arguments.count,
    tags=arguments.names("gpu"),
    name=arguments.text("a name"),
    trust=arguments.names("my_package"),
    allow_builder=arguments.names("my_package.models:make"),
    join=arguments.text("the join string that the coordinator has printed", secret=True),
    join_file=arguments.path,
    insecure=arguments.flag,
    once=arguments.flag,
    stop=arguments.instance(threading.Event, "a threading.Event"),
    exit_after_s=arguments.seconds,
    socket_folder=arguments.path,
    run_config=arguments.run_config,
)
"""Lets `run_worker` refuse arguments of another kind."""


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
