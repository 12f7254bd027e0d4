# ruff: noqa: F821
# mypy: disable-error-code="name-defined, arg-type"
"""The language as a backend: graphs run on host memory, and a converted operand is converted once."""

from __future__ import annotations

import numpy as np
import pytest

import engine
from engine.backend import HOST, DeviceType, HostBuffer, KernelRow, place
from engine.backends.sim import SimBackend
from engine.dtypes import F32, Q4_1, Q8_X
from engine.errors import KernelError, UnsupportedOp
from engine.graph import Graph
from engine.lang.function import Function
from engine.lang.words import (
    DECODERS,
    abs,
    codes,
    dot4,
    f32,
    group_sum,
    i32,
    lanes,
    maximum,
    offset,
    pack,
    round_away,
    scale,
    static,
    where,
)
from engine.op import Op, Step
from engine.tensor import Tensor, leaf
from kernels.mul_mat import mul_mat as real_mul_mat


def double(r, x, y, n):
    for i in lanes(n):
        y[r, i] = x[r, i] + x[r, i]


def double_four(r, x, y, n):
    for i in lanes(n):
        y[r, i] = x[r, i] * 2


def faulty(r, x, y, n):
    for i in lanes(n):
        y[r, i] = x[r, i + 1]


def quantize_rows(r, x, y, n_blocks):
    for b in lanes(n_blocks):
        big = f32(0)
        for j in range(32):
            big = maximum(big, abs(x[r, 32 * b + j]))
        d, total, block = big / f32(127), i32(0), y[r, b]
        inverse = where(d > 0, f32(1) / d, 0)
        for j in range(8):
            four = tuple(i32(round_away(x[r, 32 * b + 4 * j + e] * inverse)) for e in static(4))
            block.qs[j] = pack(*(four[e] for e in static(4)))
            total = total + ((four[0] + four[1]) + (four[2] + four[3]))
        block.d = d
        block.s = d * f32(total)


def mul_mat(row, column, w, x, y, n_blocks):
    total = f32(0)
    for b, s, t in lanes(n_blocks, RUNS, 8):
        block, xs = w[row, b], x[column, b * RUNS + s]
        part = f32(dot4(codes(block, s, t), xs.qs[t], 0, LOW, HIGH)) * scale(block, s, t) * xs.d
        total = total + part - offset(block, s) * xs.s * f32(0.125)
    y[column, row] = group_sum(total)


@Function
def q4_1_codes(block, s, t):
    return (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F


@Function
def q4_1_scale(block, s, t):
    return block.d


@Function
def q4_1_offset(block, s):
    return -block.m


@pytest.fixture(autouse=True)
def decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, "q4_1", {"codes": q4_1_codes, "scale": q4_1_scale, "offset": q4_1_offset})


