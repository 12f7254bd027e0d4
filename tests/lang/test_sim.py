# ruff: noqa: F821, F841, B007 (kernels: free names are constants, masks are decided elsewhere)
# mypy: disable-error-code="name-defined, arg-type, operator"
"""The living definition: kernels agree with float64, and every fault is refused with its place."""

from __future__ import annotations

import math
from builtins import abs as builtin_abs
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from engine.backend import HOST, HostBuffer, place
from engine.backends.sim import host_memory
from engine.dtypes import BF16, F16, F32, I32, Q4_1, Q8_X, DType, from_bf16, to_bf16
from engine.errors import KernelError
from engine.lang import sim
from engine.lang.function import Function
from engine.lang.words import (
    DECODERS,
    INF,
    LANES,
    abs,
    as_i32,
    as_u32,
    barrier,
    byte,
    codes,
    dot,
    dot4,
    exp,
    f32,
    first,
    fma,
    group_max,
    group_sum,
    i32,
    index,
    inside,
    lane,
    lanes,
    maximum,
    minimum,
    nibbles,
    offset,
    only,
    pack,
    private,
    rint,
    round_away,
    rsqrt,
    scale,
    span,
    static,
    table,
    u32,
    ubyte,
    where,
)
from engine.lang.words import WORDS as VOCABULARY
from engine.op import Call, Op
from engine.tensor import Tensor, leaf

Types = Mapping[str, Sequence[DType]] | None
WIDTHS = pytest.mark.parametrize("n_lanes", [1, 4, 7, 32])


def tensor_of(array: np.ndarray, dtype: DType | None = None, name: str = "t") -> Tensor:
    """A placed leaf that holds `array` (strides kept; block records and bf16 bits want their `dtype`)."""
    dtype = dtype or next(d for d in (F32, F16, I32) if d.numpy == array.dtype)
    t = leaf(dtype, (*array.shape[:-1], array.shape[-1] * dtype.block_size), name)
    buffer = HOST.allocate(t.nbytes)
    buffer.set(place(t, buffer), array)
    return t


def array_of(t: Tensor) -> np.ndarray:
    assert isinstance(t.root.buffer, HostBuffer)
    return t.root.buffer.array(t)


def run(op: Op, *srcs: Tensor | None, n_lanes: int = 4, layouts: Mapping[str, str] | None = None, **params: Any) -> np.ndarray:
    """The op's result on these tensors."""
    node = op(*srcs, **params)
    if node.view_of is None:
        place(node, HOST.allocate(node.nbytes))
    sim.launch(Call.of(node, layouts or {}, n_lanes), op.variants[-1], host_memory)
    return array_of(node)


def make(contract: str, kernel: Any, groups: str = "r", types: Types = None, params: Mapping[str, Any] | None = None, **variant: Any) -> Op:
    """An op of one kernel."""
    made = Op(kernel.__name__, contract, types=types, params=params or {})
    made.variant(groups, name="general", **variant)(kernel)
    return made


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- kernels that are right -------------------------------------------------------------------------------------


def rms_norm(row, x, w, y, n, eps):
    squares = f32(0)
    for i in lanes(n):
        v = x[row, i]
        squares = fma(v, v, squares)
    factor = rsqrt(group_sum(squares) / f32(n) + eps)
    for i in lanes(n):
        y[row, i] = x[row, i] * factor * w[i]


RMS_NORM = make("x[r, n], w[n] -> y[r, n]", rms_norm, types={"x": (F32, F16, BF16)}, params={"eps": 1e-6})


@WIDTHS
@pytest.mark.parametrize("n", [0, 1, 3, 33, 64])
def test_rms_norm(n_lanes: int, n: int) -> None:
    x, w = normal(3, n), normal(n, seed=1)
    got = run(RMS_NORM, tensor_of(x), tensor_of(w), n_lanes=n_lanes)
    want = x / np.sqrt((x.astype(float) ** 2).sum(-1, keepdims=True) / max(n, 1) + 1e-6) * w
    np.testing.assert_allclose(got, want, rtol=1e-5)


@WIDTHS
def test_half_formats_permuted_views_and_short_operands(n_lanes: int) -> None:
    x = normal(5, 3)
    for dtype, stored, exact in ((F16, x.astype(np.float16), x.astype(np.float16)), (BF16, to_bf16(x), from_bf16(to_bf16(x)))):
        got = run(RMS_NORM, tensor_of(stored, dtype).transpose(), tensor_of(normal(5, seed=1)), n_lanes=n_lanes)
        e = exact.T.astype(float)
        np.testing.assert_allclose(got, e / np.sqrt((e**2).mean(-1, keepdims=True) + 1e-6) * normal(5, seed=1), rtol=1e-5)
    one = run(RMS_NORM, tensor_of(x[0]), tensor_of(normal(3, seed=1)), n_lanes=n_lanes)
    assert one.shape == (3,)


