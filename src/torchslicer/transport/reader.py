"""Frames out of a stream: bounded, resumable, and straight into the memory of their tensors."""

from __future__ import annotations

from typing import Protocol

import torch

from torchslicer.errors import DeadlineError, FrameError, PeerClosedError
from torchslicer.transport.base import ChannelOptions, ChannelStats, Deadline
from torchslicer.transport.frame import (
    HEADER_BYTES,
    Expect,
    Frame,
    FrameHeader,
    FrameLimits,
    arrival_of,
    block_of,
    decode_header,
)
from torchslicer.transport.payload import Arrival
from torchslicer.transport.shared import Borrower
from torchslicer.transport.stream import TICK_S, Stream

# Small frames come with one system call, header and payload together; of large ones no more than this is copied.
_SCRATCH_BYTES = 8 << 10


class Checks(Protocol):
    """The channel's rules, which may change while it lives."""

    limits: FrameLimits
    expect: Expect | None


class FrameReader:
    """Reads one frame after another. After a DeadlineError the next call goes on where this one stopped."""

    def __init__(
        self, stream: Stream, checks: Checks, stats: ChannelStats, *, peer: str, options: ChannelOptions
    ) -> None:
        self._stream, self._checks, self._stats, self._peer, self._options = stream, checks, stats, peer, options
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0
        self._header_deadline: Deadline | None = None
        self._header: FrameHeader | None = None
        self._arrival: Arrival | torch.Tensor | None = None
        self._borrower: Borrower | None = None
        self._filled = 0
        self._stall: Deadline | None = None

    def read(self, deadline: Deadline) -> Frame:
        """Return the next frame.

        Raises:
            DeadlineError: It is not complete yet.
            FrameError: It is not valid, or came too slowly.
            PeerClosedError: The stream has ended.
        """
        if self._header is None:
            self._read_header(deadline)
        header, arrival = self._header, self._arrival
        assert header is not None
        assert arrival is not None
        if isinstance(arrival, Arrival):
            self._read_payload(header, arrival, deadline)
        self._header = self._arrival = None
        self._stats.frames_received += 1
        return Frame(header, arrival.finish() if isinstance(arrival, Arrival) else arrival)

    def _read_header(self, deadline: Deadline) -> None:
        while self._end - self._start < HEADER_BYTES:
            self._more(deadline)
        found = self._scratch[self._start : self._start + HEADER_BYTES]
        self._start += HEADER_BYTES
        self._header_deadline = None
        block, shares = block_of(found), self._stream.shares
        header = decode_header(found, self._checks.limits, self._checks.expect, shares=shares)
        self._stall = None
        if block:
            self._header, self._arrival = header, self._borrow(block, header)
            return
        arrival = arrival_of(header)
        taken = min(self._end - self._start, header.payload_bytes)
        arrival.view[:taken] = self._scratch[self._start : self._start + taken]
        self._start += taken
        self._stats.bytes_received += HEADER_BYTES + taken
        self._header, self._arrival, self._filled = header, arrival, taken

    def _borrow(self, block: int, header: FrameHeader) -> torch.Tensor:
        """Return the tensor that lies in the sender's memory; its descriptor came with the first one."""
        descriptor = self._stream.take_descriptor()
        if descriptor is not None:
            self._borrower = Borrower(descriptor)
        if self._borrower is None:
            raise FrameError(f"{header.describe()} lies in shared memory of which no descriptor came")
        self._stats.bytes_received += HEADER_BYTES + header.payload_bytes
        return self._borrower.borrow(block, header)

    def _more(self, deadline: Deadline) -> None:
        """Read something into the scratch memory, or raise."""
        have = self._end - self._start
        self._check_header_time(have)
        if self._start:
            self._scratch[:have] = self._scratch[self._start : self._end]
            self._start, self._end = 0, have
        remaining_s = deadline.remaining_s
        count = self._stream.read(self._scratch[have:], wait=remaining_s > TICK_S)
        if count is None and remaining_s <= TICK_S:
            self._stream.wait_readable(remaining_s)
            count = self._stream.read(self._scratch[have:], wait=False)
        if count:
            self._end += count
            self._check_header_time(have + count)
            return
        if count == 0:
            raise self._ended("" if not have else f" after {have} bytes of a frame's header")
        if deadline.passed:
            raise DeadlineError(f"nothing came from {self._peer} within {deadline.timeout_s:g} s")

    def _check_header_time(self, have: int) -> None:
        if not 0 < have < HEADER_BYTES:
            return
        if self._header_deadline is None:
            self._header_deadline = Deadline(self._options.header_timeout_s)
        elif self._header_deadline.passed:
            raise FrameError(
                f"{self._peer} sent {have} of {HEADER_BYTES} bytes of a header and nothing more for "
                f"{self._options.header_timeout_s:g} s"
            )

    def _read_payload(self, header: FrameHeader, arrival: Arrival, deadline: Deadline) -> None:
        size = header.payload_bytes
        while self._filled < size:
            wait = deadline.remaining_s > TICK_S
            count = self._stream.read(arrival.view[self._filled :], wait=wait, fill=True)
            if count:
                self._filled += count
                self._stats.bytes_received += count  # at once: it is how one sees that a large frame makes progress
                self._stall = None
            elif count == 0:
                raise self._ended(f" after {self._filled} of {size} bytes of {header.describe()}")
            else:
                self._check_payload_time(header, deadline)

    def _check_payload_time(self, header: FrameHeader, deadline: Deadline) -> None:
        progress = f"{self._filled} of {header.payload_bytes} bytes of {header.describe()}"
        if self._stall is None:
            self._stall = Deadline(self._options.stall_timeout_s)
        elif self._stall.passed:
            limit = self._options.stall_timeout_s
            raise PeerClosedError(f"{self._peer} sent {progress} and nothing more for {limit:g} s")
        if deadline.passed:
            raise DeadlineError(f"within {deadline.timeout_s:g} s {self._peer} sent only {progress}")
        self._stream.wait_readable(min(deadline.remaining_s, TICK_S))

    def close(self) -> None:
        """Let go of the sender's memory; tensors that lie in it stay."""
        self._borrower = None

    def _ended(self, where: str) -> PeerClosedError:
        return PeerClosedError(f"{self._peer} closed the connection{where}")
