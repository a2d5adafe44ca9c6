"""Channels within one process, with the semantics of the others: frames are laid out, checked and copied."""

from __future__ import annotations

import threading
from typing import NamedTuple

from torchslicer.errors import PeerClosedError, TransportError
from torchslicer.transport.base import Channel, ChannelOptions, ChannelStats, Deadline
from torchslicer.transport.frame import (
    HEADER_BYTES,
    Expect,
    Frame,
    arrival_of,
    decode_header,
    encode_header,
)
from torchslicer.transport.queue import ByteQueue, again


class _Sent(NamedTuple):
    header: bytes
    payload: memoryview


class MemoryChannel:
    """One end of a pair made by :func:`memory_pair`."""

    def __init__(
        self, outgoing: ByteQueue[_Sent], incoming: ByteQueue[_Sent], *, peer: str, options: ChannelOptions
    ) -> None:
        self.limits = options.limits
        self.expect: Expect | None = None
        self.stats = ChannelStats()
        self.peer = peer
        self.peer_names: tuple[str, ...] = ()
        self._outgoing, self._incoming = outgoing, incoming
        self._receiving = threading.Lock()
        self._error: TransportError | None = None

    @property
    def closed(self) -> bool:
        """Whether the channel has ended, on either side."""
        return self._error is not None

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Queue *frame*; see :class:`~torchslicer.transport.base.Channel`."""
        sent = _Sent(encode_header(frame.header), frame.wire())
        self._outgoing.put(sent, len(sent.payload) + HEADER_BYTES, Deadline(timeout_s))
        self.stats.frames_sent += 1
        self.stats.bytes_sent += len(sent.payload) + HEADER_BYTES

    def receive(self, *, timeout_s: float) -> Frame:
        """Return a copy of the next frame; see :class:`~torchslicer.transport.base.Channel`."""
        deadline = Deadline(timeout_s)
        with self._receiving:
            if isinstance(self._error, TransportError) and not len(self._incoming):
                raise again(self._error)
            try:
                sent = self._incoming.get(deadline)
            except PeerClosedError as error:
                self._fail(error)
                raise
            try:
                return self._land(sent)
            except TransportError as error:
                self._fail(error)
                raise

    def _land(self, sent: _Sent) -> Frame:
        header = decode_header(sent.header, self.limits, self.expect)
        if len(sent.payload) != header.payload_bytes:
            raise PeerClosedError(f"{self.peer} closed the channel in the middle of {header.describe()}")
        arrival = arrival_of(header)
        arrival.view[:] = sent.payload
        self.stats.frames_received += 1
        self.stats.bytes_received += len(sent.payload) + HEADER_BYTES
        return Frame(header, arrival.finish())

    def close(self, *, timeout_s: float = 1.0) -> None:  # noqa: ARG002  what was sent has already arrived
        """End both directions; the other side still receives what was sent before."""
        self._fail(PeerClosedError(f"the channel to {self.peer} was closed on this side"))

    def _fail(self, error: TransportError) -> None:
        if self._error is None:
            self._error = error
        # This side's own calls tell of its own error; the other side learns that its peer is gone.
        self._incoming.end(error, clear=True)
        self._outgoing.end(PeerClosedError(f"the other side of {self.peer} closed the channel"))


def memory_pair(options: ChannelOptions | None = None) -> tuple[Channel, Channel]:
    """Make two connected ends.

    >>> left, right = memory_pair()
    >>> left.send(Frame.of_message({"op": "hello"}), timeout_s=1)
    >>> right.receive(timeout_s=1).message()
    {'op': 'hello'}
    """
    options = options or ChannelOptions()
    there, back = ByteQueue[_Sent](options.send_queue_bytes), ByteQueue[_Sent](options.send_queue_bytes)
    left = MemoryChannel(there, back, peer="memory:right", options=options)
    right = MemoryChannel(back, there, peer="memory:left", options=options)
    return left, right
