"""Fused ops: one pass over memory for several ops, each number computed by the same operations in the same order, so that no bit differs.

`fuses` is the piece of a graph an op stands for; backends put it there (engine/rewrite.py), and its reference is that of the piece. What
comes before a quantised product ends in blocks, as QUANTIZE_ROWS makes them.
"""

# ruff: noqa: F821
# mypy: ignore-errors
from engine.dtypes import F16, F32, I32, I64, Q8_X, RADIX
from engine.lang.words import (
    LANES,
    abs,
    as_f32,
    as_i32,
    cos,
    f32,
    fma,
    function,
    group_max,
    group_sum,
    i32,
    index,
    lanes,
    maximum,
    minimum,
    private,
    rint,
    rsqrt,
    sin,
    span,
    static,
    where,
)
from engine.op import op
from kernels.activations import geglu, gelu_of, silu_of, swiglu
from kernels.arithmetic import add, mul
from kernels.mul_mat import LARGEST, STEP, quantize_rows
from kernels.norm import rms_norm
from kernels.rope import rope
from kernels.set_rows import set_keys

NORMED = mul.pattern(rms_norm.pattern("x", eps="eps"), "w")
X, U, W = "x[a, b, c, n]", "u[a, b, c, n]", "w[wa, wb, wc, n]"
MAGIC, SIXTEEN = 12582912.0, -0x4C000000  # 1.5 * 2^23, and its bits added up 16 times


