"""The block formats in NumPy: what the codes of a block mean, and how values become blocks.

These are references: plain, vectorised over blocks, exact in the arithmetic ggml's formats prescribe (float32: codes first, then one
product per scale). Kernels are tested against them. A decoder takes blocks, uint8 [n_blocks, block bytes], and gives float32
[n_blocks, block size]; an encoder is its counterpart. Each family of formats is a module with its tables `DECODERS` and `ENCODERS`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.dtypes import DType
from engine.errors import LanewiseError, ShapeError
from engine.gguf.quants import iq, k, lookup, plain
from engine.gguf.quants.fields import Coder

__all__ = ["DEQUANTIZERS", "NEED_IMPORTANCE", "QUANTIZERS", "dequantize", "quantize"]

DEQUANTIZERS: dict[str, Coder] = plain.DECODERS | k.DECODERS | lookup.DECODERS | iq.DECODERS
QUANTIZERS: dict[str, Coder] = plain.ENCODERS | k.ENCODERS | lookup.ENCODERS | iq.ENCODERS
NEED_IMPORTANCE = ("iq2_xxs", "iq2_xs", "iq1_s")
_CHUNK = 1 << 19  # elements worked on at a time: bounds the memory for temporaries


def dequantize(raw: NDArray[np.uint8], dtype: DType) -> NDArray[np.float32]:
    """Values of rows of blocks: uint8 [..., row bytes] -> float32 [..., n].

    Raises:
        ShapeError: `raw` is not rows of whole blocks, or the format has no reference here.
    """
    decode = _row_of(DEQUANTIZERS, dtype)
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % dtype.nbytes:
        expected = f"uint8 rows of a multiple of {dtype.nbytes} bytes"
        raise ShapeError(f"dequantize {dtype}: got {raw.dtype} {raw.shape}, expected {expected}")
    blocks = np.ascontiguousarray(raw).reshape(-1, dtype.nbytes)
    values = np.empty((len(blocks), dtype.block_size), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a scale of Inf or NaN is legal
        for part in _parts(len(blocks), dtype):
            values[part] = decode(blocks[part])
    return values.reshape(*raw.shape[:-1], raw.shape[-1] // dtype.nbytes * dtype.block_size)


def quantize(array: ArrayLike, dtype: DType) -> NDArray[np.uint8]:
    """Rows of values as blocks: [..., n], rounded to float32 first, -> uint8 [..., row bytes].

    A scale too large for f16 becomes Inf, as in ggml: values should stay below 65504 x the largest code.

    Raises:
        ShapeError: n is not a multiple of the block size, or the format has no reference here.
        LanewiseError: a block format was asked to hold Inf or NaN, or needs to be told how much each value matters.
    """
    if dtype.name in NEED_IMPORTANCE:
        raise LanewiseError(f"quantize to {dtype}: so few bits need an importance matrix, which is not read here; "
                            "iq1_m, iq2_s and q2_k are written without one")
    encode = _row_of(QUANTIZERS, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(array, np.float32)
    if np.ndim(array) == 0 or values.shape[-1] % dtype.block_size:
        expected = f"rows of a multiple of {dtype.block_size} elements"
        raise ShapeError(f"quantize to {dtype}: got {np.shape(array)}, expected {expected}")
    if dtype.is_block and not np.isfinite(values).all():
        raise LanewiseError(f"quantize to {dtype}: the values hold Inf or NaN, which blocks cannot; look for their source")
    runs = values.reshape(-1, dtype.block_size)
    blocks = np.empty((len(runs), dtype.nbytes), np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in _parts(len(runs), dtype):
            blocks[part] = encode(runs[part])
    return blocks.reshape(*values.shape[:-1], dtype.row_nbytes(values.shape[-1]))


def _row_of(table: dict[str, Coder], dtype: DType) -> Coder:
    if dtype.name not in table:
        raise ShapeError(f"{dtype} has no reference in NumPy; there are {', '.join(table)}")
    return table[dtype.name]


def _parts(n_blocks: int, dtype: DType) -> Iterator[slice]:
    step = max(1, _CHUNK // dtype.block_size)
    return (slice(at, at + step) for at in range(0, n_blocks, step))
