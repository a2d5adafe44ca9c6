"""The first stage of a P2P run on the driver's own machine, so that the model's inputs stay there."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence

from torchslicer.cluster.coordinator import Coordinator, Member
from torchslicer.cluster.part import ShippedPart
from torchslicer.executors.processes import LocalWorkers
from torchslicer.transport.sockets import private_folder
from torchslicer.transport.tcp import TcpListener

_HOST_START_TIMEOUT_S = 60.0


class HostedStage:
    """A worker process of this machine that holds stage 0; it reaches the executor through a UNIX socket."""

    def __init__(self, coordinator: Coordinator, threads: int | None, options: Sequence[str]) -> None:
        self._coordinator = coordinator
        self._threads = threads
        self._options = tuple(options)
        self._folder = private_folder()
        self._workers: LocalWorkers | None = None
        self._address = ""

    def member(self, part: ShippedPart) -> Member:
        """Return the worker; it runs the driver's own code, so it trusts and allows what its *part* needs."""
        required, builders = part.required, part.builders
        known = self._workers
        if known is not None and not (set(required) <= set(known.trust) and set(builders) <= set(known.allow_builder)):
            required = tuple(sorted({*required, *known.trust}))
            builders = tuple(sorted({*builders, *known.allow_builder}))
            self.stop()
        for member in self._coordinator.live():
            if self._workers is not None and member.node in self._workers.names:
                return member
        return self._started(required, builders)

    def _started(self, required: Sequence[str], builders: Sequence[str]) -> Member:
        self.stop()
        if not self._address:
            listener = TcpListener(f"unix:{self._folder}/driver")
            self._address = listener.address
            self._coordinator.listen(listener)
        # With certificates it has the driver's, so it must have the name in it.
        name = self._coordinator.protection.node or f"driver-{secrets.token_hex(4)}"
        self._workers = LocalWorkers(
            self._address, [name], threads=self._threads, trust=required, allow_builder=builders,
            options=self._options, folder=self._folder,
        )  # fmt: skip
        self._workers.wait_for(lambda: int(name in self._coordinator.members), timeout_s=_HOST_START_TIMEOUT_S)
        return self._coordinator.members[name]

    def close(self) -> None:
        """End the process and remove the sockets' folder."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End the process."""
        if self._workers is not None:
            self._coordinator.dismiss(self._workers.names)
            self._workers.stop()
        self._workers = None
