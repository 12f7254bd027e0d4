"""Functions of one number, element by element, in the type of x: ABS, SGN, NEG, STEP, SQR, SQRT, EXP, EXPM1, LOG, SIN, COS, FLOOR, CEIL,
ROUND, TRUNC, CLAMP.

Arithmetic is in f32, rounded once when it is stored. What compares (SGN, STEP) takes NaN as neither above nor below zero, as ggml does.
"""

# mypy: ignore-errors
import numpy as np

from engine.dtypes import FLOATS
from engine.lang.words import abs, exp, f32, fma, function, i32, lanes, log, rint, round_away, sqrt, where
from engine.op import op

ROWS = "x[a, b, c, n] -> y[a, b, c, n]"
NAN = float("nan")


def unary(name, f, reference, c=4.0):
    """The op y = f(x)."""

    @op(ROWS, groups="a b c", name=name, types={"x": FLOATS}, result="x", inplace="x", c=c)
    def each(a, b, c, x, y, n):
        for i in lanes(n):
            y[a, b, c, i] = f(x[a, b, c, i])

    each.reference(reference)
    return each


@function
def abs_of(v):
    return abs(v)


@function
def sgn_of(v):
    return where(v > 0.0, f32(1), where(v < 0.0, f32(-1), f32(0)))


@function
def neg_of(v):
    return -v


@function
def step_of(v):
    return where(v > 0.0, f32(1), f32(0))


@function
def sqr_of(v):
    return v * v


@function
def sqrt_of(v):
    return sqrt(v)


@function
def exp_of(v):
    return exp(v)


@function
def log_of(v):
    return log(v)


@function
def expm1_of(v):
    """exp(v) - 1, within 4 ulp: below 1/2 a polynomial (minimax, relative error 4e-9), where the difference would cancel."""
    p = fma(f32(1.9850359e-4), v, f32(1.4004877e-3))
    p = fma(p, v, f32(8.3336215e-3))
    p = fma(p, v, f32(4.1665141e-2))
    p = fma(p, v, f32(1.6666663e-1))
    p = fma(p, v, f32(5.0000006e-1))
    return where(abs(v) < 0.5, fma(v * v, p, v), exp(v) - 1.0)


@function
def sine(v, quarters):
    """sin(v + quarters * pi / 2), within 4 ulp for |v| <= 4e6, NaN beyond.

    n quarter turns are taken off with pi / 2 in three parts: the first fma is exact, since n has at most 22 bits and the difference
    is a multiple of 2^-23 below 2. What is left, |r| <= 0.95 with the rounding of n, has minimax polynomials (relative error 4e-11, 1e-9).
    """
    n = rint(v * 0.6366197723675814)
    r = fma(n, f32(-1.57079637050628662109375), v)
    r = fma(n, f32(4.37113882867379e-8), r)
    r = fma(n, f32(1.71512451e-15), r)
    z = r * r
    s = fma(f32(2.7007388e-6), z, f32(-1.9837073e-4))
    s = fma(s, z, f32(8.3333207e-3))
    s = fma(s, z, f32(-1.6666667e-1))
    s = fma(s * z, r, r)
    c = fma(f32(-2.7040711e-7), z, f32(2.4796978e-5))
    c = fma(c, z, f32(-1.3888872e-3))
    c = fma(c, z, f32(4.1666668e-2))
    c = fma(c, z * z, fma(z, f32(-0.5), f32(1)))
    k = i32(n) + quarters
    y = where((k & 1) == 1, c, s)
    y = where((k & 2) == 2, -y, y)
    return where(abs(v) <= 4e6, y, f32(NAN))


@function
def sin_of(v):
    return sine(v, 0)


@function
def cos_of(v):
    return sine(v, 1)


@function
def floor_of(v):
    near = rint(v)
    return where(near > v, near - 1.0, near)


@function
def ceil_of(v):
    return -floor_of(-v)


@function
def round_of(v):
    """Halves go away from zero."""
    return round_away(v)


@function
def trunc_of(v):
    return where(v < 0.0, ceil_of(v), floor_of(v))


abs_rows = unary("abs", abs_of, np.abs)
sgn = unary("sgn", sgn_of, lambda x: np.where(np.isnan(x), 0, np.sign(x)))
neg = unary("neg", neg_of, np.negative)
step = unary("step", step_of, lambda x: np.where(x > 0, 1.0, 0.0))
sqr = unary("sqr", sqr_of, np.square)
sqrt_rows = unary("sqrt", sqrt_of, np.sqrt)
exp_rows = unary("exp", exp_of, np.exp)
expm1 = unary("expm1", expm1_of, np.expm1)
log_rows = unary("log", log_of, np.log)
sin_rows = unary("sin", sin_of, np.sin)
cos_rows = unary("cos", cos_of, np.cos)
floor = unary("floor", floor_of, np.floor)
ceil = unary("ceil", ceil_of, np.ceil)
round_rows = unary("round", round_of, lambda x: np.trunc(x + np.copysign(0.5, x)))
trunc = unary("trunc", trunc_of, np.trunc)


@op(ROWS, groups="a b c", types={"x": FLOATS}, result="x", inplace="x", low=-np.inf, high=np.inf)
def clamp(a, b, c, x, y, n, low, high):
    """CLAMP: to high, then to low. NaN stays NaN."""
    for i in lanes(n):
        v = x[a, b, c, i]
        v = where(v > high, high, v)
        y[a, b, c, i] = where(v < low, low, v)


@clamp.reference
def _(x, low, high):
    return np.maximum(np.minimum(x, high), low)
