"""What every channel promises, whatever carries it.

A channel moves frames between two ends, in order, each exactly once. Its promises, checked for every kind of channel by
:mod:`torchslicer.testing.conformance`:

- ``send`` returns when the frame is on its way or queued. The queue is bounded in bytes: when it is full, ``send``
  waits until the receiver has taken something. The frame's tensor must not change afterwards.
- ``receive`` returns tensors of the same bits, sizes, strides and alignment as the sender's, in memory of their own.
- Both end within ``timeout_s``; a :class:`~torchslicer.errors.DeadlineError` leaves the channel usable.
- Whatever else breaks a channel is raised by the next call of either method, and closes it for good. Frames that
  arrived before are still delivered.
- One thread may send while another receives and a third closes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torchslicer.transport.frame import Expect, Frame, FrameLimits


@dataclass(slots=True)
class ChannelStats:
    """What has passed, headers included."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """How a channel behaves; the same for every kind.

    Attributes:
        limits: The largest payloads that are accepted; may be set anew on the channel (small until the peer has proved
            who it is).
        send_queue_bytes: Frames that wait for the network. One frame more may be in flight.
        read_ahead_bytes: Frames that a thread of the channel receives before anyone asks. 0: ``receive`` reads in the
            caller's own thread, which answers soonest, and what arrives meanwhile waits in the kernel's buffers (some
            MB). Worth it where single tensors are larger than those and cores are free. gRPC always reads ahead.
        header_timeout_s: How long a header may take after its first byte.
        stall_timeout_s: How long a frame that has begun may make no progress.
    """

    limits: FrameLimits = field(default_factory=FrameLimits)
    send_queue_bytes: int = 64 << 20
    read_ahead_bytes: int = 0
    header_timeout_s: float = 5.0
    stall_timeout_s: float = 60.0


@runtime_checkable
class Channel(Protocol):
    """One end of a connection."""

    limits: FrameLimits
    expect: Expect | None
    stats: ChannelStats

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages."""

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The names in the peer's certificate; empty without TLS."""

    @property
    def closed(self) -> bool:
        """Whether the channel has ended, on either side."""

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Send or queue *frame*.

        Raises:
            DeadlineError: The queue was still full after *timeout_s*.
            PeerClosedError: The channel has ended.
        """

    def receive(self, *, timeout_s: float) -> Frame:
        """Return the next frame.

        Raises:
            DeadlineError: No frame was complete after *timeout_s*; what has arrived of it is kept for the next call.
            FrameError: What arrived is no valid frame, or not an expected one.
            PeerClosedError: The channel has ended.
        """

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End the channel; queued frames get *timeout_s* to leave. Closing twice does nothing."""


@runtime_checkable
class Listener(Protocol):
    """Where channels come from."""

    @property
    def address(self) -> str:
        """The address that a peer connects to, with the real port."""

    def accept(self, *, timeout_s: float) -> Channel:
        """Return the next connection.

        Raises:
            DeadlineError: Nobody came within *timeout_s*.
        """

    def close(self) -> None:
        """Stop listening; accepted channels stay open."""


class Deadline:
    """A moment until which something may take.

    >>> Deadline(60).remaining_s > 59
    True
    """

    __slots__ = ("_end", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        if not 0 <= timeout_s < math.inf:
            raise ValueError(f"timeout_s: expected a finite number of seconds from 0, got {timeout_s!r}")
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds that are left; 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self._end
