"""ROPE: rotary position embedding (Su et al., arXiv:2104.09864), normal (pairs 2i, 2i + 1) and neox (pairs i, i + n / 2), partial.

`freqs[2, half]` holds the turns per position of each pair, made by the host in float64 and split in two float32, with frequency factors
and YaRN's mixture of frequencies in them: position * frequency in one float32 would be off by up to 2e-4 rad at 4,096. `magnitude`
multiplies what is rotated (YaRN, Peng et al., arXiv:2309.00071).

Positions of several axes (M-RoPE: time, height, width) are rows of `pos`; `axes` says which of them turns each pair.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32, I32
from engine.lang.words import cos, f32, fma, lanes, maximum, minimum, rint, sin
from engine.op import op


def fits(call):
    if 2 * call["half"] > call["n"]:
        return f"{2 * call['half']} rotated dimensions of {call['n']}"
    if call["t"] and not call["p"]:
        return "pos has no axis"
    return None


@op("x[a, t, h, n], pos[p, t], freqs[2, half], axes?[half] -> y[a, t, h, n]", groups="a t", rank="x", result="x",
    types={"x": (F32, F16), "pos": (I32,), "axes": (I32,)}, check=fits, inplace="x", neox=0, magnitude=1.0,
    constants={"NEOX": lambda call: call.params["neox"], "SCALED": lambda call: call.params["magnitude"] != 1.0})
def rope(a, t, x, pos, freqs, axes, y, h, n, half, p, magnitude):
    """All heads of a token turn by the same angles. An axis that `pos` does not have is clamped to one it has."""
    one = f32(pos[0, t])
    for i in lanes(half):
        position = f32(pos[minimum(maximum(axes[i], 0), p - 1), t]) if AXES else one
        turns = position * freqs[0, i]
        rest = fma(position, freqs[0, i], -turns) + position * freqs[1, i]
        angle = ((turns - rint(turns)) + rest) * 6.283185307179586
        co = cos(angle) * magnitude if SCALED else cos(angle)
        si = sin(angle) * magnitude if SCALED else sin(angle)
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
def _(x, pos, freqs, axes, neox, magnitude):
    half = freqs.shape[1]
    axis = np.zeros(half, int) if axes is None else np.clip(axes, 0, pos.shape[0] - 1)
    angle = 2 * np.pi * pos[axis].T[:, None] * (freqs[0] + freqs[1])
    one, two = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    out, u, v = x.copy(), x[..., one], x[..., two]
    co, si = magnitude * np.cos(angle), magnitude * np.sin(angle)
    out[..., one], out[..., two] = u * co - v * si, u * si + v * co
    return out
