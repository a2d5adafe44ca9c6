"""The first stage of a P2P run in the driver's own process, so that the model's inputs stay there."""

from __future__ import annotations

import secrets

import torch

from torchslicer.cluster.coordinator import Coordinator, Member
from torchslicer.cluster.inner import InnerWorker
from torchslicer.cluster.part import ShippedPart
from torchslicer.cluster.worker import WorkerSettings


class HostedStage:
    """A worker in a thread of this process that holds stage 0.

    Args:
        coordinator: That of the executor.
        threads: Threads of torch; by default the cores, shared with workers on this machine.
    """

    def __init__(self, coordinator: Coordinator, threads: int | None) -> None:
        self._coordinator = coordinator
        self._threads = threads
        self._worker: InnerWorker | None = None

    def member(self, part: ShippedPart) -> Member:
        """Return the worker; it runs the driver's own code, so it trusts and allows what its *part* needs."""
        known = self._worker
        if known is not None:
            settings = known.settings
            trusts = set(part.required) <= set(settings.trusted) and set(part.builders) <= set(settings.builders)
            if trusts and known.alive:
                return known.member
            self.stop()
        # With certificates it has the driver's, so it must have the name in it.
        name = self._coordinator.protection.node or f"driver-{secrets.token_hex(4)}"
        settings = WorkerSettings(
            name, threads=self._threads or 0, tags=self._coordinator.tag_filter, trusted=part.required,
            builders=part.builders,
        )  # fmt: skip
        self._worker = InnerWorker(self._coordinator, settings, self._coordinator.protection)
        return self._worker.member

    def rest(self) -> None:
        """Call it after a run: lets torch use as many threads in this process again as the caller has set."""
        # MKL, and threads that start later, have one number for the whole process: the last that any thread has set.
        torch.set_num_threads(torch.get_num_threads())

    def stop(self) -> None:
        """End it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._coordinator.dismiss([worker.settings.node])
            worker.stop()
