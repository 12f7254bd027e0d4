"""ADD, MUL, SCALE, the activation functions and RMS_NORM: repetition, ends of the range, empty rows."""

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


def example(name: str, *arrays: Array, **params: float) -> Example:
    operands = dict(zip((o.name for o in OPS[name].contract.operands), arrays, strict=True))
    return Example.of(OPS[name], (name, ("f32",) * (len(arrays) + 1)), operands, **params)


@pytest.mark.parametrize("shape", [(37,), (1,), (5, 37), (5, 1), (3, 1, 37), (3, 1, 1), (2, 1, 5, 1), (1, 3, 1, 37)], ids=str)
@pytest.mark.parametrize("name", ["add", "mul"])
def test_the_shorter_operand_is_repeated(name: str, shape: tuple[int, ...], cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    x, w = rng.standard_normal((2, 3, 5, 37)).astype("f4"), rng.standard_normal(shape).astype("f4")
    got = check_call(cpu, example(name, x, w))
    assert np.array_equal(got, x + w if name == "add" else x * w)


@pytest.mark.parametrize("shape", [(36,), (2, 37), (0,), (7, 1)], ids=str)
def test_what_does_not_divide_is_refused(shape: tuple[int, ...], cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="cannot be repeated"):
        run_guarded(cpu, example("add", np.zeros((5, 37), "f4"), np.zeros(shape, "f4")))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3, 4)], ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "silu", "gelu", "tanh", "swiglu", "geglu", "scale", "rms_norm", "soft_max"])
def test_nothing_gives_nothing(name: str, shape: tuple[int, ...], cpu: CpuBackend) -> None:
    required = [o for o in OPS[name].contract.operands if not o.optional]
    operands = {o.name: np.zeros(shape, "f4") for o in required}
    got = check_call(cpu, Example.of(OPS[name], (name, ("f32",) * len(OPS[name].contract.views)), operands))
    assert got.shape == shape


@pytest.mark.parametrize(("name", "x", "want"), [
    ("silu", [0, INF, 100, -1000, NAN], [0, INF, 100, 0, NAN]),
    ("gelu", [0, INF, 100, -1000, 1e30, -1e30, NAN], [0, INF, 100, 0, 1e30, 0, NAN]),
    ("tanh", [0, INF, -INF, 20, -20, 1e-30, NAN], [0, 1, -1, 1, -1, 1e-30, NAN])])
def test_activations_at_the_ends(name: str, x: list[float], want: list[float], cpu: CpuBackend) -> None:
    got, _ = run_guarded(cpu, example(name, np.array(x, "f4")))
    assert np.array_equal(got, np.array(want, "f4"), equal_nan=True)


def test_scale_takes_its_numbers_as_float32(cpu: CpuBackend) -> None:
    got, _ = run_guarded(cpu, example("scale", np.ones(5, "f4"), factor=0.1, bias=0.0))
    assert (got == np.float32(0.1)).all()


@pytest.mark.parametrize("n", [1, 7, 16, 33, 4096])
def test_rms_norm_of_a_row_of_zeros(n: int, cpu: CpuBackend) -> None:
    assert not check_call(cpu, example("rms_norm", np.zeros((2, n), "f4"), eps=1e-6)).any()


def test_rms_norm_of_a_long_row(cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).standard_normal((2, 11008)).astype("f4")
    check_call(cpu, example("rms_norm", x, eps=1e-6))
