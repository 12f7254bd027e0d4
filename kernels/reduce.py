"""SUM_ROWS, MEAN, SUM, ARGMAX, CUMSUM: numbers of whole rows."""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import I32
from engine.lang.words import INF, LANES, f32, group_max, group_min, group_sum, i32, lane, lanes, only, span, where
from engine.op import op

ONE = "x[a, b, c, n] -> y[a, b, c, 1]"


def numbers(call):
    return call.tensors["x"].n_elements


@op(ONE, groups="a b c", flop=numbers)
def sum_rows(a, b, c, x, y, n):
    total = f32(0)
    for i in lanes(n):
        total = total + x[a, b, c, i]
    y[a, b, c, 0] = group_sum(total)


@sum_rows.reference
def _(x):
    return np.sum(x, axis=-1, keepdims=True)


@op(ONE, groups="a b c", flop=numbers)
def mean(a, b, c, x, y, n):
    """MEAN of each row; NaN where it is empty."""
    total = f32(0)
    for i in lanes(n):
        total = total + x[a, b, c, i]
    y[a, b, c, 0] = group_sum(total) / f32(n)


@mean.reference
def _(x):
    return np.sum(x, axis=-1, keepdims=True) / np.float64(x.shape[-1])


def sum_parts(one, parts, y, rows):
    total = f32(0)
    for i in lanes(rows):
        total = total + parts[i]
    y[0] = group_sum(total)


def n_rows(call):
    return call["a"] * call["b"] * call["c"]


@op("x[a, b, c, n] -> y[1]", groups="a b c", name="sum", flop=numbers,
    variant={"sizes": {"rows": n_rows, "one": lambda call: 1}, "then": "sum_parts: one", "scratch": {"parts": lambda call: [n_rows(call)]}})
def sum_all(i, j, k, x, parts, b, c, n):
    """SUM of all elements: of the rows first, then of their sums."""
    total = f32(0)
    for l in lanes(n):
        total = total + x[i, j, k, l]
    parts[(i * b + j) * c + k] = group_sum(total)


@sum_all.reference
def _(x):
    return np.sum(x).reshape(1)


@op("x[r, n] -> y[r]", groups="r", types={"y": (I32,)}, flop=numbers)
def argmax(r, x, y, n):
    """ARGMAX: the place of each row's largest number, the first of equals; NaN counts as -inf. An empty row gives 0."""
    best = f32(-INF)
    at = i32(0)
    for i in lanes(n):
        v = x[r, i]
        better = v > best
        best = where(better, v, best)
        at = where(better, i32(i), at)
    top = group_max(best)
    y[r] = group_min(where(best == top, at, i32(n)))


@argmax.reference
def _(x):
    return np.argmax(np.where(np.isnan(x), -np.inf, x), axis=-1) if x.shape[-1] else np.zeros(x.shape[0], np.int64)


@op("x[a, b, c, n] -> y[a, b, c, n]", groups="a b c", inplace="x", flop=numbers)
def cumsum(a, b, c, x, y, n):
    """CUMSUM: each element and all before it in its row.

    A lane has a stretch of the row: it sums it, then sums it up from what the lanes before it have.
    """
    stretch = (n + LANES - 1) // LANES
    with span(0, LANES) as l:
        start = i32(l) * stretch
        own = f32(0)
        for k in range(stretch):
            with only(start + k < n):
                own = own + x[a, b, c, start + k]
        total = f32(0)
        for j in range(LANES):
            total = total + where(i32(l) > j, lane(own, j), 0.0)
        for k in range(stretch):
            with only(start + k < n):
                total = total + x[a, b, c, start + k]
                y[a, b, c, start + k] = total


@cumsum.reference
def _(x):
    return np.cumsum(x, axis=-1)
