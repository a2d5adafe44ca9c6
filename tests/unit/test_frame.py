"""Frames: what is laid out is read back, and nothing impossible is accepted."""

from __future__ import annotations

import struct

import pytest
import torch

from torchslicer.errors import FrameError, TransportError
from torchslicer.testing import tensors_of_every_kind
from torchslicer.transport.address import Endpoint, choose_endpoint, join_address, split_address
from torchslicer.transport.base import Deadline
from torchslicer.transport.dtypes import CODE_OF_DTYPE
from torchslicer.transport.frame import (
    HEADER_BYTES,
    Frame,
    FrameFlags,
    FrameHeader,
    FrameKind,
    FrameLimits,
    arrival_of,
    decode_header,
    encode_header,
)
from torchslicer.transport.geometry import Layout

LIMITS = FrameLimits()
HEADER = encode_header(Frame.of_tensor(FrameKind.FORWARD, torch.ones(2, 3)).header)


def patched(offset: int, form: str, *values: int) -> bytes:
    data = bytearray(HEADER)
    struct.pack_into("<" + form, data, offset, *values)
    return bytes(data)


def test_every_kind_of_header_is_read_back() -> None:
    for name, tensor in tensors_of_every_kind():
        header = Frame.of_tensor(FrameKind.STATE, tensor, value=3).header
        assert decode_header(encode_header(header), LIMITS) == header, name


def test_layout_of_the_header_is_pinned() -> None:
    header = FrameHeader(
        FrameKind.BACKWARD, FrameFlags.LAST_LEAF, generation=1, microbatch=2, pass_index=3, value=4, stage=5, leaf=6,
        num_leaves=7, run=8,
    )  # fmt: skip
    expected = bytes.fromhex(
        "54534c46 01 03 0400 01000000 02000000 0300000000000000 0000000000000000"
        "04000000 05000000 0600 0700 00 00 00 00 0800000000000000 0000000000000000"
    )
    assert encode_header(header) == expected + bytes(128)
    assert HEADER_BYTES == 192
    assert HEADER_BYTES % 64 == 0


def test_codes_of_dtypes_are_pinned() -> None:
    assert {str(dtype).removeprefix("torch."): code for dtype, code in CODE_OF_DTYPE.items()}.items() >= {
        "bool": 1, "uint8": 2, "int8": 3, "int16": 4, "int32": 5, "int64": 6, "uint16": 7, "uint32": 8, "uint64": 9,
        "float16": 16, "float32": 17, "float64": 18, "bfloat16": 19, "complex32": 24, "complex64": 25,
        "complex128": 26, "float8_e4m3fn": 32, "float8_e5m2": 33, "float8_e4m3fnuz": 34, "float8_e5m2fnuz": 35,
    }.items()  # fmt: skip


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET / HTTP/1.1\r\n" + bytes(176), "not a TorchSlicer frame"),
        (HEADER[:-1], "has 192 bytes, got 191"),
        (patched(4, "B", 2), "frame version 2, expected 1"),
        (patched(5, "B", 99), "unknown kind 99"),
        (patched(5, "B", FrameKind.CONTROL), "expected a payload of bytes"),
        (patched(6, "H", 1 << 15), "flags 0x8000"),
        (patched(24, "Q", 25), "payload of 25 bytes, but shape (2, 3) of torch.float32 takes 24"),
        (patched(24, "Q", 2**64 - 1), "payload of 18446744073709551615 bytes"),
        (patched(40, "HH", 2, 2), "leaf 2 of 2"),
        (patched(44, "B", 200), "unknown dtype code 200"),
        (patched(44, "B", 0), "plain bytes has no shape"),
        (patched(45, "B", 9), "beyond the number of dimensions, 9"),
        (patched(45, "B", 1), "beyond the number of dimensions, 1"),
        (patched(46, "B", 64), "alignment 64"),
        (patched(47, "B", Layout.COMPACT), "has layout DENSE, not 2"),
        (patched(56, "Q", 1), "unexpected block of shared memory 0x1"),
        (patched(64, "QQ", 2**63, 2**63), "impossible shape"),
        (patched(128, "qq", -3, 1), "impossible shape"),
        (patched(128, "qq", 2**62, 1), "has layout COMPACT, not 1"),
    ],
)
def test_impossible_headers_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode_header(data, LIMITS)
    assert problem in str(caught.value)


