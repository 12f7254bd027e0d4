"""SET_ROWS: write rows into a tensor at given ids; the write into the KV cache. Ids are distinct; one outside the tensor is clamped to it.

`set_rows` writes row-major memory (V), `set_keys` the layout of K: blocks of 32 keys, `[head, n / 32, head_dim, 32]`, so that attention
reads 32 keys of one dimension side by side, whatever LANES is.
"""

# mypy: ignore-errors
import numpy as np

from engine.dtypes import DTYPES, F16, F32, FLOATS, I32, I64
from engine.lang.words import LANES, index, lanes, maximum, minimum, span, static
from engine.op import op
from kernels.encode import ENCODERS

WRITTEN = tuple(DTYPES[name] for name in ENCODERS)


def has_rows(call):
    """Ids are repeated over the matrices of x, and clamped to a row that exists."""
    for d, of in (("a", "ia"), ("b", "ib")):
        if call[d] and (not call[of] or call[d] % call[of]):
            return f"ids for {call[of]} matrices cannot be repeated over {call[d]}"
    if call["a"] * call["b"] * call["r"] and not call["m"]:
        return f"y of shape {[call[d] for d in ('a', 'b', 'm', 'n')]} has no row that ids could name"
    return None


def moved(call):
    """Bytes of the rows that are read and written."""
    x, y = call.tensors["x"], call.tensors["y"]
    return x.n_elements * x.dtype.nbytes + x.n_elements // max(1, call["n"]) * y.dtype.row_nbytes(call["n"])


@op("x[a, b, r, n], ids[ia, ib, r], y[a, b, m, n] -> y", groups="a b r", check=has_rows, cost_bytes=moved,
    types={"x": (F32, F16), "ids": (I32, I64), "y": (*FLOATS, *WRITTEN)},
    keys=lambda types: types["x"] is F32 or types["y"] in FLOATS, variant={"types": {"y": FLOATS}})
def set_rows(a, b, r, x, ids, y, m, n, ia, ib):
    row = minimum(maximum(index(ids[a % ia, b % ib, r]), 0), m - 1)
    for i in lanes(n):
        y[a, b, row, i] = x[a, b, r, i]


def set_blocks(encode):
    """Lanes are blocks."""

    def set_rows_blocks(a, b, r, x, ids, y, m, ia, ib, n_blocks):
        row = minimum(maximum(index(ids[a % ia, b % ib, r]), 0), m - 1)
        for k in lanes(n_blocks):
            block = y[a, b, row, k]
            block.d = encode(block, tuple(x[a, b, r, 32 * k + j] for j in static(32)))

    return set_rows_blocks


for name, encode in ENCODERS.items():
    set_rows.variant("a b r", name=f"to_{name}", types={"x": (F32,), "y": (DTYPES[name],)},
                     sizes={"n_blocks": lambda call: call["n"] // call.tensors["y"].dtype.block_size})(set_blocks(encode))


@set_rows.reference
def _(x, ids, y):
    out = y.copy()
    a, b = np.indices(x.shape[:2])
    rows = np.clip(ids.astype(np.int64), 0, max(y.shape[2] - 1, 0))
    if out.size:
        out[a[..., None], b[..., None], rows[a % len(rows), b % rows.shape[1]]] = x
    return out


def has_keys(call):
    """Ids are clamped to a cell that exists."""
    if call["r"] * call["h"] and not call["blocks"]:
        return f"y of shape {[call[d] for d in ('h', 'blocks', 'd')]} blocks of 32 has no cell that ids could name"
    return None


@op("x[r, h, d], ids[r], y[h, blocks, d, 32] -> y", groups="r h", types={"ids": (I32, I64), "y": (F32, F16)}, check=has_keys,
    cost_bytes=lambda call: 8 * call.tensors["x"].n_elements)
def set_keys(r, h, x, ids, y, d, blocks):
    cell = minimum(maximum(index(ids[r]), 0), blocks * 32 - 1)
    for i in lanes(d):
        y[h, cell // 32, i, cell % 32] = x[r, h, i]


@set_keys.variant("r/LANES h", types={"ids": (I32,)}, when=lambda call: None if call["r"] >= call.lanes else f"only {call['r']} rows")
def set_keys_tile(tile, h, x, ids, y, r, d, blocks):
    """Lanes are rows: neighbouring keys share cache lines, which are written while they are at hand."""
    with span(tile * LANES, r) as row:
        cell = minimum(maximum(ids[row], 0), blocks * 32 - 1)
        for i in range(d):
            y[h, cell // 32, i, cell % 32] = x[row, h, i]


@set_keys.reference
def _(x, ids, y):
    out = y.copy()
    ids = np.clip(ids.astype(np.int64), 0, max(32 * y.shape[1] - 1, 0))
    out[:, ids // 32, :, ids % 32] = x
    return out
