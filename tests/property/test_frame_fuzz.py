"""Whatever arrives: a valid frame or a FrameError, and never more memory than the limits allow."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchslicer.errors import FrameError, PeerClosedError
from torchslicer.testing import tensors_of_every_kind
from torchslicer.transport import payload
from torchslicer.transport.base import ChannelOptions, ChannelStats, Deadline
from torchslicer.transport.frame import (
    HEADER_BYTES,
    Expect,
    Frame,
    FrameKind,
    FrameLimits,
    arrival_of,
    decode_header,
    encode_header,
)
from torchslicer.transport.reader import FrameReader

LIMITS = FrameLimits(max_payload_bytes=1 << 16, max_control_bytes=1 << 12)
# Payload and spread-out tensor, each within the limit, and the slack for alignment.
MOST_BYTES = 2 * (1 << 16) + 2 * 64
VALID = [encode_header(Frame.of_tensor(FrameKind.FORWARD, tensor).header) for _, tensor in tensors_of_every_kind()]
INTERESTING = st.one_of(
    st.sampled_from([0, 1, 2, 63, 64, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)


class Counting:
    """Counts the bytes that the decoder asks torch for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        for name in ("empty", "empty_strided"):
            monkeypatch.setattr(payload.torch, name, self._counted(getattr(torch, name)))

    def _counted(self, make):  # type: ignore[no-untyped-def]
        def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
            tensor = make(*args, **kwargs)
            self.num_bytes += tensor.untyped_storage().nbytes()
            return tensor

        return counted


class Bytes:
    """A stream of bytes that are there already, in pieces of any size."""

    shares = False

    def __init__(self, data: bytes, piece: int) -> None:
        self.data, self.piece, self.position = data, piece, 0

    def read(self, view: memoryview, *, wait: bool, fill: bool = False) -> int:
        found = self.data[self.position : self.position + min(self.piece, len(view))]
        view[: len(found)] = found
        self.position += len(found)
        return len(found)


class Rules:
    limits = LIMITS
    expect: Expect | None = None


@st.composite
def mutated_headers(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            data[draw(st.integers(0, HEADER_BYTES - 1))] = draw(st.integers(0, 255))
        else:
            offset = draw(st.sampled_from([16, 24, 48, *range(64, 192, 8)]))
            struct.pack_into("<Q", data, offset, draw(INTERESTING))
    return bytes(data)


def decode(data: bytes) -> None:
    """Go all the way of a received header, up to the finished payload."""
    try:
        header = decode_header(data, LIMITS)
    except FrameError:
        return
    assert decode_header(encode_header(header), LIMITS) == header
    arrival = arrival_of(header)
    assert len(arrival.view) == header.payload_bytes
    arrival.finish()


@settings(max_examples=1000)
@given(st.one_of(mutated_headers(), st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)))
def test_any_header_is_decoded_or_refused_within_the_limits(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        counting = Counting(monkeypatch)
        decode(data)
    assert counting.num_bytes <= MOST_BYTES


def read_all(reader: FrameReader) -> None:
    while True:
        reader.read(Deadline(10))


@given(st.binary(max_size=600), st.integers(1, 700), st.booleans())
def test_any_bytes_end_in_an_error_of_ours(data: bytes, piece: int, magic: bool) -> None:
    stream = Bytes(b"TSLF\x01" * magic + data, piece)
    reader = FrameReader(stream, Rules(), ChannelStats(), peer="fuzz", options=ChannelOptions())  # type: ignore[arg-type]
    with pytest.raises((FrameError, PeerClosedError)):
        read_all(reader)


@given(st.lists(st.sampled_from(list(tensors_of_every_kind())), min_size=1, max_size=3), st.integers(1, 5000))
def test_frames_are_put_together_from_any_pieces(named: list[tuple[str, torch.Tensor]], piece: int) -> None:
    frames = [Frame.of_tensor(FrameKind.FORWARD, tensor, microbatch=index) for index, (_, tensor) in enumerate(named)]
    data = b"".join(encode_header(frame.header) + bytes(frame.wire()) for frame in frames)
    rules = Rules()
    rules.limits = FrameLimits()
    reader = FrameReader(Bytes(data, piece), rules, ChannelStats(), peer="fuzz", options=ChannelOptions())  # type: ignore[arg-type]
    for frame in frames:
        found = reader.read(Deadline(10))
        assert found.header == frame.header
        assert bytes(found.wire()) == bytes(frame.wire())
