"""A queue bounded in bytes, which ends with an error."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
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

    >>> queue = ByteQueue[str](10)
    >>> queue.put("a", 4, Deadline(0))
    >>> queue.get(Deadline(0))
    'a'
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._error: TransportError | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, size_bytes: int, deadline: Deadline) -> None:
        """Append *item*, waiting for room.

        Raises:
            DeadlineError: There was none in time.
            TransportError: The queue has ended.
        """
        with self._changed:
            self._wait(lambda: self._error is not None or self._has_room(size_bytes), deadline)
            if self._error is not None:
                raise again(self._error)
            if not self._has_room(size_bytes):
                raise DeadlineError(f"the queue of {self._max_bytes} bytes stayed full for {deadline.timeout_s:g} s")
            self._items.append((item, size_bytes))
            self._bytes += size_bytes
            self._changed.notify_all()

    def get(self, deadline: Deadline) -> T:
        """Take the first item; after an end, those that are left come first.

        Raises:
            DeadlineError: Nothing came in time.
            TransportError: The queue has ended and is empty.
        """
        with self._changed:
            self._wait(lambda: bool(self._items) or self._error is not None, deadline)
            if self._items:
                item, size_bytes = self._items.popleft()
                self._bytes -= size_bytes
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise again(self._error)
            raise DeadlineError(f"nothing came within {deadline.timeout_s:g} s")

    def end(self, error: TransportError, *, clear: bool = False) -> None:
        """Let every further ``put`` raise *error*, and ``get`` once nothing is left. The first end counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            if clear:
                self._items.clear()
                self._bytes = 0
            self._changed.notify_all()

    def wait_empty(self, deadline: Deadline) -> bool:
        """Wait until everything was taken; say whether it was."""
        with self._changed:
            self._wait(lambda: not self._items, deadline)
            return not self._items

    def _has_room(self, size_bytes: int) -> bool:
        return not self._items or self._bytes + size_bytes <= self._max_bytes

    def _wait(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        if not ready():
            self._changed.wait_for(ready, deadline.remaining_s)
