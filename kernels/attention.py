"""FLASH_ATTN_EXT: attention with an online softmax (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).

K lies in blocks of 32 keys, V row-major. Keys are cut into pieces of 256, whatever the number of threads; a second launch merges the
pieces in order. COLUMNS heads that share a KV head run together. A block of keys that is masked as a whole changes no bit.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32
from engine.lang.words import INF, exp, f32, fma, group_max, group_sum, lane, lanes, maximum, minimum, private, span, static, tanh, where
from engine.op import op

PIECE = 8  # blocks of 32 keys


def shapes(call):
    if call["m"] != 32 * call["blocks"]:
        return f"V has {call['m']} keys, K {call['blocks']} blocks of 32"
    if call["kv"] == 0 or call["h"] % call["kv"]:
        return f"{call['h']} heads do not share {call['kv']} KV heads evenly"
    return None


def columns(call):
    shared = call["h"] // call["kv"]
    return next(c for c in (4, 3, 2, 1) if shared % c == 0)


def tiles(call):
    return -(-call["e"] // call.lanes)


def lanes_fit(call):
    return None if 32 % call.lanes == 0 else f"{call.lanes} lanes do not divide 32 keys"


def merge_pieces(t, h, part, y, e, pieces):
    top = f32(-INF)
    for p in range(pieces):
        top = maximum(top, part[t, h, p, e])
    total = f32(0)
    for p in range(pieces):
        peak = part[t, h, p, e]
        total = total + part[t, h, p, e + 1] * where(peak == -INF, f32(0), exp(peak - top))
    for i in lanes(e):
        out = f32(0)
        for p in range(pieces):
            peak = part[t, h, p, e]
            out = fma(part[t, h, p, i], where(peak == -INF, f32(0), exp(peak - top)), out)
        y[t, h, i] = where(total == 0.0, f32(0), out / total)


@op("q[t, h, d], k[kv, blocks, d, 32], v[kv, m, e], mask?[t, m] -> y[t, h, e]", groups="t h/COLUMNS pieces",
    types={"k": (F16, F32), "v": (F16, F32), "mask": (F16, F32)}, check=shapes, factor=1.0, cap=0.0,
    flop=lambda call: 2 * call["t"] * call["h"] * call["m"] * (call["d"] + call["e"]),
    constants={"COLUMNS": columns, "WIDTH": lambda call: call["d"], "TILES": tiles, "KEY_TILES": lambda call: 32 // call.lanes,
               "STEP": lambda call: next(s for s in (4, 2, 1) if tiles(call) % s == 0), "EXTENT": lambda call: call["e"],
               "CAP": lambda call: call.params["cap"] != 0},
    variant={"sizes": {"pieces": lambda call: -(-call["blocks"] // PIECE), "shared": lambda call: call["h"] // call["kv"]},
             "when": lanes_fit, "then": "merge_pieces: t h",
             "scratch": {"part": lambda call: (call["t"], call["h"], -(-call["blocks"] // PIECE), call["e"] + 2)}})
def flash_attn_ext(t, strip, piece, q, k, v, mask, part, blocks, shared, factor, cap):
    head = strip * COLUMNS
    kv = head // shared
    peak, total, shrink = private(COLUMNS, f32(-INF)), private(COLUMNS, f32(0)), private(COLUMNS, f32(0))
    out = private(COLUMNS * TILES, f32(0))
    for block in range(piece * PIECE, minimum(blocks, piece * PIECE + PIECE)):
        visible = f32(0)
        if MASK:
            with span(0, LANES) as lane_of_tile:
                seen = f32(-INF)
                for j in static(KEY_TILES):
                    seen = maximum(seen, mask[t, block * 32 + j * LANES + lane_of_tile])
                visible = group_max(seen)
        if visible > -INF:
            score, weight = private(COLUMNS * KEY_TILES, f32(0)), private(COLUMNS * KEY_TILES, f32(0))
            with span(0, LANES) as key:
                for i in range(WIDTH):
                    for j in static(KEY_TILES):
                        ki = k[kv, block, i, key + j * LANES]
                        for c in static(COLUMNS):
                            score[c * KEY_TILES + j] = fma(ki, q[t, head + c, i], score[c * KEY_TILES + j])
                for c in static(COLUMNS):
                    high = f32(-INF)
                    for j in static(KEY_TILES):
                        s = score[c * KEY_TILES + j] * factor
                        if CAP:
                            s = cap * tanh(s / cap)
                        if MASK:
                            s = s + mask[t, block * 32 + j * LANES + key]
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
                    for l in range(LANES):
                        ws = tuple(lane(weight[c * KEY_TILES + j], l) for c in static(COLUMNS))
                        for u in static(STEP):
                            with span((chunk * STEP + u) * LANES, EXTENT) as x:
                                vx = v[kv, block * 32 + j * LANES + l, x]
                                for c in static(COLUMNS):
                                    out[c * TILES + chunk * STEP + u] = fma(vx, ws[c], out[c * TILES + chunk * STEP + u])
    for u in static(TILES):
        with span(u * LANES, EXTENT) as x:
            for c in static(COLUMNS):
                part[t, head + c, piece, x] = out[c * TILES + u]
    for c in static(COLUMNS):
        part[t, head + c, piece, EXTENT] = peak[c]
        part[t, head + c, piece, EXTENT + 1] = total[c]


@flash_attn_ext.reference
def _(q, k, v, mask, factor, cap):
    shared = q.shape[1] // k.shape[0]
    keys = np.repeat(k.transpose(0, 1, 3, 2).reshape(k.shape[0], -1, k.shape[2]), shared, 0)
    s = np.einsum("thd,hkd->htk", q, keys) * factor
    if cap:
        s = cap * np.tanh(s / cap)
    if mask is not None:
        s = s + mask
    top = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.where(s == -np.inf, 0, np.exp(s - np.where(np.isneginf(top), 0, top)))
    whole = e.sum(-1, keepdims=True)
    p = np.where(whole == 0, 0, e / np.where(whole == 0, 1, whole))
    return np.einsum("htk,hke->the", p, np.repeat(v, shared, 0))
