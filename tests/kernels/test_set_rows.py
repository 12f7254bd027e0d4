"""SET_ROWS and SET_KEYS: what is written, where, and that nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import DType
from engine.errors import ShapeError
from engine.gguf.quants import quantize
from engine.testing import Example, check_call, run_guarded
from engine.testing.values import records
from kernels import OPS
from kernels.set_rows import WRITTEN

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


@pytest.mark.parametrize("target", ["cpu of 8 lanes", "cpu of 4 lanes", "sim"])
@pytest.mark.parametrize("dtype", WRITTEN, ids=str)
def test_rows_become_blocks(dtype: DType, target: str, run_seed: int) -> None:
    """A quantised cache: rows that are written have the bytes of `quantize`, the others those they had."""
    op = OPS["set_rows"]
    backend = SimBackend([op], lanes=4) if target == "sim" else CpuBackend([op], lanes=int(target.split()[2]), threads=2)
    rng = np.random.default_rng(run_seed)
    before = rng.integers(0, 256, (2, 3, 6, 5 * dtype.nbytes), np.uint8)
    x = rng.standard_normal((2, 3, 2, 160)).astype("f4")
    want = before.copy()
    want[:, :, [4, 1]] = quantize(x, dtype)
    operands = {"x": x, "ids": np.array([4, 1], "i8"), "y": records(before, dtype)}
    got, guards = run_guarded(backend, Example.of(op, ("set_rows", ("f32", "i64", dtype.name)), operands))
    if isinstance(backend, CpuBackend):
        backend.close()
    assert guards.intact and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("of", [(1, 1), (2, 1), (1, 2), (4, 2), (4, 6)], ids=str)
def test_ids_are_repeated_over_matrices(of: tuple[int, int], cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    x, y = rng.standard_normal((4, 6, 3, 9)).astype("f2"), np.zeros((4, 6, 8, 9), "f4")
    ids = rng.permuted(np.tile(np.arange(8, dtype="i4"), (*of, 1)), axis=-1)[..., :3]
    want = y.copy()
    for a in range(4):
        for b in range(6):
            want[a, b, ids[a % of[0], b % of[1]]] = x[a, b]
    got = check_call(cpu, Example.of(OPS["set_rows"], ("set_rows", ("f16", "i32", "f32")), {"x": x, "ids": ids, "y": y}))
    assert np.array_equal(got, want)


@pytest.mark.parametrize("wild", [-1, 5, 2**31 - 1, -(2**31)])
def test_ids_outside_write_nothing_outside(wild: int, cpu: CpuBackend) -> None:
    """They are clamped, in every kernel."""
    x, ids = np.arange(7, dtype="f4").reshape(1, 7), np.array([wild], "i4")
    row = 0 if wild < 0 else 4
    operands = {"x": x, "ids": ids, "y": -np.ones((5, 7), "f4")}
    got = check_call(cpu, Example.of(OPS["set_rows"], ("set_rows", ("f32", "i32", "f32")), operands))
    assert np.array_equal(got[row], x[0]) and (np.delete(got, row, 0) == -1).all()
    many = np.where(np.arange(16) == 9, wild if wild != 5 else 64, np.arange(16) + 20).astype("i4")
    keys = np.random.default_rng(0).standard_normal((16, 2, 3)).astype("f4")
    cell = np.clip(many, 0, 63)
    operands = {"x": keys, "ids": many, "y": np.zeros((2, 2, 3, 32), "f4")}
    for variant in ("set_keys_tile", "general"):
        example = Example.of(OPS["set_keys"], ("set_keys", ("f32", "i32", "f32")), operands)
        got, guards = run_guarded(cpu, example, variant)
        assert guards.intact and np.array_equal(got[:, cell // 32, :, cell % 32], keys)


def test_what_cannot_be_written_is_refused(cpu: CpuBackend) -> None:
    one, key = np.zeros((1, 1), "f4"), ("set_rows", ("f32", "i32", "f32"))
    with pytest.raises(ShapeError, match="no row that ids could name"):
        run_guarded(cpu, Example.of(OPS["set_rows"], key, {"x": one, "ids": np.zeros(1, "i4"), "y": np.zeros((0, 1), "f4")}))
    with pytest.raises(ShapeError, match="ids for 2 matrices cannot be repeated over 3"):
        operands = {"x": np.zeros((3, 2, 4), "f4"), "ids": np.zeros((2, 2), "i4"), "y": np.zeros((3, 5, 4), "f4")}
        run_guarded(cpu, Example.of(OPS["set_rows"], key, operands))
    nothing = {"x": np.zeros((0, 4), "f4"), "ids": np.zeros(0, "i4"), "y": np.zeros((0, 4), "f4")}
    assert check_call(cpu, Example.of(OPS["set_rows"], key, nothing)).size == 0
