"""ADD, SUB, MUL, DIV, ADD1, ADD_ID, SCALE, the activation functions, RMS_NORM: repetition, types, ends of the range, empty rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.dtypes import DTYPES
from engine.errors import ShapeError, UnsupportedOp
from engine.op import Key
from engine.testing import Example, check_call, elements, run_guarded, values
from kernels import OPS

Array = np.ndarray[Any, Any]
INF, NAN = np.inf, np.nan
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def example(name: str, *arrays: Array, **params: float) -> Example:
    operands = dict(zip((o.name for o in OPS[name].contract.operands), arrays, strict=True))
    return Example.of(OPS[name], (name, ("f32",) * (len(arrays) + 1)), operands, **params)


@pytest.mark.parametrize("shape", [(37,), (1,), (5, 37), (5, 1), (3, 1, 37), (3, 1, 1), (2, 1, 5, 1), (1, 3, 1, 37)], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_the_shorter_operand_is_repeated(name: str, shape: tuple[int, ...], cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    x, w = rng.standard_normal((2, 3, 5, 37)).astype("f4"), rng.standard_normal(shape).astype("f4")
    got = check_call(cpu, example(name, x, w))
    assert np.array_equal(got, BINARY[name](x, w))


@pytest.mark.parametrize("key", [k for k in OPS["div"].keys()], ids=str)
def test_the_result_has_the_type_of_the_first_operand(key: Key, cpu: CpuBackend) -> None:
    """Operands in f16 or bf16 are taken exactly, the quotient is rounded once."""
    x, w, y = (DTYPES[t] for t in key[1])
    call = Example.of(OPS["div"], key, {"x": elements(np.array([6, -1, 0, 1, 0]), x), "w": elements(np.array([3, 3, 3, 0, 0]), w)})
    got = check_call(cpu, call)
    assert y is x and got.dtype == x.numpy
    third = values(elements(np.array([-1 / 3]), x), x)
    np.testing.assert_array_equal(values(got, x), [2, *third, 0, INF, NAN])


def test_the_quotient_of_what_the_table_does_not_hold_is_refused(cpu: CpuBackend) -> None:
    with pytest.raises(UnsupportedOp):
        run_guarded(cpu, Example.of(OPS["div"], ("div", ("f16", "bf16", "f16")), {"x": np.ones(4, "f2"), "w": np.ones(4, "u2")}))


def test_add1_adds_one_number(cpu: CpuBackend) -> None:
    got = check_call(cpu, example("add1", np.array([[1, 2], [3, INF]], "f4"), np.array([0.5], "f4")))
    assert got.tolist() == [[1.5, 2.5], [3.5, INF]]
    with pytest.raises(ShapeError, match="w"):
        run_guarded(cpu, example("add1", np.zeros((2, 2), "f4"), np.zeros(2, "f4")))


def test_add_id_adds_the_bias_of_each_expert(cpu: CpuBackend) -> None:
    """x [tokens, experts used, n], w [experts, n]; ids outside are clamped."""
    x, w = np.zeros((2, 3, 4), "f4"), np.arange(20, dtype="f4").reshape(5, 4)
    ids = np.array([[4, 0, 1], [2, -7, 99]], "i4")
    got = check_call(cpu, Example.of(OPS["add_id"], ("add_id", ("f32", "f32", "i32", "f32")), {"x": x, "w": w, "ids": ids}))
    assert np.array_equal(got, w[[[4, 0, 1], [2, 0, 4]]])


@pytest.mark.parametrize("shape", [(36,), (2, 37), (0,), (7, 1)], ids=str)
def test_what_does_not_divide_is_refused(shape: tuple[int, ...], cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="cannot be repeated"):
        run_guarded(cpu, example("add", np.zeros((5, 37), "f4"), np.zeros(shape, "f4")))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3, 4)], ids=str)
@pytest.mark.parametrize("name", [*BINARY, "silu", "gelu", "tanh", "swiglu", "geglu", "scale", "rms_norm", "soft_max"])
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
