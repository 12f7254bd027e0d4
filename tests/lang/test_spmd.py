# ruff: noqa: F821, B007 (kernels: free names are constants)
# mypy: ignore-errors
"""Text for targets where a lane is a work-item: what lanes that take no part must still do, and where barriers stand.

Each kernel runs on a device of OpenCL and as the language's own meaning; the bits are the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.backends.opencl.printer import print_program
from engine.backends.sim import SimBackend
from engine.dtypes import F32, I32
from engine.errors import DeviceError
from engine.lang.binding import bind
from engine.lang.words import (
    INF,
    LANES,
    barrier,
    f32,
    first,
    group_max,
    group_sum,
    i32,
    index,
    inside,
    lane,
    lanes,
    maximum,
    only,
    private,
    span,
    static,
    where,
)
from engine.op import Call, Step, op
from engine.tensor import leaf
from engine.testing import Example, run_guarded

ROWS = "x[r, n] -> y[r, n]"


@op(ROWS, groups="r")
def counted(r, x, y, n):
    """A uniform name that grows once a tile, also in lanes past the end."""
    tiles = i32(0)
    for i in lanes(n):
        tiles = tiles + 1
        y[r, i] = x[r, i] + f32(tiles)
    barrier()
    y[r, 0] = f32(tiles)


@op(ROWS, groups="r")
def summed_in_tiles(r, x, y, n):
    """Words across lanes inside a partial tile: lanes past the end bring zero."""
    for i in lanes(n):
        whole = group_sum(x[r, i])
        high = group_max(where(inside(i), x[r, i], -INF))
        y[r, i] = whole - high


@op(ROWS, groups="r")
def exchanged(r, x, y, n):
    """Lanes read each other, again and again: every read comes after all writes, every write after all reads."""
    for i in lanes(n):
        v = x[r, i]
        for k in range(3):
            total = f32(0)
            for j in range(LANES):
                total = total + lane(v, j) * f32(j + 1)
            v = v * 0.5 + total
        y[r, i] = v + lane(v, 0)


@op(ROWS, groups="r")
def uneven(r, x, y, n):
    """Branches that only some groups take, with words across lanes on both sides."""
    for i in lanes(n):
        v = group_sum(x[r, i])
        if r % 2 == 1:
            v = v + group_max(x[r, i] * 2.0)
        else:
            for k in range(r):
                v = v + group_sum(x[r, i] * f32(k))
        y[r, i] = v


@op(ROWS, groups="r")
def nested(r, x, y, n):
    """A lane space inside a lane space: lanes mean something else there."""
    for i in lanes(n):
        peak = group_max(x[r, i])
        with span(first(i), n) as j:
            with only(x[r, j] < peak):
                y[r, j] = x[r, j] - peak
            with only(x[r, j] >= peak):
                y[r, j] = peak
        total = f32(0)
        with span(0, LANES) as k:
            total = group_sum(f32(k))
        with only(x[r, i] > 0.0):
            y[r, i] = y[r, i] + total


@op(ROWS, groups="r")
def conditions(r, x, y, n):
    """only() around words across lanes: lanes without the condition come along and write nothing."""
    for i in lanes(n):
        y[r, i] = -1.0
        kept = f32(0)
        with only(x[r, i] > 0.0):
            kept = x[r, i]
            whole = group_sum(kept)
            y[r, i] = whole + kept


@op("x[r, n], ids[r] -> y[r, n]", groups="r", types={"ids": (I32,)})
def looped(r, x, ids, y, n):
    """A loop whose end changes while it runs: the end is what it was at first."""
    stop = index(ids[r])
    t = private(2, f32(0))
    for k in range(stop):
        stop = stop + 1
        for j in static(2):
            t[j] = t[j] + f32(k + j)
    for i in lanes(n):
        y[r, i] = x[r, i] + t[0] * 8.0 + t[1] + f32(stop)


@op(ROWS, groups="r")
def handed_on(r, x, y, n):
    """Memory of the group: what a lane wrote is read by another behind a barrier."""
    for i in lanes(n):
        y[r, i] = x[r, i] * x[r, i]
    barrier()
    back = f32(0)
    for i in lanes(n):
        back = maximum(back, y[r, index(n - 1)])
    barrier()
    for i in lanes(n):
        y[r, i] = y[r, i] + back


OPS = (counted, summed_in_tiles, exchanged, uneven, nested, conditions, looped, handed_on)


@pytest.fixture(scope="module")
def opencl():
    from engine.backends.opencl import OpenCLBackend

    try:
        found = OpenCLBackend.discover(OPS)
    except DeviceError as why:
        pytest.skip(str(why))
    yield found[0]
    for backend in found:
        backend.close()


def example_of(kernel, n, rows=3):
    x = np.random.default_rng(n).standard_normal((rows, n)).astype(np.float32)
    operands = {"x": x, **({"ids": np.arange(rows, dtype=np.int32)} if kernel is looped else {})}
    return Example.of(kernel, kernel.keys()[0], operands)


@pytest.mark.parametrize("kernel", OPS, ids=lambda k: k.name)
@pytest.mark.parametrize("n", ["1", "LANES - 1", "LANES", "2 * LANES + 3"])
def test_a_work_item_a_lane_means_what_the_language_says(opencl, kernel, n):
    lanes_ = opencl.table.lanes
    example = example_of(kernel, eval(n, {"LANES": lanes_}))
    got, guards = run_guarded(opencl, example)
    want, _ = run_guarded(SimBackend(OPS, lanes=lanes_), example)
    assert guards.intact, guards
    np.testing.assert_array_equal(got, want)


def text_of(kernel):
    node = kernel(leaf(F32, (2, 40), "x"), *([leaf(I32, (2,), "ids")] if kernel is looped else []))
    call = Call.of(Step.of(node), {}, 32)
    b = bind(call, kernel.variants[-1])[0]
    return print_program(b.kernel(), f"{kernel.name}_kernel")


def test_a_word_across_lanes_takes_one_barrier():
    """Two sums in a row use two arrays, so nothing has to wait for the reads of the first."""
    body = text_of(summed_in_tiles).partition("__kernel")[2]
    assert body.count("barrier(CLK_LOCAL_MEM_FENCE);") == 3  # one a word, and one that closes the loop's body


def test_no_barrier_stands_where_lanes_do_not_meet():
    assert "barrier" not in text_of(looped).partition("__kernel")[2]


def test_lanes_that_take_no_part_are_branched_round_where_nothing_needs_them():
    assert "if (" not in text_of(looped).partition("__kernel")[2].replace("if (lane == 0)", "")


def test_the_text_shows_the_kernels_lines():
    text = text_of(conditions)
    assert "// kept = x[r, i]" in text
    assert "// with only(x[r, i] > 0.0):" in text