def tiles(call):
    """Tiles of a block of 32."""
    return max(1, 32 // call.lanes)


def wide(call):
    """Blocks side by side: what one waits for, the others fill."""
    return max(1, min(4, 16 // tiles(call)))


STRIPS = {"sizes": {"n_blocks": lambda call: call["n"] // 32, "n_strips": lambda call: -(-(call["n"] // 32) // wide(call))},
          "constants": {"TILE": lambda call: min(call.lanes, 32), "TILES": tiles, "WIDE": wide}}


def repeats(call):
    """The matrices and rows of w divide those of x."""
    if any(call[x] and (call[w] == 0 or call[x] % call[w]) for x, w in (("a", "wa"), ("b", "wb"), ("c", "wc"))):
        return f"operand w of shape {[call[d] for d in ('wa', 'wb', 'wc', 'n')]} cannot be repeated to {[call[d] for d in 'abcn']}"
    return None


@function
def place(strip, e, i, n_blocks):
    """The element of lane i in tile e of a strip of WIDE blocks. The last block stands for those that are missing."""
    return (minimum(strip * WIDE + e // TILES, n_blocks - 1) * TILES + e % TILES) * TILE + i


@function
def quantize_blocks(blocks, i, values):
    """QUANTIZE_ROWS for WIDE blocks, TILES tiles each; the sum of their scales.

    A float32 near MAGIC has no fraction: adding MAGIC rounds to nearest even, and the lowest bits are the integer. The bits of MAGIC itself
    end in 22 zeros, and 16 of them in a sum are taken off.
    """
    big, d, inverse = private(WIDE, i32(0)), private(WIDE, f32(0)), private(WIDE, f32(0))
    high_sums, low_sums = private(WIDE, i32(0)), private(WIDE, i32(0))
    for k in static(WIDE):
        for t in static(TILES):
            big[k] = maximum(big[k], as_i32(abs(values[k * TILES + t])))  # the bits of magnitudes are in order, NaN above infinity
    for k in static(WIDE):
        top = as_f32(group_max(big[k]))
        d[k] = top / LARGEST
        inverse[k] = where(top > 0.0, minimum(LARGEST / top, 3.0e38), f32(0))
    for k in static(WIDE):
        for t in static(TILES):
            code = values[k * TILES + t] * inverse[k]
            whole = where(code == code, code, f32(0)) + MAGIC
            high = (whole - MAGIC) * STEP + MAGIC
            low = fma(high - MAGIC, -RADIX, whole)
            blocks[k].q[i + t * TILE] = as_i32(high)
            blocks[k].q[i + (t * TILE + 32)] = as_i32(low)
            high_sums[k] = high_sums[k] + where(i + t * TILE < 16, as_i32(high), as_i32(high) << 16)
            low_sums[k] = low_sums[k] + where(i + t * TILE < 16, as_i32(low), as_i32(low) << 16)
    total = f32(0)
    for k in static(WIDE):
        both_high, both_low = group_sum(high_sums[k]) - SIXTEEN, group_sum(low_sums[k]) - SIXTEEN  # two sums in a word
        first_high, first_low = (both_high << 16) >> 16, (both_low << 16) >> 16
        second_high, second_low = (both_high - first_high) >> 16, (both_low - first_low) >> 16
        blocks[k].d = d[k]
        blocks[k].s = d[k] * f32(RADIX * (first_high + second_high) + (first_low + second_low))
        blocks[k].sums[0] = first_high
        blocks[k].sums[1] = second_high
        blocks[k].sums[2] = first_low
        blocks[k].sums[3] = second_low
        total = total + d[k]
    return total


# -- norms ------------------------------------------------------------------------------------------------------


@op(f"{X}, {W} -> y[a, b, c, n]", groups="a b c", types={"w": (F32, F16)}, check=repeats, inplace="x", eps=1e-5, fuses=NORMED,
    flop=lambda call: 5 * call.tensors["x"].n_elements)
def rms_norm_mul(a, b, c, x, w, y, n, wa, wb, wc, eps):
    squares = f32(0)
    for i in lanes(n):
        v = x[a, b, c, i]
        squares = fma(v, v, squares)
    r = rsqrt(group_sum(squares) / f32(n) + eps)
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * r * w[a % wa, b % wb, c % wc, i]


@op(f"{X}, {W}, {U} -> y[a, b, c, n]", groups="a b c", types={"w": (F32, F16)}, check=repeats, inplace="x", eps=1e-5,
    fuses=add.pattern(NORMED, "u"), flop=lambda call: 6 * call.tensors["x"].n_elements)
def rms_norm_mul_add(a, b, c, x, w, u, y, n, wa, wb, wc, eps):
    squares = f32(0)
    for i in lanes(n):
        v = x[a, b, c, i]
        squares = fma(v, v, squares)
    r = rsqrt(group_sum(squares) / f32(n) + eps)
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * r * w[a % wa, b % wb, c % wc, i] + u[a, b, c, i]


@op(f"{X}, {W} -> y[a, b, c, n]", groups="a b c", types={"w": (F32, F16), "y": (Q8_X,)}, check=repeats, eps=1e-5, variant=STRIPS,
    fuses=quantize_rows.pattern(NORMED), flop=lambda call: 15 * call.tensors["x"].n_elements)
def rms_norm_mul_quantize(a, b, c, x, w, y, n, n_blocks, n_strips, wa, wb, wc, eps):
    squares = f32(0)
    for i in lanes(n):
        v = x[a, b, c, i]
        squares = fma(v, v, squares)
    r = rsqrt(group_sum(squares) / f32(n) + eps)
    for strip in range(n_strips):
        blocks = tuple(y[a, b, c, minimum(strip * WIDE + k, n_blocks - 1)] for k in static(WIDE))
        with span(0, TILE) as i:
            _ = quantize_blocks(blocks, i, tuple(
                x[a, b, c, place(strip, e, i, n_blocks)] * r * w[a % wa, b % wb, c % wc, place(strip, e, i, n_blocks)]
                for e in static(WIDE * TILES)))


# -- gated activations ------------------------------------------------------------------------------------------


def gate_quantize(gate, activation_of):
    """The op for activation_of(x) * u as blocks."""

    @op(f"{X}, {U} -> y[a, b, c, n]", groups="a b c", name=f"{gate.name}_quantize", types={"y": (Q8_X,)}, variant=STRIPS,
        fuses=quantize_rows.pattern(gate.pattern("x", "u")), flop=lambda call: 30 * call.tensors["x"].n_elements)
    def gated(a, b, c, x, u, y, n_blocks, n_strips):
        for strip in range(n_strips):
            blocks = tuple(y[a, b, c, minimum(strip * WIDE + k, n_blocks - 1)] for k in static(WIDE))
            with span(0, TILE) as i:
                _ = quantize_blocks(blocks, i, tuple(
                    activation_of(x[a, b, c, place(strip, e, i, n_blocks)]) * u[a, b, c, place(strip, e, i, n_blocks)]
                    for e in static(WIDE * TILES)))

    return gated


swiglu_quantize = gate_quantize(swiglu, silu_of)
geglu_quantize = gate_quantize(geglu, gelu_of)


# -- keys -------------------------------------------------------------------------------------------------------


def rotated(call):
    return None if 2 * call["half"] <= call["d"] else f"{2 * call['half']} rotated dimensions of {call['d']}"


@function
def turned(p, high, low):
    """The angle of a pair at position p, as ROPE has it."""
    turns = p * high
    rest = fma(p, high, -turns) + p * low
    return ((turns - rint(turns)) + rest) * 6.283185307179586


@op("x[r, h, d], pos[r], freqs[2, half], ids[r], y[h, blocks, d, 32] -> y", groups="r", check=rotated, neox=0,
    types={"pos": (I32,), "ids": (I32, I64), "y": (F32, F16)}, constants={"NEOX": lambda call: call.params["neox"]},
    fuses=set_keys.pattern(rope.pattern("x", "pos", "freqs", neox="neox"), "ids", "y"),
    cost_bytes=lambda call: 8 * call.tensors["x"].n_elements)
def rope_set_keys(r, x, pos, freqs, ids, y, h, d, half):
    p, cell = f32(pos[r]), index(ids[r])
    for i in lanes(half):
        angle = turned(p, freqs[0, i], freqs[1, i])
        co, si = cos(angle), sin(angle)
        for head in range(h):
            if NEOX:
                u, v = x[r, head, i], x[r, head, i + half]
                y[head, cell // 32, i, cell % 32] = u * co - v * si
                y[head, cell // 32, i + half, cell % 32] = u * si + v * co
            else:
                u, v = x[r, head, 2 * i], x[r, head, 2 * i + 1]
                y[head, cell // 32, 2 * i, cell % 32] = u * co - v * si
                y[head, cell // 32, 2 * i + 1, cell % 32] = u * si + v * co
    for i in lanes(d - 2 * half):
        for head in range(h):
            y[head, cell // 32, i + 2 * half, cell % 32] = x[r, head, i + 2 * half]


@rope_set_keys.variant("r/LANES", types={"ids": (I32,)}, when=lambda call: None if call["r"] >= call.lanes else f"only {call['r']} rows")
def rope_set_keys_tile(tile, x, pos, freqs, ids, y, r, h, d, half):
    """Lanes are rows, as in `set_keys_tile`."""
    with span(tile * LANES, r) as row:
        p, cell = f32(pos[row]), ids[row]
        for i in range(half):
            angle = turned(p, freqs[0, i], freqs[1, i])
            co, si = cos(angle), sin(angle)
            for head in range(h):
                if NEOX:
                    u, v = x[row, head, i], x[row, head, i + half]
                    y[head, cell // 32, i, cell % 32] = u * co - v * si
                    y[head, cell // 32, i + half, cell % 32] = u * si + v * co
                else:
                    u, v = x[row, head, 2 * i], x[row, head, 2 * i + 1]
                    y[head, cell // 32, 2 * i, cell % 32] = u * co - v * si
                    y[head, cell // 32, 2 * i + 1, cell % 32] = u * si + v * co
        for i in range(d - 2 * half):
            for head in range(h):
                y[head, cell // 32, i + 2 * half, cell % 32] = x[row, head, i + 2 * half]