BLOCKS = {"n_blocks": lambda call: call["k"] // 32}
DOUBLE = Op("double", "x[r, n] -> y[r, n]", params={})
DOUBLE.variant("r", name="general")(double)
DOUBLE.variant("r", when=lambda call: None if call["n"] == 4 else f"rows of {call['n']}, 4 are wanted")(double_four)
FAULTY = Op("faulty", "x[r, n] -> y[r, n]", params={})
FAULTY.variant("r", name="general")(faulty)
QUANTIZE = Op("quantize_rows", "x[r, k] -> y[r, k]", types={"y": (Q8_X,)}, params={})
QUANTIZE.variant("r", name="general", sizes=BLOCKS)(quantize_rows)
MUL_MAT = Op("mul_mat", "w[m, k], x[n, k] -> y[n, m]", types={"w": (Q4_1,), "x": (Q8_X,)}, params={})
MUL_MAT.variant("m n", name="general", sizes=BLOCKS)(mul_mat)
MUL_MAT.through["x"] = (QUANTIZE, Q8_X)
OPS = (DOUBLE, FAULTY, QUANTIZE, MUL_MAT)


def filled(t: Tensor, array: np.ndarray) -> Tensor:
    buffer = HOST.allocate(t.nbytes)
    buffer.set(place(t, buffer), array)
    return t


def run(backend: SimBackend, *outputs: Tensor) -> list[Step]:
    """Every node of the graph, each in memory of its own; the steps that ran."""
    steps = backend.optimize(Graph(outputs).nodes)
    for step in steps:
        if step.out.view_of is None:
            place(step.out, HOST.allocate(step.out.nbytes))
    backend.prepare(steps).run()
    return steps


def array_of(t: Tensor) -> np.ndarray:
    assert isinstance(t.root.buffer, HostBuffer)
    return t.root.buffer.array(t)


@pytest.mark.parametrize("n_lanes", [1, 4, 32])
def test_a_graph_with_views_runs(n_lanes: int) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    t = DOUBLE(filled(leaf(F32, (3, 4), "x"), x))
    out = DOUBLE(t.transpose()[1:])
    steps = run(SimBackend(OPS, lanes=n_lanes), out)
    assert [s.op.name for s in steps] == ["double", "double"] and steps[0].replaces == (t,)
    np.testing.assert_array_equal(array_of(out), 4 * x.T[1:])


def test_the_plan_holds_the_first_variant_that_fits() -> None:
    backend = SimBackend(OPS)
    four, five = (DOUBLE(filled(leaf(F32, (1, n), "x"), np.ones((1, n), np.float32))) for n in (4, 5))
    names = [variant.name for _, variant in backend.prepare([Step.of(four), Step.of(five)]).launches]
    assert names == ["double_four", "general"]


def test_an_operand_is_converted_once_for_all_its_readers() -> None:
    rng, backend = np.random.default_rng(0), SimBackend(OPS)
    blocks = np.zeros((5, 2), Q4_1.numpy)
    blocks["d"], blocks["m"] = rng.random((2, 5, 2, 1))
    blocks["qs"] = rng.integers(0, 2**32, (5, 2, 4))
    w, x = filled(leaf(Q4_1, (5, 64), "w"), blocks), rng.standard_normal((3, 64)).astype(np.float32)
    source = filled(leaf(F32, (3, 64), "x"), x)
    one, two = MUL_MAT(w, source), MUL_MAT(w, source)
    steps = run(backend, one, two)
    assert [s.op.name for s in steps] == ["quantize_rows", "mul_mat", "mul_mat"]
    assert [s.replaces for s in steps] == [(), (one,), (two,)]
    assert steps[1].srcs[1] is steps[2].srcs[1] is steps[0].out and steps[0].out.dtype == Q8_X
    assert one.srcs[1] is source  # the graph itself stays
    q = blocks["qs"].view(np.uint8)
    values = blocks["d"].astype(float) * np.concatenate([q & 15, q >> 4], -1) + blocks["m"]
    want = x.astype(float) @ values.reshape(5, 64).T
    np.testing.assert_allclose(array_of(one), want, atol=0.02 * np.abs(want).max())
    np.testing.assert_array_equal(array_of(one), array_of(two))


def test_a_conversion_that_is_missing_is_named() -> None:
    backend = SimBackend(OPS)
    w, x = filled(leaf(Q4_1, (5, 64), "w"), np.zeros((5, 2), Q4_1.numpy)), filled(leaf(F32, (3, 64), "x"), np.zeros((3, 64), np.float32))
    with pytest.raises(UnsupportedOp, match=r"quantize_rows \+ general: the conversion has not been inserted"):
        backend.prepare([Step.of(MUL_MAT(w, x))])


def test_what_it_is_and_what_it_refuses() -> None:
    (backend,) = SimBackend.discover(OPS)
    assert backend.device.type is DeviceType.TEST and backend.buffer_type is HOST and backend.reads(HOST)
    node = DOUBLE(leaf(F32, (1, 4), "x"))
    assert backend.supports(node) and isinstance(backend.table.lookup(backend.table.call(node))[0], KernelRow)
    assert not SimBackend([QUANTIZE]).supports(node)
    with pytest.raises(UnsupportedOp, match="no kernel for double"):
        SimBackend([QUANTIZE]).prepare([Step.of(node)])


def test_a_faulty_kernel_raises_when_it_runs() -> None:
    node = FAULTY(filled(leaf(F32, (1, 4), "x"), np.ones((1, 4), np.float32)))
    with pytest.raises(KernelError, match="index 4 is out of range, the extent is 4"):
        run(SimBackend(OPS), node)


def test_a_forced_variant_runs_or_is_refused() -> None:
    w, x = np.ones((3, 32), np.float32), np.ones((2, 32), np.float32)
    node = real_mul_mat(engine.array(engine.quantize(w, "q8_0"), "q8_0"), engine.array(x))
    with pytest.raises(UnsupportedOp, match="mul_mat_rows: operand w lies plain"):
        engine.compute(node, device="sim", variant="mul_mat_rows")
    np.testing.assert_allclose(engine.compute(node, device="sim", variant="mul_mat_along_k"), 32, rtol=1e-4)