def soft_max(r, x, mask, y, n, mask_r, factor):
    peak = f32(-INF)
    for i in lanes(n):
        v = x[r, i] * factor
        if MASK:
            v = v + mask[r % mask_r, i]
        y[r, i] = v
        peak = maximum(peak, v)
    top = group_max(peak)
    total = f32(0)
    for i in lanes(n):
        e = exp(y[r, i] - top)
        y[r, i] = e
        total += e
    whole = group_sum(total)
    for i in lanes(n):
        y[r, i] = y[r, i] / whole


SOFT_MAX = make("x[r, n], mask?[mask_r, n] -> y[r, n]", soft_max, types={"mask": (F16,)}, params={"factor": 1.0})


@WIDTHS
@pytest.mark.parametrize("masked", [False, True])
def test_soft_max(n_lanes: int, masked: bool) -> None:
    x, mask = normal(4, 37), np.zeros((2, 37), np.float16)
    mask[1, 5:] = -np.inf
    got = run(SOFT_MAX, tensor_of(x), tensor_of(mask) if masked else None, n_lanes=n_lanes, factor=0.5)
    s = x.astype(float) * 0.5 + (np.tile(mask.astype(float), (2, 1)) if masked else 0)
    e = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(got, e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-30)


def argsort(r, x, y, n, n_bits):
    for i in lanes(n):
        y[r, i] = i32(i)
    barrier()
    for merge in range(n_bits):
        for step in range(merge + 1):
            gap = 1 << (merge - step)
            for p in lanes(1 << (n_bits - 1)):
                low = ((i32(p) >> (merge - step)) << (merge - step + 1)) + (i32(p) & (gap - 1))
                high = where(step == 0, low ^ (2 * gap - 1), low + gap)
                with only(high < n):
                    i, j = y[r, low], y[r, high]
                    u, v = x[r, i], x[r, j]
                    wrong = (v < u) | ((v == u) & (j < i))
                    y[r, low] = where(wrong, j, i)
                    y[r, high] = where(wrong, i, j)
            barrier()


SORTING: dict[str, Any] = {"types": {"y": (I32,)}, "sizes": {"n_bits": lambda call: max(call["n"] - 1, 1).bit_length()}}


@WIDTHS
@pytest.mark.parametrize("n", [1, 2, 5, 32])
def test_argsort(n_lanes: int, n: int) -> None:
    x = np.round(normal(2, n) * 2)
    got = run(make("x[r, n] -> y[r, n]", argsort, **SORTING), tensor_of(x), n_lanes=n_lanes)
    np.testing.assert_array_equal(got, np.argsort(x, kind="stable"))


def attend(head, q, k, v, y, n_keys):
    peak, total = f32(-INF), f32(0)
    out = private(TILES, f32(0))
    for key in lanes(n_keys):
        s = f32(0)
        for d in range(WIDTH):
            s = fma(k[key, d], q[head, d], s)
        s = where(inside(key), s, -INF)
        top = maximum(peak, group_max(s))
        shrink = where(peak > -INF, exp(peak - top), 0)
        weight = where(s > -INF, exp(s - top), 0)
        total = total * shrink + group_sum(weight)
        peak = top
        for c in static(TILES):
            with span(c * LANES, WIDTH) as d:
                out[c] = out[c] * shrink
        for j in range(minimum(n_keys - first(key), LANES)):
            p = lane(weight, j)
            for c in static(TILES):
                with span(c * LANES, WIDTH) as d:
                    out[c] = fma(v[first(key) + j, d], p, out[c])
    for c in static(TILES):
        with span(c * LANES, WIDTH) as d:
            y[head, d] = out[c] / total


def attend_reusing_lanes(head, q, k, v, y, n_keys):
    out = f32(0)
    for key in lanes(n_keys):
        out = out * f32(0.5)
        with span(0, WIDTH) as d:
            out = out + v[0, d]
    with span(0, WIDTH) as d:
        y[head, d] = out


