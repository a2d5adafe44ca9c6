"""The unit of the wire: a fixed header of 192 bytes, then the bytes of one tensor or of one message.

``docs/wire-format.md`` has the layout. Nothing is allocated for a payload before :func:`decode_header` has bounded
every integer of its header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeAlias

import torch

from torchslicer.errors import FrameError
from torchslicer.transport.dtypes import DTYPE_OF_CODE, code_of
from torchslicer.transport.geometry import PLAIN_BYTES, Geometry, Layout, geometry_of, unpack_geometry
from torchslicer.transport.payload import Arrival, outgoing_tensor, wire_bytes

MAGIC = b"TSLF"
_TLS = b"\x16\x03"  # how a TLS handshake begins
VERSION = 1
HEADER_BYTES = 192
_FIELDS_BYTES = 64
_BLOCK = slice(56, 64)
# magic, version, kind, flags, generation, microbatch, pass_index, payload_bytes, value, stage, leaf, num_leaves,
# dtype code, ndim, alignment, layout, run, block; 8 sizes and 8 strides follow
_STRUCT = struct.Struct("<4sBBHIIQQIIHHBBBBQQ")


class FrameKind(IntEnum):
    """What a frame carries. CONTROL is a JSON object; the six after it are values of the pipeline."""

    CONTROL = 1
    FORWARD = 2
    BACKWARD = 3
    INPUT = 4
    TARGET = 5
    OUTPUT = 6
    STATE = 7
    PING = 8
    PONG = 9
    CLOSE = 10


class FrameFlags(IntFlag):
    """What a receiver must know about a leaf besides its bits."""

    NONE = 0
    WANTS_GRADIENT = 1  # the producer's tensor requires a gradient: one is expected back
    NO_GRADIENT = 2  # the answer to WANTS_GRADIENT where autograd found no path: no payload
    LAST_LEAF = 4  # no further leaf of this value follows
    PLAIN = 8  # the payload is JSON of a plain value (None, bool, int, float, text), not a tensor


_KINDS: dict[int, FrameKind] = {int(kind): kind for kind in FrameKind}
_ALL_FLAGS = int(FrameFlags.WANTS_GRADIENT | FrameFlags.NO_GRADIENT | FrameFlags.LAST_LEAF | FrameFlags.PLAIN)
_FLAGS: tuple[FrameFlags, ...] = tuple(FrameFlags(bits) for bits in range(_ALL_FLAGS + 1))


class FrameHeader(NamedTuple):
    """Everything about a frame but its payload.

    ``pass_index`` counts the passes (steps and evaluation batches) of a run; ``value`` and ``leaf`` name the tensor
    within the graph; ``stage`` is the destination. ``alignment`` is the address of the sender's tensor modulo 64: like
    the strides it changes the bits of a product of matrices, so the receiver reproduces both. ``run`` is a number made
    from the run's id, so that frames of another run are refused.
    """

    kind: FrameKind
    flags: FrameFlags = FrameFlags.NONE
    generation: int = 0
    microbatch: int = 0
    pass_index: int = 0
    value: int = 0
    stage: int = 0
    leaf: int = 0
    num_leaves: int = 1
    run: int = 0
    alignment: int = 0
    payload_bytes: int = 0
    geometry: Geometry = PLAIN_BYTES

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's sizes."""
        return self.geometry.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The tensor's strides, in elements."""
        return self.geometry.strides

    @property
    def dtype(self) -> torch.dtype | None:
        """The tensor's dtype; None for a payload of bytes."""
        return DTYPE_OF_CODE.get(self.geometry.dtype_code)

    def describe(self) -> str:
        """Say in a few words which frame this is.

        >>> FrameHeader(FrameKind.FORWARD, pass_index=3, microbatch=1, value=7, stage=2).describe()
        'FORWARD (pass 3, micro-batch 1, value 7, leaf 0, to stage 2)'
        """
        where = f"pass {self.pass_index}, micro-batch {self.microbatch}, value {self.value}, leaf {self.leaf}"
        return f"{self.kind.name} ({where}, to stage {self.stage})"


