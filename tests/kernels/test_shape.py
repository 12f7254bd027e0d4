"""REPEAT, CONCAT, PAD, ROLL, DIAG_MASK_INF: every dimension, every type, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]
NAMES = {"float32": "f32", "float16": "f16", "uint16": "bf16", "int32": "i32"}


def example(name: str, *arrays: Array, **params: float) -> Example:
    dtype = NAMES[str(arrays[0].dtype)]
    operands = dict(zip((o.name for o in OPS[name].contract.operands), arrays, strict=True))
    return Example.of(OPS[name], (name, (dtype,) * (len(arrays) + 1)), operands, **params)


def numbered(*shape: int, dtype: str = "f4") -> Array:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u2", "i4"])
@pytest.mark.parametrize("dim", range(4))
def test_concat_along_each_dimension(dim: int, dtype: str, cpu: CpuBackend) -> None:
    x = numbered(2, 3, 4, 5, dtype=dtype)
    w = numbered(*(7 if k == 3 - dim else n for k, n in enumerate(x.shape)), dtype=dtype)
    assert np.array_equal(check_call(cpu, example("concat", x, w, dim=dim)), np.concatenate([x, w], 3 - dim))


def test_concat_keeps_large_whole_numbers(cpu: CpuBackend) -> None:
    x = np.array([[2**31 - 1, -(2**31), 16777217]], "i4")
    assert check_call(cpu, example("concat", x, x[:, :1], dim=0)).tolist() == [[2**31 - 1, -(2**31), 16777217, 2**31 - 1]]


@pytest.mark.parametrize("dim", range(4))
def test_concat_with_nothing(dim: int, cpu: CpuBackend) -> None:
    x = numbered(2, 3, 4, 5)
    none = np.zeros([0 if k == 3 - dim else n for k, n in enumerate(x.shape)], "f4")
    assert np.array_equal(check_call(cpu, example("concat", x, none, dim=dim)), x)
    assert np.array_equal(check_call(cpu, example("concat", none, x, dim=dim)), x)


@pytest.mark.parametrize(("shape", "dim", "match"), [((2, 4), 0, "only dimension 0 may differ"), ((3, 5), 4, "0 .. 3")])
def test_what_cannot_be_joined_is_refused(shape: tuple[int, ...], dim: int, match: str, cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match=match):
        run_guarded(cpu, example("concat", numbered(3, 5), numbered(*shape), dim=dim))


@pytest.mark.parametrize("times", [(1, 1, 1, 1), (3, 1, 1, 1), (1, 2, 1, 3), (2, 2, 2, 2), (1, 0, 1, 1)], ids=str)
def test_repeat_tiles(times: tuple[int, ...], cpu: CpuBackend) -> None:
    x = numbered(1, 2, 3, 5)
    got = check_call(cpu, example("repeat", x, **{f"times{k}": t for k, t in enumerate(times)}))
    assert np.array_equal(got, np.tile(x, times[::-1]))


def test_repeat_makes_dimensions(cpu: CpuBackend) -> None:
    assert check_call(cpu, example("repeat", numbered(3), times1=2)).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_pad_by_hand(cpu: CpuBackend) -> None:
    x = numbered(2, 3) + 1
    got = check_call(cpu, example("pad", x, lp0=1, rp0=2, lp1=1))
    assert got.tolist() == [[0] * 6, [0, 1, 2, 3, 0, 0], [0, 4, 5, 6, 0, 0]]
    got = check_call(cpu, example("pad", x, lp0=1, rp0=4, rp1=1, circular=1))
    assert got.tolist() == [[3, 1, 2, 3, 1, 2, 3, 1], [6, 4, 5, 6, 4, 5, 6, 4], [3, 1, 2, 3, 1, 2, 3, 1]]


@pytest.mark.parametrize("params", [{"lp0": -1}, {"lp0": 4, "circular": 1}, {"rp3": -2}], ids=str)
def test_pads_that_cannot_be(params: dict[str, int], cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="is expected|not negative"):
        run_guarded(cpu, example("pad", numbered(2, 3), **params))


@pytest.mark.parametrize("shifts", [(0, 0, 0, 0), (1, 0, 0, 0), (-2, 1, 0, -1), (5, 4, 3, 2), (100, -101, 7, 1)], ids=str)
def test_roll_goes_round(shifts: tuple[int, ...], cpu: CpuBackend) -> None:
    x = numbered(2, 3, 4, 5)
    got = check_call(cpu, example("roll", x, **{f"shift{k}": s for k, s in enumerate(shifts)}))
    assert np.array_equal(got, np.roll(x, shifts[::-1], (0, 1, 2, 3)))


def test_the_mask_begins_behind_the_past(cpu: CpuBackend) -> None:
    got = check_call(cpu, example("diag_mask_inf", np.ones((2, 2, 4), "f4"), n_past=1))
    hidden = np.isneginf(got)
    assert hidden[0].tolist() == hidden[1].tolist() == [[False, False, True, True], [False, False, False, True]]


@pytest.mark.parametrize("name", ["repeat", "pad", "roll", "diag_mask_inf", "fill"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
def test_nothing_gives_nothing(name: str, shape: tuple[int, ...], cpu: CpuBackend) -> None:
    assert check_call(cpu, example(name, np.zeros(shape, "f4"))).shape == shape
