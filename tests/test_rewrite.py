"""Rewriting: what is fused, and everything for which it is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import engine
from engine.backend import HOST, KernelTable, place
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import F16, F32, I32, Q8_0
from engine.graph import Graph
from engine.op import Op, Step
from engine.rewrite import fuse, rewrite
from engine.sched.execute import Executable
from engine.settings import override
from engine.tensor import Tensor, input_tensor, leaf
from kernels import OPS
from kernels.activations import swiglu
from kernels.arithmetic import add, mul
from kernels.mul_mat import mul_mat
from kernels.norm import rms_norm
from kernels.rope import rope
from kernels.set_rows import set_keys, set_rows

TABLE = KernelTable(OPS.values(), 8)


def f32(*shape: int, name: str = "") -> Tensor:
    return leaf(F32, shape, name)


def rewritten(*outputs: Tensor, needed: Sequence[Tensor] = (), table: KernelTable = TABLE) -> list[Step]:
    nodes = Graph(outputs).nodes
    steps = rewrite(table, nodes, frozenset([*outputs, *needed]))
    assert sorted(n.name for s in steps for n in s.replaces) == sorted(n.name for n in nodes if not n.is_view_op)
    return steps


def ops_of(steps: Sequence[Step]) -> list[str]:
    return [s.op.name for s in steps]


def normed(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return mul(rms_norm(x, eps=eps), w)


# -- what is fused ----------------------------------------------------------------------------------------------


def test_operands_and_parameters_go_where_the_pattern_says() -> None:
    x, w, u = f32(3, 64), f32(64), f32(3, 64)
    y = add(normed(x, w), u)
    (step,) = rewritten(y)
    assert step.op is OPS["rms_norm_mul_add"] and step.out is y and step.params == {"eps": 1e-6}
    assert step.srcs == (x, w, u) and [n.op for n in step.replaces] == [rms_norm, mul, add]


def test_the_largest_pattern_is_taken() -> None:
    h = normed(f32(3, 64), f32(64))
    gate, up = (mul_mat(leaf(Q8_0, (64, 64), name), h) for name in ("gate", "up"))
    steps = rewritten(mul_mat(leaf(Q8_0, (5, 64), "down"), swiglu(gate, up)))
    assert ops_of(steps) == ["rms_norm_mul_quantize", "mul_mat", "mul_mat", "swiglu_quantize", "mul_mat"]
    blocks = steps[0].out
    assert [n.op for n in steps[0].replaces] == [rms_norm, mul] and blocks.dtype.name == "q8_x"
    assert steps[1].srcs[1] is steps[2].srcs[1] is blocks


def test_float_readers_leave_a_smaller_pattern() -> None:
    h = normed(f32(3, 64), f32(64))
    steps = rewritten(mul_mat(leaf(Q8_0, (5, 64), "w"), h), mul_mat(f32(5, 64), h))
    assert ops_of(steps) == ["rms_norm_mul", "quantize_rows", "mul_mat", "mul_mat"]


def keys(heads: int = 2, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rotated keys written into a cache: the write and the cache."""
    cache = place(leaf(F16, (heads, 3, 64, 32), "cache"), HOST.allocate(2 * heads * 3 * 64 * 32, "cache"))
    turned = rope(f32(4, heads, 64), leaf(I32, (4,), "pos"), table or f32(2, 32), neox=1)
    return set_keys(turned, leaf(I32, (4,), "ids"), cache), cache


def test_a_write_is_fused_into_the_memory_it_writes() -> None:
    written, cache = keys()
    (step,) = rewritten(written)
    assert step.op is OPS["rope_set_keys"] and step.out is written and step.out.root is cache and step.params == {"neox": 1}


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.fuses is not None])
def test_every_fused_op_is_put_where_it_belongs(name: str) -> None:
    shapes = {"x": (4, 2, 64), "w": (64,), "u": (4, 2, 64), "pos": (4,), "freqs": (2, 32), "ids": (4,), "y": (2, 3, 64, 32)}
    op = OPS[name]
    assert op.fuses is not None
    node = op.fuses.build({o.name: leaf(op.types[o.name][0], shapes[o.name], o.name) for o in op.contract.operands}, op.params)
    (step,) = rewritten(node)
    assert step.op is op and len(step.replaces) == op.fuses.n_ops


# -- what is not ------------------------------------------------------------------------------------------------


def test_what_something_outside_reads_is_still_written() -> None:
    r = rms_norm(f32(3, 64))
    y = mul(r, f32(64))
    assert ops_of(rewritten(y)) == ["rms_norm_mul"]
    assert ops_of(rewritten(y, needed=[r])) == ops_of(rewritten(y, r)) == ["rms_norm", "mul"]


def test_what_is_read_twice_is_still_written() -> None:
    r = rms_norm(f32(3, 64))
    assert ops_of(rewritten(mul(r, f32(64)), mul(r, f32(64)))) == ["rms_norm", "mul", "mul"]
    r = rms_norm(f32(3, 64))
    assert ops_of(rewritten(mul(r, f32(64)), mul(r[1:], f32(64)))) == ["rms_norm", "mul", "mul"]


def test_other_parameters_are_another_op() -> None:
    cache = place(leaf(F32, (2, 3, 64, 32), "cache"), HOST.allocate(4 * 2 * 3 * 64 * 32, "cache"))
    turned = rope(f32(4, 2, 64), leaf(I32, (4,), "pos"), f32(2, 32), magnitude=1.5)
    assert ops_of(rewritten(set_keys(turned, leaf(I32, (4,), "ids"), cache))) == ["rope", "set_keys"]


