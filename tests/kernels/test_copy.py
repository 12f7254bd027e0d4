"""CPY: conversions between types, blocks written to the byte, any layout to any other, other shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.backend import Backend
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import BF16, F16, F32, I8, I16, I32, I64, Q4_1, Q8_0, WEIGHT_BLOCKS, DType, from_bf16
from engine.errors import ShapeError
from engine.gguf.quants import dequantize, quantize
from engine.graph import Graph
from engine.sched.execute import Executable
from engine.tensor import Tensor, input_tensor
from engine.testing import Example, Layout, check_call, elements, run_guarded
from kernels import OPS
from kernels.copy import WRITTEN, cont, copy_to, dup

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["cpu of 8 lanes", "cpu of 4 lanes", "sim"], scope="module")
def each(request: pytest.FixtureRequest) -> Iterator[Backend]:
    ops = [OPS["cpy"], OPS["cpy_to"]]
    backend = SimBackend(ops, lanes=4) if request.param == "sim" else CpuBackend(ops, lanes=int(request.param.split()[2]))
    yield backend
    if isinstance(backend, CpuBackend):
        backend.close()


def copied(cpu: Backend, x: Array, source: str, target: str, layout: Layout | None = None) -> Array:
    layouts = {} if layout is None else {"x": layout}
    return check_call(cpu, Example.of(OPS["cpy"], ("cpy", (source, target)), {"x": x}, layouts, dtype=target))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_all_short_floats_survive(dtype: DType, cpu: CpuBackend) -> None:
    """All 65,536 patterns to float32 and back: the same number, every NaN a NaN."""
    bits = np.arange(65536, dtype=np.uint16)
    x = bits.view(np.float16) if dtype is F16 else bits
    wide = copied(cpu, x, dtype.name, "f32")
    back = copied(cpu, wide, "f32", dtype.name).view(np.uint16)
    nan = np.isnan(wide)
    assert np.array_equal(back[~nan], bits[~nan])
    narrow = back.view(np.float16).astype("f4") if dtype is F16 else from_bf16(back)
    assert np.isnan(narrow[nan]).all() and nan.sum() == (2046 if dtype is F16 else 254)


@pytest.mark.parametrize(("dtype", "oracle"), [(F16, np.float16), (BF16, ml_dtypes.bfloat16)], ids=["f16", "bf16"])
def test_ties_go_to_even(dtype: DType, oracle: Any, cpu: CpuBackend) -> None:
    """Every short float, the middle between it and its neighbour, and both sides of that middle."""
    bits = np.arange(65536, dtype=np.uint16)
    numbers = bits.view(oracle).astype("f4")
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middles = ((numbers[:-1].astype("f8") + numbers[1:]) / 2).astype("f4")
    x = np.concatenate([numbers, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))])
    got = copied(cpu, x, "f32", dtype.name).view(oracle).astype("f4")
    with np.errstate(over="ignore"):
        assert np.array_equal(got, x.astype(oracle).astype("f4"))


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_permuted_to_dense(source: str, axes: tuple[int, ...], cpu: CpuBackend, run_seed: int) -> None:
    dtype = {"f32": np.float32, "f16": np.float16}.get(source)
    values = np.random.default_rng(run_seed).standard_normal((2, 3, 5, 37)).astype("f4")
    x = values.astype(dtype) if dtype else elements(values, BF16)
    copied(cpu, x, source, "f32", Layout(axes, (1, 1, 1, 1), (0, 0, 0, 0), 3))


# -- blocks -----------------------------------------------------------------------------------------------------


def rows_of(seed: int) -> Array:
    """Rows of 13 blocks: mild, shifted, large, tiny, halves of steps, zeros of both signs, one value that stands out."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, 13 * 32)).astype("f4")
    x[1] += 5
    x[2] *= 1e6
    x[3] *= 1e-20
    x[4] = rng.integers(-254, 255, x.shape[1]) / 2
    x[5] = rng.choice([0.0, -0.0], x.shape[1])
    x[6] = np.where(np.arange(x.shape[1]) % 37, 0, 3)
    x[7] = 0.75
    return x


def as_bytes(got: Array) -> Array:
    return np.ascontiguousarray(got).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("dtype", WRITTEN, ids=str)
def test_blocks_are_written_to_the_byte(dtype: DType, each: Backend, run_seed: int) -> None:
    x = rows_of(run_seed)
    got, guards = run_guarded(each, Example.of(OPS["cpy"], ("cpy", ("f32", dtype.name)), {"x": x}, dtype=dtype.name))
    assert guards.intact and np.array_equal(as_bytes(got), quantize(x, dtype).reshape(-1))


