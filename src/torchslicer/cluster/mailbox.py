"""What has arrived at a rank and waits for the computation that will use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from torchslicer.cluster.packing import Key
from torchslicer.errors import DeadlineError


class Mailbox:
    """Filled by the threads that read channels, emptied by the one that computes.

    Args:
        stall_timeout_s: How long a wait may last without anything at all arriving.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._items: dict[Key, Any] = {}
        self._condition = threading.Condition()
        self._failure: BaseException | None = None
        self._last_arrival = time.monotonic()

    def put(self, key: Key, item: Any) -> None:
        """File an item; whoever waits for it wakes up."""
        with self._condition:
            self._items[key] = item
            self._last_arrival = time.monotonic()
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let every wait, now and later, raise *error* (the first one given)."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def take(self, keys: Sequence[Key]) -> list[Any]:
        """Return the items of *keys*, once all are there.

        Raises:
            DeadlineError: Nothing arrived for ``stall_timeout_s``.
            Exception: Whatever `fail` was called with.
        """
        started = time.monotonic()
        with self._condition:
            while True:
                if self._failure is not None:
                    raise self._failure
                missing = [key for key in keys if key not in self._items]
                if not missing:
                    return [self._items.pop(key) for key in keys]
                quiet_s = time.monotonic() - max(self._last_arrival, started)
                if quiet_s > self.stall_timeout_s:
                    kind, pass_index, stage, microbatch, value = missing[0]
                    raise DeadlineError(
                        f"waited {quiet_s:.0f} s for {kind.name} (pass {pass_index}, stage {stage}, micro-batch "
                        f"{microbatch}, value {value}) and nothing arrived; raise stall_timeout_s if stages take longer"
                    )
                self._condition.wait(min(1.0, self.stall_timeout_s))

    def clear(self) -> None:
        """Throw away what is there."""
        with self._condition:
            self._items.clear()
