"""SOFT_MAX of each row of factor * x + mask. A row masked as a whole gives zeros."""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32
from engine.lang.words import INF, exp, f32, group_max, group_sum, inside, lanes, maximum, where
from engine.op import op


def divides(call):
    """Each of the mask's leading extents divides that of x."""
    for x, m in (("a", "ma"), ("h", "mh")):
        if (extent := call.dims.get(m, 1)) == 0 and call[x] or extent and call[x] % extent:
            return f"a mask with {m} = {extent} cannot be repeated to {call[x]}"
    return None


@op("x[a, h, r, n], mask?[ma, mh, r, n] -> y[a, h, r, n]", groups="a h r", types={"mask": (F32, F16)}, check=divides, inplace="x",
    factor=1.0, variant={"sizes": {"ma": lambda call: call.dims.get("ma", 1), "mh": lambda call: call.dims.get("mh", 1)}})
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
        v = v + np.tile(mask, [*(n // m if m else 1 for n, m in zip(x.shape[:2], mask.shape[:2], strict=True)), 1, 1])
    top = np.max(v, axis=-1, keepdims=True, initial=-np.inf)
    e = np.where(v == -np.inf, 0, np.exp(v - np.where(np.isneginf(top), 0, top)))
    whole = e.sum(-1, keepdims=True)
    return np.where(whole == 0, 0, e / np.where(whole == 0, 1, whole))