def test_small_payload_cannot_ask_for_large_memory() -> None:
    data = bytearray(patched(128, "qq", 2**40, 1))
    data[47] = Layout.COMPACT
    with pytest.raises(FrameError, match="more than the limit"):
        decode_header(bytes(data), LIMITS)


def test_limits_of_messages_and_tensors_are_apart() -> None:
    limits = FrameLimits(max_payload_bytes=24, max_control_bytes=10)
    decode_header(HEADER, limits)
    with pytest.raises(FrameError, match="11 bytes, more than the limit of 10"):
        decode_header(encode_header(Frame.of_bytes(FrameKind.STATE, bytes(11)).header), limits)


def test_expectation_is_asked_before_anything_is_allocated() -> None:
    seen: list[FrameHeader] = []
    decode_header(HEADER, LIMITS, seen.append)
    assert [header.shape for header in seen] == [(2, 3)]


def test_dense_tensors_are_not_copied() -> None:
    tensor = torch.zeros(4, 5)
    wire = Frame.of_tensor(FrameKind.FORWARD, tensor.t()).wire()
    tensor[0, 0] = 1.0
    assert bytes(wire[:4]) == struct.pack("<f", 1.0)


def test_wire_bytes_outlive_the_tensor_and_the_arrival_its_block() -> None:
    frame = Frame.of_tensor(FrameKind.FORWARD, torch.full((5,), 2.0)[1:])
    arrival = arrival_of(frame.header)
    arrival.view[:] = frame.wire()
    result = arrival.finish()
    del frame, arrival
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [2.0] * 4
    assert result.data_ptr() % 64 == 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.empty(2, dtype=torch.uint4),
        torch.ones([1] * 9),
    ],
    ids=["sparse", "uint4", "nine dimensions"],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(tensor: torch.Tensor) -> None:
    with pytest.raises(FrameError, match="cannot be sent"):
        Frame.of_tensor(FrameKind.FORWARD, tensor)


@pytest.mark.parametrize("names", [{"generation": -1}, {"microbatch": 1 << 32}, {"leaf": 1 << 16}, {"run": 1 << 64}])
def test_fields_that_do_not_fit_are_refused_by_the_sender(names: dict[str, int]) -> None:
    with pytest.raises(FrameError, match="a field does not fit the header"):
        encode_header(FrameHeader(FrameKind.PING, **names))  # type: ignore[arg-type]


@pytest.mark.parametrize("payload", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_message_that_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError, match="expected a JSON object"):
        Frame.of_bytes(FrameKind.CONTROL, payload).message()


def test_bytes_are_no_tensor() -> None:
    with pytest.raises(FrameError, match="expected a tensor, got 3 plain bytes"):
        Frame.of_bytes(FrameKind.STATE, b"abc").tensor()


@pytest.mark.parametrize("timeout_s", [-1.0, float("inf"), float("nan")])
def test_waits_must_be_finite(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds"):
        Deadline(timeout_s)


@pytest.mark.parametrize(
    "address", ["", "host", ":80", "host:", "host:x", "host:70000", "::1:80", "[::1]", "[]:80", "host:-1", "host:٣"]
)
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(TransportError, match="address"):
        split_address(address)


@pytest.mark.parametrize("address", ["10.0.0.1:80", "[::1]:0", "host:65535"])
def test_addresses_are_read_and_written(address: str) -> None:
    assert join_address(*split_address(address)) == address


def test_endpoint_of_another_host_is_not_taken() -> None:
    with pytest.raises(TransportError, match="offered: unix:/a"):
        choose_endpoint([Endpoint("unix:/a", host_id="elsewhere")])
