"""IQ formats: 4 or 8 elements of a block of 256 are a point of a grid; signs and the scales of runs are kept apart.

The encoders search the scale of each run as for K-quants, with the nearest point of the grid in place of the nearest code, and choose the
points once more when the scales are rounded: those with the least weighted error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.gguf.quants.fields import Bytes, Coder, Doubles, Floats, f16, f16_bytes, join_bits, split_bits
from engine.gguf.quants.search import reciprocal, search_step
from engine.grids import GRIDS, SIGNS

_DELTA = 0.125  # what IQ1 formats add to a point, or take off
_ROWS = 1 << 12  # points looked up at a time: bounds the memory for distances


def _words(blocks: Bytes, at: int, count: int, kind: str) -> NDArray[np.int64]:
    """`count` integers from byte `at` on: int64 [n_blocks, count]."""
    width = np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, at : at + width * count]).view(kind).astype(np.int64)


def _negative(signs: NDArray[np.int64], n: int) -> NDArray[np.bool_]:
    """Bits of sign bytes, the lowest first: [...] -> [..., n]."""
    return (signs[..., None] >> np.arange(n) & 1).astype(np.bool_)


def _signed(points: NDArray[np.int8], signs: NDArray[np.int64]) -> Floats:
    """Points [n, runs, 4, 8] with their sign bytes [n, runs, 4]."""
    values = points.astype(np.float32)
    return np.where(_negative(signs, 8), -values, values)


def _scaled(points: Floats, steps: Floats) -> Floats:
    """Points of a block times the steps [n, runs] of its runs."""
    n, runs = steps.shape
    values: Floats = points.reshape(n, runs, -1) * steps[:, :, None]
    return values.reshape(n, 256)


def _decode_iq2_xxs(blocks: Bytes) -> Floats:
    words = _words(blocks, 2, 16, "<u4").reshape(-1, 8, 2)
    places, packed = words[..., :1] >> np.arange(0, 32, 8) & 255, words[..., 1]
    signs = SIGNS[packed[..., None] >> np.arange(0, 28, 7) & 127].astype(np.int64)
    steps = f16(blocks, 0) * (np.float32(0.5) + (packed >> 28).astype(np.float32)) * np.float32(0.25)
    return _scaled(_signed(GRIDS["iq2_xxs"][places], signs), steps)


def _quarters(blocks: Bytes, at: int) -> Floats:
    """Steps of 16 runs: d (0.5 + nibble) / 4."""
    return f16(blocks, 0) * (np.float32(0.5) + split_bits(blocks[:, at : at + 8], 1, 4)) * np.float32(0.25)


def _decode_iq2_xs(blocks: Bytes) -> Floats:
    words = _words(blocks, 2, 32, "<u2").reshape(-1, 8, 4)
    return _scaled(_signed(GRIDS["iq2_xs"][words & 511], SIGNS[words >> 9].astype(np.int64)), _quarters(blocks, 66))


def _decode_iq2_s(blocks: Bytes) -> Floats:
    low, signs = (_words(blocks, at, 32, "u1").reshape(-1, 8, 4) for at in (2, 34))
    high = _words(blocks, 66, 8, "u1")[..., None] >> np.arange(0, 8, 2) & 3
    return _scaled(_signed(GRIDS["iq2_s"][low | high << 8], signs), _quarters(blocks, 74))


def _decode_iq3_xxs(blocks: Bytes) -> Floats:
    packed = _words(blocks, 66, 8, "<u4")
    points = GRIDS["iq3_xxs"][blocks[:, 2:66]].reshape(-1, 8, 4, 8)
    signs = SIGNS[packed[..., None] >> np.arange(0, 28, 7) & 127].astype(np.int64)
    steps = f16(blocks, 0) * (np.float32(0.5) + (packed >> 28).astype(np.float32)) * np.float32(0.5)
    return _scaled(_signed(points, signs), steps)


def _decode_iq3_s(blocks: Bytes) -> Floats:
    high = _words(blocks, 66, 8, "u1")[..., None] >> np.arange(8) & 1
    places = _words(blocks, 2, 64, "u1").reshape(-1, 8, 8) | high << 8
    signs = _words(blocks, 74, 32, "u1").reshape(-1, 8, 4)
    steps = f16(blocks, 0) * (1 + 2 * split_bits(blocks[:, 106:110], 1, 4)).astype(np.float32)
    return _scaled(_signed(GRIDS["iq3_s"][places].reshape(-1, 8, 4, 8), signs), steps)


def _decode_iq1_s(blocks: Bytes) -> Floats:
    high = _words(blocks, 34, 8, "<u2")
    places = _words(blocks, 2, 32, "u1").reshape(-1, 8, 4) | (high[..., None] >> np.arange(0, 12, 3) & 7) << 8
    delta = np.where(high & 0x8000, -_DELTA, _DELTA).astype(np.float32)
    steps = f16(blocks, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    return _scaled(GRIDS["iq1_s"][places].astype(np.float32) + delta[..., None, None], steps)


def _decode_iq1_m(blocks: Bytes) -> Floats:
    """The nibbles of d are on top of the four scale words."""
    scales = _words(blocks, 48, 4, "<u2")
    d = ((scales >> 12) << np.arange(0, 16, 4)).sum(axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    steps = d * (2 * (scales[..., None] >> np.arange(0, 12, 3) & 7).reshape(-1, 16) + 1).astype(np.float32)
    nibbles = split_bits(blocks[:, 32:48], 1, 4).astype(np.int64)
    places = _words(blocks, 0, 32, "u1") | (nibbles & 7) << 8
    delta = np.where(nibbles & 8, -_DELTA, _DELTA).astype(np.float32)
    return _scaled(GRIDS["iq1_s"][places].astype(np.float32) + delta[..., None], steps)


# Encoders.


@dataclass(frozen=True)
class _Lattice:
    """A grid, and all numbers whose digits are levels, of which the grid has some."""

    points: NDArray[np.float32]  # [points, ndim]

    @cached_property
    def levels(self) -> NDArray[np.float32]:
        return np.unique(self.points)

    @cached_property
    def _near(self) -> NDArray[np.intp]:
        """Number -> its nearest point; the lowest digit is the first element."""
        n, ndim = len(self.levels), self.points.shape[1]
        numbers = self.levels[np.arange(n**ndim)[:, None] // n ** np.arange(ndim) % n]
        return self.nearest(numbers, np.ones_like(numbers))

    def round(self, u: Doubles) -> Doubles:
        """Values in steps [..., ndim] -> points nearby: the nearest of what each element alone is rounded to."""
        digits = np.searchsorted((self.levels[1:] + self.levels[:-1]) / 2, u)
        numbers = digits @ len(self.levels) ** np.arange(u.shape[-1])
        return self.points[self._near[numbers]].astype(np.float64)

    def nearest(self, u: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.intp]:
        """The point with the least sum of weights * (point - u)^2: [n, ndim] -> [n]."""
        terms = np.concatenate([self.points * self.points, -2 * self.points], axis=1).T
        out = np.empty(len(u), np.intp)
        for at in range(0, len(u), _ROWS):
            w = weights[at : at + _ROWS]
            out[at : at + _ROWS] = (np.concatenate([w, w * u[at : at + _ROWS]], axis=1) @ terms).argmin(axis=1)
        return out


_LATTICES = {name: _Lattice(grid.astype(np.float32)) for name, grid in GRIDS.items()}


def _weights(x: Doubles) -> Doubles:
    """Of elements [n, runs, length]: x squared, and a quarter of twice its mean over the block."""
    weights: Doubles = x * x + 0.5 * np.mean(x * x, axis=(1, 2), keepdims=True)
    return weights


def _search_points(lattice: _Lattice, magnitudes: Doubles, weights: Doubles) -> Doubles:
    """Step of each run: magnitudes [n, runs, length] -> [n, runs]. Candidates put the largest on the highest level, or up to 25% off."""
    by = reciprocal(magnitudes.max(axis=-1, keepdims=True)) * float(lattice.levels[-1])
    ndim = lattice.points.shape[1]

    def round_to(u: Doubles) -> Doubles:
        return lattice.round(u.reshape(-1, ndim)).reshape(u.shape)

    return search_step(magnitudes, weights, [by * (1 + 0.05 * k) for k in range(-5, 6)], round_to)


def _odd_units(steps: Doubles, limit: int) -> tuple[Doubles, Bytes, Doubles]:
    """Steps [n, runs] as an f16 unit [n, 1] times 2 code + 1, with codes 0 .. limit: unit, codes, and the steps they give."""
    unit = (steps.max(axis=1, keepdims=True) / (2 * limit + 1)).astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint((steps * reciprocal(unit) - 1) / 2), 0, limit)
    return unit, codes.astype(np.uint8), unit * (2 * codes + 1)


def _places(lattice: _Lattice, x: Doubles, weights: Doubles, steps: Doubles) -> NDArray[np.int64]:
    """Numbers of the points of a block: x [n, runs, length] -> [n, points]."""
    ndim = lattice.points.shape[1]
    u = (x * reciprocal(steps)[..., None]).astype(np.float32).reshape(-1, ndim)
    scale = reciprocal(weights.max(axis=-1, keepdims=True))  # float32 must hold them
    return lattice.nearest(u, (weights * scale).astype(np.float32).reshape(-1, ndim)).reshape(len(x), -1).astype(np.int64)


def _sign_bytes(x: Doubles) -> Bytes:
    return np.packbits(x.reshape(len(x), -1) < 0, axis=1, bitorder="little")


def _encode_iq2_s(values: Floats) -> Bytes:
    x = values.astype(np.float64).reshape(-1, 16, 16)
    lattice, weights, magnitudes = _LATTICES["iq2_s"], _weights(x), np.abs(x)
    unit, scales, steps = _odd_units(_search_points(lattice, magnitudes, weights), 15)
    places = _places(lattice, magnitudes, weights, steps)
    high = join_bits((places >> 8).astype(np.uint8), 1, 2)
    fields = [f16_bytes(unit * 8), (places & 255).astype(np.uint8), _sign_bytes(x), high, join_bits(scales, 1, 4)]
    return np.concatenate(fields, axis=1)


def _encode_iq3_s(values: Floats) -> Bytes:
    x = values.astype(np.float64).reshape(-1, 8, 32)
    lattice, weights, magnitudes = _LATTICES["iq3_s"], _weights(x), np.abs(x)
    unit, scales, steps = _odd_units(_search_points(lattice, magnitudes, weights), 15)
    places = _places(lattice, magnitudes, weights, steps)
    high = np.packbits((places >> 8).astype(np.uint8), axis=1, bitorder="little")
    fields = [f16_bytes(unit), (places & 255).astype(np.uint8), high, _sign_bytes(x), join_bits(scales, 1, 4)]
    return np.concatenate(fields, axis=1)


def _even_signs(x: Doubles, weights: Doubles) -> NDArray[np.bool_]:
    """Which elements are written as negative: an even number of each 8. The sign that costs least is changed."""
    eights = x.reshape(len(x), -1, 8)
    negative: NDArray[np.bool_] = eights < 0
    cheapest = (weights.reshape(eights.shape) * eights * eights).argmin(axis=-1)[..., None]
    odd = negative.sum(axis=-1, keepdims=True) % 2 == 1
    np.put_along_axis(negative, cheapest, np.take_along_axis(negative, cheapest, -1) ^ odd, -1)
    return negative.reshape(x.shape)


def _encode_iq3_xxs(values: Floats) -> Bytes:
    x = values.astype(np.float64).reshape(-1, 8, 32)
    lattice, weights = _LATTICES["iq3_xxs"], _weights(x)
    negative = _even_signs(x, weights)
    positive = np.where(negative, -x, x)  # an element whose sign is changed is below 0 here
    unit, scales, steps = _odd_units(_search_points(lattice, np.abs(x), weights), 15)
    places = _places(lattice, positive, weights, steps)
    signs = np.packbits(negative.reshape(len(x), -1), axis=1, bitorder="little").reshape(-1, 8, 4).astype(np.uint32) & 127
    packed = np.bitwise_or.reduce(signs << np.arange(0, 28, 7, dtype=np.uint32), axis=2) | scales.astype(np.uint32) << 28
    return np.concatenate([f16_bytes(unit * 4), places.astype(np.uint8), packed.astype("<u4").view(np.uint8)], axis=1)


def _encode_iq1_m(values: Floats) -> Bytes:
    x = values.astype(np.float64).reshape(-1, 16, 16)
    weights = _weights(x)
    unit, scales, steps = _odd_units(_search_ternary(x, weights), 7)
    tried = [_places(_LATTICES["iq1_s"], x - d * steps[..., None], weights, steps) for d in (_DELTA, -_DELTA)]
    eights = x.reshape(-1, 32, 8)
    costs = [_cost(eights, weights, p, np.repeat(steps, 2, axis=1), d) for p, d in zip(tried, (_DELTA, -_DELTA), strict=True)]
    lower = costs[1] < costs[0]
    places = np.where(lower, tried[1], tried[0])
    nibbles = (places >> 8 | lower.astype(np.int64) << 3).astype(np.uint8)
    words = np.bitwise_or.reduce(scales.reshape(-1, 4, 4).astype(np.uint16) << np.arange(0, 12, 3, dtype=np.uint16), axis=2)
    d = f16_bytes(unit).view("<u2") >> np.arange(0, 16, 4, dtype=np.uint16) << 12
    return np.concatenate([(places & 255).astype(np.uint8), join_bits(nibbles, 1, 4), (words | d).astype("<u2").view(np.uint8)], axis=1)


def _cost(x: Doubles, weights: Doubles, places: NDArray[np.int64], steps: Doubles, delta: float) -> Doubles:
    """Weighted squared error of each 8 elements."""
    written = (_LATTICES["iq1_s"].points[places] + delta) * steps[..., None]
    cost: Doubles = (weights.reshape(x.shape) * (written - x) ** 2).sum(-1)
    return cost


def _search_ternary(x: Doubles, weights: Doubles) -> Doubles:
    """Step of each run of 16. Candidates put the largest magnitude between 1 and 2.5 levels; each 8 elements have the better delta."""
    lattice = _LATTICES["iq1_s"]
    by = reciprocal(np.abs(x).max(axis=-1, keepdims=True))

    def round_to(u: Doubles) -> Doubles:
        eights, w = u.reshape(-1, 8), weights.reshape(-1, 8)
        upper, lower = (lattice.round(eights - d) + d for d in (_DELTA, -_DELTA))
        better = (w * (lower - eights) ** 2).sum(-1) < (w * (upper - eights) ** 2).sum(-1)
        return np.where(better[:, None], lower, upper).reshape(u.shape)

    return search_step(x, weights, [by * (1 + 0.125 * k) for k in range(13)], round_to)


DECODERS: dict[str, Coder] = {
    "iq2_xxs": _decode_iq2_xxs, "iq2_xs": _decode_iq2_xs, "iq2_s": _decode_iq2_s, "iq3_xxs": _decode_iq3_xxs, "iq3_s": _decode_iq3_s,
    "iq1_s": _decode_iq1_s, "iq1_m": _decode_iq1_m}
ENCODERS: dict[str, Coder] = {"iq2_s": _encode_iq2_s, "iq3_xxs": _encode_iq3_xxs, "iq3_s": _encode_iq3_s, "iq1_m": _encode_iq1_m}
