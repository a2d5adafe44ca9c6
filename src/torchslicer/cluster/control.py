"""The control channel between a coordinator and a worker: typed messages, and tensors that follow some of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchslicer.cluster.messages import Heartbeat, Message, decode, encode
from torchslicer.errors import DeadlineError, ProtocolError
from torchslicer.transport.base import Channel
from torchslicer.transport.frame import Frame, FrameKind

SEND_TIMEOUT_S = 3600.0
"""How long a full queue may block a sender. A peer that takes nothing at all is given up long before: by the channel,
and by whoever watches the heartbeats."""

_POLL_S = 1.0


class Control:
    """Sends and receives messages on a channel. Any thread may send; one thread receives."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._sending = threading.Lock()
        self._next: Any = None
        self._bytes = -1
        self._seen = time.monotonic()

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self.channel.peer

    def send(
        self, message: Message, tensors: Sequence[torch.Tensor] = (), *, timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        """Send a message, and *tensors* after it; heartbeats may come between the tensors."""
        self._send(Frame.of_bytes(FrameKind.CONTROL, encode(message)), timeout_s)
        for index, tensor in enumerate(tensors):
            self._send(Frame.of_tensor(FrameKind.STATE, tensor.detach(), value=index), timeout_s)

    def _send(self, frame: Frame, timeout_s: float) -> None:
        with self._sending, whole_frames(self.channel):
            self.channel.send(frame, timeout_s=timeout_s)

    def beat(self, message: Heartbeat) -> None:
        """Send a heartbeat without waiting: where the channel is busy, what passes there is sign of life enough.

        Raises:
            PeerClosedError: The channel has ended.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(DeadlineError):
                self.channel.send(Frame.of_bytes(FrameKind.CONTROL, encode(message)), timeout_s=0)
        finally:
            self._sending.release()

    def silent_s(self) -> float:
        """Return how long not a single byte has come; to be asked by one thread, once a second or so."""
        count, now = self.channel.stats.bytes_received, time.monotonic()
        if count != self._bytes:
            self._bytes, self._seen = count, now
        return now - self._seen

    def excuse(self) -> None:
        """Count silence from now on: it was this side that did not listen."""
        self._seen = time.monotonic()

    def receive(self, *, timeout_s: float) -> Any:
        """Return the next message.

        Raises:
            ProtocolError: A tensor came where a message was expected, or the message is malformed.
            DeadlineError, PeerClosedError, FrameError: As the channel says.
        """
        if self._next is not None:
            message, self._next = self._next, None
            return message
        frame = self.channel.receive(timeout_s=timeout_s)
        if frame.header.kind is not FrameKind.CONTROL or not isinstance(frame.payload, bytes):
            raise ProtocolError(f"{self.peer} sent {frame.header.describe()} where a message was expected")
        return decode(frame.payload)

    def receive_tensors(self, count: int, *, check: Callable[[], None] = lambda: None) -> list[torch.Tensor] | None:
        """Return the *count* tensors that follow a message; None if the sender gave it up and went on to another.

        Takes as long as the sender keeps sending: *check* is called about once a second, and raises to end it.

        Raises:
            ProtocolError: Something else came.
        """
        tensors: list[torch.Tensor] = []
        while len(tensors) < count:
            try:
                frame = self.channel.receive(timeout_s=_POLL_S)
            except DeadlineError:
                check()
                continue
            if frame.header.kind is FrameKind.STATE and frame.header.value == len(tensors):
                tensors.append(frame.tensor())
            elif frame.header.kind is FrameKind.CONTROL and isinstance(frame.payload, bytes):
                message = decode(frame.payload)
                if not isinstance(message, Heartbeat):
                    self._next = message
                    return None
            else:
                raise ProtocolError(f"{self.peer} sent {frame.header.describe()} instead of tensor {len(tensors)}")
        return tensors

    def close(self, *, timeout_s: float = 1.0) -> None:
        """End the channel; what is queued gets *timeout_s* to leave."""
        self.channel.close(timeout_s=timeout_s)


class whole_frames:  # noqa: N801 - used as a context, like a function
    """Ends a channel when a send is interrupted (Ctrl-C): half a frame may be on its way, and nothing can follow it."""

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            self._channel.close(timeout_s=0)
