"""A worker inside the coordinator's own process: the same worker, behind channels of memory.

It computes only while the one that trains waits for it: they share the process's random numbers.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading

from torchslicer.cluster.coordinator import Coordinator
from torchslicer.cluster.links import COORDINATOR
from torchslicer.cluster.members import Member
from torchslicer.cluster.messages import Endpoint
from torchslicer.cluster.security import Protection
from torchslicer.cluster.worker import Worker, WorkerSettings
from torchslicer.errors import DeadlineError, PeerClosedError, TorchSlicerError
from torchslicer.transport.base import Channel
from torchslicer.transport.memory import memory_pair

logger = logging.getLogger("torchslicer.worker")

_STOP_TIMEOUT_S = 5.0


class InnerHub:
    """Where the coordinator attaches to a worker of its own process; nobody else can."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self._arrived: queue.SimpleQueue[Channel] = queue.SimpleQueue()

    def attach(self) -> Channel:
        """Return the coordinator's end of a new data channel."""
        here, there = memory_pair()
        self._arrived.put(there)
        return here

    def take(self, run_id: str, generation: int, rank: int, *, node: str, secret: str, timeout_s: float) -> Channel:  # noqa: ARG002  whoever can attach knows it all
        """Return the coordinator's data channel.

        Raises:
            DeadlineError: It did not attach.
            PeerClosedError: *rank* is not the coordinator.
        """
        if rank != COORDINATOR:
            raise PeerClosedError(f"rank {rank} ({node}) cannot connect to a stage in the driver's process")
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(f"the coordinator did not attach within {timeout_s:g} s") from None

    def forget(self, run_id: str) -> None:  # noqa: ARG002  a process has one run at a time
        """Drop channels that nobody took."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait().close(timeout_s=0)


class InnerWorker:
    """A worker in a thread of this process, registered with *coordinator*.

    Args:
        coordinator: Whom it serves.
        settings: Who it is.
        protection: Of the connections that it makes to other workers.
    """

    def __init__(self, coordinator: Coordinator, settings: WorkerSettings, protection: Protection) -> None:
        self.settings = settings
        hub = InnerHub()
        self._worker = Worker(settings, hub, protection=protection)
        here, there = memory_pair()
        self._thread = threading.Thread(target=self._serve, args=(there,), name="torchslicer-stage-0", daemon=True)
        self._thread.start()
        self.member: Member = coordinator.adopt(here, inner=hub)

    def _serve(self, channel: Channel) -> None:
        try:
            self._worker.serve(channel)
        except TorchSlicerError as error:
            logger.warning("the stage in this process ended: %s", error)

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive() and self.member.lost is None

    def stop(self) -> None:
        """End it; what it computes is not interrupted."""
        self._worker.stop()
        self.member.control.close(timeout_s=0)
        self._thread.join(timeout=_STOP_TIMEOUT_S)
