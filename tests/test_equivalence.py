"""Every op, by every variant of every key, means the same on the CPU and in the language's own definition with 1, 4 and 32 lanes.

A run without `--all-keys` takes every key on the CPU with few calls; elsewhere one key of each op and block size, another for each seed,
and never leaves a variant out. Each test counts the calls that were really made, and fails without any.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.backend import HOST, Backend, BufferType, HostBuffer, KernelTable, Plan, place
from engine.backends.blas import BlasBackend
from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.backends.sim import SimBackend
from engine.cli.ops import matrix, write_csv
from engine.dtypes import DTYPES, F32, FLOATS, Q8_0, Q8_X, RADIX, WEIGHT_BLOCKS, DType
from engine.gguf.quants import QUANTIZERS
from engine.layouts import PackedBufferType
from engine.op import Key, Step
from engine.tensor import leaf
from engine.testing import (
    Case,
    Disagreement,
    Example,
    FilteredBackend,
    agrees_in_mean,
    assert_close,
    bits,
    cases,
    check_call,
    conformance,
    elements,
    examples,
    in_rotation,
    quantize_activations,
    refusal,
    run_guarded,
    values,
)
from kernels import OPS

ALL = list(OPS.values())
EXAMPLES = settings.default.max_examples if settings.default else 10
CASES = cases(KernelTable(ALL, 1), ALL)
WIDE = [c for known in [set(CASES)] for c in cases(KernelTable(ALL, 32), ALL) if c not in known]  # rows of tables with many lanes only
ROWS = list({(c.op.name, c.variant): c for c in CASES}.values())  # one key of each variant
TARGETS = ("cpu", "sim-1", "sim-4", "sim-32")
BUDGETS = {"cpu": 50_000, "sim-1": 1_000, "sim-4": 3_000, "sim-32": 10_000}
WEIGHTS = (*FLOATS, *WEIGHT_BLOCKS)
THREADS = (1, 2, 3, 5)


# -- what runs where --------------------------------------------------------------------------------------------


def in_turn(config: pytest.Config, every: Sequence[Case] = CASES) -> Sequence[Case]:
    """One key of each op and block size, by the run's seed, and one of each variant that those leave out; all of them if asked."""
    if config.getoption("--all-keys"):
        return every
    seed = config.getoption("--lanewise-seed")
    chosen = in_rotation(every, seed)
    covered = {(c.op.name, c.variant) for c in chosen}
    left: dict[tuple[str, str], list[Case]] = {}
    for case in every:
        if (case.op.name, case.variant) not in covered:
            left.setdefault((case.op.name, case.variant), []).append(case)
    return [*chosen, *(group[seed % len(group)] for group in left.values())]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        some = in_turn(metafunc.config)
        if "target" in metafunc.fixturenames:
            pairs = [(t, c) for t in TARGETS for c in (CASES if t == "cpu" else some)]
            pairs += [("sim-32", c) for c in in_turn(metafunc.config, WIDE)]
            metafunc.parametrize("target,case", pairs, ids=[f"{t}-{c}" for t, c in pairs])
        else:
            metafunc.parametrize("case", some, ids=str)


@pytest.fixture(scope="session")
def backends(cpu: CpuBackend) -> Mapping[str, Backend]:
    return {"cpu": cpu, **{f"sim-{n}": SimBackend(ALL, lanes=n) for n in (1, 4, 32)}}


@pytest.fixture(scope="session")
def teams() -> Iterator[list[CpuBackend]]:
    made = [CpuBackend(ALL, threads=n) for n in THREADS]
    yield made
    for backend in made:
        backend.close()


def memory_of(backend: Backend, case: Case) -> BufferType | None:
    return case.memory(backend)


def calls(case: Case, lanes: int, target: str = "cpu", **more: Any) -> st.SearchStrategy[Example]:
    return examples(case.op, case.key, lanes=lanes, budget=more.pop("budget", BUDGETS[target]), whole=case.packed, **more)


# -- equivalence ------------------------------------------------------------------------------------------------


