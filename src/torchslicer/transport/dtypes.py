"""The code of every dtype on the wire; an exact table, so that an unknown code is an error and never a guess."""

from __future__ import annotations

from functools import cache

import torch

from torchslicer.errors import FrameError

# Codes never change their meaning; 0 stands for a payload of plain bytes. Names, because older builds lack some.
_NAMES: dict[int, str] = {
    1: "bool",
    2: "uint8",
    3: "int8",
    4: "int16",
    5: "int32",
    6: "int64",
    7: "uint16",
    8: "uint32",
    9: "uint64",
    16: "float16",
    17: "float32",
    18: "float64",
    19: "bfloat16",
    24: "complex32",
    25: "complex64",
    26: "complex128",
    32: "float8_e4m3fn",
    33: "float8_e5m2",
    34: "float8_e4m3fnuz",
    35: "float8_e5m2fnuz",
    36: "float8_e8m0fnu",
    37: "float4_e2m1fn_x2",
}
DTYPE_OF_CODE: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)
}
CODE_OF_DTYPE: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_ITEMSIZE: dict[int, int] = {code: dtype.itemsize for code, dtype in DTYPE_OF_CODE.items()}
# Bits are moved as integers: copies then exist for every dtype, and none of them touches a NaN.
_BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def code_of(dtype: torch.dtype) -> int:
    """Return the wire code of *dtype*.

    Raises:
        FrameError: The dtype has no code (quantised and sub-byte dtypes).

    >>> code_of(torch.float32)
    17
    """
    try:
        return CODE_OF_DTYPE[dtype]
    except KeyError:
        raise FrameError(f"a tensor of {dtype} cannot be sent; convert it, to torch.float32 for example") from None


def itemsize_of(code: int) -> int:
    """Return the bytes of one element; 1 for code 0, plain bytes.

    Raises:
        FrameError: The code is not in the table.
    """
    if code == 0:
        return 1
    try:
        return _ITEMSIZE[code]
    except KeyError:
        raise FrameError(f"unknown dtype code {code}; do both sides run the same version?") from None


@cache
def bits_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same size whose copies keep every bit."""
    return _BITS[dtype.itemsize]
