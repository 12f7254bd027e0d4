"""Elementwise ops: arithmetic, functions of one number, gated activations."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from engine.testing.example import Example
from engine.testing.facts.base import Bound, Draw, Facts, Sizes, bound_of_copies, exact, shorter
from engine.testing.values import TINY, Array


def _bound_of_scale(e: Example) -> Bound:
    x = e.decoded["x"]
    assert x is not None
    return Bound(np.abs(x * e.params["factor"]) + abs(e.params["bias"]))


SILU_FLOOR = 128 * math.log(2) / 2.0**128  # 1 + exp(-v) overflows from v = -128 ln 2 on: what follows may be zero


def _gate(e: Example) -> tuple[Array, Array | None]:
    """What the activation takes, and what it is multiplied with: two operands, the halves of one, or none."""
    x, u = e.decoded["x"], e.decoded.get("u")
    assert x is not None
    if not e.op.name.endswith("_fused"):
        return x, u
    n = x.shape[-1] // 2
    return (x[..., n:], x[..., :n]) if e.params["swapped"] else (x[..., :n], x[..., n:])


def _exponent(e: Example, x: Array) -> tuple[Array | float, float]:
    """z where the activation is x / (1 + exp(-z)) with a rounded z, 0 where z is x itself; and z / x near zero."""
    name = e.op.name.removesuffix("_fused")
    if name in ("gelu", "geglu"):
        return 2 * 0.7978845608028654 * (x * (1 + 0.044715 * x * x)), 2 * 0.7978845608028654
    if name in ("gelu_quick", "geglu_quick"):
        return 1.702 * x, 1.702
    if name == "swiglu_oai":
        return e.params["alpha"] * np.minimum(x, e.params["limit"]), e.params["alpha"]
    return 0.0, 1.0


def _bound_of_gates(e: Example) -> Bound:
    """SILU, GELU and their gated forms. exp(-z) magnifies the error of z by |z|, as far as it matters beside 1."""
    x, u = _gate(e)
    z, slope = _exponent(e, x)
    condition = np.where(z < -700, 1.0, 1 / (1 + np.exp(np.minimum(z, 700)))) * np.abs(z)
    products = np.abs(e.want) * (1 + condition)
    times: Array | float = 1.0 if u is None else np.abs(u) + (1 if e.op.name.startswith("swiglu_oai") else 0)
    return Bound(np.where(e.want == 0, 0, products), floor=TINY + SILU_FLOOR / min(slope, 1) * times)


def _bound_of_erf_gates(e: Example) -> Bound:
    """x times a probability that below the normal range is precise to 2^-149 only, where |x| < 16."""
    _, u = _gate(e)
    return Bound(np.abs(e.want), floor=TINY * (1 if u is None else 1 + np.abs(u)))


def _bound_of_xielu(e: Example) -> Bound:
    """The terms that are added: below zero exp(x) - 1 and x cancel."""
    x = e.decoded["x"]
    assert x is not None
    p = e.params
    below = (np.abs(np.expm1(np.minimum(x, p["eps"]))) + np.abs(x)) * abs(p["alpha_n"])
    return Bound(np.where(x > 0, abs(p["alpha_p"]) * x * x, below) + np.abs(p["beta"] * x))


def _experts(draw: Draw, sizes: Sizes) -> None:
    sizes["m"] = max(sizes["m"], 1)


def _expert_ids(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Rows of w, and some that are none."""
    return rng.integers(-1, e.sizes["m"] + 2, shape)


def _two_halves(draw: Draw, sizes: Sizes) -> None:
    sizes["m"] = 2 * sizes["n"]


_REPEATED = Facts(shorter(("wa", "a"), ("wb", "b"), ("wc", "c"), ("wn", "n")))
_EXACT = Facts(bound=bound_of_copies)
_GATES = Facts(bound=_bound_of_gates, decades={"x": (-30, 4)})
_SWAPPED = {"swapped": st.sampled_from([0, 1])}
# What underflows and is then multiplied by an infinity is NaN in float32 and infinite in float64: no infinities here.
_GATED = Facts(bound=_bound_of_gates, decades={"x": (-30, 4), "u": (-30, 30)}, specials="nan")
_FUSED = Facts(_two_halves, bound=_bound_of_gates, decades={"x": (-30, 4)}, params=_SWAPPED, specials="nan")
_OAI = {"alpha": exact(1.702, 0.5), "limit": exact(7, 2)}
_TURNS = Facts(decades={"x": (-30, 5)})  # SIN and COS are for |x| <= 4e6

FACTS: dict[str, Facts] = {
    **dict.fromkeys(("add", "sub", "mul", "div"), _REPEATED),
    **dict.fromkeys(("abs", "sgn", "neg", "step", "relu", "floor", "ceil", "round", "trunc"), _EXACT),
    **dict.fromkeys(("silu", "gelu", "gelu_quick"), _GATES),
    **dict.fromkeys(("reglu", "swiglu", "geglu", "geglu_quick"), _GATED),
    **dict.fromkeys(("reglu_fused", "swiglu_fused", "geglu_fused", "geglu_quick_fused"), _FUSED),
    "scale": Facts(params={"factor": exact(1, 0, -0.375, 1e-3, 1e3), "bias": exact(0, 1.5, -1e-3)}, bound=_bound_of_scale),
    "add_id": Facts(_experts, values={"ids": _expert_ids}),
    "sin": _TURNS, "cos": _TURNS,
    "gelu_erf": Facts(bound=_bound_of_erf_gates),
    "geglu_erf": Facts(bound=_bound_of_erf_gates, decades={"x": (-30, 4), "u": (-30, 30)}, specials="nan"),
    "geglu_erf_fused": Facts(_two_halves, bound=_bound_of_erf_gates, decades={"x": (-30, 4)}, params=_SWAPPED, specials="nan"),
    "swiglu_oai": Facts(bound=_bound_of_gates, decades={"x": (-30, 4)}, params=_OAI),
    "swiglu_oai_fused": Facts(_two_halves, bound=_bound_of_gates, decades={"x": (-30, 4)}, params={**_SWAPPED, **_OAI}),
    "clamp": Facts(params={"low": exact(-1, -0.3, 0.5, 6.1035e-5), "high": exact(0, 0.7, 2)}, bound=bound_of_copies),
    "leaky_relu": Facts(params={"slope": exact(0.1, 0.01, 2, -0.5)}),
    "xielu": Facts(params={"alpha_n": exact(0.8, 4), "alpha_p": exact(0.8, 0.3), "beta": exact(0.5, -0.25), "eps": exact(-1e-6, -0.1)},
                   bound=_bound_of_xielu),
}