def test_agrees_with_the_reference(target: str, case: Case, backends: Mapping[str, Backend]) -> None:
    backend, hits = backends[target], 0
    memory = memory_of(backend, case)

    @settings(max_examples=max(3, EXAMPLES // 2 if target == "cpu" else EXAMPLES // 3))
    @given(example=calls(case, backend.table.lanes, target))
    def check(example: Example) -> None:
        nonlocal hits
        assert not refusal(backend, example, None, memory), "a legal call is refused by every variant"
        assume(not refusal(backend, example, case.variant, memory))
        hits += 1
        check_call(backend, example, case.variant, memory)

    check()
    assert hits, f"{case} was never run"


def test_a_view_gives_the_bits_of_its_copy(case: Case, cpu: CpuBackend) -> None:
    memory, hits = memory_of(cpu, case), 0

    @settings(max_examples=max(3, EXAMPLES // 2))
    @given(example=calls(case, cpu.table.lanes))
    def check(example: Example) -> None:
        nonlocal hits
        assume(any(example.layouts.values()) and not refusal(cpu, example, case.variant, memory))
        hits += 1
        of_view, _ = run_guarded(cpu, example, case.variant, memory)
        of_copy, _ = run_guarded(cpu, example.dense(), case.variant, memory)
        assert bits(of_view) == bits(of_copy), example

    check()
    assert hits, f"{case} was never run"


@pytest.mark.parametrize("row", [c for c in ROWS if c.op.inplace], ids=str)
def test_in_place_gives_the_same_bits(row: Case, cpu: CpuBackend) -> None:
    @settings(max_examples=max(3, EXAMPLES // 3))
    @given(example=calls(row, cpu.table.lanes))
    def check(example: Example) -> None:
        example = example.dense()
        assume(not refusal(cpu, example, row.variant))
        apart, _ = run_guarded(cpu, example, row.variant)
        over, guards = run_guarded(cpu, example, row.variant, in_place=True)
        assert guards.intact, guards
        assert bits(over) == bits(apart), example

    check()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_number_of_threads_gives_the_same_bits(row: Case, teams: Sequence[CpuBackend]) -> None:
    @settings(max_examples=max(3, EXAMPLES // 3))
    @given(example=calls(row, teams[0].table.lanes, budget=200_000))
    def check(example: Example) -> None:
        assume(not refusal(teams[0], example, row.variant, memory_of(teams[0], row)))
        runs = [run_guarded(team, example, row.variant, memory_of(team, row)) for team in teams]
        assert all(guards.intact for _, guards in runs)
        assert len({bits(got) for got, _ in runs}) == 1, example

    check()


# -- products ---------------------------------------------------------------------------------------------------


@cache
def weights(dtype: DType, m: int, k: int) -> np.ndarray[Any, Any]:
    """Normal numbers as the format stores them; any codes where nothing is stored without an importance matrix."""
    if dtype.is_block and dtype.name not in QUANTIZERS:
        key = ("mul_mat", (dtype.name, "f32", "f32"))
        return Example(OPS["mul_mat"], key, {}, {"w": (m, k), "x": (1, k)}, {}, {"w": "codes", "x": "mild"}, {}, m).operands["w"]
    return elements(np.random.default_rng([m, k]).standard_normal((m, k)), dtype)


def product(dtype: DType, w: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> Example:
    """w x^T with float activations: what a model asks for."""
    return Example.of(OPS["mul_mat"], ("mul_mat", (dtype.name, "f32", "f32")), {"w": w, "x": x})


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
def test_a_column_has_the_same_bits_whatever_runs_beside_it(dtype: DType, packed: bool, cpu: CpuBackend, run_seed: int) -> None:
    if packed and not dtype.is_block:
        return
    memory = cpu.packed if packed else None
    w = weights(dtype, 2 * cpu.table.lanes + 3, 512)
    x = np.random.default_rng(run_seed).standard_normal((33, 512)).astype(np.float32)
    alone = np.concatenate([run_guarded(cpu, product(dtype, w, x[j : j + 1]), weights=memory)[0] for j in range(33)])
    for n in (*range(1, 10), 16, 33):
        together, _ = run_guarded(cpu, product(dtype, w, x[:n]), weights=memory)
        assert together.tobytes() == alone[:n].tobytes(), f"{dtype}, {n} columns"


@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_float_activations_agree_in_mean(dtype: DType, cpu: CpuBackend, run_seed: int) -> None:
    """Two planes of bytes have steps of largest / 32,384: a block of 32 normal numbers, the largest about 2.1, is off by an NMSE of
    (2.1 / 32,384)^2 / 12 = 3.5e-10. Over 256 independent results 1e-8 is out of the reach of chance, and 50,000 times below the contract.
    """
    x = np.random.default_rng(run_seed).standard_normal((8, 512)).astype(np.float32)
    for memory in (None, cpu.packed):
        example = product(dtype, weights(dtype, 32, 512), x)
        got, _ = run_guarded(cpu, example, weights=memory)
        assert agrees_in_mean(example, got, 1e-8)
    assert not agrees_in_mean(example, got * np.float32(1.03))


@pytest.mark.parametrize("target", ["cpu", "sim-4"])
@pytest.mark.parametrize("row", [c for c in CASES if c.op.name == "mul_mat" and c.key[1][1] == "q8_x"], ids=str)
def test_extreme_codes_against_extreme_activations(row: Case, target: str, backends: Mapping[str, Backend]) -> None:
    """All codes at one end of their range (-128 of Q8_0 among them) against +127, -127 and both: no sum may saturate or wrap."""
    backend, dtype = backends[target], DTYPES[row.key[1][0]]
    x = quantize_activations(np.ones((3, 256), np.float32))
    planes = np.full((3, 8, 64), 127, np.int8)
    planes[1] = -127
    planes[2, :, ::3] = -127
    x["qs"], x["sums"] = planes.view("<u4"), planes.reshape(3, 8, 4, 16).sum(-1, dtype=np.int16)
    x["s"] = x["d"] * (RADIX * planes[..., :32].sum(-1, dtype=np.int32) + planes[..., 32:].sum(-1, dtype=np.int32))[..., None]
    for kind in ("highest", "lowest"):
        w = Example(row.op, row.key, {}, {"w": (5, 256), "x": (3, 256)}, {}, {"w": kind, "x": "mild"}, {}, 7).operands["w"]
        if dtype is Q8_0:
            assert set(np.unique(np.ascontiguousarray(w["qs"]).view(np.int8))) == {127 if kind == "highest" else -128}
        check_call(backend, Example.of(row.op, row.key, {"w": w, "x": x}), row.variant, memory_of(backend, row))


@pytest.mark.parametrize("kind", ["mild", "decade", "equal", "signs", "wide", "special"])
def test_quantized_activations_are_exact_to_the_bit(kind: str, backends: Mapping[str, Backend]) -> None:
    op = OPS["quantize_rows"]

    @given(example=examples(op, ("quantize_rows", ("f32", "q8_x")), budget=3_000, kinds={"x": kind}))
    def check(example: Example) -> None:
        want = quantize_activations(example.operands["x"])
        usable = np.isfinite(want["d"])[..., 0]
        for target in ("cpu", "sim-32"):
            got, _ = run_guarded(backends[target], example)
            assert got[usable].tobytes() == want[usable].tobytes()
            assert np.isnan(values(got, Q8_X).reshape(*got.shape, 32)[~usable]).all()

    check()


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_packed_weights_come_back_byte_for_byte(dtype: DType, lanes: int, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    packed = PackedBufferType(lanes)
    for rows in range(1, 41):
        for shape in ((rows, dtype.block_size), (2, rows, 3 * dtype.block_size)):
            t = leaf(dtype, shape, "w")
            raw = rng.integers(0, 256, (*shape[:-1], dtype.row_nbytes(shape[-1])), np.uint8)
            buffer = packed.allocate(packed.nbytes_of(t))
            place(t, buffer)
            buffer.set(t, raw)
            assert buffer.get(t).tobytes() == raw.tobytes(), (dtype, shape)


def test_packed_memory_holds_empty_weights(cpu: CpuBackend) -> None:
    for shape in ((0, 32), (3, 0), (2, 0, 32)):
        t = leaf(Q8_0, shape, "w")
        buffer = cpu.packed.allocate(cpu.packed.nbytes_of(t))
        place(t, buffer)
        buffer.set(t, np.zeros((*shape[:-1], Q8_0.row_nbytes(shape[-1])), np.uint8))
        assert buffer.get(t).size == 0


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_packed_batches_start_behind_padded_rows(rows: int, cpu: CpuBackend, run_seed: int) -> None:
    """Two matrices in one tensor, with a number of rows that is no multiple of the lanes."""
    rng = np.random.default_rng(run_seed)
    w = elements(rng.standard_normal((2, rows, 64)), Q8_0)
    x = rng.standard_normal((2, 3, 64)).astype(np.float32)
    check_call(cpu, product(Q8_0, w, x), "mul_mat_rows", cpu.packed)


# -- the support table ------------------------------------------------------------------------------------------

SUPPORT = Path(__file__).parent / "golden_figures" / "support.csv"


def test_the_support_table_is_what_it_was(backends: Mapping[str, Backend]) -> None:
    """What a backend gains or loses is a change of a file: `lanewise ops -b sim --csv > tests/golden_figures/support.csv`.

    More lanes only add rows.
    """
    added = {case.variant for case in WIDE}
    for backend in backends.values():
        text = io.StringIO()
        write_csv([{"op": row["op"], "types": row["types"], "sim": [n for n in row[backend.name] if n.rpartition(" + ")[2] not in added]}
                   for row in matrix(ALL, [backend])], text)
        assert text.getvalue() == SUPPORT.read_text()


def test_the_support_table_of_blas_is_what_it_was() -> None:
    table = BlasBackend().table
    assert set(table.rows) == {("mul_mat", ("f32", "f32", "f32")), ("mul_mat", ("f16", "f32", "f32"))}


def test_every_variant_of_every_op_is_in_turn(request: pytest.FixtureRequest) -> None:
    for some, widths in ((CASES, range(1, 17)), (WIDE, range(17, 33))):
        assert {(c.op.name, c.variant) for c in in_turn(request.config, some)} == {
            (op.name, v.name) for op in ALL for v in op.variants if v.least_lanes in widths}


def test_the_rotation_takes_one_key_of_each_op_and_block_size() -> None:
    groups = {(c.op.name, c.block_size) for c in CASES}
    seen: dict[tuple[str, int], set[Key]] = {}
    for seed in range(300):
        chosen: dict[tuple[str, int], set[Key]] = {}
        for c in in_rotation(CASES, seed):
            chosen.setdefault((c.op.name, c.block_size), set()).add(c.key)
        assert set(chosen) == groups and all(len(keys) == 1 for keys in chosen.values())
        for group, keys in chosen.items():
            seen.setdefault(group, set()).update(keys)
    assert {key for keys in seen.values() for key in keys} == {c.key for c in CASES}, "every key has its turn"


# -- the tools themselves ---------------------------------------------------------------------------------------


class SpoilingPlan(Plan):
    def __init__(self, inner: Plan, steps: Sequence[Step], spoil: str) -> None:
        self.inner, self.step, self.spoil = inner, steps[-1], spoil

    def run(self) -> None:
        out, src = self.step.out, self.step.srcs[0]
        assert src is not None and isinstance(out.root.buffer, HostBuffer) and isinstance(src.root.buffer, HostBuffer)
        before = out.root.buffer.array(out).copy()
        self.inner.run()
        array, memory = out.root.buffer.array(out), out.root.buffer.memory
        if self.spoil == "one element":
            array[0, 0] *= np.float32(1.01)
        elif self.spoil == "one left out":
            array[0, -1] = before[0, -1]
        elif self.spoil == "behind the end":
            memory[out.root.buffer_offset + out.nbytes] ^= 1
        elif self.spoil == "before the start":
            memory[out.root.buffer_offset - 1] ^= 1
        elif self.spoil == "an operand":
            src.root.buffer.array(src)[0, 0] += 1
        elif self.spoil == "infinity for NaN":
            array[np.isnan(array)] = np.inf


class Spoiling(FilteredBackend):
    """Right kernels with one planted fault."""

    def __init__(self, inner: Backend, spoil: str) -> None:
        super().__init__(inner, lambda call: None)
        self.spoil = spoil

    def prepare(self, steps: Sequence[Step]) -> Plan:
        return SpoilingPlan(self.inner.prepare(steps), steps, self.spoil)


@pytest.mark.parametrize("spoil", ["one element", "one left out", "behind the end", "before the start", "an operand", "infinity for NaN"])
@pytest.mark.parametrize("op", ["mul_mat", "rms_norm", "silu"])
def test_a_planted_fault_is_found(spoil: str, op: str, cpu: CpuBackend, run_seed: int) -> None:
    x = np.random.default_rng(run_seed).standard_normal((5, 256)).astype(np.float32)
    x[0, 0] = 1.5  # the spoilt element of an elementwise op is not tiny
    x[3, 3] = np.nan
    operands = {"w": weights(F32, 6, 256), "x": x} if op == "mul_mat" else {"x": x}
    example = Example.of(OPS[op], (op, ("f32",) * (len(operands) + 1)), operands)
    check_call(cpu, example)
    with pytest.raises(Disagreement) as found:
        check_call(Spoiling(cpu, spoil), example)
    assert op in str(found.value)


@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_one_wrong_code_among_a_row_is_found(dtype: DType, cpu: CpuBackend, run_seed: int) -> None:
    """The limit for quantised products sees one code changed by one, which an error in the mean would not."""
    x = np.random.default_rng(run_seed).uniform(0.5, 1, (2, 256)).astype(np.float32)
    w = weights(dtype, 4, 256)
    got = check_call(cpu, product(dtype, w, x))
    other = w.copy()
    other["ql" if dtype.field("ql") else "qs"][0, 0, 0] ^= 1
    with pytest.raises(Disagreement):
        assert_close(product(dtype, other, x), got)


def test_conformance_counts_and_repeats(cpu: CpuBackend) -> None:
    ops = [OPS[n] for n in ("add", "rms_norm")]
    report = conformance(cpu, ops, examples=4, seed=3)
    assert report.ok and report.counts == {"ok": len(cases(cpu.table, ops))}
    assert conformance(cpu, ops, examples=4, seed=3).outcomes == report.outcomes
    left_out = conformance(cpu, ops, examples=2, only=lambda case: case.op.name == "rms_norm")
    assert left_out.counts == {"ok": 1, "left out": len(cases(cpu.table, ops)) - 1}


def test_conformance_of_a_backend_that_computes_nothing_fails() -> None:
    report = conformance(NullBackend(ALL, buffer_type=HOST), [OPS["silu"]], examples=4)
    assert not report.ok and set(report.counts) == {"mismatch"}
    assert "seed" in str(report)


def test_conformance_of_a_backend_that_refuses_everything_fails(cpu: CpuBackend) -> None:
    report = conformance(FilteredBackend(cpu, lambda call: "not today"), [OPS["silu"]], examples=4)
    assert not report.ok and set(report.counts) == {"refused"} and "not today" in str(report)


def test_the_same_seed_gives_the_same_data() -> None:
    example = Example(OPS["add"], ("add", ("f32", "f32", "f32")), {}, {"x": (2, 3), "w": (2, 3)}, {}, {"x": "wide", "w": "special"}, {}, 11)
    again = Example(OPS["add"], example.key, {}, example.shapes, {}, example.kinds, {}, 11)
    assert all(np.array_equal(example.operands[n], again.operands[n], equal_nan=True) for n in ("x", "w"))
    assert not np.array_equal(example.operands["x"], example.operands["w"])
