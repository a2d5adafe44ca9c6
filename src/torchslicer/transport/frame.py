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
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from torchslicer.errors import FrameError
from torchslicer.transport.dtypes import DTYPE_OF_CODE, code_of, itemsize_of
from torchslicer.transport.payload import Arrival, is_dense, outgoing_tensor, reduced_shape, span, wire_bytes

MAGIC = b"TSLF"
VERSION = 1
HEADER_BYTES = 192
MAX_NDIM = 8
# Products beyond this cannot be sizes of anything; it keeps torch's own 64-bit arithmetic from overflowing.
_MAX_EXTENT = 1 << 48
# magic, version, kind, flags, generation, microbatch, pass_index, payload_bytes, value, stage, leaf, num_leaves,
# dtype code, ndim, alignment, layout, run, reserved, 8 sizes, 8 strides
_STRUCT = struct.Struct("<4sBBHIIQQIIHHBBBBQQ8Q8q")
_UNUSED = (0,) * MAX_NDIM


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


class Layout(IntEnum):
    """How the payload's bytes become the tensor's memory."""

    BYTES = 0  # no tensor
    DENSE = 1  # the tensor's memory from its first byte to its last
    COMPACT = 2  # its elements in row-major order, dimensions of stride 0 once; the receiver spreads them


