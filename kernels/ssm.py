"""SSM_CONV and SSM_SCAN: the two ops of Mamba (Gu and Dao, arXiv:2312.00752) and Mamba-2 (Dao and Gu, arXiv:2405.21060) with a state."""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import I32
from engine.lang.words import exp, f32, fma, group_sum, index, lanes, log1p, maximum, minimum, where
from engine.op import op


def holds_a_window(call):
    return None if call["w"] and call["n"] + 1 >= call["w"] else f"rows of {call['n']} inputs for a convolution of {call['w']}"


@op("x[s, i, n], c[i, w] -> y[s, t, i]", groups="s t", check=holds_a_window,
    infer=lambda dims, params: {"t": max(dims["n"] - dims["w"] + 1, 0)},
    flop=lambda call: 2 * call["s"] * call["t"] * call["i"] * call["w"])
def ssm_conv(s, t, x, c, y, i, w):
    """SSM_CONV: each channel i along the tokens, its own w weights; x begins with the w - 1 inputs before the first token."""
    for channel in lanes(i):
        total = f32(0)
        for j in range(w):
            total = fma(x[s, channel, t + j], c[channel, j], total)
        y[s, t, channel] = total


@ssm_conv.reference
def _(x, c):
    windows = np.lib.stride_tricks.sliding_window_view(x, c.shape[1], -1) if x.shape[2] >= c.shape[1] else np.zeros((*x.shape[:2], 0, 0))
    return np.einsum("sitj,ij->sti", windows, c[:, : windows.shape[-1]])


def state_fits(call):
    if call["an"] not in (1, call["n"]):
        return f"A has {call['an']} numbers a head: 1 or {call['n']}, one for each of the state's, are expected"
    if call["g"] == 0 and call["h"] or call["g"] and call["h"] % call["g"]:
        return f"{call['h']} heads do not share {call['g']} groups evenly"
    if call["s"] and not call["r"]:
        return "no state that ids could name"
    if not 1 <= call.params["snapshots"] <= call["t"] + 1:
        return f"{call.params['snapshots']} snapshots of {call['t']} tokens: 1 to {call['t'] + 1} are expected"
    return None


def flat(dims, params):
    """Elements of the result: y, then the snapshots."""
    return {"o": dims["s"] * dims["h"] * dims["p"] * (dims["t"] + params["snapshots"] * dims["n"])}


@op("state[r, h, p, n], x[s, t, h, p], dt[s, t, h], a[h, an], b[s, t, g, n], c[s, t, g, n], ids[s] -> y[o]", groups="s h p",
    types={"ids": (I32,)}, check=state_fits, infer=flat, snapshots=1, constants={"OWN": lambda call: call["an"] > 1},
    flop=lambda call: 5 * call["s"] * call["t"] * call["h"] * call["p"] * call["n"],
    variant={"sizes": {"heads": lambda call: call["h"], "width": lambda call: call["p"], "sequences": lambda call: call["s"],
                       "shared": lambda call: call["h"] // max(call["g"], 1)}})
def ssm_scan(s, h, p, state, x, dt, a, b, c, ids, y, t, n, r, heads, width, sequences, shared, snapshots):
    """SSM_SCAN: state = exp(dt a) state + dt x b and y = state . c, token by token, dt through softplus.

    Lanes are the state's n numbers. `a` has one number a head (Mamba-2) or n of them (Mamba). The result is flat: y[s, t, h, p], then
    `snapshots` states [s, h, p, n]: the last one, the one a token before it, and so on. The state before the first token is row ids[s];
    an id outside is clamped. A token's state is written to its snapshot, the oldest one kept until there are newer ones.
    """
    row = minimum(maximum(index(ids[s]), 0), r - 1)
    place = sequences * t * heads * width + ((s * heads + h) * width + p) * n
    apart = sequences * heads * width * n
    for i in lanes(n):
        y[place + minimum(t, snapshots - 1) * apart + i] = state[row, h, p, i]
    for token in range(t):
        d = dt[s, token, h]
        step = where(d > 20.0, d, log1p(exp(d)))
        size = x[s, token, h, p] * step
        old = place + minimum(t - token, snapshots - 1) * apart
        new = place + minimum(t - token - 1, snapshots - 1) * apart
        total = f32(0)
        for i in lanes(n):
            kept = exp(step * (a[h, i] if OWN else a[h, 0]))
            now = fma(y[old + i], kept, size * b[s, token, h // shared, i])
            y[new + i] = now
            total = fma(now, c[s, token, h // shared, i], total)
        y[((s * t + token) * heads + h) * width + p] = group_sum(total)


@ssm_scan.reference
def _(state, x, dt, a, b, c, ids, snapshots):
    t, shared = x.shape[1], x.shape[2] // max(b.shape[2], 1)
    now = state[np.clip(ids, 0, max(len(state) - 1, 0)).astype(np.int64)]
    step = np.where(dt > 20, dt, np.log1p(np.exp(np.minimum(dt, 20))))
    y, states = np.zeros(x.shape), [now]
    for k in range(t):
        kept = np.exp(step[:, k, :, None] * a)[:, :, None]
        put = np.repeat(b[:, k], shared, 1)[:, :, None] * (step[:, k, :, None] * x[:, k])[..., None]
        now = now * kept + put
        y[:, k] = np.einsum("shpn,shn->shp", now, np.repeat(c[:, k], shared, 1))
        states.append(now)
    return np.concatenate([y.reshape(-1), *(kept.reshape(-1) for kept in states[: -snapshots - 1 : -1])])
