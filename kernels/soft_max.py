"""SOFT_MAX of each row of factor * x + mask. A row masked as a whole gives zeros."""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32
from engine.lang.words import INF, exp, f32, group_max, group_sum, inside, lanes, maximum, where
from engine.op import op


@op("x[a, h, r, n], mask?[ma, mh, r, n] -> y[a, h, r, n]", groups="a h r", types={"mask": (F32, F16)}, inplace="x", factor=1.0)
def soft_max(a, h, r, x, mask, y, n, ma, mh, factor):
    peak = f32(-INF)
    for i in lanes(n):
        v = x[a, h, r, i] * factor
        if MASK:
            v = v + mask[a % ma, h % mh, r, i]
        peak = maximum(peak, where(inside(i), v, -INF))
    top = group_max(peak)
    total = f32(0)
    for i in lanes(n):
        v = x[a, h, r, i] * factor
        if MASK:
            v = v + mask[a % ma, h % mh, r, i]
        e = where(v == -INF, f32(0), exp(v - top))
        y[a, h, r, i] = e
        total = total + e
    whole = group_sum(total)
    for i in lanes(n):
        y[a, h, r, i] = where(whole == 0.0, f32(0), y[a, h, r, i] / whole)


@soft_max.reference
def _(x, mask, factor):
    v = x * factor
    if mask is not None:
        v = v + np.tile(mask, [x.shape[0] // mask.shape[0], x.shape[1] // mask.shape[1], 1, 1])
    top = np.max(v, axis=-1, keepdims=True, initial=-np.inf)
    e = np.where(v == -np.inf, 0, np.exp(v - np.where(np.isneginf(top), 0, top)))
    whole = e.sum(-1, keepdims=True)
    return np.where(whole == 0, 0, e / np.where(whole == 0, 1, whole))
