"""SET_ROWS: write rows into a tensor at given ids; the write into the KV cache. Ids are distinct and inside the tensor.

`set_rows` writes row-major memory (V), `set_keys` the layout of K: blocks of 32 keys, `[head, n / 32, head_dim, 32]`, so that attention
reads 32 keys of one dimension side by side, whatever LANES is.
"""

# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32, I32, I64
from engine.lang.words import LANES, index, lanes, span
from engine.op import op


@op("x[a, b, r, n], ids[r], y[a, b, m, n] -> y", groups="a b r", types={"ids": (I32, I64), "y": (F32, F16)},
    cost_bytes=lambda call: 8 * call.tensors["x"].n_elements)
def set_rows(a, b, r, x, ids, y, n):
    row = index(ids[r])
    for i in lanes(n):
        y[a, b, row, i] = x[a, b, r, i]


@set_rows.reference
def _(x, ids, y):
    out = y.copy()
    out[:, :, ids.astype(np.int64)] = x
    return out


@op("x[r, h, d], ids[r], y[h, blocks, d, 32] -> y", groups="r h", types={"ids": (I32, I64), "y": (F32, F16)},
    cost_bytes=lambda call: 8 * call.tensors["x"].n_elements)
def set_keys(r, h, x, ids, y, d):
    cell = index(ids[r])
    for i in lanes(d):
        y[h, cell // 32, i, cell % 32] = x[r, h, i]


@set_keys.variant("r/LANES h", types={"ids": (I32,)}, when=lambda call: None if call["r"] >= call.lanes else f"only {call['r']} rows")
def set_keys_tile(tile, h, x, ids, y, r, d):
    """Lanes are rows: neighbouring keys share cache lines, which are written while they are at hand."""
    with span(tile * LANES, r) as row:
        cell = ids[row]
        for i in range(d):
            y[h, cell // 32, i, cell % 32] = x[row, h, i]


@set_keys.reference
def _(x, ids, y):
    out = y.copy()
    ids = ids.astype(np.int64)
    out[:, ids // 32, :, ids % 32] = x
    return out
