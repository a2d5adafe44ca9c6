"""How a worker waits for its coordinator, and how it is told to end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from torchslicer.cluster.worker import Worker

logger = logging.getLogger("torchslicer.worker")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_SAY_WAITING_S = 10.0


class Waiting:
    """Waits longer each time, and says so once in a while."""

    def __init__(self, stopping: threading.Event, text: str) -> None:
        self._stopping, self._text = stopping, text
        self._pause_s = _FIRST_RETRY_S
        self._next_word = time.monotonic() + _FIRST_RETRY_S

    def a_little(self, error: Exception) -> None:
        """Wait, less when the worker is told to stop; *error* is why."""
        if time.monotonic() >= self._next_word:
            logger.info("%s (%s)", self._text, error)
            self._next_word = time.monotonic() + _SAY_WAITING_S
        self._stopping.wait(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_RETRY_S)


class Ending:
    """Lets SIGTERM and SIGINT (in the main thread) and an event stop the worker, also before there is one."""

    def __init__(self, stop: threading.Event | None, exit_after_s: float | None) -> None:
        self.event = threading.Event()
        self._exit_after_s = exit_after_s
        self.worker: Worker | None = None
        self._stop = stop
        self._before: dict[int, Callable[..., object] | int | None] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, lambda *_: self.end())
        if self._stop is not None:
            self._thread = threading.Thread(target=self._follow, name="torchslicer-stop", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        while not self._done.is_set():
            if self._stop is not None and self._stop.wait(0.1):
                self.end()
                return

    def end(self) -> None:
        """Stop the worker; end the process if that takes too long."""
        self.event.set()
        if self.worker is not None:
            self.worker.stop()
        if self._exit_after_s is not None:
            threading.Thread(target=self._force, name="torchslicer-force", daemon=True).start()

    def _force(self) -> None:
        """End the process when the code of a stage does not return; there is no other way to stop it."""
        if not self._done.wait(self._exit_after_s):
            logger.error("a stage did not return within %.0f s; the process ends", self._exit_after_s)
            os._exit(143)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
