"""MUL_MAT: y = x w^T, with w[m, k] the weights in rows as files hold them, and QUANTIZE_ROWS, which makes x ready for quantised weights.

Quantised products use integer dot products of bytes, on interleaved weights one output row a lane. A column's bits do not depend on how
many columns run with it: the order of a sum follows from m, k and the number of lanes.

On GPUs the rows of a small matrix are too few groups, so k is cut into slices: a group adds up one slice for a tile of rows, and a second
launch adds up the slices in order. Where there are columns enough, a group takes all slices in turn, with the same bits.

Note [planes]: one plane of 8 bits for activations is not enough. On a 135M model it moves logits by an NMSE of 2e-4 to 1e-2, at random:
which way a value is rounded depends on the last bit of what came before, so another SIMD width gives other tokens. A second plane for the
rest brings that to 1e-6, and the same tokens come out on every CPU; decoding reads the same weights and is hardly slower.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

import kernels.quants  # noqa: F401
from engine.dtypes import F32, FLOATS, Q8_X, RADIX, WEIGHT_BLOCKS
from engine.lang.words import (
    abs,
    as_f32,
    as_i32,
    codes,
    dot,
    dot4,
    f32,
    fma,
    group_max,
    group_sum,
    i32,
    lanes,
    maximum,
    minimum,
    offset,
    only,
    private,
    rint,
    scale,
    span,
    static,
    u32,
    where,
)
from engine.op import op

STEP = 1.0 / RADIX
LARGEST = RADIX * 127.0 + 126.0  # the largest magnitude: its high byte must not round to 128


@op("x[a, b, n, k] -> y[a, b, n, k]", groups="a b n", types={"y": (Q8_X,)},
    variant={"sizes": {"n_blocks": lambda call: call["k"] // 32}})
def quantize_rows(a, b, n, x, y, n_blocks):
    """QUANTIZE_ROWS: blocks of 32 in two planes of signed bytes, with their scale (the largest magnitude / LARGEST) and sums.

    A NaN or an infinity makes the block's scale or sum NaN or infinite.
    """
    for j in range(n_blocks):
        big = i32(0)
        for i in lanes(32):
            big = maximum(big, as_i32(abs(x[a, b, n, j * 32 + i])))  # the bits of magnitudes are in order, NaN above infinity
        top = as_f32(group_max(big))
        d = top / LARGEST
        inverse = where(top > 0.0, minimum(LARGEST / top, 3.0e38), f32(0))
        block = y[a, b, n, j]
        high_sums, low_sums = i32(0), i32(0)
        for i in lanes(32):
            q = i32(rint(x[a, b, n, j * 32 + i] * inverse))
            high = i32(rint(f32(q) * STEP))
            low = q - RADIX * high
            block.q[i] = high
            block.q[i + 32] = low
            high_sums = high_sums + where(i < 16, high, high << 16)
            low_sums = low_sums + where(i < 16, low, low << 16)
        whole_high, whole_low = group_sum(high_sums), group_sum(low_sums)  # two sums in a word: 16 bytes stay within 16 bits
        first_high, first_low = (whole_high << 16) >> 16, (whole_low << 16) >> 16
        second_high, second_low = (whole_high - first_high) >> 16, (whole_low - first_low) >> 16
        block.d = d
        block.s = d * f32(RADIX * (first_high + second_high) + (first_low + second_low))
        block.sums[0] = first_high
        block.sums[1] = second_high
        block.sums[2] = first_low
        block.sums[3] = second_low


def columns_of(call):
    """Columns in a register tile: as many as there are, up to 8, or 4 for K-quants, whose scales take registers; the last is partial."""
    w = call.weight_format
    most = 4 if w is not None and w.block_size > 32 else 8
    return next(c for c in (1, 2, 4, 8) if c >= min(call["n"], most))


GPU_LANES = 32  # and more; CPUs have fewer
GROUPS = 2048  # wanted of a launch: about 16 for each multiprocessor of the largest GPUs
LEAST = 256  # elements of k in a slice
TILE = {"COLUMNS": lambda call: min(columns_of(call), 4), "ROWS": 4}  # of floats


def slice_length(call):
    """Blocks of a slice of k (floats: elements, whole tiles of lanes): tiles of rows and slices make GROUPS where k is long enough."""
    w = call.weight_format
    block, rows, step = (w.block_size, call.lanes, 1) if w else (1, TILE["ROWS"], call.lanes)
    wanted = min(-(-GROUPS // max(-(-call["m"] // rows), 1)), call["k"] // LEAST)
    return -(-(call["k"] // block) // (max(wanted, 1) * step)) * step


def slices(call):
    w = call.weight_format
    return -(-call["k"] // max(slice_length(call) * (w.block_size if w else 1), 1))


def cut(call):
    return None if slices(call) > 1 else f"k = {call['k']} stays whole with {call['m']} rows"


def cut_and_few(call):
    """Without slices there were too few groups."""
    groups = call["a"] * call["b"] * -(-call["m"] // call.lanes) * -(-call["n"] // columns_of(call))
    return cut(call) or (f"{groups} groups are enough without slices" if groups >= GROUPS else None)


def merge_slices(a, b, column, tile, partial, y, m, slices):
    with span(tile * LANES, m) as i:
        whole = f32(0)
        for s in range(slices):
            whole = whole + partial[s, a, b, column, i]
        y[a, b, column, i] = whole


SIZES = {"ra": lambda call: call["a"] // max(call["wa"], 1), "rb": lambda call: call["b"] // max(call["wb"], 1),
         "n_blocks": lambda call: call["k"] // call.weight_format.block_size}
CUT = {"sizes": {**SIZES, "slices": slices, "length": slice_length}, "least_lanes": GPU_LANES}
SPLIT = {**CUT, "then": "merge_slices: a b n m/LANES",
         "scratch": {"partial": lambda call: (slices(call), call["a"], call["b"], call["n"], call["m"])}}


def batches(call):
    """Batches of x share matrices of w evenly (grouped heads)."""
    for x, w in (("a", "wa"), ("b", "wb")):
        if call[x] and (call[w] == 0 or call[x] % call[w]):
            return f"{call[w]} matrices of w are not shared evenly by {call[x]} of x"
    return None


@op("w[wa, wb, m, k], x[a, b, n, k] -> y[a, b, n, m]", groups="a b m/ROWS n/COLUMNS",
    types={"w": (*FLOATS, *WEIGHT_BLOCKS), "x": (F32, Q8_X)}, check=batches, constants={"COLUMNS": 1, "ROWS": 1},
    keys=lambda types: (types["w"] in WEIGHT_BLOCKS) == (types["x"] is Q8_X),
    flop=lambda call: 2 * call["a"] * call["b"] * call["m"] * call["n"] * call["k"],
    variant={"types": {"w": FLOATS, "x": (F32,)}, "sizes": SIZES, "constants": TILE})
def mul_mat(a, b, tile, strip, w, x, y, m, n, k, ra, rb):
    """MUL_MAT: lanes along k, ROWS x COLUMNS sums in registers."""
    total = private(ROWS * COLUMNS, f32(0))
    for i in lanes(k):
        xs = tuple(x[a, b, minimum(strip * COLUMNS + c, n - 1), i] for c in static(COLUMNS))
        for r in static(ROWS):
            v = w[a // ra, b // rb, minimum(tile * ROWS + r, m - 1), i]
            for c in static(COLUMNS):
                total[r * COLUMNS + c] = fma(v, xs[c], total[r * COLUMNS + c])
    for r in static(ROWS):
        for c in static(COLUMNS):
            if (tile * ROWS + r < m) & (strip * COLUMNS + c < n):
                y[a, b, strip * COLUMNS + c, tile * ROWS + r] = group_sum(total[r * COLUMNS + c])


INTERLEAVED = {"types": {"w": WEIGHT_BLOCKS, "x": (Q8_X,)}, "layouts": {"w": "lanes"}}
WHOLE = {"COLUMNS": columns_of, "QUADS": lambda call: call.weight_format.scale_run // 4, "SLICE": 0, "PARTIAL": 0, "TURNS": 0, "LENGTH": 0}


@mul_mat.variant("a b m/LANES n/COLUMNS", sizes=SIZES, constants=WHOLE, **INTERLEAVED)
@mul_mat.variant("a b m/LANES n/COLUMNS", name="mul_mat_rows_in_turn", constants=WHOLE | {"TURNS": 1, "LENGTH": 1}, when=cut,
                 **INTERLEAVED, **CUT)
@mul_mat.variant("a b m/LANES n/COLUMNS slices", name="mul_mat_rows_split", constants=WHOLE | {"SLICE": 1, "PARTIAL": 1, "LENGTH": 1},
                 when=cut_and_few, **INTERLEAVED, **SPLIT)
def mul_mat_rows(a, b, tile, strip, slice, w, x, y, partial, m, n, n_blocks, ra, rb, length):
    """Lanes are rows, COLUMNS columns in registers, interleaved weights: whole sums, those of one slice of k, or of all slices in turn."""
    total = private(COLUMNS, f32(0))
    if TURNS:
        whole = private(COLUMNS, f32(0))
        edge = length
    with span(0, LANES) as l:
        rows = l + tile * LANES
        for j in range(slice * length if PARTIAL else 0, minimum(slice * length + length, n_blocks) if PARTIAL else n_blocks):
            if TURNS:
                if j == edge:
                    edge = edge + length
                    for c in static(COLUMNS):
                        whole[c] = whole[c] + total[c]
                        total[c] = f32(0)
            block = w[a // ra, b // rb, rows, j]
            for s in static(RUNS):
                if OFFSET and QUADS == 8:
                    least = offset(block, s, 0)
                for q in static(8 // QUADS):
                    quads = tuple(codes(block, s, q * QUADS + t) for t in static(QUADS))
                    d = scale(block, s, q * QUADS)
                    for c in static(COLUMNS):
                        xs = x[a, b, minimum(strip * COLUMNS + c, n - 1), j * RUNS + s]
                        high_sum = xs.sums[q] if QUADS == 4 else xs.sums[0] + xs.sums[1]
                        low_sum = xs.sums[2 + q] if QUADS == 4 else xs.sums[2] + xs.sums[3]
                        high = dot(quads, tuple(xs.qs[q * QUADS + t] for t in static(QUADS)), high_sum, LOW, HIGH)
                        low = dot(quads, tuple(xs.qs[8 + q * QUADS + t] for t in static(QUADS)), low_sum, LOW, HIGH)
                        part = RADIX * high + low
                        if ZERO:
                            part = part - ZERO * (RADIX * high_sum + low_sum)
                        total[c] = fma(d * xs.d, f32(part), total[c])
                        if OFFSET and QUADS == 4:
                            total[c] = fma(-offset(block, s, 4 * q) * xs.d, f32(RADIX * high_sum + low_sum), total[c])
                if OFFSET and QUADS == 8:
                    for c in static(COLUMNS):
                        xs = x[a, b, minimum(strip * COLUMNS + c, n - 1), j * RUNS + s]
                        total[c] = fma(-least, xs.s, total[c])
        with only(rows < m):
            for c in static(COLUMNS):
                if strip * COLUMNS + c < n:
                    if PARTIAL:
                        partial[slice, a, b, strip * COLUMNS + c, rows] = total[c]
                    else:
                        y[a, b, strip * COLUMNS + c, rows] = whole[c] + total[c] if TURNS else total[c]


@mul_mat.variant("a b m n", types={"w": WEIGHT_BLOCKS, "x": (Q8_X,)}, sizes=SIZES)
def mul_mat_along_k(a, b, row, column, w, x, y, n_blocks, ra, rb):
    """Lanes along k, the file's layout."""
    total = f32(0)
    for j, s, t in lanes(n_blocks, RUNS, 8):
        block, xs = w[a // ra, b // rb, row, j], x[a, b, column, j * RUNS + s]
        quad, ones = codes(block, s, t), u32(0x01010101)
        part = RADIX * dot4(quad, xs.qs[t], i32(0), LOW, HIGH) + dot4(quad, xs.qs[8 + t], i32(0), LOW, HIGH)
        if ZERO:
            part = part - ZERO * (RADIX * dot4(ones, xs.qs[t], i32(0), 1, 1) + dot4(ones, xs.qs[8 + t], i32(0), 1, 1))
        value = f32(part) * scale(block, s, t) * xs.d
        if OFFSET and SCALE_RUN == 32:
            value = value - offset(block, s, t) * xs.s * 0.125
        if OFFSET and SCALE_RUN == 16:
            value = value - offset(block, s, t) * xs.d * f32(RADIX * xs.sums[t // 4] + xs.sums[2 + t // 4]) * 0.25
        total = total + value
    y[a, b, column, row] = group_sum(total)


@mul_mat.variant("a b m/ROWS n/COLUMNS slices", types={"w": FLOATS, "x": (F32,)}, constants=TILE, when=cut, **SPLIT)
def mul_mat_split(a, b, tile, strip, slice, w, x, partial, m, n, k, ra, rb, length):
    """The general kernel for one slice of k."""
    total = private(ROWS * COLUMNS, f32(0))
    for l in lanes(minimum(length, k - slice * length)):
        i = l + slice * length
        xs = tuple(x[a, b, minimum(strip * COLUMNS + c, n - 1), i] for c in static(COLUMNS))
        for r in static(ROWS):
            v = w[a // ra, b // rb, minimum(tile * ROWS + r, m - 1), i]
            for c in static(COLUMNS):
                total[r * COLUMNS + c] = fma(v, xs[c], total[r * COLUMNS + c])
    for r in static(ROWS):
        for c in static(COLUMNS):
            if (tile * ROWS + r < m) & (strip * COLUMNS + c < n):
                partial[slice, a, b, strip * COLUMNS + c, tile * ROWS + r] = group_sum(total[r * COLUMNS + c])


mul_mat.through["x"] = (quantize_rows, Q8_X)


@mul_mat.reference
def _(w, x):
    w = np.repeat(np.repeat(w, x.shape[0] // max(w.shape[0], 1), 0), x.shape[1] // max(w.shape[1], 1), 1)
    return np.einsum("abmk,abnk->abnm", w, x)


@quantize_rows.reference
def _(x):
    return x
