"""CPY: conversions between float types, and any layout to a dense one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.dtypes import BF16, F16, DType, from_bf16
from engine.testing import Example, Layout, check_call, elements
from kernels import OPS

Array = np.ndarray[Any, Any]


def copied(cpu: CpuBackend, x: Array, source: str, target: str, layout: Layout | None = None) -> Array:
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
