"""SOFT_MAX: with and without a mask, rows masked as a whole, masks shared by heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]


def example(x: Array, mask: Array | None = None, sinks: Array | None = None, **params: float) -> Example:
    mask_type = "f32" if mask is None else {2: "f16", 4: "f32"}[mask.dtype.itemsize]
    operands = {n: a for n, a in (("x", x), ("mask", mask), ("sinks", sinks)) if a is not None}
    return Example.of(OPS["soft_max"], ("soft_max", ("f32", mask_type, "f32", "f32")), operands, **params)


@pytest.mark.parametrize("n", [1, 7, 16, 33, 1000])
def test_without_a_mask(n: int, cpu: CpuBackend, run_seed: int) -> None:
    """The operand is optional: its dimensions are then unknown."""
    x = np.random.default_rng(run_seed).standard_normal((2, 3, 5, n)).astype("f4")
    got = check_call(cpu, example(x, factor=0.125))
    assert np.allclose(got.sum(-1), 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_a_mask_is_repeated(shape: tuple[int, int], dtype: str, cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    mask = np.where(rng.random((*shape, 5, 37)) < 0.3, -np.inf, rng.standard_normal((*shape, 5, 37))).astype(dtype)
    check_call(cpu, example(rng.standard_normal((2, 3, 5, 37)).astype("f4"), mask))


def test_a_row_masked_as_a_whole_gives_zeros(cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).standard_normal((3, 37)).astype("f4")
    mask = np.zeros((3, 37), "f4")
    mask[1] = -np.inf
    got = check_call(cpu, example(x, mask))
    assert not got[1].any() and got[0].all() and got[2].all()


def test_large_values_do_not_overflow(cpu: CpuBackend) -> None:
    got = check_call(cpu, example(np.array([[3e38, 3e38, -3e38, 0]], "f4")))
    assert np.array_equal(got, [[0.5, 0.5, 0, 0]])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_no_number_fills_its_row(poison: float, cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).standard_normal((3, 37)).astype("f4")
    x[1, 20] = poison
    got = check_call(cpu, example(x))
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("shape", [(2, 1), (0, 1), (1, 2)], ids=str)
def test_a_mask_that_does_not_fit_is_refused(shape: tuple[int, int], cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="cannot be repeated"):
        run_guarded(cpu, example(np.zeros((3, 3, 5, 37), "f4"), np.zeros((*shape, 5, 37), "f4")))


def test_empty_batches(cpu: CpuBackend) -> None:
    for shape in ((0, 3, 5, 37), (2, 0, 5, 37)):
        assert check_call(cpu, example(np.zeros(shape, "f4"), np.zeros(shape, "f4"))).size == 0


def test_sinks_take_their_share(cpu: CpuBackend, run_seed: int) -> None:
    """Rows of zeros and a sink of log(3): n / (n + 3) is left, spread evenly; a row masked as a whole stays zero."""
    mask = np.zeros((5, 37), "f4")
    mask[4] = -np.inf
    got = check_call(cpu, example(np.zeros((2, 3, 5, 37), "f4"), mask, np.log([3, 1, 1e-30]).astype("f4")))
    assert np.allclose(got[:, :, :4], 1 / np.array([40, 38, 37])[:, None, None], rtol=1e-6) and not got[:, :, 4].any()
    x = np.random.default_rng(run_seed).standard_normal((2, 3, 5, 37)).astype("f4")
    check_call(cpu, example(x, mask, np.array([-np.inf, 50, 0], "f4")))


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12])
def test_slopes_bend_the_mask(heads: int, cpu: CpuBackend, run_seed: int) -> None:
    """2^(-8 / n2), its powers, and half way between for heads beyond the largest power of two."""
    n2 = max(n for n in (1, 2, 4, 8) if n <= heads)
    slopes = [2.0 ** (-8 * (h + 1) / n2) if h < n2 else 2.0 ** (-8 * (h - n2 + 0.5) / n2) for h in range(heads)]
    mask = np.array([[0, -1, -np.inf]], "f4")
    got = check_call(cpu, example(np.zeros((1, heads, 1, 3), "f4"), mask, max_bias=8.0))
    assert np.allclose(np.log(got[..., 0] / got[..., 1]).reshape(-1), slopes, rtol=0, atol=1e-6) and not got[..., 2].any()
    rng = np.random.default_rng(run_seed)
    bent = rng.standard_normal((5, 37)).astype("f2")
    check_call(cpu, example(rng.standard_normal((2, heads, 5, 37)).astype("f4"), bent, max_bias=8.0, factor=0.125))


@pytest.mark.parametrize("bias", [-1.0, 65.0, float("nan")])
def test_slopes_out_of_range_are_refused(bias: float, cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="max_bias"):
        run_guarded(cpu, example(np.zeros((3, 37), "f4"), max_bias=bias))
