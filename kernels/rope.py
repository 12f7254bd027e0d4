"""ROPE: rotary position embedding (Su et al., arXiv:2104.09864), normal (pairs 2i, 2i + 1) and neox (pairs i, i + n / 2), partial.

`freqs[2, half]` holds the turns per position of each pair, made by the host in float64 and split in two float32, with frequency factors
divided in: position * frequency in one float32 would be off by up to 2e-4 rad at 4,096.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import I32
from engine.lang.words import cos, f32, fma, lanes, rint, sin
from engine.op import op


def fits(call):
    return None if 2 * call["half"] <= call["n"] else f"{2 * call['half']} rotated dimensions of {call['n']}"


@op("x[a, t, h, n], pos[t], freqs[2, half] -> y[a, t, h, n]", groups="a t", types={"pos": (I32,)}, check=fits, inplace="x",
    constants={"NEOX": lambda call: call.params["neox"]}, neox=0)
def rope(a, t, x, pos, freqs, y, h, n, half):
    """All heads of a token turn by the same angles."""
    p = f32(pos[t])
    for i in lanes(half):
        turns = p * freqs[0, i]
        rest = fma(p, freqs[0, i], -turns) + p * freqs[1, i]
        angle = ((turns - rint(turns)) + rest) * 6.283185307179586
        co, si = cos(angle), sin(angle)
        for head in range(h):
            if NEOX:
                u, v = x[a, t, head, i], x[a, t, head, i + half]
                y[a, t, head, i] = u * co - v * si
                y[a, t, head, i + half] = u * si + v * co
            else:
                u, v = x[a, t, head, 2 * i], x[a, t, head, 2 * i + 1]
                y[a, t, head, 2 * i] = u * co - v * si
                y[a, t, head, 2 * i + 1] = u * si + v * co
    for i in lanes(n - 2 * half):
        for head in range(h):
            y[a, t, head, i + 2 * half] = x[a, t, head, i + 2 * half]


@rope.reference
def _(x, pos, freqs, neox):
    half = freqs.shape[1]
    angle = 2 * np.pi * pos[:, None, None] * (freqs[0] + freqs[1])
    one, two = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    out, u, v = x.copy(), x[..., one], x[..., two]
    out[..., one], out[..., two] = u * np.cos(angle) - v * np.sin(angle), u * np.sin(angle) + v * np.cos(angle)
    return out
