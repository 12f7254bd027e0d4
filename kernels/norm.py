"""RMS_NORM: each row divided by its root mean square (Zhang and Sennrich, arXiv:1910.07467). Weights follow as MUL."""

# mypy: ignore-errors
import numpy as np

from engine.lang.words import f32, fma, group_sum, lanes, rsqrt
from engine.op import op


@op("x[a, b, c, n] -> y[a, b, c, n]", groups="a b c", inplace="x", eps=1e-5, flop=lambda call: 4 * call.tensors["x"].n_elements)
def rms_norm(a, b, c, x, y, n, eps):
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
