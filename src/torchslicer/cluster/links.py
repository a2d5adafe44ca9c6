"""Data channels of one rank: to the ranks that its values come from and go to, and to the coordinator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchslicer.cluster.control import whole_frames
from torchslicer.cluster.mailbox import Mailbox
from torchslicer.cluster.packing import Address, Assembler, Key, gradient_frames, key_of, packet_frames
from torchslicer.errors import (
    DeadlineError,
    FrameError,
    PeerClosedError,
    ProtocolError,
    TorchSlicerError,
    TransportError,
)
from torchslicer.pipeline.boundary import Gradients, Packet
from torchslicer.pipeline.exchange import Slot
from torchslicer.pipeline.stage import Route
from torchslicer.transport.base import Channel
from torchslicer.transport.frame import Frame, FrameHeader, FrameKind

COORDINATOR = -1
"""Rank of the coordinator on data channels."""

_POLL_S = 1.0
_PATIENCE_S = 0.2


@dataclass(frozen=True)
class RunKey:
    """What every frame of a run carries: a number made from the run's id, and the generation."""

    run: int
    generation: int


class Links:
    """Sends to other ranks, and files what they send. Any thread may send.

    Args:
        key: Run and generation; frames of another one are dropped and counted.
        mailbox: Where arrivals are filed.
        on_lost: Called with the rank and the error when a channel breaks.
        send_timeout_s: How long a full queue may block a sender.
    """

    def __init__(
        self,
        key: RunKey,
        mailbox: Mailbox,
        *,
        on_lost: Callable[[int, TorchSlicerError], None],
        send_timeout_s: float,
    ) -> None:
        self.key = key
        self.mailbox = mailbox
        self.stale_frames = 0
        self._on_lost = on_lost
        self._send_timeout_s = send_timeout_s
        self._channels: dict[int, Channel] = {}
        self._threads: list[threading.Thread] = []
        self._changing = threading.Lock()
        self._closing = False

    def add(self, rank: int, channel: Channel) -> None:
        """Take a channel into use and start to read it.

        Raises:
            PeerClosedError: The links were closed meanwhile.
        """
        channel.expect = self._expect
        thread = threading.Thread(target=self._read, args=(rank, channel), name=f"torchslicer-link-{rank}", daemon=True)
        with self._changing:
            closing = self._closing
            if not closing:
                self._channels[rank] = channel
                self._threads.append(thread)
                thread.start()
        if closing:
            channel.close(timeout_s=0)
            raise PeerClosedError("the run is over")

    def _expect(self, header: FrameHeader) -> None:
        """Refuse, before anything is allocated, what cannot belong to this run."""
        if header.run != self.key.run:
            raise FrameError(f"{header.describe()} is of another run")

    def _read(self, rank: int, channel: Channel) -> None:
        assembler = Assembler()
        try:
            while not self._closing:
                with contextlib.suppress(DeadlineError):
                    self._file(assembler, channel.receive(timeout_s=_POLL_S))
        except TorchSlicerError as error:
            self._lose(rank, error)
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would leave the rank waiting
            self._lose(rank, ProtocolError(f"what it sent could not be read ({type(error).__name__}: {error})"))

    def _lose(self, rank: int, error: TorchSlicerError) -> None:
        if not self._closing:
            self._on_lost(rank, error)

    def _file(self, assembler: Assembler, frame: Frame) -> None:
        if frame.header.generation != self.key.generation:
            self.stale_frames += 1
            return
        if frame.header.kind is FrameKind.STATE:
            self.mailbox.put((*key_of(frame.header)[:4], frame.header.value), frame)
            return
        complete = assembler.add(frame)
        if complete is not None:
            self.mailbox.put(*complete)

    def send(self, rank: int, frames: Iterable[Frame]) -> None:
        """Send frames to a rank.

        Raises:
            Exception: Whatever ended the run: what the mailbox failed with, or the channel.
        """
        channel = self._channels[rank]
        for frame in frames:
            try:
                self._send(channel, frame)
            except TransportError as error:
                self._lose(rank, error)
                self.mailbox.check()
                raise

    def _send(self, channel: Channel, frame: Frame) -> None:
        """Send a frame; while the queue is full, look from time to time whether the run still lasts."""
        deadline = time.monotonic() + self._send_timeout_s
        with whole_frames(channel):
            while True:
                try:
                    return channel.send(frame, timeout_s=_PATIENCE_S)
                except DeadlineError:
                    self.mailbox.check()
                    if time.monotonic() > deadline:
                        raise

    def address(self, pass_index: int, stage: int, microbatch: int, value: int) -> Address:
        """Return the address of a value in this run."""
        return Address(self.key.generation, pass_index, stage, microbatch, value, self.key.run)

    def traffic(self) -> Mapping[int, tuple[int, int]]:
        """Bytes sent to and received from each rank."""
        channels = dict(self._channels)
        return {rank: (c.stats.bytes_sent, c.stats.bytes_received) for rank, c in channels.items()}

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Close every channel and wait for the threads that read them; what is queued gets *timeout_s* to leave."""
        with self._changing:
            self._closing = True
            channels, threads = list(self._channels.values()), list(self._threads)
        for channel in channels:
            channel.close(timeout_s=timeout_s)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)


class RankExchange:
    """The exchange of a rank that holds some of the stages (`torchslicer.pipeline.exchange.Exchange`).

    Args:
        links: Channels to the other ranks.
        held: The stages of this rank.
        rank_of: Rank of every stage.
    """

    def __init__(self, links: Links, held: Sequence[int], rank_of: Sequence[int]) -> None:
        self.links = links
        self.mailbox = links.mailbox
        self.pass_index = 0
        self._held = frozenset(held)
        self._rank_of = tuple(rank_of)

    def begin(self, pass_index: int) -> None:
        """Start a pass; what is sent and taken from now on belongs to it."""
        self.pass_index = pass_index

    def send_packet(self, route: Route, microbatch: int, packet: Packet) -> None:
        """Hand a value to every stage that uses it."""
        for stage in route.consumers:
            if stage in self._held:
                self.mailbox.put(self._key(FrameKind.FORWARD, stage, microbatch, route.node), packet)
            else:
                address = self.links.address(self.pass_index, stage, microbatch, route.node)
                self.links.send(self._rank_of[stage], packet_frames(FrameKind.FORWARD, packet, address))

    def take_packets(self, slot: Slot, routes: tuple[Route, ...]) -> dict[int, Packet]:
        """Wait for the values of *routes*."""
        return self._take(FrameKind.FORWARD, slot, routes)

    def send_gradients(self, stage: int, route: Route, microbatch: int, gradients: Gradients) -> None:
        """Hand the gradient of a value to *stage*."""
        if stage in self._held:
            self.mailbox.put(self._key(FrameKind.BACKWARD, stage, microbatch, route.node), gradients)
            return
        address = self.links.address(self.pass_index, stage, microbatch, route.node)
        self.links.send(self._rank_of[stage], gradient_frames(gradients, address))

    def take_gradients(self, slot: Slot, routes: tuple[Route, ...]) -> dict[int, Gradients]:
        """Wait for the gradients of the values of *routes*."""
        return self._take(FrameKind.BACKWARD, slot, routes)

    def clear(self) -> None:
        """Nothing to do: a pass that failed ends the run, and with it the mailbox."""

    def _take(self, kind: FrameKind, slot: Slot, routes: tuple[Route, ...]) -> dict[int, Any]:
        stage, microbatch = slot
        items = self.mailbox.take([self._key(kind, stage, microbatch, route.node) for route in routes])
        return {route.node: item for route, item in zip(routes, items, strict=True)}

    def _key(self, kind: FrameKind, stage: int, microbatch: int, value: int) -> Key:
        return (kind, self.pass_index, stage, microbatch, value)
