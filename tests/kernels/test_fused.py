"""Fused ops: the bits of the ops they stand for, on the CPU with any number of threads, and in the language's own definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.backend import HOST, Backend, HostBuffer, place
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import DTYPES, F32
from engine.graph import Graph
from engine.op import Op, Step
from engine.tensor import Tensor, leaf
from engine.testing import Example, examples, run_guarded
from engine.testing.limits import assert_same_bits
from kernels import OPS

Array = np.ndarray[Any, Any]
FUSED = [op for op in OPS.values() if op.fuses is not None]
KEYS = [(op, key) for op in FUSED for key in op.keys()]


def filled(dtype: str, shape: tuple[int, ...], data: Array, name: str) -> Tensor:
    t = leaf(DTYPES[dtype], shape, name)
    buffer = HOST.allocate(t.nbytes)
    buffer.set(place(t, buffer), data)
    return t


def unfused(backend: Backend, example: Example) -> Array:
    """What the ops of the pattern make of the same operands, one after the other, each result in memory of its own."""
    dtypes = {n: t.name for n, t in example.dtypes.items()}
    tensors: dict[str, Tensor | None] = {n: filled(dtypes[n], s, example.operands[n], n) for n, s in example.shapes.items()}
    assert example.op.fuses is not None
    last = example.op.fuses.build(tensors, example.params)
    nodes = Graph([last]).nodes
    for node in nodes:
        if node.view_of is None:
            place(node, HOST.allocate(node.nbytes))
    backend.prepare([Step.of(node) for node in nodes]).run()
    assert isinstance(last.root.buffer, HostBuffer)
    return last.root.buffer.array(last).copy()


def check(backend: Backend, example: Example) -> None:
    got, guards = run_guarded(backend, example)
    assert guards.intact, guards
    assert_same_bits(example, got, unfused(backend, example), "the ops it stands for")


@pytest.mark.parametrize(("op", "key"), KEYS, ids=[f"{op.name}-{'-'.join(key[1])}" for op, key in KEYS])
@given(data=st.data())
@settings(max_examples=40)
def test_the_same_bits_as_the_ops_it_stands_for(op: Op, key: tuple[str, tuple[str, ...]], cpu: CpuBackend, data: Any) -> None:
    example = data.draw(examples(op, key, lanes=cpu.table.lanes), label="call")
    assume(0 not in example.sizes.values())
    check(cpu, example)


@pytest.mark.parametrize("n_lanes", [1, 4, 64])
@pytest.mark.parametrize(("op", "key"), KEYS, ids=[f"{op.name}-{'-'.join(key[1])}" for op, key in KEYS])
@given(data=st.data())
@settings(max_examples=3)
def test_in_plain_python(op: Op, key: tuple[str, tuple[str, ...]], n_lanes: int, data: Any) -> None:
    example = data.draw(examples(op, key, lanes=n_lanes, budget=500), label="call")
    assume(0 not in example.sizes.values())
    check(SimBackend(list(OPS.values()), lanes=n_lanes), example)


@pytest.mark.parametrize("n_blocks", [*range(1, 10), 18, 33])
@pytest.mark.parametrize("op", [op for op in FUSED if op.name.endswith("_quantize")], ids=lambda op: op.name)
def test_any_number_of_blocks(op: Op, n_blocks: int, cpu: CpuBackend, run_seed: int) -> None:
    n = 32 * n_blocks
    check(cpu, Example.parse(f"{op.name}[f32,f32,q8_x] x=3,{n} {op.contract.operands[1].name}={n if 'norm' in op.name else f'3,{n}'} "
                             f"seed={run_seed % 2**31}", OPS))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, 3e-34, 1e30, 3.4e38, np.inf, -np.inf, np.nan], ids=str)
def test_blocks_of_odd_values(value: float, cpu: CpuBackend) -> None:
    """Rows of one value, and that value among ordinary ones."""
    x = np.random.default_rng(3).standard_normal((3, 96)).astype(np.float32)
    x[0], x[1, 40] = value, value
    for name in ("rms_norm_mul_quantize", "swiglu_quantize", "geglu_quantize"):
        op = OPS[name]
        other = {o.name: np.ones((1, 96) if o.name == "w" else (3, 96), np.float32) for o in op.contract.operands[1:]}
        check(cpu, Example.of(op, (name, ("f32", "f32", "q8_x")), {"x": x, **other}))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("op", FUSED, ids=lambda op: op.name)
def test_any_number_of_threads(op: Op, threads: int, cpu: CpuBackend, run_seed: int) -> None:
    operands = {"x": "67,2,64" if op.name == "rope_set_keys" else "67,64", "w": "64", "u": "67,64", "pos": "67", "freqs": "2,24",
                "ids": "67", "y": "2,3,64,32"}
    text = " ".join(f"{o.name}={operands[o.name]}" for o in op.contract.operands)
    example = Example.parse(f"{op.name}[{','.join(op.keys()[0][1])}] {text} seed={run_seed % 2**31}", OPS)
    want = run_guarded(cpu, example)[0]
    cpu.set_threads(threads)
    try:
        assert_same_bits(example, run_guarded(cpu, example)[0], want, "two threads")
    finally:
        cpu.set_threads(2)


@pytest.mark.parametrize("op", FUSED, ids=lambda op: op.name)
def test_a_pattern_names_what_the_op_has(op: Op) -> None:
    """Every operand and parameter once or more, none that there is not; written in place as the last of the ops does."""
    assert op.fuses is not None
    names, params = set(), set()
    pending = [op.fuses]
    while pending:
        part = pending.pop()
        names |= {o for o in part.operands if isinstance(o, str)}
        params |= set(part.params.values())
        assert set(part.params) <= set(part.op.params)
        assert len(part.operands) <= len(part.op.contract.operands)
        pending += part.inner
    assert names == {o.name for o in op.contract.operands} and params == set(op.params)
    assert op.contract.writes == op.fuses.op.contract.writes
    assert all(t is F32 for t in op.types["x"]), "a result that is rounded before it is used again would differ"