_KINDS: dict[int, FrameKind] = {int(kind): kind for kind in FrameKind}
_LAYOUTS: dict[int, Layout] = {int(layout): layout for layout in Layout}
_ALL_FLAGS = int(FrameFlags.WANTS_GRADIENT | FrameFlags.NO_GRADIENT | FrameFlags.LAST_LEAF | FrameFlags.PLAIN)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Everything about a frame but its payload.

    ``pass_index`` counts the passes (steps and evaluation batches) of a run; ``value`` and ``leaf`` name the tensor
    within the graph; ``stage`` is the destination. Strides are in elements, ``alignment`` is the address of the
    sender's tensor modulo 64: both change the bits of a product of matrices, so the receiver reproduces them.
    ``run`` is a number made from the run's id, so that frames of another run are refused.
    """

    kind: FrameKind
    flags: FrameFlags = FrameFlags.NONE
    generation: int = 0
    microbatch: int = 0
    pass_index: int = 0
    payload_bytes: int = 0
    value: int = 0
    stage: int = 0
    leaf: int = 0
    num_leaves: int = 1
    dtype_code: int = 0
    alignment: int = 0
    layout: Layout = Layout.BYTES
    run: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype | None:
        """The tensor's dtype; None for a payload of bytes."""
        return DTYPE_OF_CODE.get(self.dtype_code)

    @property
    def span_bytes(self) -> int:
        """Bytes from the tensor's first element to its last: what a receiver allocates for it."""
        if not self.dtype_code:
            return self.payload_bytes
        return _extent(self.shape, self.strides, self.dtype_code).span_bytes

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
        if tensor.dim() > MAX_NDIM:
            raise FrameError(f"a tensor of {tensor.dim()} dimensions cannot be sent; at most {MAX_NDIM} are possible")
        code = code_of(tensor.dtype)
        ready, alignment = outgoing_tensor(tensor)
        shape, strides = tuple(ready.shape), ready.stride()
        extent = _extent(shape, strides, code)
        header = FrameHeader(
            kind,
            dtype_code=code,
            alignment=alignment,
            layout=extent.layout,
            shape=shape,
            strides=strides,
            payload_bytes=extent.payload_bytes,
            **names,
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
        return wire_bytes(self.payload, self.header.payload_bytes, dense=self.header.layout == Layout.DENSE)


def arrival_of(header: FrameHeader) -> Arrival:
    """Allocate what the payload of a checked *header* needs."""
    if not header.dtype_code:
        return Arrival(header.payload_bytes)
    return Arrival.of_tensor(
        header.shape,
        header.strides,
        DTYPE_OF_CODE[header.dtype_code],
        alignment=header.alignment,
        num_bytes=header.payload_bytes,
    )


def encode_header(header: FrameHeader) -> bytes:
    """Lay out *header* in its 192 bytes.

    Raises:
        FrameError: A field does not fit its width.
    """
    h, fill = header, _UNUSED[len(header.shape) :]
    try:
        return _STRUCT.pack(
            MAGIC, VERSION, h.kind, h.flags, h.generation, h.microbatch, h.pass_index, h.payload_bytes, h.value,
            h.stage, h.leaf, h.num_leaves, h.dtype_code, len(h.shape), h.alignment, h.layout, h.run, 0,
            *h.shape, *fill, *h.strides, *fill,
        )  # fmt: skip
    except struct.error as error:
        raise FrameError(f"{h.describe()}: a field does not fit the header: {error}") from None


def decode_header(data: bytes | bytearray | memoryview, limits: FrameLimits, expect: Expect | None = None) -> FrameHeader:
    """Read a header and check every number in it.

    Args:
        data: The 192 bytes.
        limits: The largest payloads to accept.
        expect: Called with the header at last; it raises to refuse what the plan does not foresee.

    Raises:
        FrameError: The bytes are no header, or one that is impossible or beyond the limits.

    >>> decode_header(encode_header(FrameHeader(FrameKind.PING)), FrameLimits()).kind.name
    'PING'
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}")
    fields = _STRUCT.unpack(data)
    (magic, version, kind, flags, generation, microbatch, pass_index, payload_bytes, value, stage, leaf, num_leaves,
     code, ndim, alignment, layout, run, reserved) = fields[:18]  # fmt: skip
    if magic != MAGIC:
        raise FrameError(f"not a TorchSlicer frame: it begins with {magic!r}, not {MAGIC!r}; what is connected here?")
    if version != VERSION:
        raise FrameError(f"frame version {version}, expected {VERSION}; install the same release on both sides")
    if kind not in _KINDS or layout not in _LAYOUTS or flags & ~_ALL_FLAGS or reserved:
        raise FrameError(f"unknown kind {kind}, layout {layout}, flags {flags:#x} or reserved field {reserved:#x}")
    if ndim > MAX_NDIM or alignment > 63 or leaf >= max(num_leaves, 1):
        raise FrameError(f"impossible ndim {ndim}, alignment {alignment} or leaf {leaf} of {num_leaves}")
    if fields[18 + ndim : 26] != _UNUSED[ndim:] or fields[26 + ndim :] != _UNUSED[ndim:]:
        raise FrameError("sizes or strides are set beyond the number of dimensions")
    header = FrameHeader(
        _KINDS[kind], _flags(flags), generation, microbatch, pass_index, payload_bytes, value, stage, leaf, num_leaves,
        code, alignment, _LAYOUTS[layout], run, fields[18 : 18 + ndim], fields[26 : 26 + ndim],
    )  # fmt: skip
    (_check_tensor if code else _check_bytes)(header, limits)
    if expect is not None:
        expect(header)
    return header


@lru_cache(maxsize=None)
def _flags(bits: int) -> FrameFlags:
    return FrameFlags(bits)


def _check_bytes(header: FrameHeader, limits: FrameLimits) -> None:
    if header.shape or header.alignment or header.layout != Layout.BYTES:
        raise FrameError(f"{header.describe()}: a payload of bytes has no shape, alignment or layout")
    if header.payload_bytes > limits.max_control_bytes:
        raise _beyond(header, "bytes of a message", header.payload_bytes, limits.max_control_bytes)


def _check_tensor(header: FrameHeader, limits: FrameLimits) -> None:
    if header.kind == FrameKind.CONTROL or header.layout == Layout.BYTES:
        raise FrameError(f"{header.describe()}: expected a payload of bytes, got a tensor")
    extent = _extent(header.shape, header.strides, header.dtype_code)
    if header.layout != extent.layout:
        raise FrameError(f"{header.describe()}: strides {header.strides} do not have layout {header.layout.name}")
    if header.payload_bytes != extent.payload_bytes:
        raise FrameError(
            f"{header.describe()}: payload of {header.payload_bytes} bytes, but shape {header.shape} of "
            f"{header.dtype} takes {extent.payload_bytes}"
        )
    largest = max(extent.payload_bytes, extent.span_bytes)
    if largest > limits.max_payload_bytes:
        raise _beyond(header, "bytes of a tensor", largest, limits.max_payload_bytes)


class _Extent(NamedTuple):
    layout: Layout
    payload_bytes: int
    span_bytes: int


@lru_cache(maxsize=4096)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...], code: int) -> _Extent:
    """Compute what a shape takes; cached, since training sends the same few shapes for ever."""
    itemsize = itemsize_of(code)
    if any(stride < 0 for stride in strides) or prod(size or 1 for size in shape) > _MAX_EXTENT:
        raise FrameError(f"impossible shape {shape} with strides {strides}")
    span_bytes = span(shape, strides) * itemsize
    if is_dense(shape, strides):
        return _Extent(Layout.DENSE, prod(shape) * itemsize, span_bytes)
    return _Extent(Layout.COMPACT, prod(reduced_shape(shape, strides)) * itemsize, span_bytes)


def _beyond(header: FrameHeader, what: str, found: int, limit: int) -> FrameError:
    return FrameError(f"{header.describe()}: {found} {what}, more than the limit of {limit}")
