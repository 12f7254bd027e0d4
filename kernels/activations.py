"""Activation functions, and the gated forms: the activation of one operand times the other.

Split, a gate has two operands, x and u: act(x) * u. Fused, it has one, whose rows hold x and then u; `swapped` turns the halves round.
All in the type of x; arithmetic is in f32, rounded once when it is stored. RELU and HARDSIGMOID of NaN are 0, as in ggml.
"""

# mypy: ignore-errors
import math

import numpy as np

from engine.dtypes import FLOATS
from engine.lang.words import abs, exp, f32, fma, function, lanes, log1p, maximum, minimum, tanh, where
from engine.op import op
from kernels.unary import ROWS, expm1_of, unary

SPLIT = "x[a, b, c, n], u[a, b, c, n] -> y[a, b, c, n]"
FUSED = "x[a, b, c, m] -> y[a, b, c, n]"
C1, C2 = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and Hendrycks and Gimpel's cubic term (arXiv:1606.08415)
QUICK = 1.702  # of the logistic form, from the same paper


# -- functions --------------------------------------------------------------------------------------------------


@function
def relu_of(v):
    return where(v > 0.0, v, f32(0))


@function
def elu_of(v):
    return where(v > 0.0, v, expm1_of(v))


@function
def tanh_of(v):
    return tanh(v)


@function
def sigmoid_of(v):
    return 1.0 / (1.0 + exp(-v))


@function
def silu_of(v):
    return v / (1.0 + exp(-v))


@function
def gelu_of(v):
    """0.5 v (1 + tanh(z)) = v / (1 + exp(-2 z)), which does not cancel for negative v."""
    z = C1 * (v * (1.0 + C2 * v * v))
    return v / (1.0 + exp(-2.0 * z))


@function
def gelu_quick_of(v):
    return v / (1.0 + exp(-QUICK * v))


@function
def normal_of(v):
    """The distribution function of the normal distribution, (1 + erf(v / sqrt(2))) / 2, within 7 ulp; 0 and 1 at the infinities.

    Its lower tail is exp(-v v / 2) times a rational function (minimax in t = 1 / (1 + 0.35 |v|), relative error 4e-8). What rounding
    takes from v v / 2 is put back to first order.
    """
    a = minimum(abs(v), 16.0)
    half = 0.5 * a
    square = a * half
    rest = fma(a, half, -square)
    t = 1.0 / fma(a, f32(0.35), f32(1))
    p = fma(f32(-2.915787285e-2), t, f32(1.440308577e-1))
    p = fma(p, t, f32(-2.558388783e-1))
    p = fma(p, t, f32(1.593195550e-1))
    p = fma(p, t, f32(-2.321225928e-2))
    p = fma(p, t, f32(1.055524636e-1))
    p = fma(p, t, f32(1.198212971e-1))
    p = fma(p, t, f32(1.398635142e-1))
    p = fma(p, t, f32(1.396213069e-1))
    tail = p * t * exp(-square)
    tail = fma(tail, -rest, tail)
    return where(v > 0.0, 1.0 - tail, where(v != v, v, tail))


@function
def gelu_erf_of(v):
    return v * normal_of(v)


@function
def hardsigmoid_of(v):
    return minimum(f32(1), maximum(f32(0), (v + 3.0) / 6.0))


@function
def hardswish_of(v):
    return v * hardsigmoid_of(v)


@function
def softplus_of(v):
    """log(1 + exp(v)); above 20 it is v to the last bit."""
    return where(v > 20.0, v, log1p(exp(v)))


def _relu(x):
    return np.where(x > 0, x, 0)


def _elu(x):
    return np.where(x > 0, x, np.expm1(x))


def _silu(x):
    return x / (1 + np.exp(-x))


def _gelu(x):
    return x / (1 + np.exp(-2 * C1 * (x * (1 + C2 * x * x))))


def _gelu_quick(x):
    return x / (1 + np.exp(-QUICK * x))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gelu_erf(x):
    return x * (0.5 * _erfc(x * -math.sqrt(0.5)))


def _hardsigmoid(x):
    return np.fmin(1, np.fmax(0, (x + 3) / 6))


# -- ops of one operand -----------------------------------------------------------------------------------------


relu = unary("relu", relu_of, _relu)
elu = unary("elu", elu_of, _elu)
tanh_rows = unary("tanh", tanh_of, np.tanh)
sigmoid = unary("sigmoid", sigmoid_of, lambda x: 1 / (1 + np.exp(-x)))
silu = unary("silu", silu_of, _silu)
gelu = unary("gelu", gelu_of, _gelu)
gelu_quick = unary("gelu_quick", gelu_quick_of, _gelu_quick)
gelu_erf = unary("gelu_erf", gelu_erf_of, _gelu_erf, c=8.0)
hardsigmoid = unary("hardsigmoid", hardsigmoid_of, _hardsigmoid)
hardswish = unary("hardswish", hardswish_of, lambda x: x * _hardsigmoid(x))
softplus = unary("softplus", softplus_of, lambda x: np.where(x > 20, x, np.log1p(np.exp(x))), c=8.0)


