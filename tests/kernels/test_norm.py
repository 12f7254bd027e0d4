"""NORM, L2_NORM, GROUP_NORM: cancellation, rows of equals, uneven groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]


def example(name: str, x: Array, **params: float) -> Example:
    return Example.of(OPS[name], (name, ("f32",) * 2), {"x": x}, **params)


def test_norm_by_hand(cpu: CpuBackend) -> None:
    got = check_call(cpu, example("norm", np.array([[1, 3], [-2, -2]], "f4"), eps=3.0))
    np.testing.assert_allclose(got, [[-0.5, 0.5], [0, 0]], rtol=1e-6)


def test_norm_far_from_zero(cpu: CpuBackend, run_seed: int) -> None:
    """mean(x^2) - mean(x)^2 would have no digit left."""
    x = (4096 + np.random.default_rng(run_seed).integers(-8, 9, (3, 768)) / 64).astype("f4")
    call = example("norm", x, eps=1e-12)
    got = check_call(cpu, call)
    np.testing.assert_allclose(got, call.want.reshape(got.shape), atol=5e-3)
    np.testing.assert_allclose(got.std(-1), 1, rtol=1e-3)


@pytest.mark.parametrize("n", [1, 7, 16, 33, 4096])
@pytest.mark.parametrize("name", ["norm", "l2_norm"])
def test_rows_of_zeros_and_of_one_number(name: str, n: int, cpu: CpuBackend) -> None:
    assert not check_call(cpu, example(name, np.zeros((2, n), "f4"), eps=1e-6)).any()
    check_call(cpu, example(name, np.full((2, n), 3.0, "f4"), eps=1e-6))


def test_l2_norm_by_hand(cpu: CpuBackend) -> None:
    got = check_call(cpu, example("l2_norm", np.array([[3, -4], [1e-8, 0]], "f4"), eps=1e-6))
    np.testing.assert_allclose(got, [[0.6, -0.8], [1e-2, 0]], rtol=1e-6)


@pytest.mark.parametrize(("channels", "n_groups"), [(4, 2), (5, 2), (5, 4), (3, 3), (6, 1)])
def test_groups_of_channels(channels: int, n_groups: int, cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).standard_normal((2, channels, 3, 11)).astype("f4")
    got = check_call(cpu, example("group_norm", x, n_groups=n_groups, eps=1e-6))
    per = -(-channels // n_groups)
    for start in range(0, channels, per):
        group = got[:, start : start + per].reshape(2, -1)
        np.testing.assert_allclose(group.mean(-1), 0, atol=1e-5)
        np.testing.assert_allclose(group.std(-1), 1, rtol=1e-4)


@pytest.mark.parametrize("n_groups", [0, -1, 6])
def test_groups_that_cannot_be(n_groups: int, cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="n_groups"):
        run_guarded(cpu, example("group_norm", np.zeros((1, 5, 2, 3), "f4"), n_groups=n_groups))
