"""SET_ROWS and SET_KEYS: what is written, where, and that nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.testing import Example, check_call
from kernels import OPS

TYPES = {"f4": "f32", "f2": "f16", "i4": "i32", "i8": "i64"}


@pytest.mark.parametrize("integer", ["i4", "i8"])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_keys_lie_in_blocks_of_32(dtype: str, integer: str, cpu: CpuBackend, run_seed: int) -> None:
    """Cell c of head h: [h, c // 32, :, c % 32]; every other cell keeps its bits."""
    rng = np.random.default_rng(run_seed)
    cache = rng.standard_normal((2, 3, 5, 32)).astype(dtype)
    x, ids = rng.standard_normal((4, 2, 5)).astype("f4"), np.array([0, 31, 32, 95], integer)
    want = cache.copy()
    for row, cell in enumerate(ids):
        for head in range(2):
            want[head, cell // 32, :, cell % 32] = x[row, head].astype(dtype)
    key = ("set_keys", ("f32", TYPES[integer], TYPES[dtype]))
    got = check_call(cpu, Example.of(OPS["set_keys"], key, {"x": x, "ids": ids, "y": cache}))
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_rows_are_written_in_every_batch(dtype: str, cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    cache, x = rng.standard_normal((2, 3, 6, 37)).astype(dtype), rng.standard_normal((2, 3, 2, 37)).astype("f4")
    want = cache.copy()
    want[:, :, [5, 1]] = x.astype(dtype)
    key = ("set_rows", ("f32", "i64", TYPES[dtype]))
    got = check_call(cpu, Example.of(OPS["set_rows"], key, {"x": x, "ids": np.array([5, 1], "i8"), "y": cache}))
    assert got.tobytes() == want.tobytes()


def test_values_beyond_f16_become_infinite_and_nan_stays(cpu: CpuBackend) -> None:
    x = np.array([[65504, 65519, 65520, -1e30, np.nan, 6e-8, 2e-8, -0.0]], "f4")
    key = ("set_rows", ("f32", "i32", "f16"))
    got = check_call(cpu, Example.of(OPS["set_rows"], key, {"x": x, "ids": np.zeros(1, "i4"), "y": np.zeros((2, 8), "f2")}))
    with np.errstate(over="ignore"):
        assert np.array_equal(got[0], x[0].astype("f2"), equal_nan=True)