def test_operands_the_pattern_leaves_out_must_be_left_out() -> None:
    cache = place(leaf(F32, (2, 3, 64, 32), "cache"), HOST.allocate(4 * 2 * 3 * 64 * 32, "cache"))
    turned = rope(f32(4, 2, 64), leaf(I32, (1, 4), "pos"), f32(2, 32), leaf(I32, (32,), "axes"))
    assert ops_of(rewritten(set_keys(turned, leaf(I32, (4,), "ids"), cache))) == ["rope", "set_keys"]


def test_the_order_of_operands_counts() -> None:
    x, w = f32(3, 64), f32(3, 64)
    assert ops_of(rewritten(mul(w, rms_norm(x)))) == ["rms_norm", "mul"]


@pytest.mark.parametrize("w", [(1,), (3, 1), (32,)], ids=str)
def test_shapes_must_meet_the_contract(w: tuple[int, ...]) -> None:
    assert ops_of(rewritten(mul(rms_norm(f32(3, 64)), f32(*w)))) == ["rms_norm", "mul"]


def test_the_table_must_have_a_kernel() -> None:
    table = KernelTable([OPS["rms_norm_mul"]], 8)
    table.rows = {k: v for k, v in table.rows.items() if "f16" not in k[1]}
    x, nodes = f32(3, 64), [rms_norm, mul]
    for dtype, fits in ((F32, True), (F16, False)):
        made = Graph([mul(rms_norm(x), leaf(dtype, (64,), "w"))]).nodes
        steps = fuse(table, [Step.of(n) for n in made])
        assert [s.op for s in steps] == ([OPS["rms_norm_mul"]] if fits else nodes)
    assert fuse(KernelTable([rms_norm, mul], 8), [Step.of(n) for n in made]) == [Step.of(n) for n in made]


def test_a_variant_the_user_decides_stays() -> None:
    backend = SimBackend(OPS.values())
    y = normed(f32(3, 64), f32(64))
    with backend.forced(y, "general"):
        assert ops_of(backend.optimize(Graph([y]).nodes, [y])) == ["rms_norm", "mul"]
    assert ops_of(backend.optimize(Graph([y]).nodes, [y])) == ["rms_norm_mul"]


def test_a_write_between_keeps_the_order() -> None:
    """The norm reads what is written before its product: at the product's place it would read something else."""
    x = add(f32(8, 64), f32(64))
    r = rms_norm(x)
    written = set_rows(f32(2, 64), leaf(I32, (2,), "ids"), x)
    y = mul(r, f32(64))
    assert ops_of(rewritten(written, y)) == ["add", "rms_norm", "set_rows", "mul"]
    r = rms_norm(x)
    y = mul(r, f32(64))
    assert ops_of(rewritten(y, set_rows(f32(2, 64), leaf(I32, (2,), "ids"), x))) == ["add", "rms_norm_mul", "set_rows"]


def test_a_fused_op_does_not_read_what_it_writes() -> None:
    memory = place(leaf(F32, (2, 3, 64, 32), "memory"), HOST.allocate(4 * 2 * 3 * 64 * 32, "cache"))
    turned = rope(memory.reshape(96, 2, 64)[:4], leaf(I32, (4,), "pos"), f32(2, 32))
    assert ops_of(rewritten(set_keys(turned, leaf(I32, (4,), "ids"), memory))) == ["rope", "set_keys"]


# -- in force ---------------------------------------------------------------------------------------------------


def chain(x: Tensor, w: Tensor) -> Tensor:
    """Norms, a product of quantised weights, a gate, a sum: every pattern without a cache."""
    weights = engine.array(engine.quantize(np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32), "q8_0"), "q8_0")
    h = mul_mat(weights, normed(x, w))
    gated = mul_mat(weights, swiglu(h, mul_mat(weights, normed(h, w))))
    return add(normed(gated, w), x)


def results(backend: CpuBackend | SimBackend, fused: bool) -> tuple[np.ndarray, list[str]]:
    x, w = input_tensor(F32, (3, 64), "x"), input_tensor(F32, (64,), "w")
    rng = np.random.default_rng(1)
    with override(fuse=fused), Executable([backend], Graph([chain(x, w)])) as made:
        for t in made.graph.inputs:
            made.set(t, rng.standard_normal(t.shape).astype(np.float32))
        made.run()
        return made.get(made.graph.outputs[0]), [f.op for s in made.explain().splits for f in s.fused]


def test_a_setting_turns_it_off_and_no_bit_differs(cpu: CpuBackend) -> None:
    for backend in (cpu, SimBackend(OPS.values(), lanes=4)):
        plain, none = results(backend, False)
        got, fused = results(backend, True)
        assert none == [] and sorted(fused) == ["rms_norm_mul_add", "rms_norm_mul_quantize", "rms_norm_mul_quantize", "swiglu_quantize"]
        assert np.array_equal(got, plain)


def test_a_pattern_reads_as_it_is_meant() -> None:
    op: Op = OPS["rms_norm_mul_quantize"]
    assert str(op.fuses) == "quantize_rows(mul(rms_norm(x, eps), w))"
    x, w = np.random.default_rng(0).standard_normal((2, 32)), np.arange(32.0)
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(op.reference_of([x.reshape(1, 1, 2, 32), w.reshape(1, 1, 1, 32)], {}).reshape(2, 32), want)
