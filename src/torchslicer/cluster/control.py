"""The control channel between a coordinator and a worker: typed messages, and tensors that follow some of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from torchslicer.cluster.messages import Heartbeat, Message, decode, encode
from torchslicer.errors import ProtocolError
from torchslicer.transport.base import Channel
from torchslicer.transport.frame import Frame, FrameKind

SEND_TIMEOUT_S = 60.0


class Control:
    """Sends and receives messages on a channel. Any thread may send; one thread receives."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._sending = threading.Lock()

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self.channel.peer

    def send(
        self, message: Message, tensors: Sequence[torch.Tensor] = (), *, timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        """Send a message, and *tensors* after it; other messages may come between the tensors."""
        self._send(Frame.of_bytes(FrameKind.CONTROL, encode(message)), timeout_s)
        for index, tensor in enumerate(tensors):
            self._send(Frame.of_tensor(FrameKind.STATE, tensor.detach(), value=index), timeout_s)

    def _send(self, frame: Frame, timeout_s: float) -> None:
        with self._sending:
            self.channel.send(frame, timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> Any:
        """Return the next message.

        Raises:
            ProtocolError: A tensor came where a message was expected, or the message is malformed.
            DeadlineError, PeerClosedError, FrameError: As the channel says.
        """
        frame = self.channel.receive(timeout_s=timeout_s)
        if frame.header.kind is not FrameKind.CONTROL or not isinstance(frame.payload, bytes):
            raise ProtocolError(f"{self.peer} sent {frame.header.describe()} where a message was expected")
        return decode(frame.payload)

    def receive_tensors(self, count: int, *, timeout_s: float) -> list[torch.Tensor]:
        """Return the *count* tensors that follow a message; heartbeats between them are passed over.

        Raises:
            ProtocolError: Something else came.
        """
        tensors: list[torch.Tensor] = []
        while len(tensors) < count:
            frame = self.channel.receive(timeout_s=timeout_s)
            if frame.header.kind is FrameKind.STATE and frame.header.value == len(tensors):
                tensors.append(frame.tensor())
            elif not _is_heartbeat(frame):
                raise ProtocolError(f"{self.peer} sent {frame.header.describe()} instead of tensor {len(tensors)}")
        return tensors

    def close(self) -> None:
        """End the channel."""
        self.channel.close()


def _is_heartbeat(frame: Frame) -> bool:
    if frame.header.kind is not FrameKind.CONTROL or not isinstance(frame.payload, bytes):
        return False
    return isinstance(decode(frame.payload), Heartbeat)
