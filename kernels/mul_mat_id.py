"""MUL_MAT_ID: each token's products with the matrices (experts) that its ids name: y[t, u] = w[ids[t, u]] x[t, u], or x[t, 0] for all u.

A row has the bits that MUL_MAT gives for its expert, on GPUs with the same slices of k. Groups go over rows of the matrices first, tokens
next: tokens of a batch that share an expert find its rows in the cache. An id that names no expert is clamped to one that exists.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

import kernels.quants  # noqa: F401
from engine.dtypes import F32, FLOATS, I32, Q8_X, RADIX, WEIGHT_BLOCKS
from engine.lang.words import (
    codes,
    dot,
    dot4,
    f32,
    fma,
    function,
    group_sum,
    i32,
    index,
    lanes,
    maximum,
    minimum,
    offset,
    only,
    private,
    scale,
    span,
    static,
    u32,
)
from engine.op import op
from kernels.mul_mat import GPU_LANES, GROUPS, cut, quantize_rows, slice_length, slices


def experts(call):
    """x has one row a token, or one for each id; there is an expert that ids could name."""
    if call["xu"] not in (1, call["u"]):
        return f"x has {call['xu']} rows a token: 1 or {call['u']}, one for each id, are expected"
    if call["t"] * call["u"] and not call["e"]:
        return "w has no expert that ids could name"
    return None


def moved(call):
    """Bytes of the experts that are read, at most one for each id, and of everything else."""
    w, x, ids, y = (call.tensors[n] for n in ("w", "x", "ids", "y"))
    used = min(call["e"], call["t"] * call["u"])
    return used * call["m"] * w.dtype.row_nbytes(call["k"]) + x.nbytes + ids.nbytes + y.nbytes


def cut_and_few(call):
    """Without slices there were too few groups."""
    groups = -(-call["m"] // call.lanes) * call["t"] * call["u"]
    return cut(call) or (f"{groups} groups are enough without slices" if groups >= GROUPS else None)


def merge_slices(t, u, tile, partial, y, m, slices):
    with span(tile * LANES, m) as i:
        whole = f32(0)
        for s in range(slices):
            whole = whole + partial[s, t, u, i]
        y[t, u, i] = whole


SIZES = {"n_blocks": lambda call: call["k"] // call.weight_format.block_size}
CUT = {"sizes": {**SIZES, "slices": slices, "length": slice_length}, "least_lanes": GPU_LANES}
SPLIT = {**CUT, "then": "merge_slices: t u m/LANES", "scratch": {"partial": lambda call: (slices(call), call["t"], call["u"], call["m"])}}


@op("w[e, m, k], x[t, xu, k], ids[t, u] -> y[t, u, m]", groups="m/ROWS t u",
    types={"w": (*FLOATS, *WEIGHT_BLOCKS), "x": (F32, Q8_X), "ids": (I32,)}, check=experts, cost_bytes=moved,
    constants={"OWN": lambda call: call["xu"] > 1}, keys=lambda types: (types["w"] in WEIGHT_BLOCKS) == (types["x"] is Q8_X),
    flop=lambda call: 2 * call["t"] * call["u"] * call["m"] * call["k"],
    variant={"types": {"w": FLOATS, "x": (F32,)}, "constants": {"ROWS": 4}})
def mul_mat_id(tile, t, u, w, x, ids, y, e, m, k):
    """Lanes along k, ROWS sums in registers."""
    expert = minimum(maximum(index(ids[t, u]), 0), e - 1)
    own = u if OWN else 0
    total = private(ROWS, f32(0))
    for i in lanes(k):
        xs = x[t, own, i]
        for r in static(ROWS):
            total[r] = fma(w[expert, minimum(tile * ROWS + r, m - 1), i], xs, total[r])
    for r in static(ROWS):
        if tile * ROWS + r < m:
            y[t, u, tile * ROWS + r] = group_sum(total[r])


@function
def half_run(block, s, q, xs, total):
    """Adds the products of QUADS quads of run s, from quad q * QUADS on."""
    quads = tuple(codes(block, s, q * QUADS + t) for t in static(QUADS))
    high_sum = xs.sums[q] if QUADS == 4 else xs.sums[0] + xs.sums[1]
    low_sum = xs.sums[2 + q] if QUADS == 4 else xs.sums[2] + xs.sums[3]
    high = dot(quads, tuple(xs.qs[q * QUADS + t] for t in static(QUADS)), high_sum, LOW, HIGH)
    low = dot(quads, tuple(xs.qs[8 + q * QUADS + t] for t in static(QUADS)), low_sum, LOW, HIGH)
    part = RADIX * high + low
    if ZERO:
        part = part - ZERO * (RADIX * high_sum + low_sum)
    whole = fma(scale(block, s, q * QUADS) * xs.d, f32(part), total)
    if OFFSET and QUADS == 4:
        whole = fma(-offset(block, s, 4 * q) * xs.d, f32(RADIX * high_sum + low_sum), whole)
    return whole


INTERLEAVED = {"types": {"w": WEIGHT_BLOCKS, "x": (Q8_X,)}, "layouts": {"w": "lanes"}}
WHOLE = {"QUADS": lambda call: call.weight_format.scale_run // 4, "SLICE": 0, "PARTIAL": 0, "TURNS": 0, "LENGTH": 0}


@mul_mat_id.variant("m/LANES t u", sizes=SIZES, constants=WHOLE, **INTERLEAVED)
@mul_mat_id.variant("m/LANES t u", name="mul_mat_id_rows_in_turn", constants=WHOLE | {"TURNS": 1, "LENGTH": 1}, when=cut,
                    **INTERLEAVED, **CUT)
@mul_mat_id.variant("m/LANES t u slices", name="mul_mat_id_rows_split", constants=WHOLE | {"SLICE": 1, "PARTIAL": 1, "LENGTH": 1},
                    when=cut_and_few, **INTERLEAVED, **SPLIT)
def mul_mat_id_rows(tile, t, u, slice, w, x, ids, y, partial, e, m, n_blocks, length):
    """Lanes are rows, interleaved weights: whole sums, those of one slice of k, or of all slices in turn, as `mul_mat_rows` has them."""
    expert = minimum(maximum(index(ids[t, u]), 0), e - 1)
    own = u if OWN else 0
    total = f32(0)
    if TURNS:
        whole = f32(0)
        edge = length
    with span(0, LANES) as l:
        rows = l + tile * LANES
        for j in range(slice * length if PARTIAL else 0, minimum(slice * length + length, n_blocks) if PARTIAL else n_blocks):
            if TURNS:
                if j == edge:
                    edge = edge + length
                    whole = whole + total
                    total = f32(0)
            block = w[expert, rows, j]
            for s in static(RUNS):
                xs = x[t, own, j * RUNS + s]
                for q in static(8 // QUADS):
                    total = half_run(block, s, q, xs, total)
                if OFFSET and QUADS == 8:
                    total = fma(-offset(block, s, 0), xs.s, total)
        with only(rows < m):
            if PARTIAL:
                partial[slice, t, u, rows] = total
            else:
                y[t, u, rows] = whole + total if TURNS else total


@mul_mat_id.variant("m t u", types={"w": WEIGHT_BLOCKS, "x": (Q8_X,)}, sizes=SIZES)
def mul_mat_id_along_k(row, t, u, w, x, ids, y, e, n_blocks):
    """Lanes along k, the file's layout."""
    expert = minimum(maximum(index(ids[t, u]), 0), e - 1)
    own = u if OWN else 0
    total = f32(0)
    for j, s, quad in lanes(n_blocks, RUNS, 8):
        block, xs = w[expert, row, j], x[t, own, j * RUNS + s]
        four, ones = codes(block, s, quad), u32(0x01010101)
        part = RADIX * dot4(four, xs.qs[quad], i32(0), LOW, HIGH) + dot4(four, xs.qs[8 + quad], i32(0), LOW, HIGH)
        if ZERO:
            part = part - ZERO * (RADIX * dot4(ones, xs.qs[quad], i32(0), 1, 1) + dot4(ones, xs.qs[8 + quad], i32(0), 1, 1))
        value = f32(part) * scale(block, s, quad) * xs.d
        if OFFSET and SCALE_RUN == 32:
            value = value - offset(block, s, quad) * xs.s * 0.125
        if OFFSET and SCALE_RUN == 16:
            value = value - offset(block, s, quad) * xs.d * f32(RADIX * xs.sums[quad // 4] + xs.sums[2 + quad // 4]) * 0.25
        total = total + value
    y[t, u, row] = group_sum(total)


@mul_mat_id.variant("m/ROWS t u slices", types={"w": FLOATS, "x": (F32,)}, constants={"ROWS": 4}, when=cut, **SPLIT)
def mul_mat_id_split(tile, t, u, slice, w, x, ids, partial, e, m, k, length):
    """The general kernel for one slice of k."""
    expert = minimum(maximum(index(ids[t, u]), 0), e - 1)
    own = u if OWN else 0
    total = private(ROWS, f32(0))
    for l in lanes(minimum(length, k - slice * length)):
        i = l + slice * length
        xs = x[t, own, i]
        for r in static(ROWS):
            total[r] = fma(w[expert, minimum(tile * ROWS + r, m - 1), i], xs, total[r])
    for r in static(ROWS):
        if tile * ROWS + r < m:
            partial[slice, t, u, tile * ROWS + r] = group_sum(total[r])


mul_mat_id.through["x"] = (quantize_rows, Q8_X)


@mul_mat_id.reference
def _(w, x, ids):
    at, x = np.clip(ids, 0, max(len(w) - 1, 0)), np.broadcast_to(x, (*ids.shape, x.shape[-1]))
    y = np.zeros((*ids.shape, w.shape[1]))
    for expert in np.unique(at):
        y[at == expert] = x[at == expert] @ w[expert].T
    return y
