"""SSM_CONV and SSM_SCAN: both kinds of A, groups, states that go from call to call, snapshots."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]
SCAN = OPS["ssm_scan"]


def conv(x: Array, c: Array) -> Example:
    return Example.of(OPS["ssm_conv"], ("ssm_conv", ("f32", "f32", "f32")), {"x": x, "c": c})


def scan(seed: int, s: int = 2, t: int = 5, h: int = 4, p: int = 3, n: int = 16, g: int = 1, rows: int = 3, mamba2: bool = True,
         ids: tuple[int, ...] = (2, 0), **params: int) -> Example:
    rng = np.random.default_rng(seed)
    shapes = {"state": (rows, h, p, n), "x": (s, t, h, p), "dt": (s, t, h), "b": (s, t, g, n), "c": (s, t, g, n)}
    made = {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    made["a"] = -rng.uniform(0.5, 1, (h, 1 if mamba2 else n)).astype("f4")
    made["ids"] = np.array(ids[:s], "i4")
    names = [o.name for o in SCAN.contract.operands]
    types = tuple("i32" if n == "ids" else "f32" for n in (*names, "y"))
    return Example.of(SCAN, ("ssm_scan", types), {n: made[n] for n in names}, **params)


def parts(e: Example, got: Array) -> tuple[Array, Array]:
    """y[s, t, h, p] and the states [snapshots, s, h, p, n] of a flat result."""
    (s, t, h, p), n = e.operands["x"].shape, e.operands["state"].shape[3]
    return got[: s * t * h * p].reshape(s, t, h, p), got[s * t * h * p :].reshape(-1, s, h, p, n)


def number_by_number(e: Example) -> Array:
    """The recurrence in Python's floats, one number of the state at a time."""
    o = {name: a.astype("f8") for name, a in e.operands.items()}
    (s, t, h, p), (_, _, _, n), g = o["x"].shape, o["state"].shape, o["b"].shape[2]
    y, last = np.zeros((s, t, h, p)), np.zeros((s, h, p, n))
    for i, j, k in np.ndindex(s, h, p):
        for q in range(n):
            now = o["state"][int(o["ids"][i]), j, k, q]
            for token in range(t):
                dt = o["dt"][i, token, j]
                step = dt if dt > 20 else math.log(1 + math.exp(dt))
                a = o["a"][j, q % o["a"].shape[1]]
                now = math.exp(step * a) * now + step * o["x"][i, token, j, k] * o["b"][i, token, j // (h // g), q]
                y[i, token, j, k] += now * o["c"][i, token, j // (h // g), q]
            last[i, j, k, q] = now
    return np.concatenate([y.reshape(-1), last.reshape(-1)])


@pytest.mark.parametrize(("t", "d_conv"), [(1, 4), (5, 4), (64, 4), (3, 1), (2, 9), (0, 4)])
@pytest.mark.parametrize("channels", [1, 7, 8, 65])
def test_convolution_sees_each_token_and_those_before(t: int, d_conv: int, channels: int, cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    x, c = rng.standard_normal((2, channels, t + d_conv - 1)).astype("f4"), rng.standard_normal((channels, d_conv)).astype("f4")
    got = check_call(cpu, conv(x, c))
    want = [[[np.dot(x[s, i, k : k + d_conv].astype("f8"), c[i]) for i in range(channels)] for k in range(t)] for s in range(2)]
    assert got.shape == (2, t, channels) and np.allclose(got, np.reshape(want, got.shape), rtol=0, atol=1e-5)


def test_convolution_of_too_few_inputs_is_refused(cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="2 inputs for a convolution of 4"):
        run_guarded(cpu, conv(np.zeros((1, 3, 2), "f4"), np.zeros((3, 4), "f4")))


@pytest.mark.parametrize("mamba2", [False, True], ids=["mamba", "mamba2"])
@pytest.mark.parametrize("n", [1, 5, 8, 16, 33, 128])
def test_a_scan_is_the_recurrence(n: int, mamba2: bool, cpu: CpuBackend, run_seed: int) -> None:
    made = scan(run_seed, n=n, mamba2=mamba2)
    assert np.allclose(made.want, number_by_number(made), rtol=1e-12, atol=1e-12)
    check_call(cpu, made)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_share_groups(groups: int, cpu: CpuBackend, run_seed: int) -> None:
    made = scan(run_seed, g=groups)
    assert np.allclose(made.want, number_by_number(made), rtol=1e-12, atol=1e-12)
    check_call(cpu, made)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_state_goes_on_in_the_next_call(cut: int, cpu: CpuBackend, run_seed: int) -> None:
    """The bits of two calls are those of one."""
    whole = scan(run_seed, ids=(0, 2))
    y, state = parts(whole, run_guarded(cpu, whole)[0])

    def of(tokens: slice, **more: Array) -> Example:
        some = {n: np.ascontiguousarray(whole.operands[n][:, tokens]) for n in ("x", "dt", "b", "c")}
        return Example.of(SCAN, whole.key, {**whole.operands, **some, **more})

    first = of(slice(0, cut))
    first_y, between = parts(first, check_call(cpu, first))
    rest = of(slice(cut, None), state=between[0], ids=np.array([0, 1], "i4"))
    rest_y, last = parts(rest, check_call(cpu, rest))
    assert np.concatenate([first_y, rest_y], 1).tobytes() == y.tobytes() and last.tobytes() == state.tobytes()


@pytest.mark.parametrize("snapshots", [1, 2, 5, 6])
def test_snapshots_are_the_last_states(snapshots: int, cpu: CpuBackend, run_seed: int) -> None:
    """The newest first; one more than there are tokens holds the state before the first."""
    made = scan(run_seed, snapshots=snapshots)
    y, states = parts(made, check_call(cpu, made))
    assert len(states) == snapshots
    for back in range(min(snapshots, 5)):
        operands = {n: a[:, : 5 - back].copy() if n in ("x", "dt", "b", "c") else a for n, a in made.operands.items()}
        shorter = Example.of(SCAN, made.key, operands)
        short_y, last = parts(shorter, run_guarded(cpu, shorter)[0])
        assert states[back].tobytes() == last[0].tobytes() and short_y.tobytes() == y[:, : 5 - back].tobytes()
    if snapshots == 6:
        assert np.array_equal(states[5], made.operands["state"][[2, 0]])


def test_no_tokens_leave_the_state(cpu: CpuBackend, run_seed: int) -> None:
    made = scan(run_seed, t=0)
    _, states = parts(made, check_call(cpu, made))
    assert np.array_equal(states[0], made.operands["state"][[2, 0]])


def test_ids_outside_are_clamped(cpu: CpuBackend, run_seed: int) -> None:
    wild = check_call(cpu, scan(run_seed, ids=(1 << 30, -5)))
    assert wild.tobytes() == check_call(cpu, scan(run_seed, ids=(2, 0))).tobytes()


def test_large_steps_pass_softplus_unchanged(cpu: CpuBackend, run_seed: int) -> None:
    made = scan(run_seed)
    for dt in (19.9, 20.1, 80.0, 200.0, -80.0):
        check_call(cpu, replace(made, given={**made.given, "dt": np.full((2, 5, 4), dt, "f4")}))


def test_what_does_not_fit_is_refused(cpu: CpuBackend) -> None:
    for message, made in (("7 snapshots of 5 tokens", scan(0, snapshots=7)), ("3 groups evenly", scan(0, g=3)),
                          ("0 snapshots", scan(0, snapshots=0)), ("no state", scan(0, rows=0))):
        with pytest.raises(ShapeError, match=message):
            run_guarded(cpu, made)
    made = scan(0)
    with pytest.raises(ShapeError, match="A has 2 numbers a head"):
        run_guarded(cpu, Example.of(SCAN, made.key, {**made.operands, "a": np.zeros((4, 2), "f4")}))
