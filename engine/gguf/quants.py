"""The block formats in NumPy: what the codes of a block mean, and how values become blocks.

These are references: plain, vectorised over blocks, exact in the arithmetic ggml's formats prescribe
(float32: codes first, then one product per scale). Kernels are tested against them. A decoder takes blocks,
uint8 [n_blocks, block bytes], and gives float32 [n_blocks, block size]; an encoder is its counterpart.

Quality of the encoders: the plain formats choose scale and codes in float32 exactly as ggml does, nothing
fused, so that ties fall the same way. Q4_K, Q5_K and Q6_K search the scale (and minimum) of each run by
weighted least squares over the same candidates as ggml, in float64: codes differ from ggml's here and there,
the squared error by a few percent at most, either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.dtypes import DType, from_bf16, to_bf16
from engine.errors import LanewiseError, ShapeError

# uint8, float32 and float64; NumPy's stubs lose the width in expressions like `codes << 4`.
Bytes: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[Any]
Coder: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]

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
        LanewiseError: a block format was asked to hold Inf or NaN.
    """
    encode = _row_of(QUANTIZERS, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(array, np.float32)
    if np.ndim(array) == 0 or values.shape[-1] % dtype.block_size:
        expected = f"rows of a multiple of {dtype.block_size} elements"
        raise ShapeError(f"quantize to {dtype}: got {np.shape(array)}, expected {expected}")
    if dtype.is_block and not np.isfinite(values).all():
        raise LanewiseError(
            f"quantize to {dtype}: the values hold Inf or NaN, which blocks cannot; look for their source"
        )
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


# Fields. `run` is the number of bytes after which a format moves on from low to high bits.


def _f16(blocks: Bytes, at: int) -> Floats:
    """The f16 field at byte `at`: float32 [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _f16_bytes(values: NDArray[Any]) -> Bytes:
    """[n_blocks] or [n_blocks, 1], rounded to f16: uint8 [n_blocks, 2]."""
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _split_bits(packed: Bytes, run: int, bits: int) -> Bytes:
    """Codes of `bits` bits: of each `run` bytes the lowest bits of all, then the next of all, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: Bytes = packed.reshape(len(packed), -1, 1, run) >> shifts & ((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _join_bits(codes: Bytes, run: int, bits: int) -> Bytes:
    """The inverse of `_split_bits`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(codes.reshape(len(codes), -1, 8 // bits, run) << shifts, axis=2)
    return packed.reshape(len(codes), -1)


def _split_flags(packed: Bytes) -> Bytes:
    """The 32 bits of a little-endian u32, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _join_flags(flags: Bytes) -> Bytes:
    return np.packbits(flags, axis=1, bitorder="little")


def _split_six(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minimums of 6 bits; the top bits of the last four are in bytes 0 to 7."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return scales, mins


def _join_six(scales: Bytes, mins: Bytes) -> Bytes:
    (s, t), (m, n) = np.split(scales, 2, axis=1), np.split(mins, 2, axis=1)
    return np.concatenate([s | (t >> 4 << 6), m | (n >> 4 << 6), (t & 15) | ((n & 15) << 4)], axis=1)


# Decoders.


def _decode_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _decode_f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: Bytes) -> Floats:
    return from_bf16(blocks.view("<u2"))


def _decode_q4_0(blocks: Bytes) -> Floats:
    codes = _split_bits(blocks[:, 2:], 16, 4).astype(np.float32) - 8
    return codes * _f16(blocks, 0)


def _decode_q4_1(blocks: Bytes) -> Floats:
    codes = _split_bits(blocks[:, 4:], 16, 4).astype(np.float32)
    return codes * _f16(blocks, 0) + _f16(blocks, 2)


def _decode_q5_0(blocks: Bytes) -> Floats:
    codes = _split_bits(blocks[:, 6:], 16, 4) | _split_flags(blocks[:, 2:6]) << 4
    values: Floats = (codes.astype(np.float32) - 16) * _f16(blocks, 0)
    return values


def _decode_q5_1(blocks: Bytes) -> Floats:
    codes = _split_bits(blocks[:, 8:], 16, 4) | _split_flags(blocks[:, 4:8]) << 4
    values: Floats = codes.astype(np.float32) * _f16(blocks, 0) + _f16(blocks, 2)
    return values


def _decode_q8_0(blocks: Bytes) -> Floats:
    values: Floats = blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(blocks, 0)
    return values


def _decode_q4_k(blocks: Bytes) -> Floats:
    return _scaled_less_min(blocks, _split_bits(blocks[:, 16:], 32, 4))


def _decode_q5_k(blocks: Bytes) -> Floats:
    codes = _split_bits(blocks[:, 48:], 32, 4) | _split_bits(blocks[:, 16:48], 32, 1) << 4
    return _scaled_less_min(blocks, codes)


def _scaled_less_min(blocks: Bytes, codes: Bytes) -> Floats:
    """d * scale * code - dmin * min for each run of 32; the head of Q4_K and Q5_K is the same."""
    scales, mins = _split_six(blocks[:, 4:16])
    steps, lows = _f16(blocks, 0) * scales, _f16(blocks, 2) * mins
    values: Floats = codes.reshape(-1, 8, 32).astype(np.float32) * steps[:, :, None] - lows[:, :, None]
    return values.reshape(-1, 256)


def _decode_q6_k(blocks: Bytes) -> Floats:
    codes = _split_bits(blocks[:, :128], 64, 4) | _split_bits(blocks[:, 128:192], 32, 2) << 4
    steps = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8)
    values: Floats = (codes.astype(np.float32) - 32).reshape(-1, 16, 16) * steps[:, :, None]
    return values.reshape(-1, 256)


# Encoders. Codes come from the scale before it is rounded to f16 in the plain formats, after in the K
# formats, as in ggml.


def _inverse(steps: NDArray[Any]) -> NDArray[Any]:
    """1 / step, and 0 where the step is 0 or too small to have one."""
    usable = np.abs(steps) >= np.finfo(steps.dtype).tiny
    inverse: NDArray[Any] = np.divide(1, steps, out=np.zeros_like(steps), where=usable)
    return inverse


def _signed_extreme(values: NDArray[Any]) -> NDArray[Any]:
    """The value of largest magnitude in each run, the first of equals: [..., 1]."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)


def _encode_f32(values: Floats) -> Bytes:
    return values.astype("<f4", copy=False).view(np.uint8)


def _encode_f16(values: Floats) -> Bytes:
    """Round to nearest even; a NaN becomes the quiet NaN of its sign."""
    bits = np.where(
        np.isnan(values), 0x7E00 | np.signbit(values) * 0x8000, values.astype(np.float16).view(np.uint16)
    )
    return bits.astype("<u2").view(np.uint8)


def _encode_bf16(values: Floats) -> Bytes:
    return to_bf16(values).astype("<u2").view(np.uint8)


def _symmetric(values: Floats, half: int) -> tuple[Floats, Bytes]:
    """Scale and codes 0 .. 2 half - 1, the value of largest magnitude on code 0."""
    steps = _signed_extreme(values) / np.float32(-half)
    codes = np.trunc(values * _inverse(steps) + np.float32(half + 0.5))
    return steps, np.clip(codes, 0, 2 * half - 1).astype(np.uint8)


def _from_min(values: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """Scale, minimum and codes 0 .. top."""
    low = values.min(axis=1, keepdims=True)
    steps = (values.max(axis=1, keepdims=True) - low) / np.float32(top)
    codes = np.trunc((values - low) * _inverse(steps) + np.float32(0.5))
    return steps, low, np.clip(codes, 0, top).astype(np.uint8)


def _encode_q4_0(values: Floats) -> Bytes:
    steps, codes = _symmetric(values, 8)
    return np.concatenate([_f16_bytes(steps), _join_bits(codes, 16, 4)], axis=1)


def _encode_q4_1(values: Floats) -> Bytes:
    steps, low, codes = _from_min(values, 15)
    return np.concatenate([_f16_bytes(steps), _f16_bytes(low), _join_bits(codes, 16, 4)], axis=1)


def _encode_q5_0(values: Floats) -> Bytes:
    steps, codes = _symmetric(values, 16)
    return np.concatenate([_f16_bytes(steps), _join_flags(codes >> 4), _join_bits(codes & 15, 16, 4)], axis=1)


def _encode_q5_1(values: Floats) -> Bytes:
    steps, low, codes = _from_min(values, 31)
    return np.concatenate(
        [_f16_bytes(steps), _f16_bytes(low), _join_flags(codes >> 4), _join_bits(codes & 15, 16, 4)], axis=1
    )


def _encode_q8_0(values: Floats) -> Bytes:
    steps = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = (values * _inverse(steps)).astype(np.float64)
    codes = np.trunc(scaled + np.copysign(0.5, scaled))  # halves away from zero
    return np.concatenate(
        [_f16_bytes(steps), np.clip(codes, -127, 127).astype(np.int8).view(np.uint8)], axis=1
    )


def _encode_q4_k(values: Floats) -> Bytes:
    head, codes = _with_mins(values, top=15, first=-1.0, n_steps=20)
    return np.concatenate([head, _join_bits(codes, 32, 4)], axis=1)


def _encode_q5_k(values: Floats) -> Bytes:
    head, codes = _with_mins(values, top=31, first=-0.5, n_steps=15)
    return np.concatenate([head, _join_bits(codes >> 4, 32, 1), _join_bits(codes & 15, 32, 4)], axis=1)


def _with_mins(values: Floats, top: int, first: float, n_steps: int) -> tuple[Bytes, Bytes]:
    """The head (d, dmin, 6-bit scales and minimums) and the codes of Q4_K and Q5_K."""
    x = values.astype(np.float64).reshape(-1, 8, 32)
    steps, lows = _search_with_min(x, top, first, n_steps)
    d, scales = _six_bits(steps)
    dmin, mins = _six_bits(-lows)
    steps, lows = d * scales, -dmin * mins
    codes = np.clip(np.rint((x - lows[..., None]) * _inverse(steps)[..., None]), 0, top).astype(np.uint8)
    head = [_f16_bytes(d), _f16_bytes(dmin), _join_six(scales.astype(np.uint8), mins.astype(np.uint8))]
    return np.concatenate(head, axis=1), codes.reshape(-1, 256)


def _six_bits(values: Doubles) -> tuple[Doubles, Doubles]:
    """Eight values >= 0 as an f16 step [n, 1] and codes 0 .. 63 [n, 8]."""
    largest = values.max(axis=1, keepdims=True)
    codes = np.clip(np.rint(values * (63 * _inverse(largest))), 0, 63)
    return (largest / 63).astype(np.float16).astype(np.float64), codes


def _search_with_min(x: Doubles, top: int, first: float, n_steps: int) -> tuple[Doubles, Doubles]:
    """Step and minimum (<= 0) of each run with the least weighted error: x [n, runs, 32] -> two [n, runs].

    Candidates round the run with an inverse step of (top + shift) / span, shift = first, first + 0.1, ...
    (span: from the best minimum so far), and then fit step and minimum to the codes by least squares.
    """
    weights = np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + np.abs(x)
    high, low = x.max(axis=-1), np.minimum(x.min(axis=-1), 0.0)
    step = (high - low) / top
    least = _error(x, weights, _codes_between(x, low, high, top, top), step, low)
    for i in range(n_steps + 1):
        codes = _codes_between(x, low, high, top + first + 0.1 * i, top)
        new_step, new_low = _fit_line(x, weights, codes)
        error = _error(x, weights, codes, new_step, new_low)
        better = error < least
        step, low = np.where(better, new_step, step), np.where(better, new_low, low)
        least = np.where(better, error, least)
    return step, low


def _codes_between(x: Doubles, low: Doubles, high: Doubles, n_codes: float, top: int) -> Doubles:
    """Codes 0 .. top of x when `n_codes` steps lead from low to high."""
    inverse = n_codes * _inverse(high - low)
    return np.clip(np.rint((x - low[..., None]) * inverse[..., None]), 0, top)


def _fit_line(x: Doubles, weights: Doubles, codes: Doubles) -> tuple[Doubles, Doubles]:
    """Step and minimum (<= 0) that bring step * codes + minimum nearest to x; 0 where all codes are equal."""
    w, wl, wx = weights.sum(-1), (weights * codes).sum(-1), (weights * x).sum(-1)
    wll, wlx = (weights * codes * codes).sum(-1), (weights * codes * x).sum(-1)
    inverse = _inverse(np.maximum(w * wll - wl * wl, 0.0))
    step, low = (w * wlx - wx * wl) * inverse, (wll * wx - wl * wlx) * inverse
    return np.where(low > 0, wlx * _inverse(wll), step), np.minimum(low, 0.0)


def _error(x: Doubles, weights: Doubles, codes: Doubles, step: Doubles, low: Doubles) -> Doubles:
    error: Doubles = (weights * (step[..., None] * codes + low[..., None] - x) ** 2).sum(-1)
    return error


def _encode_q6_k(values: Floats) -> Bytes:
    x = values.astype(np.float64).reshape(-1, 16, 16)
    steps = _search_symmetric(x, 32)
    inverse = -128 * _inverse(_signed_extreme(steps))
    d = _inverse(inverse).astype(np.float16).astype(np.float64)
    scales = np.clip(np.rint(steps * inverse), -128, 127)
    codes = np.clip(np.rint(x * _inverse(d * scales)[..., None]), -32, 31) + 32
    codes = codes.reshape(-1, 256).astype(np.uint8)
    tail = [scales.astype(np.int8).view(np.uint8), _f16_bytes(d)]
    return np.concatenate([_join_bits(codes & 15, 64, 4), _join_bits(codes >> 4, 32, 2), *tail], axis=1)


def _search_symmetric(x: Doubles, half: int) -> Doubles:
    """Step of each run for codes -half .. half - 1: x [n, runs, 16] -> [n, runs]; errors weigh x squared.

    Candidates round with an inverse step of -(half + shift) / extreme, shift = 0, then -0.9 .. 0.9; the step
    is fitted to the codes.
    """
    weights = x * x
    inverse = _inverse(_signed_extreme(x))
    best_step, best_gain = np.zeros(x.shape[:-1]), np.zeros(x.shape[:-1])
    for shift in (0, *range(-9, 0), *range(1, 10)):
        codes = np.clip(np.rint(x * inverse * -(half + 0.1 * shift)), -half, half - 1)
        wlx, wll = (weights * codes * x).sum(-1), (weights * codes * codes).sum(-1)
        step = wlx * _inverse(wll)
        better = step * wlx > best_gain
        best_step, best_gain = np.where(better, step, best_step), np.where(better, step * wlx, best_gain)
    return best_step


DEQUANTIZERS: dict[str, Coder] = {
    "f32": _decode_f32,
    "f16": _decode_f16,
    "bf16": _decode_bf16,
    "q4_0": _decode_q4_0,
    "q4_1": _decode_q4_1,
    "q5_0": _decode_q5_0,
    "q5_1": _decode_q5_1,
    "q8_0": _decode_q8_0,
    "q4_k": _decode_q4_k,
    "q5_k": _decode_q5_k,
    "q6_k": _decode_q6_k,
}
QUANTIZERS: dict[str, Coder] = {
    "f32": _encode_f32,
    "f16": _encode_f16,
    "bf16": _encode_bf16,
    "q4_0": _encode_q4_0,
    "q4_1": _encode_q4_1,
    "q5_0": _encode_q5_0,
    "q5_1": _encode_q5_1,
    "q8_0": _encode_q8_0,
    "q4_k": _encode_q4_k,
    "q5_k": _encode_q5_k,
    "q6_k": _encode_q6_k,
}
