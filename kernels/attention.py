"""FLASH_ATTN_EXT: attention with an online softmax (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).

K lies in blocks of 32 keys, V row-major, one stream's KV heads behind the other's. Keys are cut into pieces of 256, whatever the number of
threads; a second launch merges the pieces in order. COLUMNS heads that share a KV head run together. A block of keys that is masked as a
whole changes no bit. Sinks (Xiao et al., arXiv:2309.17453) are logits without a value; ALiBi (Press et al., arXiv:2108.12409) is a slope
for each head that multiplies the mask.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import BF16, DTYPES, F16, F32
from engine.lang.words import (
    INF,
    exp,
    f32,
    fma,
    group_max,
    group_sum,
    lane,
    lanes,
    maximum,
    minimum,
    private,
    span,
    static,
    tanh,
    where,
)
from engine.op import op
from kernels.soft_max import alibi_slope, bends, largest_power, slopes_of, wrong_bias

PIECE = 8  # blocks of 32 keys


def shapes(call):
    """K's blocks hold V's keys, the last one perhaps in part; heads share KV heads and masks evenly."""
    s, kv, h = max(call["s"], 1), call["kv"], call["h"]
    if call["blocks"] != -(-call["m"] // 32):
        return f"V has {call['m']} keys, K {call['blocks']} blocks of 32"
    if kv % s:
        return f"{kv} KV heads do not belong to {s} streams evenly"
    if kv == 0 or h % (kv // s):
        return f"{h} heads do not share {kv // s} KV heads evenly"
    for x, m in (("s", "ms"), ("h", "mh")):
        if (extent := call.dims.get(m, 1)) == 0 and call[x] or extent and call[x] % extent:
            return f"a mask with {m} = {extent} cannot be repeated to {call[x]}"
    return wrong_bias(call)


def shared(call):
    """Heads of a KV head."""
    return call["h"] // max(call["kv"] // max(call["s"], 1), 1)


def pieces(call):
    return -(-call["blocks"] // PIECE)


def columns(call):
    return next(c for c in (4, 3, 2, 1) if shared(call) % c == 0)


def tiles(call):
    return -(-call["e"] // call.lanes)


def lanes_fit(call):
    return None if 32 % call.lanes == 0 else f"{call.lanes} lanes do not divide 32 keys"


def merge_pieces(row, h, part, sinks, y, t, e, pieces):
    stream = row // t if STREAMS else 0
    token = row % t if STREAMS else row
    top = sinks[h] if SINKS else f32(-INF)
    for p in range(pieces):
        top = maximum(top, part[row, h, p, e])
    total = f32(0)
    if SINKS:
        total = total + where(sinks[h] == -INF, f32(0), exp(sinks[h] - top))
    for p in range(pieces):
        peak = part[row, h, p, e]
        total = total + part[row, h, p, e + 1] * where(peak == -INF, f32(0), exp(peak - top))
    for i in lanes(e):
        out = f32(0)
        for p in range(pieces):
            peak = part[row, h, p, e]
            out = fma(part[row, h, p, i], where(peak == -INF, f32(0), exp(peak - top)), out)
        y[stream, token, h, i] = where(total == 0.0, f32(0), out / total)


SIZES = {"rows": lambda call: call["s"] * call["t"], "pieces": pieces, "shared": shared, "n2": largest_power,
         "own": lambda call: call["kv"] // max(call["s"], 1), **{m: lambda call, m=m: max(call.dims.get(m, 1), 1) for m in ("ms", "mh")}}


@op("q[s, t, h, d], k[kv, blocks, d, 32], v[kv, m, e], mask?[ms, mh, t, m], sinks?[h] -> y[s, t, h, e]",
    groups="rows h/COLUMNS pieces", rank="q", types={"k": (F16, F32, BF16), "v": (F16, F32, BF16), "mask": (F16, F32)}, check=shapes,
    factor=1.0, cap=0.0, max_bias=0.0,
    flop=lambda call: 2 * call["s"] * call["t"] * call["h"] * call["m"] * (call["d"] + call["e"]),
    constants={"COLUMNS": columns, "WIDTH": lambda call: call["d"], "TILES": tiles, "KEY_TILES": lambda call: 32 // call.lanes,
               "STEP": lambda call: next(s for s in (4, 2, 1) if tiles(call) % s == 0), "EXTENT": lambda call: call["e"],
               "CAP": lambda call: call.params["cap"] != 0, "ALIBI": bends, "STREAMS": lambda call: call["s"] > 1,
               "HEAD_MASKS": lambda call: call.dims.get("mh", 1) > 1, "RAGGED": lambda call: call["m"] % 32 != 0},
    variant={"sizes": SIZES, "when": lanes_fit, "then": "merge_pieces: rows h",
             "scratch": {"part": lambda call: (call["s"] * call["t"], call["h"], pieces(call), call["e"] + 2)}})
def flash_attn_ext(row, strip, piece, q, k, v, mask, part, t, m, blocks, ms, mh, shared, own, n2, factor, cap, max_bias):
    """What K holds beyond V's last key, in its last block, are no keys."""
    head = strip * COLUMNS
    stream = row // t if STREAMS else 0
    token = row % t if STREAMS else row
    kv = stream * own + head // shared if STREAMS else head // shared
    masks = stream % ms if STREAMS else 0
    if ALIBI:
        slopes = tuple(alibi_slope(head + c, n2, max_bias) for c in static(COLUMNS))
    peak, total, shrink = private(COLUMNS, f32(-INF)), private(COLUMNS, f32(0)), private(COLUMNS, f32(0))
    out = private(COLUMNS * TILES, f32(0))
    for block in range(piece * PIECE, minimum(blocks, piece * PIECE + PIECE)):
        visible = f32(0)
        if MASK:
            with span(0, LANES) as lane_of_tile:
                seen = f32(-INF)
                for j in static(KEY_TILES):
                    cell = block * 32 + j * LANES + lane_of_tile
                    at = minimum(cell, m - 1) if RAGGED else cell
                    for c in static(COLUMNS if HEAD_MASKS else 1):
                        seen = maximum(seen, mask[masks, (head + c) % mh if HEAD_MASKS else 0, token, at])
                visible = group_max(seen)
        if visible > -INF:
            score, weight = private(COLUMNS * KEY_TILES, f32(0)), private(COLUMNS * KEY_TILES, f32(0))
            with span(0, LANES) as key:
                for i in range(WIDTH):
                    for j in static(KEY_TILES):
                        ki = k[kv, block, i, key + j * LANES]
                        for c in static(COLUMNS):
                            score[c * KEY_TILES + j] = fma(ki, q[stream, token, head + c, i], score[c * KEY_TILES + j])
                for c in static(COLUMNS):
                    high = f32(-INF)
                    for j in static(KEY_TILES):
                        place = block * 32 + j * LANES + key
                        within = minimum(place, m - 1) if RAGGED else place
                        s = score[c * KEY_TILES + j] * factor
                        if CAP:
                            s = cap * tanh(s / cap)
                        if MASK and ALIBI:
                            s = fma(slopes[c], mask[masks, (head + c) % mh if HEAD_MASKS else 0, token, within], s)
                        if MASK and not ALIBI:
                            s = s + mask[masks, (head + c) % mh if HEAD_MASKS else 0, token, within]
                        if RAGGED:
                            s = where(place < m, s, -INF)
                        score[c * KEY_TILES + j] = s
                        high = maximum(high, s)
                    best = maximum(peak[c], group_max(high))
                    shrink[c] = where(peak[c] == -INF, f32(0), exp(peak[c] - best))
                    whole = f32(0)
                    for j in static(KEY_TILES):
                        s = score[c * KEY_TILES + j]
                        e = where(s == -INF, f32(0), exp(s - best))
                        weight[c * KEY_TILES + j] = e
                        whole = whole + e
                    total[c] = total[c] * shrink[c] + group_sum(whole)
                    peak[c] = best
            for chunk in static(TILES // STEP):
                for u in static(STEP):
                    with span((chunk * STEP + u) * LANES, EXTENT) as x:
                        for c in static(COLUMNS):
                            out[c * TILES + chunk * STEP + u] = out[c * TILES + chunk * STEP + u] * shrink[c]
                for j in static(KEY_TILES):
                    n_keys = minimum(LANES, m - block * 32 - j * LANES) if RAGGED else LANES
                    for l in range(n_keys):
                        ws = tuple(lane(weight[c * KEY_TILES + j], l) for c in static(COLUMNS))
                        for u in static(STEP):
                            with span((chunk * STEP + u) * LANES, EXTENT) as x:
                                vx = v[kv, block * 32 + j * LANES + l, x]
                                for c in static(COLUMNS):
                                    out[c * TILES + chunk * STEP + u] = fma(vx, ws[c], out[c * TILES + chunk * STEP + u])
    for u in static(TILES):
        with span(u * LANES, EXTENT) as x:
            for c in static(COLUMNS):
                part[row, head + c, piece, x] = out[c * TILES + u]
    for c in static(COLUMNS):
        part[row, head + c, piece, EXTENT] = peak[c]
        part[row, head + c, piece, EXTENT + 1] = total[c]


@flash_attn_ext.reference
def _(q, k, v, mask, sinks, factor, cap, max_bias):
    (s, _, h, d), (kv, m, e) = q.shape, v.shape
    keys, values = (np.repeat(x.reshape(s, kv // max(s, 1), m, n), h * s // kv, 1)
                    for x, n in ((k.transpose(0, 1, 3, 2).reshape(kv, k.shape[1] * 32, d)[:, :m], d), (v, e)))
    scores = np.einsum("sthd,shkd->shtk", q, keys) * factor
    if cap:
        scores = cap * np.tanh(scores / cap)
    if mask is not None:
        scores = scores + slopes_of(h, max_bias)[:, None, None] * np.tile(mask, (s // max(len(mask), 1), h // max(mask.shape[1], 1), 1, 1))
    none = np.full((1, h, 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), none)
    top = np.where(np.isneginf(top), 0, top)
    p = np.exp(scores - top)
    whole = p.sum(-1, keepdims=True) + np.exp(none - top)
    return np.einsum("shtk,shke->sthe", p / np.where(whole == 0, 1, whole), values)


@op("k[t, kv, d] -> y[kv, blocks, d, 32]", groups="kv blocks", types={"k": (F32, F16, BF16), "y": (F16, F32, BF16)}, dtype="f16",
    result=lambda params: DTYPES[params["dtype"]], infer=lambda dims, params: {"blocks": -(-dims["t"] // 32)},
    variant={"when": lanes_fit})
def pack_keys(kv, block, k, y, t, d):
    """PACK_KEYS: keys as FLASH_ATTN_EXT reads them, where no cache holds them; zeros beyond the last."""
    for tile in static(32 // LANES):
        for i in range(d):
            with span(0, LANES) as key:
                place = key + (block * 32 + tile * LANES)
                x = k[minimum(place, t - 1), kv, i]
                y[kv, block, i, key + tile * LANES] = where(place < t, x, f32(0))


@pack_keys.reference
def _(k, dtype):
    t, kv, d = k.shape
    blocks = -(-t // 32)
    return np.pad(k, ((0, 32 * blocks - t), (0, 0), (0, 0))).reshape(blocks, 32, kv, d).transpose(2, 0, 3, 1)
