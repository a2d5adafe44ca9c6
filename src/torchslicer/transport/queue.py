"""A queue bounded in bytes, which ends with an error."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Generic, TypeVar

from torchslicer.errors import DeadlineError, TransportError
from torchslicer.transport.base import Deadline

T = TypeVar("T")


def again(error: TransportError) -> TransportError:
    """Return a fresh error of the same type and text: one instance raised twice would mix two tracebacks."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


class ByteQueue(Generic[T]):
    """Holds items of at most *max_bytes* together; a single larger one is let in when nothing else is there.

    >>> waiting = ByteQueue[str](10)
    >>> waiting.put("a", 4, Deadline(0))
    >>> waiting.get(Deadline(0))
    'a'
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Its `get` waits in C; None, always last, stands for the end.
        self._items: queue.SimpleQueue[tuple[T, int] | None] = queue.SimpleQueue()
        self._bytes = self._count = self._num_waiting = 0
        self._room = threading.Condition()
        self._error: TransportError | None = None

    def __len__(self) -> int:
        return self._count

    def put(self, item: T, size_bytes: int, deadline: Deadline) -> None:
        """Append *item*, waiting for room.

        Raises:
            DeadlineError: There was none in time.
            TransportError: The queue has ended.
        """
        with self._room:
            if not self._may_put(size_bytes):
                self._wait_for_room(size_bytes, deadline)
            if self._error is not None:
                raise again(self._error)
            self._items.put((item, size_bytes))
            self._bytes += size_bytes
            self._count += 1

    def get(self, deadline: Deadline) -> T:
        """Take the first item; after an end, those that are left come first.

        Raises:
            DeadlineError: Nothing came in time.
            TransportError: The queue has ended and is empty.
        """
        try:
            found = self._items.get(timeout=deadline.remaining_s)
        except queue.Empty:
            raise DeadlineError(f"nothing came within {deadline.timeout_s:g} s") from None
        with self._room:
            if found is None:
                self._items.put(None)  # for whoever asks next
                assert self._error is not None
                raise again(self._error)
            item, size_bytes = found
            self._bytes -= size_bytes
            self._count -= 1
            if self._num_waiting:
                self._room.notify_all()
            return item

    def end(self, error: TransportError, *, clear: bool = False) -> None:
        """Let every further ``put`` raise *error*, and ``get`` once nothing is left. The first end counts."""
        with self._room:
            if self._error is None:
                self._error = error
                self._items.put(None)
            if clear:
                self._clear()
                self._items.put(None)
            self._room.notify_all()

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._items.get_nowait()
                if found is not None:
                    self._bytes -= found[1]
                    self._count -= 1

    def _may_put(self, size_bytes: int) -> bool:
        return self._error is not None or not self._count or self._bytes + size_bytes <= self._max_bytes

    def _wait_for_room(self, size_bytes: int, deadline: Deadline) -> None:
        self._num_waiting += 1
        try:
            if not self._room.wait_for(lambda: self._may_put(size_bytes), deadline.remaining_s):
                raise DeadlineError(f"the queue of {self._max_bytes} bytes stayed full for {deadline.timeout_s:g} s")
        finally:
            self._num_waiting -= 1
