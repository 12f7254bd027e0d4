"""Formats with one f16 scale, perhaps a minimum, and codes that are numbers: floats, Q4_0 to Q8_0, Q1_0, Q2_0, TQ1_0, TQ2_0.

The encoders choose scale and codes in float32 exactly as ggml does, nothing fused, so that ties fall the same way. Codes come from the
scale before it is rounded to f16.
"""

from __future__ import annotations

import numpy as np

from engine.dtypes import from_bf16, to_bf16
from engine.gguf.quants.fields import Bytes, Coder, Floats, f16, f16_bytes, join_bits, join_flags, split_bits, split_flags
from engine.gguf.quants.search import reciprocal, round_away, signed_extreme


def _decode_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _decode_f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: Bytes) -> Floats:
    return from_bf16(blocks.view("<u2"))


def _decode_q4_0(blocks: Bytes) -> Floats:
    codes = split_bits(blocks[:, 2:], 16, 4).astype(np.float32) - 8
    return codes * f16(blocks, 0)


def _decode_q4_1(blocks: Bytes) -> Floats:
    codes = split_bits(blocks[:, 4:], 16, 4).astype(np.float32)
    return codes * f16(blocks, 0) + f16(blocks, 2)


def _decode_q5_0(blocks: Bytes) -> Floats:
    codes = split_bits(blocks[:, 6:], 16, 4) | split_flags(blocks[:, 2:6]) << 4
    values: Floats = (codes.astype(np.float32) - 16) * f16(blocks, 0)
    return values


def _decode_q5_1(blocks: Bytes) -> Floats:
    codes = split_bits(blocks[:, 8:], 16, 4) | split_flags(blocks[:, 4:8]) << 4
    values: Floats = codes.astype(np.float32) * f16(blocks, 0) + f16(blocks, 2)
    return values


def _decode_q8_0(blocks: Bytes) -> Floats:
    values: Floats = blocks[:, 2:].view(np.int8).astype(np.float32) * f16(blocks, 0)
    return values


def _decode_q1_0(blocks: Bytes) -> Floats:
    values: Floats = (2 * split_flags(blocks[:, 2:]).astype(np.float32) - 1) * f16(blocks, 0)
    return values


def _decode_q2_0(blocks: Bytes) -> Floats:
    values: Floats = (split_bits(blocks[:, 2:], 1, 2).astype(np.float32) - 1) * f16(blocks, 0)
    return values


def _decode_tq1_0(blocks: Bytes) -> Floats:
    """Digits in base 3: a byte is the fraction 0.d0 d1 d2 d3 d4, in 256ths, rounded up."""
    digits = [_ternary(blocks[:, :32], 5), _ternary(blocks[:, 32:48], 5), _ternary(blocks[:, 48:52], 4)]
    values: Floats = (np.concatenate(digits, axis=1).astype(np.float32) - 1) * f16(blocks, 52)
    return values


def _ternary(packed: Bytes, n_digits: int) -> Bytes:
    """The first digit of all bytes, then the next of all: [n, bytes] -> [n, n_digits * bytes]."""
    shifted = packed[:, None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:n_digits, None]  # modulo 256
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _decode_tq2_0(blocks: Bytes) -> Floats:
    values: Floats = (split_bits(blocks[:, :64], 32, 2).astype(np.float32) - 1) * f16(blocks, 64)
    return values


def _encode_f32(values: Floats) -> Bytes:
    return values.astype("<f4", copy=False).view(np.uint8)


def _encode_f16(values: Floats) -> Bytes:
    """Round to nearest even; a NaN becomes the quiet NaN of its sign."""
    bits = np.where(np.isnan(values), 0x7E00 | np.signbit(values) * 0x8000, values.astype(np.float16).view(np.uint16))
    return bits.astype("<u2").view(np.uint8)


def _encode_bf16(values: Floats) -> Bytes:
    return to_bf16(values).astype("<u2").view(np.uint8)


def _symmetric(values: Floats, half: int) -> tuple[Floats, Bytes]:
    """Scale and codes 0 .. 2 half - 1, the value of largest magnitude on code 0."""
    steps = signed_extreme(values) / np.float32(-half)
    codes = np.trunc(values * reciprocal(steps) + np.float32(half + 0.5))
    return steps, np.clip(codes, 0, 2 * half - 1).astype(np.uint8)


