"""The Python text for numba.cuda: made of words that both meanings have, typed, with constants in the access."""

from __future__ import annotations

import ast
import builtins

import numpy as np
import pytest

from engine.backends.cuda import sim_words
from engine.backends.cuda.compiler import program_of
from engine.backends.cuda.printer import Address, Program, loose
from engine.calls import a_call
from engine.dtypes import F32
from engine.lang.binding import bind
from engine.lang.function import Function
from engine.lang.tree import Table, ViewType
from engine.lang.walk import check
from engine.lang.words import fma, group_sum, lane, lanes, where  # noqa: F401
from engine.op import Call, Op
from kernels import OPS

SIM = sim_words.words(sim_words.Memory([]), sim_words.Crowd(32))


def programs(op: Op) -> list[Program]:
    """The text of one key of each variant."""
    out = []
    for variant in op.variants:
        key = next(k for k in op.keys() if all(t in {d.name for d in variant.types.get(o.name, op.types[o.name])}
                                               for o, t in zip(op.contract.views, k[1], strict=True)))
        call = a_call(op, key, variant, 32)
        assert isinstance(call, Call), f"{op.name} {variant.name}: no call of small extents"
        out += [program_of(b) for b in bind(call, variant)]
    return out


def called(text: str) -> set[str]:
    return {n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_text_calls_words_of_the_namespace_only(op: Op) -> None:
    for p in programs(op):
        known = {*SIM, *p.functions, *(w for t in p.tables.values() for w in sim_words.table_words(t))}
        assert called(p.text) <= known
        assigned = {n.id for n in ast.walk(ast.parse(p.text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert not assigned & (known | set(dir(builtins)) & {"abs", "max", "min"}), "a name hides a word"


def test_both_meanings_have_the_same_words() -> None:
    pytest.importorskip("numba_cuda")
    from engine.backends.cuda import gpu_words

    table = Table("SOME_BYTES", np.arange(4, dtype=np.uint32))
    assert gpu_words.words(32).keys() == SIM.keys()
    assert gpu_words.words(64).keys() == SIM.keys()
    assert gpu_words.table_words(table).keys() == sim_words.table_words(table).keys()


def text_of(fn: object, **ints: int) -> str:
    views = {v: ViewType(F32, 2) for v in ("x", "y")}
    kernel = check(Function(fn), views, ("row",), ("n",), (), {"LANES": 32, **ints})  # type: ignore[arg-type]
    from engine.backends.cuda.printer import print_program

    return print_program(kernel).kernel


def scaled_and_shifted(row, x, y, n):  # type: ignore[no-untyped-def]
    for i in lanes(n):
        y[row, i] = x[row, i] * 2.0 + 1.0


def named_like_words(row, x, y, n):  # type: ignore[no-untyped-def]
    group = x[row, 0]
    load_f32 = group + 1.0
    for i in lanes(n):
        y[row, i] = where(x[row, i] > load_f32, group, x[row, i + 3])


def lane_by_lane(row, x, y, n):  # type: ignore[no-untyped-def]
    for i in lanes(n):
        v = x[row, i]
        for k in range(4):
            y[row, i] = lane(v, k) + group_sum(v)


def test_operators_name_their_type_and_are_not_contracted() -> None:
    text = text_of(scaled_and_shifted)
    assert "store_f32(y + row * y_stride_0 + i * 4, 0, add_f32(mul_f32(load_f32(x + row * x_stride_0 + i * 4, 0), 2.0), 1.0))" in text
    assert "fma" not in text


def test_names_give_way_to_words_and_constants_stay_in_the_access() -> None:
    text = text_of(named_like_words)
    assert "group_ = load_f32(x + row * x_stride_0, 0)" in text
    assert "load_f32_ = add_f32(group_, 1.0)" in text
    assert Address("x + i * 4", 12) == "x + i * 4 + 12" and Address("x", 0) == "x"


def test_words_across_lanes_are_statements_of_their_own() -> None:
    lines = [line.strip() for line in text_of(lane_by_lane).splitlines()]
    assert any(line.startswith("of_lane = lane_value_f32(") for line in lines)
    assert any(line.startswith("group_sum = group_sum_f32(") for line in lines)
    assert not any("if " in line and "group_sum_f32" in line for line in lines)


def test_a_literal_keeps_its_cast_only_where_it_stands_alone() -> None:
    assert loose("x", "f32(0.5)") == ["x", "0.5"]
    assert loose("f32(0.5)", "f32(0.25)") == ["f32(0.5)", "f32(0.25)"]
    assert loose("i32(-3)", "(a + b)") == ["-3", "a + b"]
