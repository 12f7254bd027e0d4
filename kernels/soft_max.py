"""SOFT_MAX of each row of factor * x + slope * mask. A row masked as a whole gives zeros.

The slope of a head is 1, or with `max_bias` that of ALiBi (Press et al., arXiv:2108.12409). Sinks, a logit for each head, count in a row's
sum only (Xiao et al., arXiv:2309.17453).
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32
from engine.lang.words import INF, exp, exp2, f32, function, group_max, group_sum, inside, lanes, maximum, where
from engine.op import op

STEEPEST = 64.0  # the largest max_bias: slopes stay normal numbers, so that -inf in a mask stays -inf


def largest_power(call):
    """The largest power of two up to the number of heads."""
    return 1 << max(call["h"].bit_length() - 1, 0)


def bends(call):
    return call.params["max_bias"] != 0 and call.tensors.get("mask") is not None


def wrong_bias(call):
    bias = call.params["max_bias"]
    return None if 0 <= bias <= STEEPEST else f"max_bias is {bias}, 0 to {STEEPEST:g} is expected"


@function
def alibi_slope(head, n2, max_bias):
    """2^(-max_bias (h + 1) / n2) for the first n2 heads, a power of two; those after them lie half way between."""
    step = max_bias / f32(n2)
    return where(head < n2, exp2(-step * f32(head + 1)), exp2(-step * (f32(head - n2) + 0.5)))


def slopes_of(n_head, max_bias):
    """Slopes of all heads in float64."""
    h, n2 = np.arange(n_head), 1 << max(n_head.bit_length() - 1, 0)
    return 2.0 ** (-max_bias / n2 * np.where(h < n2, h + 1, h - n2 + 0.5))


def divides(call):
    """Each of the mask's leading extents divides that of x."""
    for x, m in (("a", "ma"), ("h", "mh")):
        if (extent := call.dims.get(m, 1)) == 0 and call[x] or extent and call[x] % extent:
            return f"a mask with {m} = {extent} cannot be repeated to {call[x]}"
    return wrong_bias(call)


@op("x[a, h, r, n], mask?[ma, mh, r, n], sinks?[h] -> y[a, h, r, n]", groups="a h r", types={"mask": (F32, F16)}, check=divides,
    inplace="x", factor=1.0, max_bias=0.0, constants={"ALIBI": bends},
    variant={"sizes": {"ma": lambda call: call.dims.get("ma", 1), "mh": lambda call: call.dims.get("mh", 1), "n2": largest_power}})
def soft_max(a, h, r, x, mask, sinks, y, n, ma, mh, n2, factor, max_bias):
    if ALIBI:
        slope = alibi_slope(h, n2, max_bias)
    peak = f32(-INF)
    for i in lanes(n):
        v = x[a, h, r, i] * factor
        if MASK:
            v = v + (slope * mask[a % ma, h % mh, r, i] if ALIBI else mask[a % ma, h % mh, r, i])
        peak = maximum(peak, where(inside(i), v, -INF))
    top = maximum(group_max(peak), sinks[h]) if SINKS else group_max(peak)
    total = f32(0)
    for i in lanes(n):
        v = x[a, h, r, i] * factor
        if MASK:
            v = v + (slope * mask[a % ma, h % mh, r, i] if ALIBI else mask[a % ma, h % mh, r, i])
        e = where(v == -INF, f32(0), exp(v - top))
        y[a, h, r, i] = e
        total = total + e
    whole = group_sum(total)
    if SINKS:
        whole = whole + where(sinks[h] == -INF, f32(0), exp(sinks[h] - top))
    for i in lanes(n):
        y[a, h, r, i] = where(whole == 0.0, f32(0), y[a, h, r, i] / whole)


@soft_max.reference
def _(x, mask, sinks, factor, max_bias):
    v = x * factor
    if mask is not None:
        tiled = np.tile(mask, [*(n // m if m else 1 for n, m in zip(x.shape[:2], mask.shape[:2], strict=True)), 1, 1])
        v = v + slopes_of(x.shape[1], max_bias)[:, None, None] * tiled
    none = np.full((1, x.shape[1], 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
    top = np.maximum(np.max(v, axis=-1, keepdims=True, initial=-np.inf), none)
    top = np.where(np.isneginf(top), 0, top)
    e = np.where(v == -np.inf, 0, np.exp(v - top))
    whole = e.sum(-1, keepdims=True) + np.exp(none - top)
    return np.where(whole == 0, 0, e / np.where(whole == 0, 1, whole))
