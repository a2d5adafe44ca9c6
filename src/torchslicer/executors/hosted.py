"""The first stage of a P2P run on the driver's own machine, so that the model's inputs stay there."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence

from torchslicer.cluster.coordinator import Coordinator, Member
from torchslicer.executors.processes import LocalWorkers
from torchslicer.transport.tcp import TcpListener

_HOST_START_TIMEOUT_S = 60.0


class HostedStage:
    """A worker process of this machine that holds stage 0; it reaches the executor through a UNIX socket."""

    def __init__(self, coordinator: Coordinator, threads: int | None, options: Sequence[str]) -> None:
        self._coordinator = coordinator
        self._threads = threads
        self._options = tuple(options)
        self._folder = tempfile.TemporaryDirectory(prefix="torchslicer-")  # mode 0700
        self._workers: LocalWorkers | None = None
        self._address = ""

    def member(self, required: Sequence[str]) -> Member:
        """Return the worker; it runs the driver's own code, so it trusts what its part needs."""
        if self._workers is not None and not set(required) <= set(self._workers.trust):
            required = sorted({*required, *self._workers.trust})
            self.stop()
        for member in self._coordinator.live():
            if self._workers is not None and member.node in self._workers.names:
                return member
        return self._started(required)

    def _started(self, required: Sequence[str]) -> Member:
        self.stop()
        if not self._address:
            listener = TcpListener(f"unix:{self._folder.name}/driver")
            self._address = listener.address
            self._coordinator.listen(listener)
        # With certificates it has the driver's, so it must have the name in it.
        name = self._coordinator.protection.node or f"driver-{secrets.token_hex(4)}"
        self._workers = LocalWorkers(
            self._address, [name], threads=self._threads, trust=required, options=self._options
        )
        self._workers.wait_for(lambda: int(name in self._coordinator.members), timeout_s=_HOST_START_TIMEOUT_S)
        return self._coordinator.members[name]

    def close(self) -> None:
        """End the process and remove the socket's folder."""
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """End the process."""
        if self._workers is not None:
            self._workers.stop()
        self._workers = None
