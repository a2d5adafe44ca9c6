"""A channel that misbehaves on purpose."""

from __future__ import annotations

import time

from torchslicer.errors import PeerClosedError
from torchslicer.transport.base import Channel, ChannelStats
from torchslicer.transport.frame import Expect, Frame, FrameLimits


class _HalfFrame(Frame):
    """Says in its header what it does not hold."""

    def wire(self) -> memoryview:
        whole = super().wire()
        return whole[: len(whole) // 2]


class FaultyChannel:
    """Wraps a channel and breaks it while it sends.

    Args:
        inner: The channel that does the work.
        drop_after: Close without notice instead of sending frame number *drop_after* (from 0).
        truncate_after: Send half of that frame's payload, then close.
        delay_s: Wait before each frame.

    >>> from torchslicer.transport import FrameKind, memory_pair
    >>> left, right = memory_pair()
    >>> FaultyChannel(left, drop_after=0).send(Frame.of_bytes(FrameKind.PING), timeout_s=1)
    >>> right.receive(timeout_s=1)
    Traceback (most recent call last):
    torchslicer.errors.PeerClosedError: the other side of memory:right closed the channel
    """

    def __init__(
        self,
        inner: Channel,
        *,
        drop_after: int | None = None,
        truncate_after: int | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.inner = inner
        self._drop_after, self._truncate_after, self._delay_s = drop_after, truncate_after, delay_s
        self._num_sent = 0

    @property
    def limits(self) -> FrameLimits:
        """The inner channel's limits."""
        return self.inner.limits

    @limits.setter
    def limits(self, limits: FrameLimits) -> None:
        self.inner.limits = limits

    @property
    def expect(self) -> Expect | None:
        """The inner channel's check of headers."""
        return self.inner.expect

    @expect.setter
    def expect(self, expect: Expect | None) -> None:
        self.inner.expect = expect

    @property
    def stats(self) -> ChannelStats:
        """The inner channel's counts."""
        return self.inner.stats

    @property
    def peer(self) -> str:
        """The inner channel's peer."""
        return self.inner.peer

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The names in the peer's certificate."""
        return self.inner.peer_names

    @property
    def closed(self) -> bool:
        """Whether the inner channel has ended."""
        return self.inner.closed

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Send *frame*, unless it is the one to fail at; the fault itself raises nothing here."""
        index, self._num_sent = self._num_sent, self._num_sent + 1
        if self._delay_s:
            time.sleep(self._delay_s)
        if index == self._drop_after:
            self.inner.close(timeout_s=timeout_s)
        elif index == self._truncate_after:
            self.inner.send(_HalfFrame(frame.header, frame.payload), timeout_s=timeout_s)
            self.inner.close(timeout_s=timeout_s)
        elif self.inner.closed:
            raise PeerClosedError(f"the channel to {self.peer} has ended")
        else:
            self.inner.send(frame, timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> Frame:
        """Receive from the inner channel."""
        return self.inner.receive(timeout_s=timeout_s)

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Close the inner channel."""
        self.inner.close(timeout_s=timeout_s)
