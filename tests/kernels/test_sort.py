"""ARGSORT and TOP_K: stable, NaN last, any length, both ways to sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]
INF, NAN = np.inf, np.nan
ROW = [3, NAN, -0.0, INF, 0.0, -INF, 3, NAN, 1e-40, -1e-40]


def example(name: str, x: Array, **params: int) -> Example:
    return Example.of(OPS[name], (name, ("f32", "i32")), {"x": x}, **params)


@pytest.mark.parametrize("variant", ["general", "argsort_few"])
@pytest.mark.parametrize(("descending", "want"), [(0, [5, 9, 2, 4, 8, 0, 6, 3, 1, 7]), (1, [3, 0, 6, 8, 2, 4, 9, 5, 1, 7])])
def test_the_order_of_everything(descending: int, want: list[int], variant: str, cpu: CpuBackend) -> None:
    got = check_call(cpu, example("argsort", np.array(ROW, "f4"), descending=descending), variant)
    assert got.tolist() == want


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 9, 128, 255, 256, 257, 1000, 1024, 1025, 4099])
@pytest.mark.parametrize("descending", [0, 1])
def test_rows_of_any_length(n: int, descending: int, cpu: CpuBackend, run_seed: int) -> None:
    """Many equals: only a stable order is right."""
    x = np.random.default_rng(run_seed).integers(0, max(n // 3, 1) + 1, (3, n)).astype("f4")
    check_call(cpu, example("argsort", x, descending=descending))
    if n <= 1025:
        check_call(cpu, example("argsort", x, descending=descending), "general")


def test_top_k_by_hand(cpu: CpuBackend) -> None:
    x = np.array([ROW, ROW[::-1]], "f4")
    assert check_call(cpu, example("top_k", x, k=4)).tolist() == [[3, 0, 6, 8], [6, 3, 9, 1]]
    assert check_call(cpu, example("top_k", x, k=10))[0].tolist() == [3, 0, 6, 8, 2, 4, 9, 5, 1, 7]
    assert check_call(cpu, example("top_k", x, k=0)).shape == (2, 0)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (64, 8), (128, 8), (1025, 40), (32003, 16)])
def test_top_k_is_the_start_of_a_descending_argsort(n: int, k: int, cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).integers(-n, n, (2, n)).astype("f4")
    got = check_call(cpu, example("top_k", x, k=k))
    assert np.array_equal(got, np.argsort(-x, -1, kind="stable")[:, :k])


@pytest.mark.parametrize(("k", "match"), [(-1, "not negative"), (6, "k is 6; 0 .. 5")])
def test_k_is_within_the_row(k: int, match: str, cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match=match):
        run_guarded(cpu, example("top_k", np.zeros((2, 5), "f4"), k=k))
