"""Generated contents of operands, from a seed: mild and extreme values, NaN and infinities, blocks of any codes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from engine.dtypes import I8, I16, I32, I64, WEIGHT_BLOCKS, DType
from engine.gguf.quants import QUANTIZERS
from engine.testing.values import Array, elements, records

if TYPE_CHECKING:
    from engine.testing.example import Example
    from engine.testing.facts.base import Facts

KINDS = ("mild", "mild", "decade", "equal", "signs", "wide", "zeros", "special")
BLOCK_KINDS = ("codes", "codes", "quantized", "highest", "lowest", "zeros")
_SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 1e-40, -3e-42)
_ENDS = {"q8_0": (0x80, 0x7F), "mxfp4": (0xFF, 0x77), "nvfp4": (0xFF, 0x77)}  # bytes of the lowest and of the highest codes
_LIMITS = {"f16": (-7, 4), "bf16": (-37, 37), "f32": (-37, 37)}


def generate(rng: np.random.Generator, e: Example, name: str, facts: Facts) -> Array:
    """Stored elements of one operand."""
    shape, dtype, kind = e.shapes[name], e.dtypes[name], e.kinds[name]
    if name in facts.values:
        return elements(facts.values[name](rng, shape, e), dtype)
    if dtype in WEIGHT_BLOCKS:
        return _blocks(rng, shape, dtype, kind)
    if dtype in (I8, I16, I32, I64):
        reach = 2 ** (min(8 * dtype.nbytes, 32) - 1)
        return rng.choice([rng.integers(-5, 6, shape), rng.integers(-reach, reach, shape)]).astype(dtype.numpy)
    low, high = facts.decades.get(name, (-30, 30))
    bounds = _LIMITS.get(dtype.name, _LIMITS["f32"])
    x = _floats(rng, shape, kind, (max(low, bounds[0]), min(high, bounds[1])), facts.specials)
    return elements(x, dtype)


def _floats(rng: np.random.Generator, shape: tuple[int, ...], kind: str, decades: tuple[int, int], specials: str) -> Array:
    """Values of one kind; `decades` are the powers of ten they may have. Never beyond 4 times the largest."""
    base = np.clip(rng.standard_normal(shape), -4, 4)
    if kind == "decade":
        base *= 10.0 ** rng.integers(decades[0], decades[1] + 1)
    elif kind == "equal":
        base = np.full(shape, rng.choice([-1, 1]) * 10.0 ** rng.uniform(max(decades[0], -3), min(decades[1], 3)))
    elif kind == "signs":
        base = np.where(rng.random(shape) < 0.5, -1.0, 1.0) * 10.0 ** rng.uniform(max(decades[0], -3), min(decades[1], 3))
    elif kind == "wide":
        base *= 10.0 ** rng.integers(decades[0], decades[1] + 1, shape)
    elif kind == "zeros":  # whole blocks of activations among them
        base = np.where(rng.random((*shape[:-1], 1)) < 0.5, 0.0, base) * (np.arange(shape[-1]) // 32 % 2)
    elif kind == "special" and specials:
        pool = _SPECIALS if specials == "all" else (math.nan, -0.0)
        base = np.where(rng.random(shape) < 0.1, rng.choice(pool, shape), base)
    return base.astype(np.float32)


def _blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, kind: str) -> Array:
    """Block records: quantised values, or any codes at all; `highest` and `lowest` have every code at an end of its range, `zeros` some
    blocks with the scale 0. Scales are finite: what an infinite one times a code of 0 is, formats do not say."""
    if kind == "quantized" and dtype.name in QUANTIZERS:
        return elements(rng.standard_normal(shape), dtype)
    n = (*shape[:-1], shape[-1] // dtype.block_size)
    raw = rng.integers(0, 256, (*n, dtype.nbytes), np.uint8)
    if kind in ("highest", "lowest"):
        raw[...] = _ENDS.get(dtype.name, (0x00, 0xFF))[kind == "highest"]
    out = records(raw.reshape(*n[:-1], n[-1] * dtype.nbytes), dtype)
    if kind in ("highest", "lowest") and dtype.field("scales"):
        spread = out["scales"].view(np.uint8)
        spread[...] = rng.integers(0, 256, spread.shape, np.uint8)
    _set_scales(rng, out, dtype, n, rng.random(n) < 0.5 if kind == "zeros" else np.zeros(n, np.bool_))
    return out


def _set_scales(rng: np.random.Generator, out: Array, dtype: DType, n: tuple[int, ...], empty: Array) -> None:
    """Scales (and minima) of normal size, 0 where `empty`: f16 fields, MXFP4's exponent, and IQ1_M's f16 in the top nibbles of `scales`."""
    for f in dtype.fields:
        if f.unit == "f16":
            scales = rng.standard_normal(out[f.name].shape) * 10.0 ** rng.integers(-3, 2)
            out[f.name] = np.where(empty[..., None], 0, scales).astype(np.float16)
    if dtype.name == "mxfp4":
        out["e"] = np.where(empty, 0, rng.integers(117, 137, n))[..., None]
    elif dtype.name == "nvfp4":
        out["d"] = np.where(empty[..., None], 0, out["d"])
    elif dtype.name == "iq1_m":
        bits = np.where(empty, 0, rng.standard_normal(n)).astype(np.float16).view(np.uint16)
        nibbles = bits[..., None] >> np.array([0, 4, 8, 12], np.uint16) << 12
        out["scales"] = (out["scales"] & 0x0FFF) | nibbles
