"""OUT_PROD: hand-made numbers, matrices shared by neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS


def example(x: np.ndarray, w: np.ndarray) -> Example:
    return Example.of(OPS["out_prod"], ("out_prod", ("f32",) * 3), {"x": x, "w": w})


def test_by_hand(cpu: CpuBackend) -> None:
    x, w = np.array([[1, 2, 3], [10, 20, 30]], "f4"), np.array([[1, -1], [0, 2]], "f4")
    assert check_call(cpu, example(x, w)).tolist() == [[1, 2, 3], [19, 38, 57]]


def test_neighbours_share_a_matrix(cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    x, w = rng.integers(-4, 5, (1, 2, 5, 9)).astype("f4"), rng.integers(-4, 5, (3, 4, 5, 7)).astype("f4")
    got = check_call(cpu, example(x, w))
    assert np.array_equal(got[2, 1], w[2, 1].T @ x[0, 0]) and np.array_equal(got[1, 2], w[1, 2].T @ x[0, 1])


def test_uneven_sharing_is_refused(cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="not shared evenly"):
        run_guarded(cpu, example(np.zeros((2, 3, 4), "f4"), np.zeros((3, 3, 4), "f4")))
