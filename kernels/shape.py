"""Ops that put elements elsewhere: REPEAT, CONCAT, PAD, ROLL; and those that know only places: DIAG_MASK_INF, FILL.

Dimensions are counted as ggml does: 0 is a row's own.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32, FLOATS, I32
from engine.lang.words import INF, f32, i32, lanes, where
from engine.op import op

SAME = "x[a, b, c, n] -> y[a, b, c, n]"
GROWN = "x[xa, xb, xc, xn] -> y[a, b, c, n]"
ANY = (*FLOATS, I32)
AXES = ("n", "c", "b", "a")  # ggml's dimensions 0 .. 3


def times(dims, params):
    return {d: dims[f"x{d}"] * params[f"times{k}"] for k, d in enumerate(AXES)}


def not_negative(call):
    """Counts and widths are not negative."""
    wrong = [f"{name} is {value}" for name, value in call.params.items() if isinstance(value, int) and value < 0]
    return f"{wrong[0]}; 0 or more is expected" if wrong else None


@op(GROWN, groups="a b c", types={"x": ANY}, result="x", infer=times, check=not_negative, times0=1, times1=1, times2=1, times3=1)
def repeat(a, b, c, x, y, xa, xb, xc, xn, n):
    """REPEAT: x, so many times along each dimension."""
    for i in lanes(n):
        y[a, b, c, i] = x[a % xa, b % xb, c % xc, i % xn]


@repeat.variant("a b c", when=lambda call: None if call["xn"] == call["n"] else f"rows of {call['xn']} are repeated to {call['n']}")
def repeat_rows(a, b, c, x, y, xa, xb, xc, n):
    for i in lanes(n):
        y[a, b, c, i] = x[a % xa, b % xb, c % xc, i]


@repeat.reference
def _(x, times0, times1, times2, times3):
    return np.tile(x, (times3, times2, times1, times0))


def joined(dims, params):
    """Extents of x, and w behind it along `dim`."""
    return {f"y{d}": dims[d] + (dims[f"w{d}"] if params["dim"] == k else 0) for k, d in enumerate(AXES)}


def fits(call):
    if call.params["dim"] not in range(4):
        return f"dim is {call.params['dim']}; 0 .. 3 is expected"
    for k, d in enumerate(AXES):
        if k != call.params["dim"] and call[d] != call[f"w{d}"]:
            return f"operands have {call[d]} and {call[f'w{d}']} in dimension {k}; only dimension {call.params['dim']} may differ"
    return None


def start_along(k):
    """Where w begins in dimension k of the result."""
    return lambda call: call[AXES[k]] if call.params["dim"] == k else 0


@op("x[a, b, c, n], w[wa, wb, wc, wn] -> y[ya, yb, yc, yn]", groups="ya yb yc", types={"x": ANY, "w": ANY}, result="x",
    keys=lambda types: types["w"] is types["x"], infer=joined, check=fits, dim=0,
    variant={"sizes": {f"start{k}": start_along(k) for k in range(4)}})
def concat(i, j, k, x, w, y, a, b, c, n, wn, start0, start1, start2, start3):
    """CONCAT: w behind x, along one dimension. A row of the result has a row of x, one of w, or both."""
    if (i < a) & (j < b) & (k < c):
        for l in lanes(n):
            y[i, j, k, l] = x[i, j, k, l]
    if (i >= start3) & (j >= start2) & (k >= start1):
        for l in lanes(wn):
            y[i, j, k, start0 + l] = w[i - start3, j - start2, k - start1, l]


@concat.reference
def _(x, w, dim):
    return np.concatenate([x, w], axis=3 - dim)


def widened(dims, params):
    return {d: dims[f"x{d}"] + params[f"lp{k}"] + params[f"rp{k}"] for k, d in enumerate(AXES)}


def pads(call):
    """Widths are not negative; what goes round goes round once to the left."""
    if wrong := not_negative(call):
        return wrong
    if call.params["circular"]:
        for k, d in enumerate(AXES):
            if call.params[f"lp{k}"] > call[f"x{d}"] or call[d] and not call[f"x{d}"]:
                return f"lp{k} is {call.params[f'lp{k}']}; going round, no more than {call[f'x{d}']} is expected"
    return None


@op(GROWN, groups="a b c", types={"x": FLOATS}, result="x", infer=widened, check=pads,
    constants={"CIRCULAR": lambda call: call.params["circular"]}, lp0=0, rp0=0, lp1=0, rp1=0, lp2=0, rp2=0, lp3=0, rp3=0, circular=0)
def pad(a, b, c, x, y, xa, xb, xc, xn, n, lp0, rp0, lp1, lp2, lp3):
    """PAD: lp zeros before and rp behind, along each dimension; `circular`, what is found going round."""
    if CIRCULAR:
        for i in lanes(n):
            y[a, b, c, i] = x[(a + xa - lp3) % xa, (b + xb - lp2) % xb, (c + xc - lp1) % xc, (i + (xn - lp0)) % xn]
    else:
        if (a >= lp3) & (a < lp3 + xa) & (b >= lp2) & (b < lp2 + xb) & (c >= lp1) & (c < lp1 + xc):
            for i in lanes(lp0):
                y[a, b, c, i] = f32(0)
            for i in lanes(xn):
                y[a, b, c, lp0 + i] = x[a - lp3, b - lp2, c - lp1, i]
            for i in lanes(rp0):
                y[a, b, c, lp0 + xn + i] = f32(0)
        else:
            for j in lanes(n):
                y[a, b, c, j] = f32(0)


@pad.reference
def _(x, lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3, circular):
    widths = ((lp3, rp3), (lp2, rp2), (lp1, rp1), (lp0, rp0))
    if not circular:
        return np.pad(x, widths)
    places = [(np.arange(n + left + right) - left) % max(n, 1) for n, (left, right) in zip(x.shape, widths, strict=True)]
    return x[np.ix_(*places)]


def turn(k):
    """Where the first element of the result lies in dimension k of x."""
    return lambda call: -call.params[f"shift{k}"] % max(call[AXES[k]], 1)


@op(SAME, groups="a b c", types={"x": ANY}, result="x", shift0=0, shift1=0, shift2=0, shift3=0,
    variant={"sizes": {f"turn{k}": turn(k) for k in range(4)}})
def roll(i, j, k, x, y, a, b, c, n, turn0, turn1, turn2, turn3):
    """ROLL: each element moves on by shift along each dimension, and from the end to the start."""
    for l in lanes(n - turn0):
        y[i, j, k, l] = x[(i + turn3) % a, (j + turn2) % b, (k + turn1) % c, turn0 + l]
    for l in lanes(turn0):
        y[i, j, k, n - turn0 + l] = x[(i + turn3) % a, (j + turn2) % b, (k + turn1) % c, l]


@roll.reference
def _(x, shift0, shift1, shift2, shift3):
    return np.roll(x, (shift3, shift2, shift1, shift0), (0, 1, 2, 3))


@op("x[a, b, r, n] -> y[a, b, r, n]", groups="a b r", inplace="x", check=not_negative, n_past=0)
def diag_mask_inf(a, b, r, x, y, n, n_past):
    """DIAG_MASK_INF: -inf behind the diagonal, which starts at n_past."""
    for i in lanes(n):
        y[a, b, r, i] = where(i32(i) > i32(r + n_past), f32(-INF), x[a, b, r, i])


@diag_mask_inf.reference
def _(x, n_past):
    r, i = np.indices(x.shape[2:], sparse=True)
    return np.where(i > r + n_past, -np.inf, x)


@op(SAME, groups="a b c", types={"x": (F32, F16)}, result="x", inplace="x", value=0.0)
def fill(a, b, c, y, n, value):
    """FILL: one value everywhere, in the shape and type of x."""
    for i in lanes(n):
        y[a, b, c, i] = value


@fill.reference
def _(x, value):
    return np.full(x.shape, value)
