"""Callers who have not said who they are yet: a bounded number at a time, each for a bounded time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torchslicer.transport.base import Channel
from torchslicer.transport.frame import FrameLimits

logger = logging.getLogger("torchslicer.cluster")

_WARN_EVERY_S = 5.0

STRANGER = FrameLimits(max_payload_bytes=0, max_control_bytes=64 << 10)
"""What is accepted of a caller before it has proved who it is."""

KNOWN = FrameLimits()
"""What is accepted of a member of the run."""


class Complaints:
    """Warns of callers that were sent away: the first at once, then a number from time to time, however many come.

    Args:
        to: The logger.
    """

    def __init__(self, to: logging.Logger) -> None:
        self._logger = to
        self._lock = threading.Lock()
        self._kept_back = 0
        self._next = 0.0

    def warn(self, text: str, *values: object) -> None:
        """Say it, unless something was said a moment ago."""
        with self._lock:
            now, kept_back = time.monotonic(), self._kept_back
            quiet = now < self._next
            if quiet:
                self._kept_back += 1
            else:
                self._next, self._kept_back = now + _WARN_EVERY_S, 0
        if quiet:
            self._logger.debug(text, *values)
        elif kept_back:
            self._logger.warning(f"{text}; and %d more were sent away before", *values, kept_back)  # noqa: G004
        else:
            self._logger.warning(text, *values)


class Door:
    """Greets callers in threads of their own.

    When too many stand here at once, the one that has stood here longest goes: an honest caller says what it wants
    within milliseconds, so those that wait are the ones that keep others out.

    Args:
        limit: How many may stand here.
    """

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._callers: dict[int, Channel] = {}
        self._threads: set[threading.Thread] = set()
        self._complaints = Complaints(logger)

    def __len__(self) -> int:
        return len(self._callers)

    def greet(self, channel: Channel, greeting: Callable[[Channel], None]) -> None:
        """Let *greeting* find out who is there, in a thread."""
        with self._lock:
            oldest = None
            if len(self._callers) >= self._limit:
                oldest = self._callers.pop(next(iter(self._callers)))
            self._callers[id(channel)] = channel
            thread = threading.Thread(target=self._run, args=(channel, greeting), name="torchslicer-greet", daemon=True)
            self._threads.add(thread)
            thread.start()
        if oldest is not None:
            self._send_away(oldest)

    def _run(self, channel: Channel, greeting: Callable[[Channel], None]) -> None:
        try:
            greeting(channel)
        finally:
            self.leave(channel)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def leave(self, channel: Channel) -> None:
        """Take away a caller who has said who it is: it is not sent away any more."""
        with self._lock:
            self._callers.pop(id(channel), None)

    def _send_away(self, channel: Channel) -> None:
        self._complaints.warn(
            "more than %d connections at once that do not say who they are; the one from %s was dropped",
            self._limit,
            channel.peer,
        )
        channel.close(timeout_s=0)

    def close(self) -> None:
        """Send everybody away."""
        with self._lock:
            callers, self._callers = list(self._callers.values()), {}
            threads = list(self._threads)
        for channel in callers:
            channel.close(timeout_s=0)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)
