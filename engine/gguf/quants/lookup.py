"""Formats whose 4-bit codes stand for the values of a table: IQ4_NL, IQ4_XS, MXFP4, NVFP4.

IQ4_NL, MXFP4 and NVFP4 are encoded by ggml's plain rules, in float32; IQ4_XS by a search over ggml's candidates, in float64.
"""

from __future__ import annotations

import numpy as np

from engine.gguf.quants.fields import Bytes, Coder, Floats, f16, f16_bytes, join_bits, split_bits
from engine.gguf.quants.search import nearest, reciprocal, search_step, signed_extreme
from engine.grids import FP4, IQ4_NL

_SMALLEST = 1e-15  # ggml takes a run below it for zero
_MAGNITUDES = FP4[:8].astype(np.float32)


def _decode_iq4_nl(blocks: Bytes) -> Floats:
    values: Floats = IQ4_NL[split_bits(blocks[:, 2:], 16, 4)].astype(np.float32) * f16(blocks, 0)
    return values


def _decode_iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = split_bits(blocks[:, 4:8], 1, 4) | (high << 4).astype(np.uint8)
    steps = f16(blocks, 0) * (scales.astype(np.float32) - 32)
    codes = split_bits(blocks[:, 8:].reshape(-1, 16), 16, 4).reshape(-1, 8, 32)
    values: Floats = IQ4_NL[codes].astype(np.float32) * steps[:, :, None]
    return values.reshape(-1, 256)


def _exponent(codes: Bytes) -> Floats:
    """E8M0, halved: 2^(e - 128), subnormal for the first two."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 128).astype(np.float32)


def _decode_mxfp4(blocks: Bytes) -> Floats:
    values: Floats = FP4[split_bits(blocks[:, 1:], 16, 4)].astype(np.float32) * _exponent(blocks[:, :1])
    return values


def _small_float(codes: Bytes) -> Floats:
    """UE4M3, halved: 4 bits of exponent, 3 of mantissa; 0x7F is 0, the top bit is not looked at."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    value = np.where(exponent == 0, mantissa * np.float32(2.0**-10), np.ldexp(1 + mantissa / 8, exponent - 8))
    return np.where(codes == 0x7F, 0, value).astype(np.float32)


def _decode_nvfp4(blocks: Bytes) -> Floats:
    codes = split_bits(blocks[:, 4:].reshape(-1, 8), 8, 4).reshape(-1, 4, 16)
    values: Floats = FP4[codes].astype(np.float32) * _small_float(blocks[:, :4])[:, :, None]
    return values.reshape(-1, 64)


def _encode_iq4_nl(values: Floats) -> Bytes:
    """The value of largest magnitude is taken for the level -127; then the scale is fitted to the levels, with weights x squared."""
    extreme = signed_extreme(values)
    steps = extreme / np.float32(-127)
    codes = nearest(values * reciprocal(steps), IQ4_NL)
    levels = IQ4_NL[codes].astype(np.float32)
    weighted = values * values * levels
    wlx, wll = (np.add.accumulate(weighted * z, axis=1, dtype=np.float32)[:, -1:] for z in (values, levels))
    is_zero = np.abs(extreme) < np.float32(_SMALLEST)
    fitted = np.where(is_zero, 0, np.where(wll > 0, wlx / np.where(wll > 0, wll, 1), steps))
    codes = np.where(is_zero, 0, codes).astype(np.uint8)
    return np.concatenate([f16_bytes(fitted.astype(np.float32)), join_bits(codes, 16, 4)], axis=1)


def _encode_iq4_xs(values: Floats) -> Bytes:
    x = values.astype(np.float64).reshape(-1, 8, 32)
    extreme = signed_extreme(x)
    by = np.where(np.abs(extreme) < _SMALLEST, 0, reciprocal(extreme))
    levels = IQ4_NL.astype(np.float64)
    steps = search_step(x, x * x, [by * 127, *(by * (k - 127) for k in range(-7, 8))], lambda u: levels[nearest(u, levels)])
    d = (signed_extreme(steps) / -32).astype(np.float16).astype(np.float64)
    scales = np.clip(np.rint(steps * reciprocal(d)), -32, 31)
    codes = nearest(x * reciprocal(d * scales)[..., None], levels).reshape(-1, 32)
    scales = (scales + 32).astype(np.uint8)
    high = np.bitwise_or.reduce((scales >> 4).astype("<u2") << np.arange(0, 16, 2, dtype="<u2"), axis=1, keepdims=True).astype("<u2")
    fields = [f16_bytes(d), high.view(np.uint8), join_bits(scales & 15, 1, 4), join_bits(codes, 16, 4).reshape(len(scales), -1)]
    return np.concatenate(fields, axis=1)


def _nearest_fp4(x: Floats, steps: Floats) -> Bytes:
    """The codes nearest to x in these steps (>= 0); halfway it is the smaller magnitude. All are 0 where the step is."""
    middles = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    magnitudes = np.abs(x)
    codes = sum((magnitudes > m * steps for m in middles), np.zeros(x.shape, np.uint8))
    codes = np.where(steps > 0, codes, 0).astype(np.uint8)
    return codes | ((x < 0) & (codes > 0)).astype(np.uint8) << 3


def _encode_mxfp4(values: Floats) -> Bytes:
    """The exponent is that of the largest magnitude, less 2: E2M1 reaches 6."""
    largest = np.abs(values).max(axis=1, keepdims=True)
    exponents = np.where(largest > 0, np.clip(np.frexp(largest)[1] + 124, 0, 254), 0).astype(np.uint8)
    return np.concatenate([exponents, join_bits(_nearest_fp4(values, _exponent(exponents)), 16, 4)], axis=1)


def _to_small_float(x: Floats) -> Bytes:
    """x >= 0 as UE4M3: at most 448, halves up."""
    x = np.minimum(x, np.float32(448))
    exponents = np.where(x > 0, np.maximum(np.frexp(x)[1] - 1, -6), -6)
    mantissas = np.floor(np.ldexp(x, 3 - exponents) + np.float32(0.5)).astype(np.int32)  # 8 .. 16, less where subnormal
    return np.minimum((exponents + 6) * 8 + mantissas, 0x7E).astype(np.uint8)


def _encode_nvfp4(values: Floats) -> Bytes:
    x = values.reshape(-1, 4, 16)
    scales = _to_small_float(np.abs(x).max(axis=2) / np.float32(6))
    codes = _nearest_fp4(x, _small_float(scales)[:, :, None])
    return np.concatenate([scales, join_bits(codes.reshape(-1, 16), 8, 4).reshape(len(scales), -1)], axis=1)


DECODERS: dict[str, Coder] = {"iq4_nl": _decode_iq4_nl, "iq4_xs": _decode_iq4_xs, "mxfp4": _decode_mxfp4, "nvfp4": _decode_nvfp4}
ENCODERS: dict[str, Coder] = {"iq4_nl": _encode_iq4_nl, "iq4_xs": _encode_iq4_xs, "mxfp4": _encode_mxfp4, "nvfp4": _encode_nvfp4}
