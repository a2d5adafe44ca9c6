"""Tensors that two processes of a host exchange without a copy on the receiver's side.

The sender lends: it copies a tensor into memory that both map, and tells by a frame without payload where it lies. The
receiver computes on those pages; when its tensor is freed, the block is the sender's again. A socket would copy twice,
the second time with the receiver's core, into memory that has left the caches (``docs/decisions/0006``)::

    0        64                    block: 64 bytes, the first of which says whether it is lent
    | unused | block | payload ... | block | payload ...

The memory has no name and no file: its descriptor goes through the UNIX socket, and it ends with the two processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

from torchslicer.errors import FrameError
from torchslicer.transport.dtypes import DTYPE_OF_CODE
from torchslicer.transport.frame import Frame, FrameHeader, FrameKind
from torchslicer.transport.geometry import Layout
from torchslicer.transport.payload import ALIGNMENT, memory_at, span
from torchslicer.transport.posix import FCNTL

HEAD_BYTES = 64
_PAGE_BYTES = 4096
_FREE, _LENT = 0, 1
# The memory keeps its size, so that no page can vanish under a receiver that computes.
_SEALS = tuple(getattr(FCNTL, name, 0) for name in ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"))

AVAILABLE = all(_SEALS) and hasattr(os, "memfd_create")
"""Whether this system has such memory: Linux."""


_KINDS = (FrameKind.FORWARD, FrameKind.BACKWARD, FrameKind.INPUT, FrameKind.TARGET)
"""What lives for a step at most. Weights and outputs stay with whoever gets them, and need memory of their own."""
_LEAST_BYTES = 64 << 10


def worth_lending(frame: Frame, payload: memoryview) -> bool:
    """Whether shared memory is the better way for a frame whose wire form is *payload*."""
    header = frame.header
    return (
        header.payload_bytes >= _LEAST_BYTES
        and header.kind in _KINDS
        and header.geometry.layout == Layout.DENSE
        and len(payload) == header.payload_bytes
    )


class Lender:
    """The sender's end.

    Args:
        size_bytes: What is lent at most at a time. Pages are taken when they are used first.

    Attributes:
        descriptor: To be sent to the receiver; None once `given` was called.

    Raises:
        OSError: The system gives no such memory.
    """

    def __init__(self, size_bytes: int) -> None:
        size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.descriptor: int | None = os.memfd_create("torchslicer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            FCNTL.fcntl(self.descriptor, FCNTL.F_ADD_SEALS, sum(_SEALS))
            self._map, self._base = _mapped(self.descriptor, size_bytes)
        except BaseException:
            self.given()
            raise
        self._blocks: list[tuple[int, int]] = []  # where each begins, and how many bytes it has, in that order

    def given(self) -> None:
        """Close the descriptor: the receiver has one of its own."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def lend(self, address: int, size_bytes: int, alignment: int) -> int | None:
        """Copy *size_bytes* from *address* into a free block; return where it begins, None if there is no room."""
        block = self._free_block(HEAD_BYTES + ALIGNMENT + size_bytes)
        if block is not None:
            ctypes.memmove(self._base + block + HEAD_BYTES + alignment, address, size_bytes)
            self._map[block] = _LENT
        return block

    def _free_block(self, size_bytes: int) -> int | None:
        """Return the first free block that is large enough, but not twice as large, or a new one."""
        for block, capacity in self._blocks:
            if size_bytes <= capacity < 2 * size_bytes and self._map[block] == _FREE:
                return block
        capacity = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        made = self._new_block(capacity)
        if made is None:  # tensors of other sizes come now: what is free goes together again
            self._blocks = [each for each in self._blocks if self._map[each[0]] != _FREE]
            made = self._new_block(capacity)
        return made

    def _new_block(self, capacity: int) -> int | None:
        """Make a block in the first gap that has room for it."""
        begin = HEAD_BYTES
        for index, (block, other) in enumerate([*self._blocks, (len(self._map), 0)]):
            if begin + capacity <= block:
                self._blocks.insert(index, (begin, capacity))
                return begin
            begin = block + other
        return None


class Borrower:
    """The receiver's end.

    Args:
        descriptor: What the sender sent; it is closed here.

    Raises:
        FrameError: It is no memory that keeps its size.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            if not AVAILABLE or FCNTL.fcntl(descriptor, FCNTL.F_GET_SEALS) & _SEALS[0] == 0:
                raise FrameError("a descriptor came that is not of sealed shared memory")
            self._map, self._base = _mapped(descriptor, os.fstat(descriptor).st_size)
        except (OSError, ValueError) as error:
            raise FrameError(f"shared memory cannot be used: {error}; same_host=False does without") from error
        finally:
            os.close(descriptor)

    def borrow(self, block: int, header: FrameHeader) -> torch.Tensor:
        """Return the tensor that lies in *block*, which is lent until the tensor's memory is freed.

        Raises:
            FrameError: There can be no such block.
        """
        geometry, first = header.geometry, block + HEAD_BYTES + header.alignment
        fits = 0 < geometry.payload_bytes <= len(self._map) - first
        if block % HEAD_BYTES or geometry.layout != Layout.DENSE or not fits:
            raise FrameError(f"{header.describe()}: cannot lie at {block} of {len(self._map)} bytes of shared memory")
        memory = memory_at(self._base + first, geometry.payload_bytes, _Loan(self._map, block))
        elements = span(geometry.shape, geometry.strides)
        flat = torch.frombuffer(memory, dtype=DTYPE_OF_CODE[geometry.dtype_code], count=elements)
        return flat.as_strided(geometry.shape, geometry.strides)


class _Loan:
    """Lives as long as the borrowed tensor's memory, and gives the block back.

    Not in a process that was forked meanwhile: its copy of the tensor ends, not the tensor.
    """

    __slots__ = ("_block", "_getpid", "_map", "_process")

    def __init__(self, memory: mmap.mmap, block: int) -> None:
        self._map, self._block = memory, block
        self._getpid = os.getpid  # still there when the interpreter ends
        self._process = os.getpid()

    def __del__(self) -> None:
        if self._getpid() == self._process:
            self._map[self._block] = _FREE


def _mapped(descriptor: int, size_bytes: int) -> tuple[mmap.mmap, int]:
    """Map the memory; return it with its address."""
    memory = mmap.mmap(descriptor, size_bytes)
    anchor: Any = ctypes.c_char.from_buffer(memory)
    return memory, ctypes.addressof(anchor)
