"""What has arrived at a rank and waits for the computation that will use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from torchslicer.cluster.packing import Key
from torchslicer.errors import DeadlineError
from torchslicer.transport.frame import FrameKind

_LONGEST_WAIT_S = 1.0
_WHAT = {
    FrameKind.FORWARD: "an activation",
    FrameKind.BACKWARD: "a gradient",
    FrameKind.INPUT: "an input",
    FrameKind.TARGET: "the target",
    FrameKind.OUTPUT: "the output",
    FrameKind.STATE: "the gradient of a tied parameter",
    FrameKind.CONTROL: "the factor that gradients are clipped by",
}


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
        self._waiting_for: Key | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, key: Key, item: Any) -> None:
        """File an item; whoever waits for it wakes up."""
        with self._condition:
            self._last_arrival = time.monotonic()
            if self._failure is None:
                self._items[key] = item
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let every wait, now and later, raise *error* (the first one given)."""
        with self._condition:
            self._failure = self._failure or error
            self._items.clear()
            self._condition.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """What `fail` was first called with."""
        return self._failure

    @property
    def waits_for(self) -> str:
        """What the computation waits for at this moment, in words; empty if for nothing."""
        key = self._waiting_for
        return "" if key is None else _words(key)

    def check(self) -> None:
        """Raise what `fail` was called with, if it was."""
        if self._failure is not None:
            raise self._failure

    def take(self, keys: Sequence[Key]) -> list[Any]:
        """Return the items of *keys*, once all are there.

        Raises:
            DeadlineError: Nothing arrived for ``stall_timeout_s``.
            Exception: Whatever `fail` was called with.
        """
        started = time.monotonic()
        with self._condition:
            try:
                while True:
                    self.check()
                    missing = next((key for key in keys if key not in self._items), None)
                    if missing is None:
                        return [self._items.pop(key) for key in keys]
                    self._waiting_for = missing
                    quiet_s = time.monotonic() - max(self._last_arrival, started)
                    if quiet_s > self.stall_timeout_s:
                        raise DeadlineError(_too_long(missing, quiet_s))
                    self._condition.wait(min(_LONGEST_WAIT_S, self.stall_timeout_s))
            finally:
                self._waiting_for = None


def _words(key: Key) -> str:
    kind, _, stage, microbatch, value = key
    where = "" if kind in (FrameKind.CONTROL, FrameKind.STATE) else f" of stage {stage}, micro-batch {microbatch}"
    return f"{_WHAT.get(kind, kind.name)}{where} (value {value})"


def _too_long(key: Key, quiet_s: float) -> str:
    return f"waited {quiet_s:.0f} s for {_words(key)} and nothing arrived; raise stall_timeout_s if stages take longer"