def _from_min(values: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """Scale, minimum and codes 0 .. top. The first of equals counts, which says what sign a zero has."""
    low, high = (np.take_along_axis(values, at(values, axis=1, keepdims=True), axis=1) for at in (np.argmin, np.argmax))
    steps = (high - low) / np.float32(top)
    codes = np.trunc((values - low) * reciprocal(steps) + np.float32(0.5))
    return steps, low, np.clip(codes, 0, top).astype(np.uint8)


def _encode_q4_0(values: Floats) -> Bytes:
    steps, codes = _symmetric(values, 8)
    return np.concatenate([f16_bytes(steps), join_bits(codes, 16, 4)], axis=1)


def _encode_q4_1(values: Floats) -> Bytes:
    steps, low, codes = _from_min(values, 15)
    return np.concatenate([f16_bytes(steps), f16_bytes(low), join_bits(codes, 16, 4)], axis=1)


def _encode_q5_0(values: Floats) -> Bytes:
    steps, codes = _symmetric(values, 16)
    return np.concatenate([f16_bytes(steps), join_flags(codes >> 4), join_bits(codes & 15, 16, 4)], axis=1)


def _encode_q5_1(values: Floats) -> Bytes:
    steps, low, codes = _from_min(values, 31)
    return np.concatenate([f16_bytes(steps), f16_bytes(low), join_flags(codes >> 4), join_bits(codes & 15, 16, 4)], axis=1)


def _encode_q8_0(values: Floats) -> Bytes:
    steps = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.clip(round_away(values * reciprocal(steps)), -127, 127)
    return np.concatenate([f16_bytes(steps), codes.astype(np.int8).view(np.uint8)], axis=1)


def _encode_q1_0(values: Floats) -> Bytes:
    """Signs; the scale is the mean magnitude, added up from the first to the last element."""
    steps = np.add.accumulate(np.abs(values), axis=1, dtype=np.float32)[:, -1:] / np.float32(128)
    return np.concatenate([f16_bytes(steps), join_flags((values >= 0).view(np.uint8))], axis=1)


def _thirds(values: Floats) -> tuple[Bytes, Bytes]:
    """The scale, the largest magnitude, as f16 bytes, and codes 0, 1, 2."""
    steps = np.abs(values).max(axis=1, keepdims=True)
    return f16_bytes(steps), (round_away(values * reciprocal(steps)) + 1).astype(np.uint8)


def _encode_q2_0(values: Floats) -> Bytes:
    steps, codes = _thirds(values)
    return np.concatenate([steps, join_bits(codes, 1, 2)], axis=1)


def _encode_tq1_0(values: Floats) -> Bytes:
    steps, codes = _thirds(values)
    parts = np.split(codes, [160, 240], axis=1)
    return np.concatenate([*(_join_ternary(p, n) for p, n in zip(parts, (5, 5, 4), strict=True)), steps], axis=1)


def _join_ternary(codes: Bytes, n_digits: int) -> Bytes:
    """The inverse of `_ternary`."""
    powers = np.array([81, 27, 9, 3, 1], np.uint16)[:n_digits, None]
    number = (codes.reshape(len(codes), n_digits, -1) * powers).sum(axis=1, dtype=np.uint16)
    return ((number * 256 + 242) // 243).astype(np.uint8)


def _encode_tq2_0(values: Floats) -> Bytes:
    steps, codes = _thirds(values)
    return np.concatenate([join_bits(codes, 32, 2), steps], axis=1)


DECODERS: dict[str, Coder] = {
    "f32": _decode_f32, "f16": _decode_f16, "bf16": _decode_bf16, "q4_0": _decode_q4_0, "q4_1": _decode_q4_1, "q5_0": _decode_q5_0,
    "q5_1": _decode_q5_1, "q8_0": _decode_q8_0, "q1_0": _decode_q1_0, "q2_0": _decode_q2_0, "tq1_0": _decode_tq1_0, "tq2_0":
    _decode_tq2_0}
ENCODERS: dict[str, Coder] = {
    "f32": _encode_f32, "f16": _encode_f16, "bf16": _encode_bf16, "q4_0": _encode_q4_0, "q4_1": _encode_q4_1, "q5_0": _encode_q5_0,
    "q5_1": _encode_q5_1, "q8_0": _encode_q8_0, "q1_0": _encode_q1_0, "q2_0": _encode_q2_0, "tq1_0": _encode_tq1_0, "tq2_0":
    _encode_tq2_0}
