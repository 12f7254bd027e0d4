"""Gated activations: both forms, turned halves, hand-made values, what cannot be halved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]
GATES = ["reglu", "geglu", "swiglu", "swiglu_oai", "geglu_erf", "geglu_quick"]


def split(name: str, x: Array, u: Array, **params: float) -> Example:
    return Example.of(OPS[name], (name, ("f32",) * 3), {"x": x, "u": u}, **params)


def fused(name: str, x: Array, **params: float) -> Example:
    return Example.of(OPS[f"{name}_fused"], (f"{name}_fused", ("f32",) * 2), {"x": x}, **params)


@pytest.mark.parametrize("name", GATES)
def test_both_forms_give_the_same_bits(name: str, cpu: CpuBackend, run_seed: int) -> None:
    x, u = np.random.default_rng(run_seed).standard_normal((2, 3, 5, 37)).astype("f4")
    want = check_call(cpu, split(name, x, u))
    assert np.array_equal(check_call(cpu, fused(name, np.concatenate([x, u], -1))), want)
    assert np.array_equal(check_call(cpu, fused(name, np.concatenate([u, x], -1), swapped=1)), want)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


@pytest.mark.parametrize(("name", "want"), [
    ("reglu", [6, 0]), ("swiglu", [2 * sigmoid(2) * 3, -1 * sigmoid(-1) * 4]),
    ("geglu_quick", [2 * sigmoid(3.404) * 3, -1 * sigmoid(-1.702) * 4]),
    ("geglu_erf", [(1 + math.erf(math.sqrt(2))) * 3, -0.5 * (1 + math.erf(-math.sqrt(0.5))) * 4]),
    ("geglu", [(1 + math.tanh(0.7978845608028654 * 2 * (1 + 0.044715 * 4))) * 3,
               -0.5 * (1 + math.tanh(-0.7978845608028654 * (1 + 0.044715))) * 4])])
def test_values_by_hand(name: str, want: list[float], cpu: CpuBackend) -> None:
    call = split(name, np.array([2, -1], "f4"), np.array([3, 4], "f4"))
    np.testing.assert_allclose(call.want.reshape(-1), want, rtol=1e-12)
    np.testing.assert_allclose(check_call(cpu, call), want, rtol=1e-6)


def test_the_gate_of_gpt_oss_is_limited(cpu: CpuBackend) -> None:
    """x to the limit from above, u to both sides; NaN stays NaN."""
    x, u = np.array([9, 2, -9, 1, np.nan, 1], "f4"), np.array([9, -9, 0, 1, 1, np.nan], "f4")
    want = [2 * sigmoid(1) * 3, 2 * sigmoid(1) * -1, -9 * sigmoid(-4.5), sigmoid(0.5) * 2, math.nan, math.nan]
    got = check_call(cpu, split("swiglu_oai", x, u, alpha=0.5, limit=2.0))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_odd_row_has_no_halves(cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="no two halves"):
        run_guarded(cpu, fused("swiglu", np.zeros((2, 5), "f4")))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 6)], ids=str)
def test_nothing_gives_nothing(shape: tuple[int, ...], cpu: CpuBackend) -> None:
    assert check_call(cpu, fused("geglu", np.zeros(shape, "f4"))).shape == (*shape[:-1], shape[-1] // 2)