@pytest.mark.parametrize("dtype", WRITTEN, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_blocks_cannot_hold_shows(dtype: DType, bad: float, each: Backend) -> None:
    """Nowhere does NaN or an infinity become an ordinary number; the block beside it is right."""
    x = np.arange(128, dtype="f4").reshape(2, 64) - 40
    x[0, 7] = x[1, 0] = bad
    got, _ = run_guarded(each, Example.of(OPS["cpy"], ("cpy", ("f32", dtype.name)), {"x": x}, dtype=dtype.name))
    values = dequantize(as_bytes(got).reshape(2, -1), dtype)
    assert not np.isfinite(values[:, :32]).any()
    assert np.array_equal(values[:, 32:], dequantize(quantize(x[:, 32:], dtype), dtype))


@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_blocks_are_copied_as_bytes(dtype: DType, each: Backend, run_seed: int) -> None:
    """Every second row, backwards from the last dimension but one; NaN scales and all."""
    raw = np.random.default_rng(run_seed).integers(0, 256, (2, 3, 2 * dtype.nbytes), np.uint8)
    x = raw.reshape(-1).view(dtype.numpy).reshape(2, 3, 2)
    layout = {"x": Layout((1, 0, 2), (2, 1, 1), (1, 0, 0), 3)}
    got, guards = run_guarded(each, Example.of(OPS["cpy"], ("cpy", (dtype.name, dtype.name)), {"x": x}, layout, dtype=dtype.name))
    assert guards.intact and np.array_equal(as_bytes(got), raw.reshape(-1))


# -- integers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [I8, I16, I32, I64], ids=str)
def test_integers_are_copied_as_they_are(dtype: DType, each: Backend) -> None:
    ends = np.iinfo(dtype.numpy)
    x = np.array([[0, 1, -1, ends.min, ends.max, 77, ends.max - 1]] * 3, dtype.numpy)
    assert np.array_equal(copied(each, x, dtype.name, dtype.name), x)


def test_floats_to_integers_and_back(each: Backend) -> None:
    """Towards zero, saturating, NaN to 0; integers beyond 24 bits round to even."""
    x = np.array([0.0, -0.0, 1.9, -1.9, 2147483520.0, 2.0**31, -(2.0**31), -1e30, np.inf, -np.inf, np.nan], "f4")
    want = [0, 0, 1, -1, 2147483520, 2**31 - 1, -(2**31), -(2**31), 2**31 - 1, -(2**31), 0]
    assert copied(each, x, "f32", "i32").tolist() == want
    n = np.array([2**24 + 1, 2**24 + 3, -(2**31), 2**31 - 1, 5], "i4")
    assert copied(each, n, "i32", "f32").tolist() == [2.0**24, 2.0**24 + 4, -(2.0**31), 2.0**31, 5]


# -- shapes and targets -----------------------------------------------------------------------------------------


def run(result: Tensor, values: dict[Tensor, Array], *also: Tensor) -> list[Array]:
    """The result and other tensors after a run."""
    with Executable([CpuBackend(list(OPS.values()), threads=1)], Graph([result, *also])) as made:
        for t, data in values.items():
            made.set(t, data)
        made.run()
        return [made.get(t) for t in (result, *also)]


@pytest.mark.parametrize("shape", [(3, 5, 7, 32), (32, 7, 5, 3), (105, 32), (7, 480), (3360,)], ids=str)
@pytest.mark.parametrize("strided", ["none", "x", "y", "both"])
def test_other_shapes_keep_the_order_of_elements(shape: tuple[int, ...], strided: str) -> None:
    x, y = input_tensor(F32, (3, 7, 5, 32), "x"), input_tensor(F16, (*shape[:-1], 2 * shape[-1]), "y")
    data = np.arange(3360, dtype="f4").reshape(x.shape)
    before = np.full(y.shape, -1, "f2")
    source, given = (x.permute(0, 2, 1, 3), data.transpose(0, 2, 1, 3)) if strided in ("x", "both") else (x, data)
    if strided in ("y", "both"):
        target = y.view(shape, (*y.strides[:-1], 2 * y.strides[-1]))
    else:
        y = input_tensor(F16, shape, "y")
        target, before = y, np.full(shape, -1, "f2")
    got, whole = run(copy_to(source, target), {x: data, y: before}, y)
    want = np.ascontiguousarray(given).reshape(shape).astype("f2")
    assert np.array_equal(got, want)
    if strided in ("y", "both"):
        assert np.array_equal(whole[..., ::2], want) and (whole[..., 1::2] == -1).all()


def test_blocks_of_other_rows(run_seed: int) -> None:
    """Rows of 48 are no blocks, but all elements are."""
    x, y = input_tensor(F32, (4, 48), "x"), input_tensor(Q8_0, (2, 96), "y")
    data = np.random.default_rng(run_seed).standard_normal(x.shape).astype("f4")
    (got,) = run(copy_to(x, y), {x: data, y: np.zeros((2, 3), Q8_0.numpy)})
    assert np.array_equal(as_bytes(got), quantize(data.reshape(2, 96), Q8_0).reshape(-1))


def test_another_number_of_elements_is_refused() -> None:
    with pytest.raises(ShapeError, match="reshape"):
        copy_to(input_tensor(F32, (4, 8), "x"), input_tensor(F32, (5, 8), "y"))


def test_cont_and_dup(run_seed: int) -> None:
    x, w = input_tensor(F32, (4, 6), "x"), input_tensor(Q4_1, (3, 2, 64), "w")
    data = np.random.default_rng(run_seed).standard_normal(x.shape).astype("f4")
    raw = np.random.default_rng(run_seed).integers(0, 256, (3, 2, 2 * Q4_1.nbytes), np.uint8).reshape(-1).view(Q4_1.numpy).reshape(3, 2, 2)
    turned, same, blocks = run(cont(x.transpose(), shape=(2, 12)), {x: data, w: raw}, dup(x), cont(w.permute(1, 0, 2)))
    assert np.array_equal(turned, data.T.reshape(2, 12)) and np.array_equal(same, data)
    assert blocks.tobytes() == np.ascontiguousarray(raw.transpose(1, 0, 2)).tobytes()
