"""SUM_ROWS, MEAN, SUM, ARGMAX, CUMSUM: empty rows, NaN, equals, long rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]
INF, NAN = np.inf, np.nan


def example(name: str, x: Array) -> Example:
    return Example.of(OPS[name], (name, ("f32", "i32" if name == "argmax" else "f32")), {"x": x})


def test_sums_by_hand(cpu: CpuBackend) -> None:
    x = np.arange(1, 7, dtype="f4").reshape(2, 3)
    assert check_call(cpu, example("sum_rows", x)).tolist() == [[6], [15]]
    assert check_call(cpu, example("mean", x)).tolist() == [[2], [5]]
    assert check_call(cpu, example("sum", x)).tolist() == [21]
    assert check_call(cpu, example("cumsum", x)).tolist() == [[1, 3, 6], [4, 9, 15]]
    assert check_call(cpu, example("argmax", x)).tolist() == [2, 2]


def test_nothing_sums_to_zero(cpu: CpuBackend) -> None:
    x = np.zeros((3, 0), "f4")
    assert check_call(cpu, example("sum_rows", x)).tolist() == [[0], [0], [0]]
    assert check_call(cpu, example("sum", x)).tolist() == [0]
    assert np.isnan(check_call(cpu, example("mean", x))).all()
    assert check_call(cpu, example("argmax", x)).tolist() == [0, 0, 0]
    assert check_call(cpu, example("cumsum", x)).shape == (3, 0)
    assert check_call(cpu, example("sum", np.zeros((0, 4), "f4"))).tolist() == [0]


@pytest.mark.parametrize(("row", "place"), [
    ([1, 3, 3, 2], 1), ([NAN, 1, NAN, 2], 3), ([NAN, NAN], 0), ([-INF, -INF], 0), ([NAN, -INF], 0), ([-0.0, 0.0], 0),
    ([-INF, -1e30], 1), ([INF, NAN, INF], 0), ([7], 0)], ids=str)
def test_the_first_of_the_largest(row: list[float], place: int, cpu: CpuBackend) -> None:
    assert check_call(cpu, example("argmax", np.array([row], "f4"))).tolist() == [place]


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 1000])
def test_the_largest_anywhere(n: int, cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).integers(-9, 9, (7, n)).astype("f4")
    assert check_call(cpu, example("argmax", x)).tolist() == x.argmax(-1).tolist()


@pytest.mark.parametrize("n", [1, 7, 8, 9, 63, 64, 65, 5000])
def test_cumsum_of_whole_numbers_is_exact(n: int, cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).integers(-9, 9, (2, n)).astype("f4")
    assert np.array_equal(check_call(cpu, example("cumsum", x)), x.cumsum(-1))


def test_cumsum_passes_nan_on(cpu: CpuBackend) -> None:
    x = np.ones((1, 40), "f4")
    x[0, 20] = NAN
    got, _ = run_guarded(cpu, example("cumsum", x))
    assert np.isfinite(got[0, :20]).all() and np.isnan(got[0, 20:]).all()


def test_sum_of_many_rows(cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).integers(-9, 9, (3, 50, 7, 41)).astype("f4")
    assert check_call(cpu, example("sum", x)).tolist() == [x.sum()]