@op(ROWS, groups="a b c", types={"x": FLOATS}, result="x", inplace="x", slope=0.01)
def leaky_relu(a, b, c, x, y, n, slope):
    for i in lanes(n):
        v = x[a, b, c, i]
        y[a, b, c, i] = relu_of(v) + slope * where(v < 0.0, v, f32(0))


@leaky_relu.reference
def _(x, slope):
    return _relu(x) + slope * np.where(x < 0, x, 0)


@op(ROWS, groups="a b c", types={"x": FLOATS}, result="x", inplace="x", c=8.0, alpha_n=0.8, alpha_p=0.8, beta=0.5, eps=-1e-6)
def xielu(a, b, c, x, y, n, alpha_n, alpha_p, beta, eps):
    """XIELU (arXiv:2411.13010): alpha_p x^2 + beta x above zero, alpha_n (exp(min(x, eps)) - 1 - x) + beta x elsewhere.

    The parameters are those ggml's kernels take: softplus, and beta, are already applied to the alphas a model holds.
    """
    for i in lanes(n):
        v = x[a, b, c, i]
        below = (expm1_of(minimum(v, eps)) - v) * alpha_n
        y[a, b, c, i] = where(v > 0.0, alpha_p * v * v, below) + beta * v


@xielu.reference
def _(x, alpha_n, alpha_p, beta, eps):
    return np.where(x > 0, alpha_p * x * x, (np.expm1(np.fmin(x, eps)) - x) * alpha_n) + beta * x


# -- gated forms ------------------------------------------------------------------------------------------------


def same_type(types):
    return types["u"] is types["x"]


def two_halves(call):
    return f"rows of {call['m']} have no two halves" if call["m"] % 2 else None


def half(dims, params):
    return {"n": dims["m"] // 2}


def halves(x, swapped):
    """x and u of the fused form."""
    n = x.shape[-1] // 2
    return (x[..., n:], x[..., :n]) if swapped else (x[..., :n], x[..., n:])


GATE = {"groups": "a b c", "types": {"x": FLOATS, "u": FLOATS}, "result": "x", "keys": same_type, "inplace": "x"}
FUSED_GATE = {"groups": "a b c", "types": {"x": FLOATS}, "result": "x", "infer": half, "check": two_halves, "swapped": 0}


def gated(name, f, reference, c=4.0):
    """The op f(x) * u in both forms: `name` and `name`_fused."""

    @op(SPLIT, name=name, c=c, **GATE)
    def split(a, b, c, x, u, y, n):
        for i in lanes(n):
            y[a, b, c, i] = f(x[a, b, c, i]) * u[a, b, c, i]

    @op(FUSED, name=f"{name}_fused", c=c, **FUSED_GATE)
    def fused(a, b, c, x, y, n, swapped):
        gate = n * swapped
        up = n - gate
        for i in lanes(n):
            y[a, b, c, i] = f(x[a, b, c, gate + i]) * x[a, b, c, up + i]

    @fused.reference
    def _(x, swapped):
        v, u = halves(x, swapped)
        return reference(v) * u

    split.reference(lambda x, u: reference(x) * u)
    return split, fused


reglu, reglu_fused = gated("reglu", relu_of, _relu)
geglu, geglu_fused = gated("geglu", gelu_of, _gelu)
swiglu, swiglu_fused = gated("swiglu", silu_of, _silu)
geglu_erf, geglu_erf_fused = gated("geglu_erf", gelu_erf_of, _gelu_erf, c=8.0)
geglu_quick, geglu_quick_fused = gated("geglu_quick", gelu_quick_of, _gelu_quick)


@function
def oai_of(v, u, alpha, limit):
    """The gate of gpt-oss: v sigmoid(alpha v) (u + 1), v no more than limit, u within -limit .. limit. NaN stays NaN."""
    gate = where(v > limit, limit, v)
    up = where(u > limit, limit, where(u < -limit, -limit, u))
    return gate / (1.0 + exp(-alpha * gate)) * (up + 1.0)


def _oai(x, u, alpha, limit):
    v = np.minimum(x, limit)
    return v / (1 + np.exp(-alpha * v)) * (np.clip(u, -limit, limit) + 1)


@op(SPLIT, **GATE, alpha=1.702, limit=7.0)
def swiglu_oai(a, b, c, x, u, y, n, alpha, limit):
    for i in lanes(n):
        y[a, b, c, i] = oai_of(x[a, b, c, i], u[a, b, c, i], alpha, limit)


@swiglu_oai.reference
def _(x, u, alpha, limit):
    return _oai(x, u, alpha, limit)


@op(FUSED, **FUSED_GATE, alpha=1.702, limit=7.0)
def swiglu_oai_fused(a, b, c, x, y, n, swapped, alpha, limit):
    gate = n * swapped
    up = n - gate
    for i in lanes(n):
        y[a, b, c, i] = oai_of(x[a, b, c, gate + i], x[a, b, c, up + i], alpha, limit)


@swiglu_oai_fused.reference
def _(x, swapped, alpha, limit):
    return _oai(*halves(x, swapped), alpha, limit)
