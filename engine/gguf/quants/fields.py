"""Fields of blocks: 16-bit floats, codes of a few bits, flags; and what all formats share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# uint8, float32 and float64; NumPy's stubs lose the width in expressions like `codes << 4`.
Bytes: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[Any]
Coder: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]

# `run` is the number of bytes after which a format moves on from low to high bits.


def f16(blocks: Bytes, at: int) -> Floats:
    """The f16 field at byte `at`: float32 [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def f16_bytes(values: NDArray[Any]) -> Bytes:
    """[n_blocks] or [n_blocks, 1], rounded to f16: uint8 [n_blocks, 2]."""
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def split_bits(packed: Bytes, run: int, bits: int) -> Bytes:
    """Codes of `bits` bits: of each `run` bytes the lowest bits of all, then the next of all, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: Bytes = packed.reshape(len(packed), -1, 1, run) >> shifts & ((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def join_bits(codes: Bytes, run: int, bits: int) -> Bytes:
    """The inverse of `split_bits`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(codes.reshape(len(codes), -1, 8 // bits, run) << shifts, axis=2)
    return packed.reshape(len(codes), -1)


def split_flags(packed: Bytes) -> Bytes:
    """The 32 bits of a little-endian u32, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def join_flags(flags: Bytes) -> Bytes:
    return np.packbits(flags, axis=1, bitorder="little")


def split_six(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minimums of 6 bits; the top bits of the last four are in bytes 0 to 7."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return scales, mins


def join_six(scales: Bytes, mins: Bytes) -> Bytes:
    (s, t), (m, n) = np.split(scales, 2, axis=1), np.split(mins, 2, axis=1)
    return np.concatenate([s | (t >> 4 << 6), m | (n >> 4 << 6), (t & 15) | ((n & 15) << 4)], axis=1)
