"""RMS_NORM, NORM, L2_NORM of each row, and GROUP_NORM of groups of channels. Weights and biases follow as MUL and ADD."""

# mypy: ignore-errors
import numpy as np

from engine.lang.words import f32, fma, group_sum, lanes, maximum, minimum, rsqrt, sqrt
from engine.op import op

ROWS = "x[a, b, c, n] -> y[a, b, c, n]"


@op(ROWS, groups="a b c", inplace="x", eps=1e-5, flop=lambda call: 4 * call.tensors["x"].n_elements)
def rms_norm(a, b, c, x, y, n, eps):
    """RMS_NORM: each row divided by its root mean square (Zhang and Sennrich, arXiv:1910.07467)."""
    squares = f32(0)
    for i in lanes(n):
        v = x[a, b, c, i]
        squares = fma(v, v, squares)
    r = rsqrt(group_sum(squares) / f32(n) + eps)
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * r


@rms_norm.reference
def _(x, eps):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) / max(x.shape[-1], 1) + eps)


@op(ROWS, groups="a b c", inplace="x", eps=1e-5, flop=lambda call: 7 * call.tensors["x"].n_elements)
def norm(a, b, c, x, y, n, eps):
    """NORM: each row less its mean, divided by its standard deviation (Ba et al., arXiv:1607.06450).

    The variance is the mean square of what is left, which does not cancel as mean(x^2) - mean(x)^2 does.
    """
    total = f32(0)
    for i in lanes(n):
        total = total + x[a, b, c, i]
    mean = group_sum(total) / f32(n)
    squares = f32(0)
    for i in lanes(n):
        d = x[a, b, c, i] - mean
        squares = fma(d, d, squares)
    r = rsqrt(group_sum(squares) / f32(n) + eps)
    for i in lanes(n):
        y[a, b, c, i] = (x[a, b, c, i] - mean) * r


@norm.reference
def _(x, eps):
    return _normal(x, eps, (-1,))


def _normal(x, eps, axes):
    n = max(np.prod([x.shape[k] for k in axes]), 1)
    d = x - np.sum(x, axis=axes, keepdims=True) / n
    return d / np.sqrt(np.sum(d * d, axis=axes, keepdims=True) / n + eps)


@op(ROWS, groups="a b c", inplace="x", eps=1e-12, flop=lambda call: 3 * call.tensors["x"].n_elements)
def l2_norm(a, b, c, x, y, n, eps):
    """L2_NORM: each row divided by its length, or by eps where that is more."""
    squares = f32(0)
    for i in lanes(n):
        v = x[a, b, c, i]
        squares = fma(v, v, squares)
    r = 1.0 / maximum(sqrt(group_sum(squares)), eps)
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * r


@l2_norm.reference
def _(x, eps):
    return x / np.fmax(np.sqrt(np.sum(x * x, axis=-1, keepdims=True)), eps)


def has_groups(call):
    g = call.params["n_groups"]
    return None if 1 <= g <= max(call["c"], 1) else f"n_groups is {g}; 1 .. {max(call['c'], 1)}, the channels, is expected"


@op("x[a, c, h, n] -> y[a, c, h, n]", groups="a g", inplace="x", check=has_groups, n_groups=1, eps=1e-5,
    variant={"sizes": {"g": lambda call: call.params["n_groups"], "per": lambda call: -(-call["c"] // call.params["n_groups"])}},
    flop=lambda call: 7 * call.tensors["x"].n_elements)
def group_norm(a, g, x, y, c, h, n, per, eps):
    """GROUP_NORM: NORM over groups of channels [c, h, n], c / n_groups of them rounded up; the last group may have fewer, or none."""
    start = g * per
    stop = minimum(start + per, c)
    total = f32(0)
    for k in range(start, stop):
        for r in range(h):
            for i in lanes(n):
                total = total + x[a, k, r, i]
    count = f32((stop - start) * h * n)
    mean = group_sum(total) / count
    squares = f32(0)
    for k in range(start, stop):
        for r in range(h):
            for i in lanes(n):
                d = x[a, k, r, i] - mean
                squares = fma(d, d, squares)
    inverse = rsqrt(group_sum(squares) / count + eps)
    for k in range(start, stop):
        for r in range(h):
            for i in lanes(n):
                y[a, k, r, i] = (x[a, k, r, i] - mean) * inverse


@group_norm.reference
def _(x, n_groups, eps):
    per = -(-x.shape[1] // n_groups)
    out = x.copy()
    for start in range(0, x.shape[1], max(per, 1)):
        out[:, start : start + per] = _normal(x[:, start : start + per], eps, (1, 2, 3))
    return out
