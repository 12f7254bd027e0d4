"""Activation functions SILU, GELU (tanh form), TANH, and the gated forms SWIGLU and GEGLU: activation of one operand times the other."""

# mypy: ignore-errors
import numpy as np

from engine.lang.words import exp, function, lanes, tanh
from engine.op import op

ROWS = "x[a, b, c, n] -> y[a, b, c, n]"
GATED = "x[a, b, c, n], u[a, b, c, n] -> y[a, b, c, n]"
C1, C2 = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and Hendrycks and Gimpel's cubic term (arXiv:1606.08415)


@function
def silu_of(v):
    return v / (1.0 + exp(-v))


@function
def gelu_of(v):
    """0.5 v (1 + tanh(z)) = v / (1 + exp(-2 z)), which does not cancel for negative v."""
    z = C1 * (v * (1.0 + C2 * v * v))
    return v / (1.0 + exp(-2.0 * z))


@op(ROWS, groups="a b c", inplace="x")
def silu(a, b, c, x, y, n):
    for i in lanes(n):
        y[a, b, c, i] = silu_of(x[a, b, c, i])


@op(ROWS, groups="a b c", inplace="x")
def gelu(a, b, c, x, y, n):
    for i in lanes(n):
        y[a, b, c, i] = gelu_of(x[a, b, c, i])


@op(ROWS, groups="a b c", inplace="x", name="tanh")
def tanh_rows(a, b, c, x, y, n):
    for i in lanes(n):
        y[a, b, c, i] = tanh(x[a, b, c, i])


@op(GATED, groups="a b c", inplace="x")
def swiglu(a, b, c, x, u, y, n):
    for i in lanes(n):
        y[a, b, c, i] = silu_of(x[a, b, c, i]) * u[a, b, c, i]


@op(GATED, groups="a b c", inplace="x")
def geglu(a, b, c, x, u, y, n):
    for i in lanes(n):
        y[a, b, c, i] = gelu_of(x[a, b, c, i]) * u[a, b, c, i]


def _silu(x):
    return x / (1 + np.exp(-x))


def _gelu(x):
    return x / (1 + np.exp(-2 * C1 * (x * (1 + C2 * x * x))))


silu.reference(lambda x: _silu(x))
gelu.reference(lambda x: _gelu(x))
tanh_rows.reference(lambda x: np.tanh(x))
swiglu.reference(lambda x, u: _silu(x) * u)
geglu.reference(lambda x, u: _gelu(x) * u)
