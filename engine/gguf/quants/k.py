"""K-quants: blocks of 256 whose runs of 16 or 32 have scales (and minima) of a few bits, in units of an f16.

The encoders search the scale (and minimum) of each run over the same kind of candidates as ggml, in float64: codes differ from ggml's here
and there, the squared error by a few percent at most, either way. Codes come from the scales after they are rounded.
"""

from __future__ import annotations

import numpy as np

from engine.gguf.quants.fields import Bytes, Coder, Doubles, Floats, f16, f16_bytes, join_bits, join_six, split_bits, split_six
from engine.gguf.quants.search import reciprocal, search_symmetric, search_with_min, signed_extreme


def _values(codes: Floats, steps: Floats) -> Floats:
    """codes [n, 256] times the steps [n, runs] of their runs."""
    n, runs = steps.shape
    values: Floats = codes.reshape(n, runs, -1) * steps[:, :, None]
    return values.reshape(n, 256)


def _decode_q2_k(blocks: Bytes) -> Floats:
    steps, lows = f16(blocks, 80) * (blocks[:, :16] & 15), f16(blocks, 82) * (blocks[:, :16] >> 4)
    return _values(split_bits(blocks[:, 16:80], 32, 2).astype(np.float32), steps) - np.repeat(lows, 16, axis=1)


def _decode_q3_k(blocks: Bytes) -> Floats:
    low, high = split_bits(blocks[:, 96:104], 8, 4), split_bits(blocks[:, 104:108], 4, 2)
    steps = f16(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)
    codes = split_bits(blocks[:, 32:96], 32, 2) | split_bits(blocks[:, :32], 32, 1) << 2
    return _values(codes.astype(np.float32) - 4, steps)


def _decode_q4_k(blocks: Bytes) -> Floats:
    return _scaled_less_min(blocks, split_bits(blocks[:, 16:], 32, 4))


def _decode_q5_k(blocks: Bytes) -> Floats:
    return _scaled_less_min(blocks, split_bits(blocks[:, 48:], 32, 4) | split_bits(blocks[:, 16:48], 32, 1) << 4)


def _scaled_less_min(blocks: Bytes, codes: Bytes) -> Floats:
    """d * scale * code - dmin * min for each run of 32; the head of Q4_K and Q5_K is the same."""
    scales, mins = split_six(blocks[:, 4:16])
    return _values(codes.astype(np.float32), f16(blocks, 0) * scales) - np.repeat(f16(blocks, 2) * mins, 32, axis=1)


def _decode_q6_k(blocks: Bytes) -> Floats:
    codes = split_bits(blocks[:, :128], 64, 4) | split_bits(blocks[:, 128:192], 32, 2) << 4
    return _values(codes.astype(np.float32) - 32, f16(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _encode_q2_k(values: Floats) -> Bytes:
    x = values.astype(np.float64).reshape(-1, 16, 16)
    steps, lows = search_with_min(x, np.abs(x), top=3, first=-0.5, n_steps=15, power=1)
    d, dmin, scales, mins, codes = _with_mins(x, steps, lows, 15, 3)
    return np.concatenate([scales | mins << 4, join_bits(codes, 32, 2), d, dmin], axis=1)


def _encode_q3_k(values: Floats) -> Bytes:
    d, scales, codes = _with_scales(values, half=4, limit=32)
    scales, codes = scales + 32, codes + 4
    packed = [join_bits(codes >> 2, 32, 1), join_bits(codes & 3, 32, 2), join_bits(scales & 15, 8, 4), join_bits(scales >> 4, 4, 2), d]
    return np.concatenate(packed, axis=1)


def _encode_q4_k(values: Floats) -> Bytes:
    head, codes = _six_bits(values, top=15, first=-1.0, n_steps=20)
    return np.concatenate([head, join_bits(codes, 32, 4)], axis=1)


def _encode_q5_k(values: Floats) -> Bytes:
    head, codes = _six_bits(values, top=31, first=-0.5, n_steps=15)
    return np.concatenate([head, join_bits(codes >> 4, 32, 1), join_bits(codes & 15, 32, 4)], axis=1)


def _six_bits(values: Floats, top: int, first: float, n_steps: int) -> tuple[Bytes, Bytes]:
    """The head (d, dmin, 6-bit scales and minima) and the codes of Q4_K and Q5_K."""
    x = values.astype(np.float64).reshape(-1, 8, 32)
    weights = np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + np.abs(x)
    d, dmin, scales, mins, codes = _with_mins(x, *search_with_min(x, weights, top, first, n_steps), 63, top)
    return np.concatenate([d, dmin, join_six(scales, mins)], axis=1), codes


def _with_mins(x: Doubles, steps: Doubles, lows: Doubles, limit: int, top: int) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """d and dmin as f16 bytes, scales and minima 0 .. limit, codes 0 .. top [n, 256], of steps and minima (<= 0) [n, runs]."""
    d, scales = _in_units(steps, limit)
    dmin, mins = _in_units(-lows, limit)
    per_step = reciprocal(d * scales)[..., None]
    codes = np.clip(np.rint((x + (dmin * mins)[..., None]) * per_step), 0, top).astype(np.uint8)
    return f16_bytes(d), f16_bytes(dmin), scales.astype(np.uint8), mins.astype(np.uint8), codes.reshape(-1, 256)


def _in_units(values: Doubles, limit: int) -> tuple[Doubles, Doubles]:
    """Values >= 0 of a block as an f16 step [n, 1] and codes 0 .. limit [n, runs]."""
    largest = values.max(axis=1, keepdims=True)
    codes = np.clip(np.rint(values * (limit * reciprocal(largest))), 0, limit)
    return (largest / limit).astype(np.float16).astype(np.float64), codes


def _encode_q6_k(values: Floats) -> Bytes:
    d, scales, codes = _with_scales(values, half=32, limit=128)
    codes = codes + 32
    return np.concatenate([join_bits(codes & 15, 64, 4), join_bits(codes >> 4, 32, 2), scales, d], axis=1)


def _with_scales(values: Floats, half: int, limit: int) -> tuple[Bytes, Bytes, Bytes]:
    """d as f16 bytes, scales -limit .. limit - 1 [n, 16], codes -half .. half - 1 [n, 256]; both modulo 256."""
    x = values.astype(np.float64).reshape(-1, 16, 16)
    steps = search_symmetric(x, half)
    per_unit = -limit * reciprocal(signed_extreme(steps))
    d = reciprocal(per_unit).astype(np.float16).astype(np.float64)
    scales = np.clip(np.rint(steps * per_unit), -limit, limit - 1)
    codes = np.clip(np.rint(x * reciprocal(d * scales)[..., None]), -half, half - 1)
    return f16_bytes(d), scales.astype(np.int8).view(np.uint8), codes.astype(np.int8).view(np.uint8).reshape(-1, 256)


DECODERS: dict[str, Coder] = {"q2_k": _decode_q2_k, "q3_k": _decode_q3_k, "q4_k": _decode_q4_k, "q5_k": _decode_q5_k, "q6_k": _decode_q6_k}
ENCODERS: dict[str, Coder] = {"q2_k": _encode_q2_k, "q3_k": _encode_q3_k, "q4_k": _encode_q4_k, "q5_k": _encode_q5_k, "q6_k": _encode_q6_k}
