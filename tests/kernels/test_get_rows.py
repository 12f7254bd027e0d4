"""GET_ROWS: every bit pattern of every block format, ids outside the matrix, batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.dtypes import F32, WEIGHT_BLOCKS, DType
from engine.errors import ShapeError
from engine.gguf.quants import dequantize
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]


def example(dtype: DType, w: Array, ids: Array) -> Example:
    return Example.of(OPS["get_rows"], ("get_rows", (dtype.name, {4: "i32", 8: "i64"}[ids.dtype.itemsize], "f32")), {"w": w, "ids": ids})


@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_any_bytes_are_decoded_to_the_bit(dtype: DType, cpu: CpuBackend, run_seed: int) -> None:
    """Random bytes are legal blocks, their scales anything f16 holds. One rounding, as in the reference: the bits agree."""
    raw = np.random.default_rng(run_seed).integers(0, 256, (64, 4 * dtype.nbytes), np.uint8)
    got, _ = run_guarded(cpu, example(dtype, raw.reshape(-1).view(dtype.numpy).reshape(64, 4), np.arange(64, dtype="i4")))
    assert np.array_equal(got, dequantize(raw, dtype), equal_nan=True)


@pytest.mark.parametrize("integer", ["i4", "i8"])
def test_ids_outside_are_clamped(integer: str, cpu: CpuBackend) -> None:
    w = np.arange(12, dtype="f4").reshape(4, 3)
    ids = np.array([0, 3, 4, -1, 2**31 - 1, -(2**31), *([2**33 + 1, -(2**40)] if integer == "i8" else [])], integer)
    got = check_call(cpu, example(F32, w, ids))
    assert np.array_equal(got, w[np.clip(ids, 0, 3)])


@pytest.mark.parametrize(("matrices", "batches"), [((1, 1), (2, 3)), ((2, 3), (2, 3)), ((1, 3), (2, 3)), ((2, 1), (4, 1)),
                                                   ((1, 1), (0, 3))])
def test_matrices_are_repeated_over_batches(matrices: tuple[int, int], batches: tuple[int, int], cpu: CpuBackend, run_seed: int) -> None:
    """An empty batch is one of them."""
    rng = np.random.default_rng(run_seed)
    w = rng.standard_normal((*matrices, 5, 7)).astype("f4")
    ids = rng.integers(0, 5, (*batches, 4)).astype("i4")
    got = check_call(cpu, example(F32, w, ids))
    want = [[w[a % matrices[0], b % matrices[1]][ids[a, b]] for b in range(batches[1])] for a in range(batches[0])]
    assert np.array_equal(got, np.array(want, "f4").reshape(got.shape))


@pytest.mark.parametrize("shape", [(0, 7), (0, 3, 7), (1, 0, 3, 7)], ids=str)
def test_a_matrix_without_rows_is_refused(shape: tuple[int, ...], cpu: CpuBackend) -> None:
    """There is nothing an id could be clamped to."""
    with pytest.raises(ShapeError, match="no row"):
        run_guarded(cpu, example(F32, np.zeros(shape, "f4"), np.zeros(2, "i4")))
    assert check_call(cpu, example(F32, np.zeros((0, 7), "f4"), np.zeros(0, "i4"))).size == 0
