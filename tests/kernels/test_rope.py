"""ROPE: both orders of pairs, partial rotation, positions where float32 products would be lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]


def example(x: Array, positions: list[int], half: int, neox: int, base: float = 10000.0) -> Example:
    turns = base ** (-np.arange(half) / max(half, 1)) / (2 * np.pi)
    high = turns.astype("f4")
    freqs = np.stack([high, (turns - high).astype("f4")])
    arrays = {"x": x, "pos": np.array(positions, "i4"), "freqs": freqs}
    return Example.of(OPS["rope"], ("rope", ("f32", "i32", "f32", "i32", "f32")), arrays, neox=neox)


def heads(seed: int, t: int, n: int) -> Array:
    return np.random.default_rng(seed).standard_normal((1, t, 2, n)).astype("f4")


@pytest.mark.parametrize("neox", [0, 1])
@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_far_positions_are_as_exact_as_near_ones(base: float, neox: int, cpu: CpuBackend, run_seed: int) -> None:
    """The angle is one of float64: position * frequency in float32 would be off by 2e-4 at 4,096 already."""
    positions = [0, 1, 4095, 4096, 131071, 1 << 20, (1 << 24) - 1]
    check_call(cpu, example(heads(run_seed, len(positions), 64), positions, 32, neox, base))


@pytest.mark.parametrize("neox", [0, 1])
@pytest.mark.parametrize(("n", "half"), [(2, 1), (64, 32), (64, 8), (37, 11), (5, 2), (7, 0), (130, 65)])
def test_partial_rotation_leaves_the_rest(n: int, half: int, neox: int, cpu: CpuBackend, run_seed: int) -> None:
    x = heads(run_seed, 3, n)
    got = check_call(cpu, example(x, [5, 0, 17], half, neox))
    assert np.array_equal(got[..., 2 * half :], x[..., 2 * half :])


def test_both_orders_are_one_rotation(cpu: CpuBackend, run_seed: int) -> None:
    """Neox pairs (i, i + half), normal pairs (2 i, 2 i + 1): the same bits in another order."""
    x = heads(run_seed, 3, 16)
    order = np.arange(16).reshape(2, 8).T.reshape(-1)
    neox, _ = run_guarded(cpu, example(x, [3, 9, 4000], 8, 1))
    normal, _ = run_guarded(cpu, example(np.ascontiguousarray(x[..., order]), [3, 9, 4000], 8, 0))
    assert np.array_equal(neox[..., order], normal)


@pytest.mark.parametrize("neox", [0, 1])
def test_position_zero_changes_little_and_length_is_kept(neox: int, cpu: CpuBackend, run_seed: int) -> None:
    x = heads(run_seed, 2, 32)
    got = check_call(cpu, example(x, [0, 999], 16, neox))
    assert np.allclose(got[:, 0], x[:, 0], rtol=0, atol=4e-6)
    assert np.allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=4e-6)


def test_too_many_rotated_dimensions_are_refused(cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="rotated dimensions"):
        run_guarded(cpu, example(heads(0, 1, 7), [0], 4, 0))


@pytest.mark.parametrize("neox", [0, 1])
def test_the_magnitude_multiplies_what_is_rotated(neox: int, cpu: CpuBackend, run_seed: int) -> None:
    x = heads(run_seed, 3, 37)
    made = example(x, [0, 5, 999], 11, neox)
    larger = replace(made, params={**made.params, "magnitude": 1.5})
    got, plain = check_call(cpu, larger), check_call(cpu, made)
    assert np.allclose(got[..., :22], 1.5 * plain[..., :22], rtol=0, atol=4e-6) and np.array_equal(got[..., 22:], x[..., 22:])


@pytest.mark.parametrize("neox", [0, 1])
def test_half_floats_are_rounded_once(neox: int, cpu: CpuBackend, run_seed: int) -> None:
    x = heads(run_seed, 3, 32).astype("f2")
    wide, _ = run_guarded(cpu, example(x.astype("f4"), [1, 2, 4096], 16, neox))
    made = example(x.astype("f4"), [1, 2, 4096], 16, neox)
    got = check_call(cpu, Example.of(OPS["rope"], ("rope", ("f16", "i32", "f32", "i32", "f16")), {**made.operands, "x": x}, neox=neox))
    assert got.dtype == np.float16 and np.array_equal(got, wide.astype("f2"))


def test_axes_choose_the_position_of_each_pair(cpu: CpuBackend, run_seed: int) -> None:
    """Three axes at the same positions are one; else each pair turns as if its axis were the only one. Wrong axes are clamped."""
    x, half = heads(run_seed, 3, 32), 16
    one = example(x, [7, 80, 900], half, 1)
    positions = np.array([[7, 80, 900], [3, 4, 5], [1000, 2000, 3000]], "i4")
    axes = np.array([0, 1, 2, 2] * 4, "i4")
    key = ("rope", ("f32", "i32", "f32", "i32", "f32"))
    same, _ = run_guarded(cpu, Example.of(OPS["rope"], key, {**one.operands, "pos": positions[[0, 0, 0]], "axes": axes}, neox=1))
    assert np.array_equal(same, run_guarded(cpu, one)[0])
    mixed = check_call(cpu, Example.of(OPS["rope"], key, {**one.operands, "pos": positions, "axes": axes}, neox=1))
    for axis in range(3):
        alone, _ = run_guarded(cpu, example(x, positions[axis].tolist(), half, 1))
        pairs = np.flatnonzero(axes == axis)
        assert np.array_equal(mixed[..., [*pairs, *(pairs + half)]], alone[..., [*pairs, *(pairs + half)]])
    wild = np.where(axes == 0, -5, np.where(axes == 2, 1 << 30, axes)).astype("i4")
    clamped = check_call(cpu, Example.of(OPS["rope"], key, {**one.operands, "pos": positions, "axes": wild}, neox=1))
    assert np.array_equal(clamped, mixed)
