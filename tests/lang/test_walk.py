# ruff: noqa: F821, F841, B007 (kernels: free names are constants, some names are made only to be refused)
# mypy: disable-error-code="name-defined, arg-type"
"""The typed walk: every mistake is refused with its place, and good kernels get the right types, spaces and text."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

import kernels
from engine.dtypes import F16, F32, I32, I64, Q4_1, Q8_0, Q8_X
from engine.errors import KernelError
from engine.lang.function import Function
from engine.lang.tree import (
    INDEX,
    Assign,
    Expr,
    Grid,
    If,
    Kernel,
    Only,
    Range,
    Span,
    Stmt,
    Store,
    StoreField,
    Tiles,
    Type,
    ViewType,
)
from engine.lang.walk import check, check_function
from engine.lang.words import (
    DECODERS,
    abs,
    barrier,
    byte,
    codes,
    dot,
    dot4,
    exp,
    f32,
    first,
    fma,
    function,
    group_max,
    group_sum,
    i32,
    index,
    inside,
    lane,
    lanes,
    maximum,
    nibbles,
    offset,
    only,
    pack,
    private,
    scale,
    span,
    static,
    table,
    u32,
    where,
)

VIEWS = {"x": ViewType(F32, 2), "y": ViewType(F32, 2), "h": ViewType(F16, 2), "ids": ViewType(I32, 1), "wide": ViewType(I64, 1),
         "w": ViewType(Q4_1, 2), "q": ViewType(Q8_X, 2), "packed": ViewType(Q4_1, 2, layout="lanes8")}
GROUPS, INTS, FLOATS = ("row", "col"), ("n", "m"), ("eps",)
LEVELS = 3  # a constant of this module
SQUARES = table("WALK_SQUARES", [k * k for k in range(8)])
BYTES = table("WALK_BYTES", range(16)[::4])


def walk(fn: FunctionType | Function, **constants: int) -> Kernel:
    """Check a kernel whose parameters are named as in VIEWS, GROUPS, INTS and FLOATS."""
    f = fn if isinstance(fn, Function) else Function(fn)
    views = {name: VIEWS[name] for name in f.parameters if name in VIEWS}
    groups, ints, floats = (tuple(p for p in f.parameters if p in names) for names in (GROUPS, INTS, FLOATS))
    return check(f, views, groups, ints, floats, {"LANES": 8, "LOW": 0, "HIGH": 15, "MASK": 0, **constants})


# -- mistakes ---------------------------------------------------------------------------------------------------


@dataclass
class Mistake:
    kernel: Function
    message: str
    at: str


MISTAKES: list[Mistake] = []


def mistake(message: str, at: str) -> Callable[[FunctionType], FunctionType]:
    """A kernel that is refused with `message`, its caret under the text `at`."""

    def add(fn: FunctionType) -> FunctionType:
        MISTAKES.append(Mistake(Function(fn), message, at))
        return fn

    return add


@mistake("a varying condition in `if`: use where() or `with only(..)`", at="v > 0.0")
def varying_if(row, x, y, n):
    for i in lanes(n):
        v = x[row, i]
        if v > 0.0:
            y[row, i] = v


@mistake("a varying condition in `if`", at="total > 0.0")
def condition_that_becomes_varying_later_in_the_loop(row, x, y, n):
    total = f32(0)
    for i in lanes(n):
        if total > 0.0:
            y[row, 0] = f32(1)
        total = total + x[row, i]


@mistake("`if` wants a truth value, not a uniform f32", at="x[row, 0]")
def if_on_a_number(row, x, y):
    if x[row, 0]:
        y[row, 0] = f32(1)


@mistake("wants a uniform index, not a varying i32", at="k")
def varying_range_bound(row, x, y, n):
    for i in lanes(n):
        k = i32(x[row, i])
        for j in range(k):
            y[row, i] = f32(j)


@mistake("wants a uniform index, not a span", at="i")
def span_as_range_bound(row, y, n):
    for i in lanes(n):
        for j in range(i):
            y[row, i] = f32(j)


@mistake("wants a uniform index, not a uniform i32; convert with index()", at="ids[row]")
def data_as_range_bound(row, ids, y):
    for j in range(ids[row]):
        y[row, j] = f32(0)


@mistake("a step is a constant of 1 or more", at="for j")
def range_with_a_step_known_too_late(row, y, n, m):
    for j in range(0, n, m):
        y[row, j] = f32(0)


@mistake("a varying value is stored at a uniform index", at="y[row, 0]")
def varying_stored_at_a_uniform_index(row, x, y, n):
    for i in lanes(n):
        y[row, 0] = x[row, i]


@mistake("a varying value is stored into a uniform block", at="block.d")
def varying_stored_into_a_uniform_block(row, x, q, n):
    block = q[row, 0]
    for i in lanes(n):
        block.d = x[row, i]


@mistake("group_sum: reduces over the lanes, but its operand is uniform f32", at="group_sum(t)")
def group_word_on_a_uniform_value(row, x, y):
    t = x[row, 0]
    y[row, 0] = group_sum(t)


@mistake("group_max: wants f32 or i32, not varying truth", at="group_max(")
def group_word_on_truth(row, x, y, n):
    for i in lanes(n):
        t = group_max(x[row, i] > 0.0)


@mistake("lane: wants a varying number, not a uniform f32", at="lane(")
def lane_of_a_uniform_value(row, x, y):
    y[row, 0] = lane(x[row, 0], 0)


@mistake("lane: the lane's number is a uniform integer, not a varying i32", at="lane(")
def varying_lane_number(row, x, y, n):
    for i in lanes(n):
        v = x[row, i]
        y[row, i] = lane(v, i32(v))


@mistake("f32 and i32 meet: convert with f32(), i32() or u32()", at="x[row, 0] + ids[0]")
def f32_with_i32(row, x, y, ids):
    y[row, 0] = x[row, 0] + ids[0]


@mistake("i32 and u32 meet", at="ids[0] + u32(3)")
def i32_with_u32(row, ids, y):
    t = ids[0] + u32(3)


@mistake("f32 meets an index: write f32(i)", at="x[row, 0] * n")
def f32_with_an_index(row, x, y, n):
    y[row, 0] = x[row, 0] * n


@mistake("f32 meets an index: write f32(i)", at="x[row, i] * i")
def f32_with_a_span(row, x, y, n):
    for i in lanes(n):
        y[row, i] = x[row, i] * i


@mistake("the literal 0.5 meets an index", at="n * 0.5")
def float_literal_with_an_index(row, y, n):
    y[row, 0] = f32(n * 0.5)


@mistake("the literal 0.5 meets i32", at="ids[0] * 0.5")
def float_literal_with_an_integer(ids, y):
    t = ids[0] * 0.5


@mistake("uniform i32 meets f32: convert with f32()", at="y[row, 0] = ids[0]")
def integer_stored_as_float(row, ids, y):
    y[row, 0] = ids[0]


@mistake("total is f32 and cannot become i32", at="total = i32(1)")
def name_of_two_types(row, y):
    total = f32(0)
    total = i32(1)


@mistake("n must be known when the kernel is bound", at="n]")
def register_index_not_constant(row, y, n):
    acc = private(4, f32(0))
    acc[n] = f32(1)


@mistake("acc[4] of 4 registers", at="acc[k]")
def register_index_out_of_range(row, y):
    acc = private(4, f32(0))
    t = f32(0)
    for k in static(5):
        t = t + acc[k]


@mistake("acc[-1] of 4 registers", at="acc[-1]")
def negative_register_index(row, y):
    acc = private(4, f32(0))
    acc[-1] = f32(1)


@mistake("the registers' first value 1.5 has no type: write f32(..) or i32(..)", at="acc = private")
def registers_without_a_type(row, y):
    acc = private(4, 1.5)


@mistake("n must be known when the kernel is bound", at="n, f32(0)")
def registers_known_too_late(row, y, n):
    acc = private(n, f32(0))


@mistake("total is read before it is written here", at="total + 1.0")
def read_before_written(row, y):
    y[row, 0] = total + 1.0
    total = f32(0)


@mistake("acc is read before it is written here", at="acc[0]")
def register_before_it_is_made(row, y):
    y[row, 0] = acc[0]
    acc = private(2, f32(0))


@mistake("total is read before it is written here", at="total +")
def sum_without_a_first_value(row, x, y, n):
    for i in lanes(n):
        total = total + x[row, i]


@mistake("last is read before it is written here (a name made inside a loop or a branch ends with it)", at="last")
def name_made_in_a_loop(row, x, y, n):
    for j in range(n):
        last = x[row, j]
    y[row, 0] = last


@mistake("v is read before it is written here (a name made inside a loop or a branch ends with it)", at="v)")
def name_made_in_a_lane_space(row, x, y, n):
    for i in lanes(n):
        v = x[row, i]
    y[row, 0] = group_sum(v)


@mistake("v is read before it is written here (a name made inside a loop or a branch ends with it)", at="v")
def name_made_in_one_branch(row, x, y, n):
    if n > 3:
        v = x[row, 0]
    y[row, 0] = v


@mistake("v is made in both branches: give it a first value before the `if`", at="if n > 3:")
def name_made_in_both_branches(row, x, y, n):
    if n > 3:
        v = x[row, 0]
    else:
        v = x[row, 1]
    y[row, 0] = v


@mistake("i is read before it is written here", at="i] = f32(0)")
def index_after_its_loop(row, x, y, n):
    for i in lanes(n):
        y[row, i] = x[row, i]
    y[row, i] = f32(0)


@mistake("unknown name group_sun; did you mean group_sum?", at="group_sun(v)")
def unknown_word(row, x, y, n):
    for i in lanes(n):
        v = x[row, i]
        y[row, 0] = group_sun(v)


@mistake("unknown name totl; did you mean total?", at="totl")
def unknown_own_name(row, y):
    total = f32(0)
    y[row, 0] = totl


@mistake("unknown name zzz", at="zzz")
def unknown_name_near_nothing(row, y):
    y[row, 0] = zzz


@mistake("dot is a word and cannot be a name", at="dot = f32(0)")
def word_as_a_name(row, y):
    dot = f32(0)


@mistake("LANES is a constant and cannot be a name", at="LANES = f32(0)")
def constant_as_a_name(row, y):
    LANES = f32(0)


@mistake("scale is a word and cannot be a name", at="scale = private")
def word_as_the_name_of_registers(row, y):
    scale = private(2, f32(0))


@mistake("byte is a word and cannot be a name", at="for byte")
def word_as_the_name_of_a_loop(row, y, n):
    for byte in range(n):  # noqa: F402
        y[row, byte] = f32(0)


@mistake("byte is a word and cannot be a name", at="for byte")
def word_as_the_name_of_a_static_loop(row, y, n):
    for byte in static(4):  # noqa: F402
        y[row, byte] = f32(0)


@mistake("byte is a word and cannot be a name", at="byte in static")
def word_as_the_name_in_a_generator(row, y):
    t = tuple(f32(byte) for byte in static(4))


@mistake("lane is a word and cannot be a name", at="for lane")
def word_as_the_name_of_a_lane_index(row, y, n):
    for lane in lanes(n):  # noqa: F402
        y[row, lane] = f32(0)


@mistake("codes is a word and cannot be a name", at="for codes, t")
def word_as_the_name_of_a_grid_index(row, y, n):
    for codes, t in lanes(n, 8):  # noqa: F402
        pass


@mistake("first is a word and cannot be a name", at="with span")
def word_as_the_name_of_a_span(row, y, n):
    with span(0, n) as first:
        y[row, first] = f32(0)


@mistake("the parameter scale is named like a word", at="def parameter_named_like_a_word")
def parameter_named_like_a_word(row, y, scale):
    y[row, 0] = f32(0)


@function
def with_a_bad_parameter(scale):
    return scale + 1.0


@mistake("the parameter scale is named like a word", at="def with_a_bad_parameter")
def calls_a_function_with_a_bad_parameter(row, y):
    y[row, 0] = with_a_bad_parameter(f32(1))


@mistake("the parameter nope is no operand, dimension, size or parameter of the op", at="def unknown_parameter")
def unknown_parameter(row, y, nope):
    y[row, 0] = f32(0)


@mistake("n cannot be assigned: it is a parameter, a constant or a loop's index", at="n = 2")
def assigned_parameter(row, y, n):
    n = 2
    n = n + 1


@mistake("j cannot be assigned: it is a parameter, a constant or a loop's index", at="j = j + 1")
def assigned_loop_index(row, y, n):
    for j in range(n):
        j = j + 1


@mistake("n cannot be assigned: it is a parameter, a constant or a loop's index", at="n = n + 1")
def assigned_parameter_once(row, y, n):
    n = n + 1
    y[row, 0] = f32(n)


@mistake("i belongs to lanes(n) and is used inside lanes(5): lanes mean something else here", at="i]")
def outer_span_in_an_inner_space(row, x, y, n):
    for i in lanes(n):
        for j in lanes(5):
            y[row, j] = x[row, i]


@mistake("v belongs to lanes(n) and is used inside lanes(5): lanes mean something else here", at="v")
def outer_value_in_an_inner_space(row, x, y, n):
    for i in lanes(n):
        v = x[row, i]
        for j in lanes(5):
            y[row, j] = v


@mistake("i belongs to lanes(n), not to lanes(5)", at="inside(i)")
def inside_of_another_space(row, x, y, n):
    for i in lanes(n):
        for j in lanes(5):
            y[row, j] = where(inside(i), x[row, j], 0.0)


@mistake("inside takes the index of a lane space", at="inside(v)")
def inside_of_a_value(row, x, y, n):
    for i in lanes(n):
        v = x[row, i]
        y[row, i] = where(inside(v), v, 0.0)


@mistake("first takes the index of lanes(n) or of a span", at="first(b)")
def first_of_a_grid_index(row, x, y, n):
    for b, t in lanes(n, 4):
        y[row, t] = f32(first(b))


@mistake("out belongs to span(0, 16) and is used inside lanes(n): lanes mean something else here", at="out * shrink")
def lanes_used_again_by_a_loop_over_keys(row, x, y, n):
    out = f32(0)
    with span(0, 16) as d:
        out = out + x[row, d]
    for key in lanes(n):
        shrink = group_max(x[row, key])
        out = out * shrink


@mistake("out was made varying in span(0, 16) and is assigned in lanes(n): write it inside its own space", at="out = group_max")
def lanes_written_again_by_a_loop_over_keys(row, x, y, n):
    out = f32(0)
    with span(0, 16) as d:
        out = out + x[row, d]
    for key in lanes(n):
        out = group_max(x[row, key])


@mistake("out_0 belongs to span(0, 16) and is used inside lanes(n): lanes mean something else here", at="out[0]")
def registers_of_other_lanes(row, x, y, n):
    out = private(1, f32(0))
    with span(0, 16) as d:
        out[0] = out[0] + x[row, d]
    for key in lanes(n):
        y[row, key] = out[0]


@mistake("varying values of two lane spaces meet: lanes(n) and span(0, 16); lanes mean different things there", at="a + b")
def values_of_two_spaces(row, x, y, n):
    a = f32(0)
    b = f32(0)
    for i in lanes(n):
        a = a + x[row, i]
    with span(0, 16) as j:
        b = b + x[row, j]
    y[row, 0] = group_sum(a + b)


@mistake("the lanes of a mean lanes(n), the value's span(0, 16): lanes are re-used", at="a = b")
def assigned_from_another_space(row, x, y, n):
    a = f32(0)
    b = f32(0)
    for i in lanes(n):
        a = a + x[row, i]
    with span(0, 16) as j:
        b = b + x[row, j]
    a = b


@mistake("t = 0.0 has no type: write f32(0.0)", at="t = 0.0")
def bare_literal(row, y):
    t = 0.0


@mistake("two bare literals have no type", at="where(")
def where_of_two_literals(row, x, y, n):
    for i in lanes(n):
        y[row, i] = where(x[row, i] > 0.0, 1.0, 2.0)


@mistake("-7 // 2: operands are never negative, divisors never zero", at="-7 // 2")
def negative_constant_divided(row, y):
    k = -7 // 2


@mistake("7 % 0: operands are never negative, divisors never zero", at="7 % 0")
def remainder_by_zero(row, y):
    k = 7 % 0


@mistake("operands of // and % are never negative", at="n // -2")
def index_divided_by_a_negative(row, y, n):
    k = n // -2


@mistake("operands of // and % are never negative", at="i32(-7) % ids[0]")
def negative_integer_divided(row, ids):
    k = i32(-7) % ids[0]


@mistake("a divisor is never zero", at="n // 0")
def index_divided_by_zero(row, y, n):
    k = n // 0


@mistake("1 / 0: operands are never negative, divisors never zero", at="1 / 0")
def literal_divided_by_zero(row, y):
    y[row, 0] = f32(1 / 0)


@mistake("/ divides f32: use // on integers, or convert with f32()", at="n / 2")
def index_divided_like_a_float(row, y, n):
    y[row, n / 2] = f32(0)


@mistake("// and % work on integers", at="x[row, 0] // 2.0")
def float_divided_like_an_integer(row, x, y):
    y[row, 0] = x[row, 0] // 2.0


@mistake("'and' works on integers and truth values, not on f32", at="x[row, 0] & 3")
def bits_of_a_float(row, x, y):
    y[row, 0] = x[row, 0] & 3


@mistake("1.5 & 3: integers are expected", at="1.5 & 3")
def bits_of_a_float_literal(row, y):
    k = 1.5 & 3


@mistake("a shift by 32 of 32 bits", at="ids[0] << 32")
def shift_by_the_whole_width(row, ids):
    k = ids[0] << 32


@mistake("a shift by -1 of 64 bits", at="n << -1")
def negative_shift(row, n):
    k = n << -1


@mistake("1 << -1: a shift is never negative", at="1 << -1")
def negative_shift_of_a_literal(row):
    k = 1 << -1


@mistake("shifts work on integers", at="x[row, 0] << 2")
def shifted_float(row, x):
    k = x[row, 0] << 2


@mistake("`while` is not in the language", at="while")
def while_loop(row, y, n):
    while n > 0:
        y[row, 0] = f32(0)


@mistake("`break` is not in the language", at="break")
def break_in_a_loop(row, y, n):
    for j in range(n):
        break


@mistake("`continue` is not in the language", at="continue")
def continue_in_a_loop(row, y, n):
    for j in range(n):
        continue


@mistake("`return` is not in the language", at="return")
def return_in_a_kernel(row, y):
    return


@mistake("`functiondef` is not in the language", at="def inner")
def function_in_a_kernel(row, y):
    def inner(v):
        return v

    y[row, 0] = inner(f32(0))


@mistake("`lambda v: v` is not in the language", at="lambda v: v")
def lambda_in_a_kernel(row, y):
    f = lambda v: v  # noqa: E731


@mistake("words and functions are called by name, without keywords", at="where(")
def keyword_arguments(row, x, y):
    y[row, 0] = where(c=x[row, 0] > 0.0, x=f32(0), y=f32(1))


@mistake("`with` takes span(start, n) or only(c)", at="with span")
def keyword_of_a_span(row, y, n):
    with span(0, 8, n=n) as i:
        y[row, i] = f32(0)


@mistake("one comparison at a time: combine with &", at="0 < n < 5")
def chained_comparison(row, y, n):
    if 0 < n < 5:
        y[row, 0] = f32(0)


@mistake("one comparison at a time: combine with &", at="n in (1, 5)")
def membership(row, y, n):
    if n in (1, 5):
        y[row, 0] = f32(0)


@mistake("`and` and `or` work on constants: combine truth values with & and |", at="n > 0 and m > 0")
def and_on_truths(row, y, n, m):
    if n > 0 and m > 0:
        y[row, 0] = f32(0)


@mistake("`and` and `or` work on constants", at="(x[row, i] > 0.0) or")
def or_on_varying_truths(row, x, y, n):
    for i in lanes(n):
        with only((x[row, i] > 0.0) or (x[row, i] < -1.0)):
            y[row, i] = f32(0)


@mistake("`not n > 0` is not in the language", at="not n > 0")
def not_on_a_truth(row, y, n):
    if not n > 0:
        y[row, 0] = f32(0)


@mistake("a conditional expression works on constants: use where()", at="f32(1) if n > 0 else f32(2)")
def conditional_expression(row, y, n):
    y[row, 0] = f32(1) if n > 0 else f32(2)


@mistake("barrier() under only(): every lane must reach it", at="barrier()")
def barrier_under_only(row, x, y, n):
    for i in lanes(n):
        with only(x[row, i] > 0.0):
            barrier()


@mistake("only() stands inside a lane space", at="with only")
def only_outside_a_lane_space(row, x, y, n):
    with only(n > 3):
        y[row, 0] = f32(0)


@mistake("only() wants a truth value, not a varying f32", at="x[row, i]")
def only_on_a_number(row, x, y, n):
    for i in lanes(n):
        with only(x[row, i]):
            y[row, i] = f32(0)


@mistake("count is uniform: under only() lanes without the condition cannot keep it", at="count = count + 1")
def uniform_name_under_only(row, x, y, n):
    count = i32(0)
    for i in lanes(n):
        with only(x[row, i] > 0.0):
            count = count + 1


@mistake("a store at a uniform index under only(): lanes without the condition cannot leave it out", at="y[row, 0] = f32(1)")
def uniform_store_under_only(row, x, y, n):
    for i in lanes(n):
        with only(x[row, i] > 0.0):
            y[row, 0] = f32(1)


@mistake("q4_1 blocks have the fields d, m, qs, not dmin", at="block.dmin")
def unknown_field(row, w, y):
    block = w[row, 0]
    y[row, 0] = block.dmin


@mistake("qs[4] of 4", at="block.qs")
def field_out_of_range(row, w):
    block = w[row, 0]
    t = block.qs[4]


@mistake("v is no block", at="v.d")
def field_of_a_number(row, x, y):
    v = x[row, 0]
    y[row, 0] = v.d


@mistake("x takes 2 indices, 1 given", at="row]")
def too_few_indices(row, x, y):
    y[row, 0] = x[row]


@mistake("y takes 2 indices, 3 given", at="row, 0, 0]")
def too_many_indices(row, x, y):
    y[row, 0, 0] = x[row, 0]


@mistake("an index is an integer, not a uniform f32", at="x[row, 0]]")
def float_as_an_index(row, x, y):
    y[row, x[row, 0]] = f32(0)


@mistake("blocks are written field by field", at="q[row, 0] = f32(0)")
def block_written_whole(row, q):
    q[row, 0] = f32(0)


@mistake("packed lies lanes8: its row index is a span", at="row, 0]")
def uniform_row_of_interleaved_blocks(row, packed):
    block = packed[row, 0]


@mistake("packed lies lanes8: only its row index may vary", at="i, j]")
def varying_block_of_interleaved_blocks(row, x, packed, n):
    for i in lanes(n):
        j = i32(x[row, i])
        block = packed[i, j]


@mistake("i64 elements are read one at a time", at="wide[i]")
def varying_read_of_i64(row, y, wide, n):
    for i in lanes(n):
        k = wide[i]


@mistake("x is a view, not a value", at="x + 1.0")
def view_as_a_value(row, x, y):
    y[row, 0] = x + 1.0


@mistake("exp is a word or function, not a value", at="exp")
def word_as_a_value(row, y):
    y[row, 0] = exp


@mistake("lanes is written as `for i in lanes(n)", at="lanes(n)")
def lanes_as_a_value(row, y, n):
    k = lanes(n)


@mistake("loops go over range(..), static(..) or lanes(..)", at="for j")
def loop_over_a_view(row, x, y):
    for j in x:
        y[row, 0] = j


@mistake("loops go over range(..), static(..) or lanes(..)", at="for j")
def static_without_a_size(row, y):
    for j in static():
        y[row, j] = f32(0)


@mistake("generators go over one static(n)", at="(f32(k) for k")
def generator_without_a_size(row, y):
    t = tuple(f32(k) for k in static())


@mistake("all sizes but the first are constants", at="for b, t")
def grid_size_known_too_late(row, y, n, m):
    for b, t in lanes(n, m):
        pass


@mistake("lanes(A, B, ..) takes as many indices as sizes", at="for b, t")
def grid_with_too_few_sizes(row, y, n):
    for b, t in lanes(n):
        pass


@mistake("dot4: low and high are constants", at="dot4(")
def dot_limits_not_constant(row, q, n):
    block = q[row, 0]
    t = dot4(block.qs[0], block.qs[1], i32(0), 0, n)


@mistake("dot4: codes 0 .. 256 do not fit a byte", at="dot4(")
def dot_limits_too_large(row, q):
    block = q[row, 0]
    t = dot4(block.qs[0], block.qs[1], i32(0), 0, 256)


@mistake("dot: codes -1 .. 200 do not fit a byte", at="dot(")
def dot_limits_of_signed_codes(row, q):
    block = q[row, 0]
    t = dot((block.qs[0],), (block.qs[1],), i32(0), -1, 200)


@mistake("dot: wants two tuples of equally many u32 words", at="dot(")
def dot_of_uneven_tuples(row, q):
    block = q[row, 0]
    t = dot((block.qs[0], block.qs[1]), (block.qs[1],), i32(0), LOW, HIGH)


@mistake("fma: takes 3 operands, 2 given", at="fma(")
def too_few_operands(row, x, y):
    y[row, 0] = fma(x[row, 0], x[row, 1])


@mistake("exp: wants f32, not i32: convert with f32()", at="exp(")
def float_word_on_an_integer(row, y, ids):
    y[row, 0] = exp(ids[0])


@mistake("byte: wants a u32 and a constant 0 .. 3", at="byte(")
def byte_four(row, q):
    t = byte(q[row, 0].qs[0], 4)


@mistake("f32: a truth value is no number: use where(c, 1, 0)", at="f32(")
def truth_as_a_number(row, y, n):
    y[row, 0] = f32(n > 3)


@mistake("index: index() wants a uniform integer, not a varying i32", at="index(")
def varying_index(row, x, y, n):
    for i in lanes(n):
        k = index(i32(x[row, i]))


@mistake("where: where() wants a truth value first, not a uniform f32", at="where(")
def where_on_a_number(row, x, y):
    y[row, 0] = where(x[row, 0], f32(1), f32(2))


@mistake("codes: takes a block first", at="codes(")
def codes_of_a_number(row, x):
    t = codes(x[row, 0], 0, 0)


@mistake("codes: q8_x has no decoders in kernels/quants.py", at="codes(")
def codes_of_a_block_without_decoders(row, q):
    t = codes(q[row, 0], 0, 0)


@mistake("only a tuple is spread with *", at="*v")
def spread_number(row, q):
    v = q[row, 0].qs[0] + u32(1)
    t = pack(*v)


@mistake("several names take as many values", at="a, b = (f32(0), f32(1), f32(2))")
def uneven_assignment(row, y):
    a, b = (f32(0), f32(1), f32(2))


@mistake("one target an assignment", at="a = b = f32(0)")
def chained_assignment(row, y):
    a = b = f32(0)


@mistake("this value is not used", at="f32(0)")
def value_not_used(row, y):
    f32(0)


@mistake("the literal 'text' is no number", at='"text"')
def text_as_a_value(row, y):
    y[row, 0] = "text"


@mistake("the literal True is no number", at="True")
def truth_literal(row, y):
    y[row, 0] = True


@mistake("block is made outside and cannot be made again in a loop or a branch", at="block = w[row, j]")
def block_made_again_in_a_loop(row, w, y, n):
    block = w[row, 0]
    for j in range(n):
        block = w[row, j]
    y[row, 0] = block.d


@mistake("pair is made outside and cannot be made again in a loop or a branch", at="pair = (x[row, 2]")
def tuple_made_again_in_a_branch(row, x, y, n):
    pair = (x[row, 0], x[row, 1])
    if n > 3:
        pair = (x[row, 2], x[row, 3])
    y[row, 0] = pair[0]


@function
def without_a_return(v):
    t = v + 1.0


@mistake("an index is an integer, not a varying f32", at="SQUARES[x")
def float_index_of_a_table(row, x, y, n):
    for i in lanes(n):
        y[row, i] = f32(i32(SQUARES[x[row, i]]))


@mistake("WALK_SQUARES[8] of 8 entries", at="SQUARES[8]")
def constant_index_outside_a_table(row, y):
    y[row, 0] = f32(i32(SQUARES[8]))


@mistake("SQUARES is a table, not a value", at="SQUARES + 1")
def table_as_a_value(row, y):
    y[row, 0] = f32(SQUARES + 1)


@mistake("SQUARES is no view", at="SQUARES[0]")
def table_that_is_written(row, y):
    SQUARES[0] = u32(1)


@mistake("nibbles: takes a table first", at="nibbles(ids")
def nibbles_without_a_table(row, ids, y):
    y[row, 0] = f32(i32(nibbles(ids[0], u32(1))))


@mistake("nibbles: WALK_SQUARES has 32 bytes, a table of 16 is wanted", at="nibbles(SQUARES")
def nibbles_of_a_larger_table(row, y):
    y[row, 0] = f32(i32(nibbles(SQUARES, u32(1))))


@mistake("nibbles: wants a u32 word of four bytes", at="nibbles(BYTES")
def nibbles_of_a_signed_number(row, y):
    y[row, 0] = f32(i32(nibbles(BYTES, i32(1))))


@mistake("without_a_return must end in `return value`", at="def without_a_return")
def calls_a_function_without_a_return(row, x, y):
    y[row, 0] = without_a_return(x[row, 0])


@function
def calls_itself(v):
    return calls_itself(v)


@mistake("functions of the language do not call themselves", at="calls_itself(")
def recursion(row, x, y):
    y[row, 0] = calls_itself(x[row, 0])


@function
def mixes(v, k):
    return v * k


@mistake("f32 and i32 meet", at="v * k")
def mistake_in_a_called_function(row, x, y, ids):
    y[row, 0] = mixes(x[row, 0], ids[0])


@mistake("twice: takes 1 operands, 2 given", at="twice(")
def function_with_too_many_operands(row, x, y):
    y[row, 0] = twice(x[row, 0], x[row, 1])


@pytest.mark.parametrize("case", MISTAKES, ids=lambda m: m.kernel.name)
def test_a_mistake_is_refused_at_its_place(case: Mistake) -> None:
    with pytest.raises(KernelError) as caught:
        walk(case.kernel)
    error = caught.value
    assert case.message in error.message
    assert error.file == __file__
    in_file = linecache.getline(error.file, error.line).rstrip("\n")
    assert in_file == error.source
    assert in_file[error.column :].startswith(case.at)
    head, source, caret = str(error).splitlines()
    assert head.startswith(f"{__file__}:{error.line}:{error.column + 1}: ")
    assert source[caret.index("^") :].startswith(case.at)


def test_a_mistake_in_an_indented_kernel_has_the_column_of_the_file() -> None:
    def kernel(row, x, y):
        y[row, 0] = x[row, 0] + nothing

    with pytest.raises(KernelError) as caught:
        walk(kernel)
    assert linecache.getline(__file__, caught.value.line)[caught.value.column :].startswith("nothing")
    _, source, caret = str(caught.value).splitlines()
    assert source[caret.index("^") :].startswith("nothing")


def test_a_name_of_the_surrounding_function_is_unknown() -> None:
    captured = 3

    def kernel(row, y):
        y[row, 0] = f32(captured)

    with pytest.raises(KernelError, match="unknown name captured"):
        walk(kernel)


def test_a_word_outside_a_kernel_says_so() -> None:
    with pytest.raises(KernelError, match="exp is a word of the lane language"):
        exp(1.0)
    with pytest.raises(KernelError):
        for _ in lanes:
            pass
    with pytest.raises(KernelError):
        with span:
            pass
    with pytest.raises(KernelError):
        exp + 1


# -- good kernels -----------------------------------------------------------------------------------------------


def statements(body: list[Stmt]) -> Iterator[Stmt]:
    """Every statement, outer ones first."""
    for s in body:
        yield s
        for part in ("body", "orelse"):
            yield from statements(getattr(s, part, []))


def of(kernel: Kernel, kind: type) -> list[Any]:
    return [s for s in statements(kernel.body) if isinstance(s, kind)]


def types_of(kernel: Kernel) -> dict[str, str]:
    return {s.var.name: str(s.var.type) for s in of(kernel, Assign)}


def test_types_and_uniformity() -> None:
    def kernel(row, x, h, ids, y, n, eps):
        a = x[row, 0]
        b = f32(n) * eps
        c = ids[row] + 2
        d = index(ids[row]) + n
        for i in lanes(n):
            e = h[row, i]
            f = i + 1
            g = i32(i * 2)
            p = e > a
            q = where(p, e, 0.0)
            s = u32(g) & 255
            top = group_max(e)
            z = lane(e, 3)
            y[row, f] = q + top + z + f32(s) + f32(c) + f32(d)

    assert types_of(walk(kernel)) == {
        "a": "uniform f32", "b": "uniform f32", "c": "uniform i32", "d": "index", "e": "varying f32", "g": "varying i32",
        "p": "varying truth", "q": "varying f32", "s": "varying u32", "top": "uniform f32", "z": "uniform f32"}
    (store,) = of(walk(kernel), Store)
    assert [str(i.type) for i in store.indices] == ["index", "span"]


def test_a_name_that_becomes_varying_inside_a_loop_is_varying_from_its_first_line() -> None:
    def kernel(row, x, y, n):
        total = f32(0)
        before = total * 2.0
        for i in lanes(n):
            total = total + x[row, i]
        y[row, 0] = group_sum(total) + group_sum(before)

    k = walk(kernel)
    assert types_of(k) == {"total": "varying f32", "before": "varying f32"}
    first_home, last_home = (s for s in of(k, Assign) if s.var.name == "total")
    assert first_home.var is last_home.var
    assert (first_home.masked, last_home.masked) == (False, True)
    assert first_home.var.space == "lanes(n)"


def test_uniformity_goes_round_a_loop_until_it_is_stable() -> None:
    def kernel(row, x, y, n):
        a = f32(0)
        b = f32(0)
        c = f32(0)
        for j in range(3):
            for i in lanes(n):
                c = b + 1.0
                b = a + 1.0
                a = a + x[row, i]
        y[row, 0] = group_sum(c)

    assert set(types_of(walk(kernel)).values()) == {"varying f32"}


def test_registers_become_varying_one_by_one() -> None:
    def kernel(row, x, y, n):
        acc = private(2, f32(0))
        for i in lanes(n):
            acc[1] = acc[1] + x[row, i]
        y[row, 0] = acc[0] + group_sum(acc[1])

    assert types_of(walk(kernel)) == {"acc_0": "uniform f32", "acc_1": "varying f32"}


def test_constants_are_folded_and_dead_branches_left_out() -> None:
    def kernel(row, x, y):
        k = 2 * LEVELS + 1
        if MASK:
            y[row, 0] = not_even_looked_up
        elif k == 7 and not MASK:
            y[row, k // 2] = x[row, (k << 2) % 5] * (0.25 if k > 3 else 0.5)

    k = walk(kernel)
    (store,) = k.body
    assert isinstance(store, Store)
    assert store.indices[1].constant == 3
    assert store.value.args[0].args[1].constant == 28 % 5
    assert store.value.args[1].constant == 0.25
    assert not of(k, If)


def test_a_literal_takes_its_partners_type() -> None:
    def kernel(row, x, y, ids, n):
        a = x[row, 0] * 2
        b = 3 - ids[0]
        c = n * 4
        d = maximum(x[row, 0], 0)
        e = u32(5) | 1

    constants = [arg for s in of(walk(kernel), Assign) for arg in s.value.args if arg.op == "const"]
    assert [(c.data, c.type.kind) for c in constants] == [(2.0, "f32"), (3, "i32"), (4, "index"), (0.0, "f32"), (5, "u32"), (1, "u32")]


def test_static_loops_and_generators_are_unrolled() -> None:
    def kernel(row, x, y):
        four = tuple(x[row, k] for k in static(4))
        for k in static(4):
            y[row, 3 - k] = four[k]

    k = walk(kernel)
    assert [s.indices[1].constant for s in of(k, Store)] == [3, 2, 1, 0]
    assert [s.value.op for s in of(k, Store)] == ["name"] * 4
    assert [s.value.args[1].constant for s in of(k, Assign)] == [0, 1, 2, 3]
    assert not of(k, Range)


@function
def twice(v):
    """Documented text is skipped."""
    both = v + v
    return both


def test_functions_are_inlined_and_their_operands_computed_once() -> None:
    def kernel(row, x, y):
        y[row, 0] = twice(twice(x[row, 0]))

    k = walk(kernel)
    assert [s.value.op for s in k.body] == ["read", "add", "add", "name"]


def test_a_table_is_read_at_a_wrapped_index() -> None:
    def kernel(row, x, ids, y, n):
        for i in lanes(n):
            y[row, i] = f32(i32(SQUARES[ids[i]])) + f32(i32(SQUARES[row])) + f32(i32(SQUARES[3])) + f32(i32(SQUARES[i]))

    entries: list[Expr] = []

    def look(e: Expr) -> None:
        entries.extend([e] if e.op == "table" or e.constant == 9 else [])
        for a in e.args:
            look(a)

    (store,) = of(walk(kernel), Store)
    look(store.value)
    assert [str(e.type) for e in entries] == ["varying u32", "uniform u32", "uniform u32", "varying u32"]
    assert [e.data for e in entries] == [SQUARES, SQUARES, 9, SQUARES]
    assert [(e.args[0].op, e.args[0].args[1].constant) for e in entries if e.args] == [("and", 7)] * 3
    assert "WALK_SQUARES" in entries[0].text()


def test_nibbles_take_a_table_of_16_bytes() -> None:
    def kernel(row, ids, y, n):
        for i in lanes(n):
            y[row, i] = f32(i32(nibbles(BYTES, u32(ids[i]))))

    (store,) = of(walk(kernel), Store)
    e = store.value.args[0].args[0]
    assert (e.op, e.data, str(e.type)) == ("nibbles", BYTES, "varying u32")


def test_decoders_are_inlined_by_the_view_s_format() -> None:
    def kernel(row, w, q, y, n):
        for b, t in lanes(n, 8):
            block = w[row, b]
            y[row, 8 * b + t] = f32(byte(codes(block, 0, t), 0)) * scale(block, 0, t) - offset(block, 0, t)

    assert kernels.OPS
    k = walk(kernel)
    fields: set[str] = set()

    def look(e: Expr) -> None:
        if e.op == "field":
            fields.add(e.data)
        for a in e.args:
            look(a)

    for s in of(k, Assign) + of(k, Store):
        look(s.value)
    assert fields == {"d", "m", "qs"}


def test_offset_of_a_format_without_one_is_zero() -> None:
    def kernel(row, w, y):
        y[row, 0] = offset(w[row, 0], 0)

    k = check(Function(kernel), {"w": ViewType(Q8_0, 2), "y": VIEWS["y"]}, ("row",), (), (), {"LANES": 8})
    (store,) = of(k, Store)
    assert store.value.constant == 0.0


def test_spaces_and_statements() -> None:
    def kernel(row, x, y, q, n, m):
        for j in range(1, n, 2):
            for i in lanes(m):
                with only(x[row, i] > 0.0):
                    y[row, i] = f32(j)
        with span(n, m) as s:
            y[row, s - 1] = x[row, s]
        for b, t in lanes(n, 4):
            y[b, t] = f32(t)
        if n > m:
            q[row, 0].q[3] = ids_like(n)
        else:
            q[row, 0].d = f32(first_of(n))

    k = walk(kernel)
    assert [type(s) for s in k.body] == [Range, Span, Grid, If]
    (loop,) = of(k, Range)
    assert (loop.start.data, loop.step.data) == (1, 2)
    (grid,) = of(k, Grid)
    assert [v.type for v in grid.vars] == [Type("i32", True)] * 2
    (only_,) = of(k, Only)
    assert str(only_.condition.type) == "varying truth"
    assert [(s.field, s.value.type.kind) for s in of(k, StoreField)] == [("q", "i32"), ("d", "f32")]
    assert len(of(k, Tiles)) == 1


@function
def ids_like(v):
    return i32(v) & 127


@function
def first_of(v):
    return v + 1


def test_the_same_lane_space_again_may_use_its_values() -> None:
    def kernel(row, x, y, n):
        total = f32(0)
        for i in lanes(n):
            total = total + x[row, i]
        for i in lanes(n):
            y[row, i] = x[row, i] / (1.0 + total)

    assert types_of(walk(kernel))["total"] == "varying f32"


def test_attention_written_in_its_own_space_is_accepted() -> None:
    def kernel(row, x, y, n):
        out = f32(0)
        for k in range(n):
            peak = f32(0)
            for key in lanes(n):
                peak = maximum(peak, x[row, key])
            shrink = group_max(peak)
            with span(0, 16) as d:
                out = out * shrink + x[k, d]
        with span(0, 16) as d:
            y[row, d] = out

    assert types_of(walk(kernel))["out"] == "varying f32"


def test_outer_indices_reach_an_inner_space_through_first_and_lane() -> None:
    def kernel(row, x, y, n):
        for i in lanes(n):
            v = x[row, i]
            low, one = first(i), lane(v, 2)
            for j in lanes(5):
                y[low, j] = one + f32(first(i))

    k = walk(kernel)
    assert [str(i.type) for i in of(k, Store)[0].indices] == ["index", "span"]


def test_a_name_made_in_a_lane_space_is_not_masked_there() -> None:
    def kernel(row, x, y, n):
        for i in lanes(n):
            v = x[row, i]
            v = v * 2.0
            with only(v > 1.0):
                v = f32(1)
            y[row, i] = v

    assert [s.masked for s in of(walk(kernel), Assign) if s.var.name == "v"] == [False, False, True]


def test_an_absent_operand_may_be_a_parameter() -> None:
    def kernel(row, y, mask):
        if MASK:
            y[row, 0] = mask[row, 0]

    assert walk(kernel).body == []


def test_a_kernel_keeps_what_the_parameter_block_holds() -> None:
    def kernel(row, col, x, y, n, m, eps):
        y[row, col] = x[row, col] * eps

    k = walk(kernel)
    assert (k.groups, tuple(k.views), k.ints, k.floats) == (("row", "col"), ("x", "y"), ("n", "m"), ("eps",))
    assert k.constants["LANES"] == 8


def test_a_function_alone_takes_the_types_of_its_operands() -> None:
    def half(v):
        h = v * 0.5
        return abs(h)

    params, body, result = check_function(Function(half), [Type("f32", True)], {"LANES": 8})
    assert [p.type for p in params] == [Type("f32", True)]
    assert [type(s) for s in body] == [Assign]
    assert str(result.type) == "varying f32"


def test_a_function_s_name_that_becomes_varying_is_varying_from_its_first_line() -> None:
    def summed(v):
        total = f32(0)
        before = total * 2.0
        total = total + v
        return before + total

    _, body, result = check_function(Function(summed), [Type("f32", True)], {"LANES": 8})
    assert {s.var.name: str(s.var.type) for s in body if isinstance(s, Assign)} == {"total": "varying f32", "before": "varying f32"}
    assert str(result.type) == "varying f32"


def test_group_indices_are_indices() -> None:
    def kernel(row, col, y):
        y[row, col] = f32(row * 2 + col // 3)

    (store,) = of(walk(kernel), Store)
    assert store.value.args[0].type == INDEX


def test_decoders_are_meanings_of_the_three_words() -> None:
    assert all(set(functions) <= {"codes", "scale", "offset"} for functions in DECODERS.values())
    assert {"codes", "scale"} <= set(DECODERS["q4_1"])
