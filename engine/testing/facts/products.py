"""Products of matrices, and what reads weights: get_rows, quantize_rows."""

from __future__ import annotations

import numpy as np

from engine.dtypes import FLOATS, RADIX, WEIGHT_BLOCKS
from engine.op import padded
from engine.testing.example import Example
from engine.testing.facts.base import Bound, Draw, Facts, Sizes, bound_of_copies, divisor, shorter, sometimes_long
from engine.testing.values import TINY, Array, magnitudes


def _ids(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Row ids, some of them outside the matrix: those are clamped."""
    m = e.sizes["m"]
    wild = rng.choice([-1, m, -(2**31), 2**31 - 1, m + 7], shape)
    return np.where(rng.random(shape) < 0.2, wild, rng.integers(0, max(m, 1), shape))


def _bound_of_rows(e: Example) -> Bound:
    """GET_ROWS: floats are copied; a block's value is rounded once, twice where scales are multiplied first."""
    exact = next(iter(e.dtypes.values())) in FLOATS
    if exact:
        return bound_of_copies(e)
    w, ids = e.operands["w"], e.decoded["ids"]
    size = magnitudes(w, e.dtypes["w"])
    return Bound(e.op.reference_of([size.reshape(padded(size.shape, 4, 1)), ids], e.params) / e.op.c, floor=0.0)


def _at_least_one_row(draw: Draw, sizes: Sizes) -> None:
    sizes["m"] = max(sizes["m"], 1)
    sizes["wa"], sizes["wb"] = (divisor(draw, max(sizes[d], 1), f"w{d}") for d in "ab")


def _factors(draw: Draw, sizes: Sizes) -> None:
    shorter(("wa", "a"), ("wb", "b"))(draw, sizes)
    sometimes_long(draw, sizes)


def _bound_of_mul_mat(e: Example) -> Bound:
    """Products of integers are exact, so only scales, offsets and the sum are rounded. Below the normal range a scale d * xs.d keeps an
    absolute precision, and multiplies up to 128 * 127 * RADIX."""
    w, x = e.decoded["w"], e.decoded["x"]
    assert w is not None and x is not None
    size = magnitudes(e.operands["w"], e.dtypes["w"]).reshape(w.shape)
    k = e.sizes["k"]
    products = e.op.reference_of([size, np.abs(x)], e.params)
    if e.dtypes["w"] in WEIGHT_BLOCKS:
        return Bound(products, k, TINY + k * 128 * 127 * RADIX * 2.0**-149)
    return Bound(products, k, TINY + k * 2.0**-149)


FACTS: dict[str, Facts] = {
    "mul_mat": Facts(_factors, decades={"w": (-15, 15), "x": (-15, 15)}, bound=_bound_of_mul_mat),
    "get_rows": Facts(_at_least_one_row, values={"ids": _ids}, bound=_bound_of_rows),
    "quantize_rows": Facts(bound=bound_of_copies),
}
