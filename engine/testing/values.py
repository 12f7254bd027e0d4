"""Stored elements and their values: how float64 is rounded into a type, and what activations must be quantised to."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import I32, I64, Q4_1, Q5_1, Q8_X, RADIX, DType, from_bf16, to_bf16
from engine.gguf.quants import dequantize, quantize

Array = np.ndarray[Any, Any]
EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # below it float32 keeps an absolute, not a relative, precision
QUIET = np.errstate


def values(stored: Array, dtype: DType) -> Array:
    """Stored elements or block records as float64 (integers as int64)."""
    if dtype is Q8_X:
        planes = np.ascontiguousarray(stored["qs"]).view(np.int8).astype(np.float64)
        codes = RADIX * planes[..., :32] + planes[..., 32:]
        with QUIET(invalid="ignore"):
            return (codes * stored["d"].astype(np.float64)).reshape(*stored.shape[:-1], 32 * stored.shape[-1])
    if dtype.is_block:
        return dequantize(byte_rows(stored), dtype).astype(np.float64)
    if dtype in (I32, I64):
        return stored.astype(np.int64)
    with QUIET(invalid="ignore"):  # a NaN that signals
        return from_bf16(stored).astype(np.float64) if dtype.name == "bf16" else stored.astype(np.float64)


def elements(array: Array, dtype: DType) -> Array:
    """Values as they are stored: floats rounded to nearest even, blocks quantised."""
    if dtype is Q8_X:
        return quantize_activations(array)
    with QUIET(all="ignore"):
        if dtype.is_block:
            return records(quantize(array, dtype), dtype)
        return to_bf16(array.astype(np.float32)) if dtype.name == "bf16" else np.asarray(array).astype(dtype.numpy)


def byte_rows(records: Array) -> Array:
    """Block records [..., blocks] as bytes [..., row bytes]."""
    flat = np.ascontiguousarray(records).reshape(-1).view(np.uint8)
    return flat.reshape(*records.shape[:-1], records.shape[-1] * records.dtype.itemsize)


def records(rows: Array, dtype: DType) -> Array:
    """Bytes [..., row bytes] as block records [..., blocks]."""
    flat = np.ascontiguousarray(rows).reshape(-1).view(dtype.numpy)
    return flat.reshape(*rows.shape[:-1], rows.shape[-1] // dtype.nbytes)


def quantize_activations(x: Array) -> Array:
    """What QUANTIZE_ROWS must make of float32 rows, bit for bit: records of `Q8_X`.

    d = largest magnitude / L with L = RADIX * 127 + 126; codes = x * (L / largest), rounded to nearest even, are cut into a high byte,
    codes / RADIX rounded to nearest even, and the rest; s = d * sum of codes. A block that holds NaN or an infinity has the scale NaN; what
    such an element itself becomes is code 0.
    """
    with QUIET(all="ignore"):
        x = np.asarray(x, np.float32)
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
        top = np.fmax.reduce(np.abs(blocks), axis=-1, initial=np.float32(0))
        bad = ~np.isfinite(blocks).all(-1)
        largest = np.float32(RADIX * 127 + 126)
        inverse = np.where(top > 0, np.fmin(largest / top, np.float32(3e38)), np.float32(0)).astype(np.float32)
        scaled = np.rint(blocks * inverse[..., None])
        codes = np.where(np.isfinite(scaled), scaled, 0).astype(np.int32)
        high = np.rint(codes.astype(np.float32) * np.float32(1 / RADIX)).astype(np.int32)
        planes = np.concatenate([high, codes - RADIX * high], -1).astype(np.int8)
        out = np.zeros(blocks.shape[:-1], Q8_X.numpy)
        out["d"] = np.where(bad, np.float32(np.nan), top / largest)[..., None]
        out["sums"] = planes.reshape(*planes.shape[:-1], 4, 16).sum(-1, dtype=np.int32)
        out["s"] = out["d"] * codes.sum(-1, dtype=np.int32).astype(np.float32)[..., None]
        out["qs"] = np.ascontiguousarray(planes).reshape(-1).view("<u4").reshape(*planes.shape[:-1], 16)
        return out


def magnitudes(stored: Array, dtype: DType) -> Array:
    """|scale * (code - zero)| + |offset| of each element: what rounding errors are relative to."""
    if not dtype.has_offset:
        return np.abs(values(stored, dtype))
    positive = stored.copy()
    positive["d"] = np.abs(stored["d"])
    if dtype in (Q4_1, Q5_1):
        positive["m"] = np.abs(stored["m"])
    else:
        positive["dmin"] = -np.abs(stored["dmin"])
    return np.abs(values(positive, dtype))
