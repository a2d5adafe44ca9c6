"""What the shape, strides and dtype of a tensor mean in bytes. Checked once for each of the few forms a run sends."""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torchslicer.errors import FrameError
from torchslicer.transport.dtypes import itemsize_of
from torchslicer.transport.payload import is_dense, reduced_shape, span

MAX_NDIM = 8
# Products beyond this cannot be sizes of anything; it keeps torch's own 64-bit arithmetic from overflowing.
_MAX_EXTENT = 1 << 48
_STRUCT = struct.Struct("<8Q8q")
_UNUSED = (0,) * MAX_NDIM


class Layout(IntEnum):
    """How the payload's bytes become the tensor's memory."""

    BYTES = 0  # no tensor
    DENSE = 1  # the tensor's memory from its first byte to its last
    COMPACT = 2  # its elements in row-major order, dimensions of stride 0 once; the receiver spreads them


class Geometry(NamedTuple):
    """A valid form of a tensor; strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype_code: int
    layout: Layout
    payload_bytes: int
    span_bytes: int
    packed: bytes

    @property
    def largest_bytes(self) -> int:
        """The larger of what travels and what the receiver's tensor spans."""
        return max(self.payload_bytes, self.span_bytes)


PLAIN_BYTES = Geometry((), (), 0, Layout.BYTES, 0, 0, bytes(_STRUCT.size))


@lru_cache(maxsize=4096)
def geometry_of(shape: tuple[int, ...], strides: tuple[int, ...], code: int) -> Geometry:
    """Compute what a tensor takes.

    Raises:
        FrameError: There can be no such tensor.

    >>> geometry_of((2, 3), (3, 1), 17).payload_bytes
    24
    """
    itemsize = itemsize_of(code)
    if len(shape) > MAX_NDIM:
        raise FrameError(f"a tensor of {len(shape)} dimensions cannot be sent; at most {MAX_NDIM} are possible")
    if any(stride < 0 for stride in strides) or prod(size or 1 for size in shape) > _MAX_EXTENT:
        raise FrameError(f"impossible shape {shape} with strides {strides}")
    fill = _UNUSED[len(shape) :]
    dense = is_dense(shape, strides)
    return Geometry(
        shape,
        strides,
        code,
        Layout.DENSE if dense else Layout.COMPACT,
        prod(shape if dense else reduced_shape(shape, strides)) * itemsize,
        span(shape, strides) * itemsize,
        _STRUCT.pack(*shape, *fill, *strides, *fill),
    )


@lru_cache(maxsize=4096)
def unpack_geometry(packed: bytes, ndim: int, code: int, layout: int) -> Geometry:
    """Read sizes and strides from the last 128 bytes of a header.

    Raises:
        FrameError: They are impossible, or do not have the layout or number of dimensions that the header says.
    """
    fields = _STRUCT.unpack(packed)
    if ndim > MAX_NDIM or fields[ndim:MAX_NDIM] != _UNUSED[ndim:] or fields[MAX_NDIM + ndim :] != _UNUSED[ndim:]:
        raise FrameError(f"sizes or strides are set beyond the number of dimensions, {ndim}")
    if code == 0:
        if ndim or layout != Layout.BYTES:
            raise FrameError("a payload of plain bytes has no shape and no layout")
        return PLAIN_BYTES
    shape, strides = fields[:ndim], fields[MAX_NDIM : MAX_NDIM + ndim]
    geometry = geometry_of(shape, strides, code)
    if geometry.layout != layout:
        raise FrameError(f"shape {shape} with strides {strides} has layout {geometry.layout.name}, not {layout}")
    return geometry
