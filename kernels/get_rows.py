"""GET_ROWS: rows of a matrix by their ids, as float32; the embedding look-up. An id outside the matrix is clamped to it."""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

import kernels.quants  # noqa: F401
from engine.dtypes import FLOATS, I32, I64, WEIGHT_BLOCKS
from engine.lang.words import byte, codes, f32, fma, index, lanes, maximum, minimum, offset, scale, static, ubyte
from engine.op import op


def has_rows(call):
    """Ids are clamped to a row that exists."""
    if call["a"] * call["b"] * call["r"] and not call["wa"] * call["wb"] * call["m"]:
        return f"operand w of shape {[call[d] for d in ('wa', 'wb', 'm', 'n')]} has no row that ids could name"
    return None


def moved(call):
    """Bytes of the rows that are read, and of the result."""
    w, y = call.tensors["w"], call.tensors["y"]
    return y.n_elements // max(1, call["n"]) * w.dtype.row_nbytes(call["n"]) + 4 * y.n_elements


@op("w[wa, wb, m, n], ids[a, b, r] -> y[a, b, r, n]", groups="a b r", types={"w": (*FLOATS, *WEIGHT_BLOCKS), "ids": (I32, I64)},
    check=has_rows, variant={"types": {"w": FLOATS}}, cost_bytes=moved)
def get_rows(a, b, r, w, ids, y, n, m, wa, wb):
    row = minimum(maximum(index(ids[a, b, r]), 0), m - 1)
    for i in lanes(n):
        y[a, b, r, i] = w[a % wa, b % wb, row, i]


@get_rows.variant("a b r", types={"w": WEIGHT_BLOCKS}, sizes={"n_blocks": lambda call: call["n"] // call.weight_format.block_size})
def get_rows_blocks(a, b, r, w, ids, y, n_blocks, m, wa, wb):
    """Lanes are quads of four codes."""
    row = minimum(maximum(index(ids[a, b, r]), 0), m - 1)
    for k, s, t in lanes(n_blocks, RUNS, 8):
        block = w[a % wa, b % wb, row, k]
        quad, d, low = codes(block, s, t), scale(block, s, t), offset(block, s, t)
        for e in static(4):
            code = byte(quad, e) if LOW < 0 else ubyte(quad, e)
            y[a, b, r, (k * RUNS + s) * 32 + 4 * t + e] = fma(d, f32(code - ZERO), -low)


@get_rows.reference
def _(w, ids):
    i, j, _ = np.indices(ids.shape, sparse=True)
    return w[i % max(w.shape[0], 1), j % max(w.shape[1], 1), np.clip(ids, 0, max(w.shape[2] - 1, 0)).astype(np.int64)]
