"""Functions of one number and activations: hand-made values, ends of the range, errors over the whole range, types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]
INF, NAN = np.inf, np.nan

# What ggml's formulas give, worked out by hand: op -> (parameters, x, y).
BY_HAND: dict[str, tuple[dict[str, float], list[float], list[float]]] = {
    "abs": ({}, [-2, 0, 3, -INF, NAN], [2, 0, 3, INF, NAN]),
    "sgn": ({}, [-2, 0, 3, -INF, NAN], [-1, 0, 1, -1, 0]),
    "neg": ({}, [-2, 0, INF, NAN], [2, 0, -INF, NAN]),
    "step": ({}, [-2, 0, 1e-30, INF, NAN], [0, 0, 1, 1, 0]),
    "sqr": ({}, [-3, 0.5, -INF, NAN], [9, 0.25, INF, NAN]),
    "sqrt": ({}, [4, 0, INF, -1, NAN], [2, 0, INF, NAN, NAN]),
    "exp": ({}, [0, -INF, INF, 1000, -1000, NAN], [1, 0, INF, INF, 0, NAN]),
    "expm1": ({}, [0, 1e-20, -INF, INF, -200, NAN], [0, 1e-20, -1, INF, -1, NAN]),
    "log": ({}, [1, 0, -1, INF, NAN], [0, -INF, NAN, INF, NAN]),
    "sin": ({}, [0, 1e-20, INF, NAN], [0, 1e-20, NAN, NAN]),
    "cos": ({}, [0, 1e-20, -INF, NAN], [1, 1, NAN, NAN]),
    "floor": ({}, [2.5, -2.5, -0.3, 3, 1e30, -INF, NAN], [2, -3, -1, 3, 1e30, -INF, NAN]),
    "ceil": ({}, [2.5, -2.5, 0.3, 3, 1e30, -INF, NAN], [3, -2, 1, 3, 1e30, -INF, NAN]),
    "round": ({}, [2.5, -2.5, 0.5, 0.49999997, 8388609, -INF, NAN], [3, -3, 1, 0, 8388609, -INF, NAN]),
    "trunc": ({}, [2.5, -2.5, -0.3, 3, 1e30, -INF, NAN], [2, -2, 0, 3, 1e30, -INF, NAN]),
    "relu": ({}, [-2, 0, 3, INF, -INF, NAN], [0, 0, 3, INF, 0, 0]),
    "elu": ({}, [2, 0, -INF, INF, NAN], [2, 0, -1, INF, NAN]),
    "sigmoid": ({}, [0, INF, -INF, -1000, NAN], [0.5, 1, 0, 0, NAN]),
    "gelu_quick": ({}, [0, INF, 100, -1000, NAN], [0, INF, 100, 0, NAN]),
    "gelu_erf": ({}, [0, INF, 100, -100, -INF, NAN], [0, INF, 100, 0, NAN, NAN]),
    "hardsigmoid": ({}, [-3, 0, 3, 1.5, INF, NAN], [0, 0.5, 1, 0.75, 1, 0]),
    "hardswish": ({}, [-4, 0, 4, 1.5, INF, NAN], [0, 0, 4, 1.125, INF, NAN]),
    "softplus": ({}, [0, 21, INF, -INF, NAN], [math.log(2), 21, INF, 0, NAN]),
    "leaky_relu": ({"slope": 0.5}, [-2, 0, 3, -INF, NAN], [-1, 0, 3, -INF, 0]),
    "clamp": ({"low": -1, "high": 2}, [-3, 0, 5, INF, NAN], [-1, 0, 2, 2, NAN]),
    "xielu": ({"alpha_n": 2, "alpha_p": 0.5, "beta": 0.25, "eps": -0.5}, [2, 0, -1e4], [2.5, 2 * math.expm1(-0.5), 2 * (1e4 - 1) - 2500]),
    "fill": ({"value": 2.5}, [1, NAN], [2.5, 2.5]),
    "scale": ({"factor": 2, "bias": 1}, [1, -INF, NAN], [3, -INF, NAN]),
}


def example(name: str, x: Array, dtype: str = "f32", **params: float) -> Example:
    return Example.of(OPS[name], (name, (dtype, dtype)), {"x": x}, **params)


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name: str, cpu: CpuBackend) -> None:
    params, x, y = BY_HAND[name]
    call = example(name, np.array(x, "f4"), **params)
    np.testing.assert_allclose(call.want.reshape(-1), y, rtol=1e-6)
    got, guards = run_guarded(cpu, call)
    np.testing.assert_allclose(got, y, rtol=1e-6)
    assert guards.intact


def test_clamp_with_ends_exchanged_gives_the_lower_one(cpu: CpuBackend) -> None:
    got = check_call(cpu, example("clamp", np.array([-9, 0, 9], "f4"), low=3.0, high=1.0))
    assert got.tolist() == [3, 3, 3]


@pytest.mark.parametrize("name", ["expm1", "sin", "cos", "gelu_erf", "gelu_quick", "softplus", "elu", "sigmoid", "exp", "log", "sqr"])
def test_errors_over_the_whole_range(name: str, cpu: CpuBackend, run_seed: int) -> None:
    """Every exponent, and densely where functions turn."""
    rng = np.random.default_rng(run_seed)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view("f4")
    x = np.concatenate([bits, rng.uniform(-100, 100, 100_000).astype("f4"), rng.uniform(-2, 2, 100_000).astype("f4")])
    if name in ("sin", "cos"):
        quarters = (rng.integers(-(2**21), 2**21, 100_000) * (math.pi / 2)).astype("f4")
        x = np.concatenate([x[np.abs(x) < 4e6], quarters])
    check_call(cpu, example(name, x))


def test_sin_and_cos_end_with_their_range(cpu: CpuBackend) -> None:
    for name in ("sin", "cos"):
        got, _ = run_guarded(cpu, example(name, np.array([4e6, 4.1e6, -1e30], "f4")))
        assert np.isfinite(got[0]) and np.isnan(got[1:]).all()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["relu", "gelu", "exp", "clamp", "scale", "floor"])
def test_the_result_has_the_type_of_the_operand(name: str, dtype: str, cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).standard_normal((3, 37)).astype("f4")
    stored = x.astype("f2") if dtype == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    got = check_call(cpu, example(name, stored, dtype))
    assert got.dtype == stored.dtype
