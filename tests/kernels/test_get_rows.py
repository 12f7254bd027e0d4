"""GET_ROWS: every bit pattern of every block format, ids outside the matrix, batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
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


@pytest.mark.parametrize("byte", [0x00, 0x55, 0x77, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_codes_at_the_ends_of_their_range(dtype: DType, byte: int, cpu: CpuBackend) -> None:
    """All bits set, none, the highest and the lowest code of signed types; a scale of 1 where the format has an f16 field for it."""
    raw = np.full((2, 2 * dtype.nbytes), byte, np.uint8).reshape(-1).view(dtype.numpy).reshape(2, 2)
    for f in dtype.fields:
        if f.unit == "f16":
            raw[f.name] = 1
    got, _ = run_guarded(cpu, example(dtype, raw, np.arange(2, dtype="i4")))
    assert np.array_equal(got, dequantize(raw.view(np.uint8).reshape(2, -1), dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_any_bytes_in_plain_python(dtype: DType, run_seed: int) -> None:
    """The texts of the decoders, with every index checked, where runs and quads vary by lane and where they do not."""
    raw = np.random.default_rng(run_seed).integers(0, 256, (2, 2 * dtype.nbytes), np.uint8)
    for n_lanes in (1, 16):
        sim = SimBackend([OPS["get_rows"]], lanes=n_lanes)
        got, _ = run_guarded(sim, example(dtype, raw.reshape(-1).view(dtype.numpy).reshape(2, 2), np.arange(2, dtype="i4")))
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
