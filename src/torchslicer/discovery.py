"""Who the workers are: they register with a coordinator, or a list says where they listen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CoordinatorDiscovery:
    """Workers connect to the coordinator and register.

    Attributes:
        run_id: Name of the run; that of the configuration if None.
        timeout_s: How long to wait for enough of them; None: as the executor's configuration says (60 s by default).
        tag_filter: Tags that a worker must have; if empty, those that the configuration says.

    Example:
        >>> CoordinatorDiscovery(run_id="mnist-1", tag_filter=["gpu"]).tag_filter
        ['gpu']
    """

    run_id: str | None = None
    timeout_s: float | None = None
    tag_filter: Sequence[str] = ()


@dataclass(frozen=True)
class StaticDiscovery:
    """The driver connects to workers that listen (``torchslicer worker --listen HOST:PORT``).

    Attributes:
        peers: Their addresses, ``HOST:PORT``, in the order of stages.
        run_id: Name of the run; that of the configuration if None.
        timeout_s: How long to try to reach them; None: as the executor's configuration says (60 s by default).

    Example:
        >>> StaticDiscovery(peers=["10.0.0.7:50051", "10.0.0.8:50051"]).peers
        ['10.0.0.7:50051', '10.0.0.8:50051']
    """

    peers: Sequence[str]
    run_id: str | None = None
    timeout_s: float | None = None
