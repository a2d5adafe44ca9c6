"""Frames into a stream: at once where the kernel has room, else by a thread from a queue bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from torchslicer.errors import DeadlineError, PeerClosedError, TransportError
from torchslicer.transport.base import ChannelOptions, ChannelStats, Deadline
from torchslicer.transport.frame import HEADER_BYTES, Frame, encode_header, with_block
from torchslicer.transport.queue import again
from torchslicer.transport.shared import Lender, worth_lending
from torchslicer.transport.stream import Stream

_NOTHING = memoryview(b"")


class FrameWriter:
    """Writes frames in the order of :meth:`send`.

    When nothing is queued, the caller writes by itself as much as the kernel takes, which saves two changes of thread
    a frame. The thread exists from the first frame on that did not fit.
    """

    def __init__(self, stream: Stream, stats: ChannelStats, *, peer: str, options: ChannelOptions) -> None:
        self._stream, self._stats, self._peer, self._options = stream, stats, peer, options
        self._pending: deque[tuple[list[memoryview], int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lends = stream.shares
        self._lender: Lender | None = None
        self.error: TransportError | None = None

    def send(self, frame: Frame, timeout_s: float) -> None:
        """Write or queue *frame*.

        Raises:
            DeadlineError: The queue stayed full.
            TransportError: The writer has ended.
        """
        header, payload = encode_header(frame.header), frame.wire()
        size = HEADER_BYTES + len(payload)
        with self._changed:
            if self._pending:
                self._wait_for_room(size, Deadline(timeout_s))
            if self.error is not None:
                raise again(self.error)
            if self._lends and worth_lending(frame, payload):
                header, payload = self._lend(frame, header, payload)
            on_wire = HEADER_BYTES + len(payload)
            rest = [memoryview(header), payload] if self._pending else self._write_now(header, payload, on_wire)
            if rest:
                self._enqueue(rest, on_wire)
            self._stats.frames_sent += 1
            self._stats.bytes_sent += size

    def flush(self, deadline: Deadline) -> bool:
        """Wait until everything is with the kernel; say whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending or self.error is not None, deadline.remaining_s)

    def end(self, error: TransportError) -> None:
        """Forget what is queued and let every further call raise *error*. The first end counts."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._pending.clear()
            self._bytes = 0
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread, after :meth:`end`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        with self._changed:
            if self._lender is not None:
                self._lender.given()
                self._lender = None

    def _wait_for_room(self, size: int, deadline: Deadline) -> None:
        limit = self._options.send_queue_bytes
        ready: Callable[[], bool] = lambda: (  # noqa: E731
            self.error is not None or not self._pending or self._bytes + size <= limit
        )
        if not ready() and not self._changed.wait_for(ready, deadline.remaining_s):
            raise DeadlineError(
                f"{self._peer} took too little within {deadline.timeout_s:g} s: {self._bytes} bytes wait in a queue "
                f"of {limit}"
            )

    def _write_now(self, header: bytes, payload: memoryview, size: int) -> list[memoryview]:
        """Write for as long as the receiver keeps taking; return what is left."""
        try:
            count = self._write((header, payload))
        except PeerClosedError as error:
            self.end(error)
            raise
        if count == size:
            return []
        rest = [memoryview(header), payload]
        _advance(rest, count)
        return rest

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write some of *buffers*, and with their first byte the descriptor of the shared memory, if it is new."""
        lender = self._lender
        descriptor = None if lender is None else lender.descriptor
        count = self._stream.write(buffers, wait=True, descriptor=descriptor)
        if count and lender is not None:
            lender.given()
        return count

    def _lend(self, frame: Frame, header: bytes, payload: memoryview) -> tuple[bytes, memoryview]:
        """Put the payload into the shared memory, if there is room; return what is to be written."""
        if self._lender is None:
            if self._pending:  # the next bytes are no header, and with a header the descriptor must go
                return header, payload
            try:
                self._lender = Lender(self._options.send_queue_bytes)
            except (OSError, ValueError):
                self._lends = False
                return header, payload
        block = self._lender.lend(frame.tensor().data_ptr(), len(payload), frame.header.alignment)
        return (header, payload) if block is None else (with_block(header, block), _NOTHING)

    def _enqueue(self, buffers: list[memoryview], size: int) -> None:
        self._pending.append((buffers, size))
        self._bytes += size
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"send to {self._peer}", daemon=True)
            self._thread.start()
        elif len(self._pending) == 1:  # only then it may be asleep
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self.error is not None)
                if self.error is not None:
                    return
                buffers, size = self._pending[0]
            try:
                self._write_all(buffers)
            except TransportError as error:
                self.end(error)
                return
            with self._changed:
                if self._pending:  # not forgotten meanwhile
                    self._pending.popleft()
                    self._bytes -= size
                self._changed.notify_all()

    def _write_all(self, buffers: list[memoryview]) -> None:
        stall = Deadline(self._options.stall_timeout_s)
        while self.error is None:
            count = self._write(buffers)
            if count:
                stall = Deadline(self._options.stall_timeout_s)
                if _advance(buffers, count):
                    return
            elif stall.passed:
                raise PeerClosedError(f"{self._peer} took no byte for {self._options.stall_timeout_s:g} s")


def _advance(buffers: list[memoryview], count: int) -> bool:
    """Drop the first *count* bytes; say whether nothing is left."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if buffers and count:
        buffers[0] = buffers[0][count:]
    return not buffers