Expect: TypeAlias = "Callable[[FrameHeader], None]"


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest payloads that are accepted.

    For a tensor whose memory has gaps, payload and memory are bounded one by one, so it may need twice as much.
    """

    max_payload_bytes: int = 4 << 30
    max_control_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its payload. Make one with :meth:`of_tensor`, :meth:`of_bytes` or :meth:`of_message`."""

    header: FrameHeader
    payload: torch.Tensor | bytes

    @classmethod
    def of_tensor(cls, kind: FrameKind, tensor: torch.Tensor, **names: Any) -> Frame:
        """Wrap a tensor; *names* are fields of the header (``generation``, ``pass_index``, ``value`` ...).

        The tensor is not copied: it must not change until the frame was received.

        Raises:
            FrameError: The tensor cannot be sent: sparse, of a dtype without a code, or of more than 8 dimensions.

        >>> Frame.of_tensor(FrameKind.FORWARD, torch.ones(2, 3), value=4).header.shape
        (2, 3)
        """
        ready, alignment = outgoing_tensor(tensor)
        geometry = geometry_of(tuple(ready.shape), ready.stride(), code_of(ready.dtype))
        header = FrameHeader(
            kind, alignment=alignment, payload_bytes=geometry.payload_bytes, geometry=geometry, **names
        )
        return cls(header, ready)

    @classmethod
    def of_bytes(cls, kind: FrameKind, payload: bytes = b"", **names: Any) -> Frame:
        """Wrap plain bytes; *names* are fields of the header."""
        return cls(FrameHeader(kind, payload_bytes=len(payload), **names), payload)

    @classmethod
    def of_message(cls, message: dict[str, Any], **names: Any) -> Frame:
        """Make a CONTROL frame of a JSON object.

        >>> Frame.of_message({"op": "hello"}).message()
        {'op': 'hello'}
        """
        text = json.dumps(message, separators=(",", ":"), allow_nan=False)
        return cls.of_bytes(FrameKind.CONTROL, text.encode(), **names)

    def message(self) -> dict[str, Any]:
        """Read the JSON object of a CONTROL frame.

        Raises:
            FrameError: The payload is not a JSON object.
        """
        try:
            found = json.loads(self.payload) if isinstance(self.payload, bytes) else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise FrameError(f"{self.header.describe()}: expected a JSON object as payload")
        return found

    def tensor(self) -> torch.Tensor:
        """Return the payload as a tensor.

        Raises:
            FrameError: The payload is plain bytes.
        """
        if isinstance(self.payload, bytes):
            raise FrameError(f"{self.header.describe()}: expected a tensor, got {len(self.payload)} plain bytes")
        return self.payload

    def wire(self) -> memoryview:
        """Return the payload's bytes as they travel; of a dense tensor its own memory, not a copy."""
        if isinstance(self.payload, bytes):
            return memoryview(self.payload)
        return wire_bytes(self.payload, self.header.payload_bytes, dense=self.header.geometry.layout == Layout.DENSE)


def arrival_of(header: FrameHeader) -> Arrival:
    """Allocate what the payload of a checked *header* needs."""
    geometry = header.geometry
    if not geometry.dtype_code:
        return Arrival(header.payload_bytes)
    return Arrival.of_tensor(
        geometry.shape,
        geometry.strides,
        DTYPE_OF_CODE[geometry.dtype_code],
        alignment=header.alignment,
        num_bytes=geometry.payload_bytes,
    )


