"""What the C library does with memory that a worker has freed.

A step allocates and frees the same tensors again and again. By default glibc gives the end of its heap back to the
system each time and asks for it anew, and every page is then cleared and mapped again, hundreds in a step. During a run
it keeps what was freed; afterwards all goes back.
"""

from __future__ import annotations

import ctypes
import functools
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 512 << 20
_LARGEST_ON_HEAP_BYTES = 32 << 20
"""The most that glibc allows; what is larger is mapped by itself."""


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    names = getattr(os, "confstr_names", {})
    if "CS_GNU_LIBC_VERSION" not in names or not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
        return None
    return ctypes.CDLL(None)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next step; False where it is not glibc, which is left alone.

    >>> keep_freed_memory() in (True, False)
    True
    """
    library = _glibc()
    if library is None:
        return False
    kept = library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept and library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP_BYTES))


def return_freed_memory() -> None:
    """Give the system back what is free."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