ATTENTION = "q[heads, width], k[n_keys, width], v[n_keys, width] -> y[heads, width]"
TILED = {"WIDTH": lambda call: call["width"], "TILES": lambda call: -(-call["width"] // call.lanes)}


@WIDTHS
def test_lanes_that_change_their_meaning(n_lanes: int) -> None:
    q, k, v = normal(2, 10), normal(9, 10, seed=1), normal(9, 10, seed=2)
    got = run(make(ATTENTION, attend, "heads", constants=TILED), tensor_of(q), tensor_of(k), tensor_of(v), n_lanes=n_lanes)
    s = np.exp(q.astype(float) @ k.astype(float).T)
    np.testing.assert_allclose(got, s / s.sum(-1, keepdims=True) @ v, rtol=2e-5, atol=1e-6)


def sum_parts(part, x, y, parts, n, piece):
    total = f32(0)
    for i in lanes(maximum(minimum(piece, n - part * piece), 0)):
        total += x[i + part * piece]
    parts[part] = group_sum(total)


def sum_all(one, y, parts, n_parts):
    total = f32(0)
    for i in lanes(n_parts):
        total += parts[i]
    y[one] = group_sum(total)


SUM_SIZES = {"n_parts": lambda call: -(-call["n"] // 5), "piece": lambda call: 5, "one": lambda call: 1}
PARTS = {"parts": lambda call: (-(-call["n"] // 5),)}
SUM = make("x[n] -> y[1]", sum_parts, "n_parts", then="sum_all: one", sizes=SUM_SIZES, scratch=PARTS)


@WIDTHS
@pytest.mark.parametrize("n", [0, 1, 23, 25])
def test_two_launches_share_scratch_memory(n_lanes: int, n: int) -> None:
    x = normal(n)
    got = run(SUM, tensor_of(x), n_lanes=n_lanes)
    np.testing.assert_allclose(got, [x.astype(float).sum()], rtol=1e-5, atol=1e-6)


# -- blocks -----------------------------------------------------------------------------------------------------


@Function
def q4_1_codes(block, s, t):
    return (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F


@Function
def q4_1_scale(block, s, t):
    return block.d


@Function
def negated(v):
    return -v


@Function
def q4_1_offset(block, s):
    return negated(block.m)


@pytest.fixture(autouse=True)
def decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, "q4_1", {"codes": q4_1_codes, "scale": q4_1_scale, "offset": q4_1_offset})


def get_rows(r, w, ids, y, n_blocks):
    row = index(ids[r])
    for b, s, t in lanes(n_blocks, RUNS, 8):
        block = w[row, b]
        four, d, m = codes(block, s, t), scale(block, s, t), offset(block, s)
        for e in static(4):
            y[r, (b * RUNS + s) * 32 + 4 * t + e] = fma(d, f32(ubyte(four, e) - ZERO), -m)


def mul_mat_rows(tile, column, w, x, y, m, n_blocks):
    total = f32(0)
    with span(tile * LANES, m) as rows:
        for b in range(n_blocks):
            block, xs = w[rows, b], x[column, b]
            four = tuple(codes(block, 0, t) for t in static(8))
            part = dot(four, tuple(xs.qs[t] for t in static(8)), xs.sums[0] + xs.sums[1], LOW, HIGH)
            total = fma(scale(block, 0, 0) * xs.d, f32(part), total) - offset(block, 0) * xs.s
        y[column, rows] = total


def quantize_rows(r, x, y, n_blocks):
    for b in lanes(n_blocks):
        big = f32(0)
        for j in range(32):
            big = maximum(big, abs(x[r, 32 * b + j]))
        d = big / f32(127)
        inverse = where(d > 0, f32(1) / d, 0)
        block = y[r, b]
        block.d = d
        for half in static(2):
            count = i32(0)
            for j in static(4):
                four = tuple(i32(round_away(x[r, 32 * b + 16 * half + 4 * j + e] * inverse)) for e in static(4))
                block.qs[4 * half + j] = pack(*(four[e] for e in static(4)))
                for e in static(4):
                    count += four[e]
            block.sums[half] = count
        block.s = d * f32(block.sums[0] + block.sums[1])


BLOCKS = {"n_blocks": lambda call: call["k"] // 32}
QUANTIZE = make("x[r, k] -> y[r, k]", quantize_rows, types={"y": (Q8_X,)}, sizes=BLOCKS)
MUL_MAT = make("w[m, k], x[n, k] -> y[n, m]", mul_mat_rows, "m/LANES n", types={"w": (Q4_1,), "x": (Q8_X,)}, sizes=BLOCKS)
GET_ROWS = make("w[m, k], ids[r] -> y[r, k]", get_rows, types={"w": (Q4_1,), "ids": (I32,)}, sizes=BLOCKS)


def q4_1_blocks(rows: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    w = np.frombuffer(rng.bytes(rows * n * Q4_1.nbytes), Q4_1.numpy).reshape(rows, n).copy()
    w["d"], w["m"] = rng.random((2, rows, n, 1)).astype(np.float16)
    return w


def dequantised(w: np.ndarray) -> np.ndarray:
    q = w["qs"].view(np.uint8)
    values = w["d"].astype(float) * np.concatenate([q & 15, q >> 4], -1) + w["m"].astype(float)
    return values.reshape(w.shape[0], -1)


def side_by_side(w: np.ndarray, n: int) -> np.ndarray:
    """Blocks of a format as bytes, n rows side by side, unit by unit."""
    rows, blocks = w.shape
    padded = np.concatenate([w, np.zeros((-rows % n, blocks), w.dtype)]).reshape(-1, n, blocks)
    out = np.zeros((padded.shape[0], blocks, Q4_1.nbytes * n), np.uint8)
    for f in Q4_1.fields:
        units = np.ascontiguousarray(padded[f.name].transpose(0, 2, 3, 1))  # group, block, unit, row
        out[..., f.offset * n : (f.offset + f.nbytes) * n] = units.view(np.uint8).reshape(*out.shape[:2], -1)
    return out.reshape(-1)


@WIDTHS
def test_a_grid_of_blocks_is_decoded(n_lanes: int) -> None:
    w, ids = q4_1_blocks(5, 3), np.array([4, 0, 4], np.int32)
    got = run(GET_ROWS, tensor_of(w, Q4_1), tensor_of(ids), n_lanes=n_lanes)
    np.testing.assert_allclose(got, dequantised(w)[ids], rtol=1e-6)


@WIDTHS
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_blocks_are_written_and_multiplied_in_both_layouts(n_lanes: int, rows: int) -> None:
    w, x = q4_1_blocks(rows, 2), normal(3, 64)
    xq = run(QUANTIZE, tensor_of(x), n_lanes=n_lanes).copy()
    values = (xq["d"].astype(float) * np.ascontiguousarray(xq["qs"][..., :8]).view(np.int8)).reshape(3, 64)
    np.testing.assert_allclose(values, x, atol=0.02)
    want = values @ dequantised(w).T
    plain = run(MUL_MAT, tensor_of(w, Q4_1), tensor_of(xq, Q8_X), n_lanes=n_lanes)
    np.testing.assert_allclose(plain, want, rtol=1e-4, atol=1e-4)
    packed = tensor_of(w, Q4_1)
    memory = side_by_side(w, n_lanes)
    place(packed, HOST.wrap(memory))
    same = run(MUL_MAT, packed, tensor_of(xq, Q8_X), n_lanes=n_lanes, layouts={"w": f"lanes{n_lanes}"})
    np.testing.assert_array_equal(same, plain)


def test_packed_rows_want_a_span_at_a_multiple_of_the_lanes() -> None:
    w, ids = tensor_of(q4_1_blocks(5, 3), Q4_1), tensor_of(np.zeros(1, np.int32))
    with pytest.raises(KernelError, match="w lies lanes4: with 4 lanes its row index must be a span"):
        run(GET_ROWS, w, ids, layouts={"w": "lanes4"})


# -- words ------------------------------------------------------------------------------------------------------


def evaluate(kernel: Any, x: np.ndarray, n_lanes: int = 4, types: Types = None, **more: Any) -> np.ndarray:
    """The first row that comes out of a kernel `(r, x, y, n)`."""
    op = make("x[r, n] -> y[r, n]", kernel, types={"x": (F32, I32), **(types or {})}, **more)
    return run(op, tensor_of(np.atleast_2d(x)), n_lanes=n_lanes)[0]


def test_fma_rounds_once() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n // 3):
            y[r, i] = fma(x[r, 3 * i], x[r, 3 * i + 1], x[r, 3 * i + 2])
            y[r, n // 3 + i] = x[r, i] * 0
            y[r, 2 * (n // 3) + i] = x[r, i] * 0

    rng, cases = np.random.default_rng(5), []
    for _ in range(400):
        a, b = (np.float32(1) + rng.integers(0, 2**23, 2).astype(np.float32) * np.float32(2**-23)).tolist()
        cases.append((a, b, float(np.float32(rng.choice([-1, 1]) * 2.0 ** rng.integers(-60, 4)))))
    cases += [(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80), (2.0**-75, 2.0**-75, 2.0**-149), (np.inf, 0.0, 1.0), (3e38, 2.0, -3e38)]
    got = evaluate(kernel, np.array(cases, np.float32).reshape(-1))[: len(cases)]
    for value, (a, b, c) in zip(got, cases, strict=True):
        if math.isinf(a):
            assert math.isnan(value)
            continue
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        near = [np.nextafter(value, np.float32(-np.inf)), np.nextafter(value, np.float32(np.inf))]
        assert all(builtin_abs(Fraction(float(v)) - exact) >= builtin_abs(Fraction(float(value)) - exact) for v in near if np.isfinite(v))


def test_conversions_saturate_and_bits_stay() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i] = where(x[r, i] < f32(i32(1)), i32(x[r, i]), as_i32(u32(x[r, i])))

    x = np.array([-1.9, 0.9, np.nan, -1e20, 1e20, 3e9, 7.5, -np.inf], np.float32)
    got = evaluate(kernel, x, types={"y": (I32,)})
    assert got.tolist() == [-1, 0, 0, -(2**31), -1, int(np.uint32(3_000_000_000).view(np.int32)), 7, -(2**31)]


def test_integers_wrap_truncate_and_shift() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n // 4):
            v = x[r, i]
            y[r, i] = v // 4 + 1000 * (v % 4)
            y[r, i + n // 4] = (v >> 1) ^ i32(u32(v) >> 28)
            y[r, i + 2 * (n // 4)] = v * 2147483647 + (1 << 3)
            y[r, i + 3 * (n // 4)] = byte(as_u32(v), 1) + 1000 * ubyte(u32(v), 1)

    x = np.array([-7, 7, -8, 300, -300, 0, 5, 65535] * 4, np.int32)
    got = evaluate(kernel, x, types={"y": (I32,)}).reshape(4, 8)
    v = x[:8].astype(np.int64)
    q = np.trunc(v / 4).astype(np.int64)
    assert got[0].tolist() == (q + 1000 * (v - 4 * q)).tolist()
    assert got[1].tolist() == ((v >> 1) ^ ((v & 0xFFFFFFFF) >> 28)).tolist()
    assert got[2].tolist() == (v * 2147483647 + 8).astype(np.int32).tolist()
    b = (v >> 8) & 255
    assert got[3].tolist() == (np.where(b > 127, b - 256, b) + 1000 * b).tolist()


def test_rounding_words_and_numbers_over_nan() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n // 3):
            y[r, i] = rint(x[r, i])
            y[r, i + n // 3] = round_away(x[r, i])
            y[r, i + 2 * (n // 3)] = maximum(x[r, i], -3.0)

    x = np.array([0.5, 1.5, -2.5, np.nan, 0.49999997] * 3, np.float32)
    got = evaluate(kernel, x).reshape(3, 5)
    np.testing.assert_array_equal(got[0], [0, 2, -2, np.nan, 0])
    np.testing.assert_array_equal(got[1], [1, 2, -3, np.nan, 0])
    np.testing.assert_array_equal(got[2], np.array([0.5, 1.5, -2.5, -3, 0.49999997], np.float32))


def test_names_from_outside_keep_their_value_in_lanes_that_take_no_part() -> None:
    def kernel(r, x, y, n):
        best, seen = f32(-INF), i32(0)
        for i in lanes(n):
            with only(x[r, i] > best):
                best = x[r, i]
                seen = i32(i)
        with span(0, n) as i:
            pass
        top = group_max(best)
        for i in lanes(n):
            y[r, i] = top
        barrier()
        y[r, 0] = f32(group_max(seen))

    x = np.array([3, 9, 1, -5, 4], np.float32)
    assert evaluate(kernel, x).tolist() == [4, 9, 9, 9, 9]  # 4 is lane 0's second element, 3 is its first
    assert evaluate(kernel, x, n_lanes=1).tolist() == [1, 9, 9, 9, 9]


def test_a_name_made_in_a_branch_not_taken_is_fresh() -> None:
    def kernel(r, x, y, n):
        if MASK:
            v = f32(1)
        for i in lanes(n):
            v = x[r, i]
            y[r, i] = v

    x = normal(5)
    for mask in (0, 1):
        np.testing.assert_array_equal(evaluate(kernel, x, constants={"MASK": mask}), x)


def test_dot4_and_dot_agree() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            a, b = u32(x[r, i]) & 0x7F7F7F7F, pack(i32(i), -i32(i), 3, -127)
            y[r, i] = dot4(a, b, i32(5), 0, 127) - dot((a,), (b,), i32(-124), 0, 127) + dot4(a | 0x80, b, 0, 0, 255) * 0

    assert evaluate(kernel, np.arange(6, dtype=np.int32) * 1234567, types={"y": (I32,)}).tolist() == [5] * 6


SQUARES = table("SIM_SQUARES", [k * k for k in range(8)])
BYTES = table("SIM_BYTES", (np.arange(16) - 5).astype(np.int8))


@WIDTHS
def test_tables(n_lanes: int) -> None:
    """The tail's lanes hold no index of their own."""
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i] = i32(SQUARES[x[r, i]] + SQUARES[u32(x[r, i]) ^ 1] + SQUARES[r]) + byte(nibbles(BYTES, u32(x[r, i]) << 8), 1)

    ids = np.random.default_rng(0).integers(0, 8, (3, 37)).astype(np.int32)
    got = run(make("x[r, n] -> y[r, n]", kernel, types={"x": (I32,), "y": (I32,)}), tensor_of(ids), n_lanes=n_lanes)
    assert np.array_equal(got, ids**2 + (ids ^ 1) ** 2 + np.arange(3)[:, None] ** 2 + ids - 5)


# -- what is refused --------------------------------------------------------------------------------------------


def refuse(kernel: Any, message: str, x: np.ndarray | None = None, line: str = "", n_lanes: int = 4, **more: Any) -> KernelError:
    """The kernel's text must be refused with this message, at the line that holds `line`."""
    with pytest.raises(KernelError, match=message) as caught:
        evaluate(kernel, np.ones((2, 5), np.float32) if x is None else x, n_lanes=n_lanes, **more)
    assert caught.value.file == __file__
    if line:
        assert line in caught.value.source
        with open(__file__) as f:
            assert line in f.read().splitlines()[caught.value.line - 1]
    return caught.value


def test_an_index_outside_a_table() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i] = i32(SQUARES[x[r, i]])

    def uniform(r, x, y, n):
        y[r, 0] = i32(SQUARES[n + 5])

    def bytes_above(r, x, y, n):
        for i in lanes(n):
            y[r, i] = i32(nibbles(BYTES, u32(x[r, i])))

    def no_table(r, x, y, n):
        y[r, 0] = i32(nibbles(SQUARES, u32(1)))

    ids = {"x": np.array([[0, 16]], np.int32), "types": {"x": (I32,), "y": (I32,)}}
    refuse(kernel, "SIM_SQUARES: index 16 is out of range, there are 8 entries", line="SQUARES[x[r, i]]", **ids)
    refuse(uniform, "SIM_SQUARES: index 8 is out of range", x=np.zeros((1, 3), np.int32), types=ids["types"])
    refuse(bytes_above, r"nibbles: the bytes \[16, 0, 0, 0\] are not all in 0 .. 15", **ids)
    refuse(no_table, "takes a table of 16 bytes first", **ids)


def test_an_index_out_of_range() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i + 1]

    error = refuse(kernel, "x, dimension 1: index 5 is out of range, the extent is 5", line="x[r, i + 1]")
    assert error.source[error.column :].startswith("x[r, i + 1]")

    def uniform(r, x, y, n):
        y[r, 0] = x[r, n]

    refuse(uniform, "index 5 is out of range")

    def negative(r, x, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i - 1]

    refuse(negative, "index -1 is out of range")


def test_memory_read_before_it_is_written() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i] = y[r, i] + x[r, i]

    refuse(kernel, r"y\[0, 0\] is read before it is written \(lane 0\)", line="y[r, i] + x[r, i]")
    refuse(kernel, "is read before it is written", x=np.ones((2, 5), np.int32), types={"y": (I32,)})


def test_two_lanes_that_write_one_place() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i // 2] = x[r, i]

    refuse(kernel, r"y\[0, 0\] is written by two lanes in one store", line="y[r, i // 2] = x[r, i]")
    evaluate(kernel, np.ones(1, np.float32))

    def later(r, x, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i]
            y[r, n - 1 - i] = x[r, i]

    refuse(later, "was written by lane 3 since the last barrier", line="y[r, n - 1 - i]", x=np.ones(4, np.float32))


def test_a_varying_value_at_a_uniform_index() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, 0] = x[r, i]

    refuse(kernel, "a varying value is stored at a uniform index")


def test_another_lanes_write_is_read_behind_a_barrier_only() -> None:
    def mirrored(r, x, y, n):
        for i in lanes(n):
            y[r, i] = i32(i)
        for p in lanes(n // 2):
            y[r, p] = y[r, n - 1 - p]

    message = r"y\[0, 3\] was written by lane 3 since the last barrier\(\) \(lane 1\)"
    refuse(mirrored, message, line="y[r, p] = y[r, n - 1 - p]", types={"y": (I32,)})

    def uniform(r, x, y, n):
        y[r, 0] = f32(2)
        for i in lanes(n - 1):
            y[r, i + 1] = x[r, i] * y[r, 0]

    refuse(uniform, "was written by one lane \\(a uniform store\\) since the last barrier")
    evaluate(uniform, np.ones(5, np.float32), n_lanes=1)


def test_groups_are_independent() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[0, i] = x[r, i]

    refuse(kernel, "y\\[0, 0\\] was written by another group: groups are independent")

    def reads(r, x, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i]
            if r > 0:
                y[r, i] = y[r - 1, i]

    refuse(reads, "was written by another group: groups run in any order")


def test_mixed_element_types() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i] + u32(3)

    refuse(kernel, "f32 and u32 meet")

    def integers(r, x, y, n):
        for i in lanes(n):
            y[r, i] = f32(u32(3) * i32(i))

    refuse(integers, "u32 and i32 meet")

    def literal(r, x, y, n):
        for i in lanes(n):
            y[r, i] = f32(i32(i) * 0.5)

    refuse(literal, "i32 and f32 meet")


def test_stores_of_another_type() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i]

    refuse(kernel, "y holds i32: i32 is wanted, not a varying f32", types={"y": (I32,)})
    refuse(kernel, "y holds f32: f32 is wanted, not a varying i32", x=np.ones((1, 3), np.int32))


def test_a_varying_condition() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            if x[r, i] > 0:
                y[r, i] = x[r, i]

    refuse(kernel, "a varying condition", line="if x[r, i] > 0:")

    def both(r, x, y, n):
        for i in lanes(n):
            y[r, i] = where(x[r, i] > 0 and x[r, i] < 1, x[r, i], 0)

    refuse(both, "a varying condition")

    def bound(r, x, y, n):
        for i in lanes(n):
            for k in range(i):
                y[r, i] = x[r, i]

    refuse(bound, "a bound of range\\(\\) is a uniform index, not a varying i32")


def test_group_words_on_uniform_values() -> None:
    def kernel(r, x, y, n):
        y[r, 0] = group_sum(f32(n))

    refuse(kernel, "group_sum reduces over the lanes, but its operand is a uniform f32")

    def picks(r, x, y, n):
        y[r, 0] = lane(x[r, 0], 0)

    refuse(picks, "lane\\(\\) wants a varying number")

    def outside(r, x, y, n):
        for i in lanes(n):
            v = x[r, i]
            y[r, i] = lane(v, LANES)

    refuse(outside, "lane 4 of 4")


def test_names_and_registers_read_before_they_are_written() -> None:
    def name(r, x, y, n):
        if r > 0:
            v = f32(1)
        y[r, 0] = v

    refuse(name, "v is read before it is written", line="y[r, 0] = v")

    def register(r, x, y, n):
        t = private(2)
        t[0] = f32(1)
        y[r, 0] = t[0] + t[1]

    refuse(register, "register \\[1\\] is read before it is written")

    def beyond(r, x, y, n):
        t = private(2, f32(0))
        y[r, 0] = t[2]

    refuse(beyond, "register \\[2\\] of 2 registers")


def test_negative_operands_of_index_division() -> None:
    def quotient(r, x, y, n):
        y[r, (r - 1) // 2] = x[r, 0]

    refuse(quotient, "-1 // 2: operands of // are never negative")

    def remainder(r, x, y, n):
        y[r, n % (r - 5)] = x[r, 0]

    refuse(remainder, "5 % -5")

    def zero(r, x, y, n):
        for i in lanes(n):
            y[r, i] = f32(i32(i) // i32(i))

    refuse(zero, "// by 0")

    def over(r, x, y, n):
        y[r, n / 2] = x[r, 0]

    refuse(over, "/ divides f32")


def test_lanes_that_are_used_again() -> None:
    with pytest.raises(KernelError, match=r"made in span\(0, 6\) is used in lanes\(5\)") as caught:
        run(make(ATTENTION, attend_reusing_lanes, "heads", constants=TILED), *(tensor_of(normal(5, 6)) for _ in range(3)))
    assert "out = out * f32(0.5)" in caught.value.source

    def outer_index(r, x, y, n):
        for i in lanes(n):
            for j in lanes(n):
                y[r, i] = x[r, j]

    refuse(outer_index, "an index of lanes\\(5\\) is used in another lane space")

    def left_over(r, x, y, n):
        for i in lanes(n):
            v = x[r, i]
        y[r, i] = v

    refuse(left_over, "an index of lanes\\(5\\) is used outside of it")

    def kept(r, x, y, n):
        v = f32(0)
        for i in lanes(n):
            v = x[r, i]
        for i in lanes(n - 1):
            v = x[r, i]
            y[r, i] = v

    refuse(kept, "made in lanes\\(5\\) is used in lanes\\(4\\)")


def test_an_index_may_ask_about_its_own_space_from_inside_another() -> None:
    def kernel(r, x, y, n):
        for i in lanes(n):
            with span(first(i), n) as j:
                y[r, j] = x[r, j]

    np.testing.assert_array_equal(evaluate(kernel, np.arange(9, dtype=np.float32)), np.arange(9))

    def inside_out(r, x, y, n):
        for i in lanes(n):
            with span(first(i), n) as j:
                y[r, j] = where(inside(i), x[r, j], 0)

    refuse(inside_out, "is used in another lane space")


def test_the_promises_of_dot_are_checked() -> None:
    def codes_out_of_range(r, x, y, n):
        y[r, 0] = dot4(u32(0x10), u32(1), 0, 0, 15)

    refuse(codes_out_of_range, r"dot4: codes \[16, 0, 0, 0\] are not all in 0 .. 15", types={"y": (I32,)})

    def lowest(r, x, y, n):
        y[r, 0] = dot4(u32(1), u32(0x80), 0, 0, 15)

    refuse(lowest, r"bytes \[-128, 0, 0, 0\] are not all in -127 .. 127", types={"y": (I32,)})

    def total(r, x, y, n):
        y[r, 0] = dot((u32(1),), (u32(7),), i32(8), 0, 15)

    refuse(total, r"dot: total is 8, but the bytes of the second operand add up to \[7\]", types={"y": (I32,)})

    def packed(r, x, y, n):
        y[r, 0] = i32(pack(1, 2, 128, 0))

    refuse(packed, "pack: operand 2 is 128", types={"y": (I32,)})


def test_text_that_is_not_in_the_language() -> None:
    def unknown(r, x, y, n):
        y[r, 0] = sqare(f32(2))

    refuse(unknown, "unknown name sqare", line="sqare(f32(2))")

    def overwritten(r, x, y, n):
        exp = f32(1)
        y[r, 0] = exp

    refuse(overwritten, "exp is a word and cannot be a name")

    def bare(r, x, y, n):
        t = 0.0
        y[r, 0] = t

    refuse(bare, r"t = 0.0 has no type: write f32\(0.0\)")

    def loop(r, x, y, n):
        while n > 0:
            y[r, 0] = x[r, 0]

    refuse(loop, "`while` is not in the language")

    def chained(r, x, y, n):
        if 0 < n < 5:
            y[r, 0] = x[r, 0]

    refuse(chained, "one comparison at a time")

    def missing(r, x, y, width):
        y[r, 0] = x[r, 0]

    refuse(missing, "the parameter width is no operand")

    def read_only(r, x, y, n):
        x[r, 0] = f32(1)

    refuse(read_only, "x is an operand that is only read")


def test_an_operand_left_out_cannot_be_read() -> None:
    def kernel(r, x, mask, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i] + mask[r, i]

    with pytest.raises(KernelError, match="the operand mask was left out: guard what reads it with `if MASK:`"):
        run(make("x[r, n], mask?[r, n] -> y[r, n]", kernel), tensor_of(normal(1, 3)), None)


def test_memory_may_be_shared_in_place_and_is_poison_elsewhere() -> None:
    x = tensor_of(normal(2, 5))
    w = tensor_of(np.ones(5, np.float32))
    want = run(RMS_NORM, x, w).copy()
    node = RMS_NORM(x, w)
    node.buffer = x.buffer
    sim.launch(Call.of(node, lanes=4), RMS_NORM.variants[0], host_memory)
    np.testing.assert_array_equal(array_of(x), want)

    def half(r, x, y, n):
        for i in lanes(n // 2):
            y[r, i] = x[r, i]

    got = evaluate(half, np.ones(5, np.float32))
    assert got[:2].tolist() == [1, 1] and np.isnan(got[2:]).all()


def test_what_is_written_in_place_keeps_the_rest() -> None:
    def set_rows(r, x, ids, y, n):
        row = index(ids[r])
        for i in lanes(n):
            y[row, i] = x[r, i]

    y, x = tensor_of(normal(4, 5)), normal(2, 5, seed=1)
    before = array_of(y).copy()
    run(make("x[r, n], ids[r], y[m, n] -> y", set_rows, types={"ids": (I32,)}), tensor_of(x), tensor_of(np.array([3, 1], np.int32)), y)
    np.testing.assert_array_equal(array_of(y), [before[0], x[1], before[2], x[0]])
    with pytest.raises(KernelError, match="was written by another group"):
        run(make("x[r, n], ids[r], y[m, n] -> y", set_rows, types={"ids": (I32,)}), tensor_of(x), tensor_of(np.array([3, 3], np.int32)), y)


def test_scratch_memory_starts_as_poison() -> None:
    def kernel(r, x, y, n, parts):
        y[r, 0] = x[r, 0] + parts[0]

    refuse(kernel, r"parts\[0\] is read before it is written", scratch={"parts": lambda call: (3,)})


def test_only_and_barrier_in_their_places() -> None:
    def outside(r, x, y, n):
        with only(n > 0):
            y[r, 0] = x[r, 0]

    refuse(outside, r"only\(\) stands inside a lane space")

    def ordered(r, x, y, n):
        for i in lanes(n):
            with only(x[r, i] > 0):
                barrier()

    refuse(ordered, r"barrier\(\) under only\(\)")

    def nobody(r, x, y, n):
        for i in lanes(n):
            with only(x[r, i] < 0):
                y[r, 0] = f32(1)

    refuse(nobody, "a uniform store where no lane takes part")


def test_every_word_has_a_meaning() -> None:
    assert set(VOCABULARY) <= set(sim.WORDS)


@pytest.mark.parametrize("word", ["exp", "exp2", "log", "log1p", "tanh", "sin", "cos", "sqrt"])
def test_functions_are_rounded_float64(word: str) -> None:
    x = np.maximum(normal(64) ** 2, np.float32(0.01))
    with np.errstate(all="ignore"):
        got = sim.WORDS[word](sim.Value(x, "f32")).a
    np.testing.assert_array_equal(got, getattr(np, word)(x.astype(np.float64)).astype(np.float32))