def encode_header(header: FrameHeader) -> bytes:
    """Lay out *header* in its 192 bytes.

    Raises:
        FrameError: A field does not fit its width.
    """
    h, geometry = header, header.geometry
    try:
        return _STRUCT.pack(
            MAGIC, VERSION, h.kind, h.flags, h.generation, h.microbatch, h.pass_index, h.payload_bytes, h.value,
            h.stage, h.leaf, h.num_leaves, geometry.dtype_code, len(geometry.shape), h.alignment, geometry.layout,
            h.run, 0,
        ) + geometry.packed  # fmt: skip
    except struct.error as error:
        raise FrameError(f"{h.describe()}: a field does not fit the header: {error}") from None


def with_block(header: bytes, block: int) -> bytes:
    """Say in an encoded header that the payload does not follow, but lies in this block of the shared memory."""
    return b"".join((header[: _BLOCK.start], block.to_bytes(8, "little"), header[_BLOCK.stop :]))


def block_of(header: bytes | memoryview) -> int:
    """Return the block of shared memory that has the payload; 0 if the payload follows.

    >>> block_of(with_block(encode_header(FrameHeader(FrameKind.PING)), 64))
    64
    """
    return int.from_bytes(header[_BLOCK], "little")


def decode_header(
    data: bytes | memoryview, limits: FrameLimits, expect: Expect | None = None, *, shares: bool = False
) -> FrameHeader:
    """Read a header and check every number in it.

    Args:
        data: The 192 bytes.
        limits: The largest payloads to accept.
        expect: Called with the header at last; it raises to refuse what the plan does not foresee.
        shares: Whether the payload may lie in shared memory.

    Raises:
        FrameError: The bytes are no header, or one that is impossible or beyond the limits.

    >>> decode_header(encode_header(FrameHeader(FrameKind.PING)), FrameLimits()).kind.name
    'PING'
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}")
    (magic, version, kind, flags, generation, microbatch, pass_index, payload_bytes, value, stage, leaf, num_leaves,
     code, ndim, alignment, layout, run, block) = _STRUCT.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        hint = (
            "it speaks TLS, and this side takes plain connections" if magic[:2] == _TLS else "what is connected here?"
        )
        raise FrameError(f"not a TorchSlicer frame: it begins with {magic!r}, not {MAGIC!r}; {hint}")
    if version != VERSION:
        raise FrameError(f"frame version {version}, expected {VERSION}; install the same release on both sides")
    if kind not in _KINDS or flags > _ALL_FLAGS or (block and not shares):
        raise FrameError(f"unknown kind {kind}, flags {flags:#x} or unexpected block of shared memory {block:#x}")
    if alignment > 63 or leaf >= (num_leaves or 1):
        raise FrameError(f"impossible alignment {alignment} or leaf {leaf} of {num_leaves}")
    geometry = unpack_geometry(bytes(data[_FIELDS_BYTES:]), ndim, code, layout)
    header = FrameHeader(
        _KINDS[kind], _FLAGS[flags], generation, microbatch, pass_index, value, stage, leaf, num_leaves, run, alignment,
        payload_bytes, geometry,
    )  # fmt: skip
    _check_size(header, limits)
    if expect is not None:
        expect(header)
    return header


def _check_size(header: FrameHeader, limits: FrameLimits) -> None:
    geometry, size = header.geometry, header.payload_bytes
    if not geometry.dtype_code:
        if header.alignment:
            raise FrameError(f"{header.describe()}: a payload of plain bytes has no alignment")
        if size > limits.max_control_bytes:
            raise FrameError(f"{header.describe()}: {size} bytes, more than the limit of {limits.max_control_bytes}")
        return
    if header.kind == FrameKind.CONTROL:
        raise FrameError(f"{header.describe()}: expected a payload of bytes, got a tensor")
    if size != geometry.payload_bytes:
        raise FrameError(
            f"{header.describe()}: payload of {size} bytes, but shape {geometry.shape} of {header.dtype} takes "
            f"{geometry.payload_bytes}"
        )
    if geometry.largest_bytes > limits.max_payload_bytes:
        raise FrameError(
            f"{header.describe()}: {geometry.largest_bytes} bytes, more than the limit of {limits.max_payload_bytes}"
        )
