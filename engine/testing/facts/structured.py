"""Ops over whole rows, heads and positions: norms, soft_max, rope, attention, products of experts, state spaces."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from engine.dtypes import RADIX
from engine.testing.example import Example
from engine.testing.facts.base import Bound, Draw, Facts, Sizes, bound_of_copies, divisor, exact, mask_values, shorter, sometimes_long
from engine.testing.values import EPS, TINY, Array, magnitudes


def _bound_of_rms_norm(e: Example) -> Bound:
    return Bound(np.abs(e.want), e.sizes["n"])


def _slopes(e: Example, n_head: int) -> tuple[Array, Array]:
    """ALiBi slopes as [head, 1, 1], and what an error of a slope's exponent makes of them: 1 + the exponent."""
    h, n2 = np.arange(n_head), 2 ** int(math.log2(max(n_head, 1)))
    first, rest = (h + 1) / n2, (2 * (h - n2) + 1) / (2 * n2)
    exponent = (e.params["max_bias"] * np.where(h < n2, first, rest))[:, None, None]
    return 2.0**-exponent, 1 + exponent


def _masked(e: Example, s: Array, size: Array) -> tuple[Array, Array]:
    """Scores [batch, head, row, key] and the size of their terms, with the mask."""
    mask = e.decoded["mask"]
    if mask is None:
        return s, size
    slope, condition = _slopes(e, s.shape[1])
    tiled = np.tile(mask, [*(n // m if m else 1 for n, m in zip(s.shape[:2], mask.shape[:2], strict=True)), 1, 1])
    return s + slope * tiled, size + slope * condition * np.abs(np.where(np.isinf(tiled), 0, tiled))


def _bound_of_soft_max(e: Example) -> Bound:
    """An error of the exponent, relative to its terms, is one of the result: for a row's element and, on average, for its sum."""
    x = e.decoded["x"]
    assert x is not None
    v, size = _masked(e, x * e.params["factor"], np.abs(x * e.params["factor"]))
    return Bound(_softmax_products(e, v, size, e.want), e.sizes["n"])


def _deltas(e: Example, v: Array, size: Array, p: Array) -> Array:
    """First-order errors of the weights p: those of their own exponents and, averaged, of all, a sink's among them."""
    sinks = e.decoded["sinks"]
    none = np.full((1, v.shape[1], 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
    top = np.maximum(np.max(v, axis=-1, keepdims=True, initial=-np.inf), none)
    top = np.where(np.isneginf(top), 0, top)
    delta = np.where(np.isneginf(v), 0, size + np.abs(v - top))
    of_sink = np.where(np.isneginf(none), 0, np.abs(none) + np.abs(none - top)) * np.maximum(1 - p.sum(-1, keepdims=True), 0)
    return delta + np.sum(p * delta, axis=-1, keepdims=True) + of_sink


def _softmax_products(e: Example, v: Array, size: Array, p: Array) -> Array:
    delta = _deltas(e, v, size, p)
    return np.where(e.op.c * EPS * delta > 0.5, 1 / EPS, p * (1 + delta))


def _positions(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    return rng.integers(0, rng.choice([2, 4096, 1 << 20]), shape)


def _frequencies(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Turns per position, as a float32 and what is missing from it."""
    turns = rng.choice([1e4, 5e5]) ** (-np.arange(shape[-1]) / max(shape[-1], 1)) / (2 * np.pi)
    high = turns.astype(np.float32).astype(np.float64)
    return np.stack([high, turns - high])


def _split(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Axes of positions, some of them outside `pos`: those are clamped."""
    return rng.integers(-1, e.sizes["p"] + 1, shape)


def _rotated(draw: Draw, sizes: Sizes) -> None:
    half = sizes["n"] // 2
    sizes["half"] = draw(st.sampled_from([half, half // 2, min(half, 1)]), label="half")


def _bound_of_rope(e: Example) -> Bound:
    """|u| + |v| of each pair, times 1 + the angle within a turn: an angle is rounded thrice, sine and cosine err by 2e-7."""
    x, freqs = e.decoded["x"], e.decoded["freqs"]
    assert x is not None and freqs is not None
    half = freqs.shape[1]
    one, two = (slice(0, half), slice(half, 2 * half)) if e.params["neox"] else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    out = np.zeros_like(x)
    out[..., one] = out[..., two] = (np.abs(x[..., one]) + np.abs(x[..., two])) * (1 + np.pi) * abs(e.params["magnitude"])
    return Bound(out, floor=np.where(out > 0, TINY, 0.0))


# Head dimensions are compiled in: few of them, of every shape a tile can have.
_HEADS = (1, 5, 8, 16, 33, 64)


def _shared_heads(draw: Draw, sizes: Sizes) -> None:
    own = sizes["kv"]
    sizes["m"] = max(32 * sizes["blocks"] - draw(st.sampled_from([0, 0, 1, 31]), label="keys that are not there"), 0)
    sizes["h"] = own * draw(st.sampled_from([1, 2, 3, 4, 5]), label="heads of a KV head")
    sizes["kv"] = own * sizes["s"]
    sizes["e"] = sizes["d"] if draw(st.booleans(), label="e = d") else sizes["e"]
    sizes["ms"], sizes["mh"] = (divisor(draw, sizes[d], f"masks of {d}") for d in "sh")


def _packed(draw: Draw, sizes: Sizes) -> None:
    sizes["blocks"] = -(-sizes["t"] // 32)


def _bound_of_attention(e: Example) -> Bound:
    """First order: an error of a score weighs its own value of V, and, averaged, all of them. Beyond it only |V| itself bounds."""
    q, k, v = (e.decoded[n] for n in ("q", "k", "v"))
    assert q is not None and k is not None and v is not None
    (n, _, h, d), (kv, m, _) = q.shape, v.shape
    own = kv // n
    keys = k.transpose(0, 1, 3, 2).reshape(kv, k.shape[1] * 32, d)[:, :m]
    at = np.arange(n)[:, None] * own + np.arange(h) // (h // own)  # the KV head of each head
    keys, cells = keys[at], np.abs(v[at])
    s = np.einsum("sthd,shkd->shtk", q, keys) * e.params["factor"]
    size = math.sqrt(max(d, 1)) * np.einsum("sthd,shkd->shtk", np.abs(q), np.abs(keys)) * abs(e.params["factor"])
    if cap := e.params["cap"]:
        s, size = cap * np.tanh(s / cap), size + abs(cap)
    s, size = _masked(e, s, size)
    sinks = e.decoded["sinks"]
    none = np.full((1, h, 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), none)
    top = np.where(np.isneginf(top), 0, top)
    weight, sink = np.exp(s - top), np.exp(none - top)
    whole = weight.sum(-1, keepdims=True) + sink
    p = weight / np.where(whole == 0, 1, whole)
    delta = _deltas(e, s, size, p)
    products = np.einsum("shtk,shke->sthe", p * (1 + delta), cells)
    lost = (e.op.c * EPS * delta.max(-1, initial=0) > 0.5).transpose(0, 2, 1)[..., None]
    most = 2 * np.max(cells, axis=2, initial=0)[:, None]
    return Bound(np.where(lost, most / EPS, products), max(k.shape[1] * 32, 1))


def _experts(draw: Draw, sizes: Sizes) -> None:
    sizes["xu"] = draw(st.sampled_from([1, sizes["u"]]), label="rows of x for each token")
    sizes["e"] = max(sizes["e"], 1)
    sometimes_long(draw, sizes)


def _expert_ids(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Experts, some of them twice, some outside: those are clamped."""
    n = e.sizes["e"]
    return np.where(rng.random(shape) < 0.1, rng.choice([-1, n, -(2**31), 2**31 - 1], shape), rng.integers(0, n, shape))


def _bound_of_mul_mat_id(e: Example) -> Bound:
    """As for MUL_MAT: only scales, offsets and the sum are rounded."""
    w, x, ids = (e.decoded[n] for n in ("w", "x", "ids"))
    assert w is not None and x is not None
    size, k = magnitudes(e.operands["w"], e.dtypes["w"]).reshape(w.shape), e.sizes["k"]
    lost = 128 * 127 * RADIX if e.dtypes["w"].is_block else 1
    return Bound(e.op.reference_of([size, np.abs(x), ids], e.params), k, TINY + k * lost * 2.0**-149)


def _windows(draw: Draw, sizes: Sizes) -> None:
    sizes["w"] = max(sizes["w"], 1)
    sizes["n"] = max(sizes["n"], sizes["w"] - 1)
    sizes["t"] = sizes["n"] - sizes["w"] + 1


def _bound_of_ssm_conv(e: Example) -> Bound:
    x, c = e.decoded["x"], e.decoded["c"]
    assert x is not None and c is not None
    return Bound(e.op.reference_of([np.abs(x), np.abs(c)], e.params), e.sizes["w"], TINY)


def _scanned(draw: Draw, sizes: Sizes) -> None:
    sizes["h"] = sizes["g"] * draw(st.sampled_from([1, 2, 3]), label="heads of a group")
    sizes["an"] = draw(st.sampled_from([1, sizes["n"]]), label="numbers of A a head")
    sizes["r"] = max(sizes["r"], 1)
    sizes["o"] = sizes["s"] * sizes["h"] * sizes["p"] * (sizes["t"] + sizes["n"])


def _decays(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    return -rng.uniform(0.01, 4, shape)


def _steps(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """On both sides of where softplus is the identity."""
    return rng.choice([-30.0, -2.0, 1.0, 20.0], shape) + rng.standard_normal(shape)


def _rows_of_states(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    return rng.integers(-1, e.sizes["r"] + 1, shape)


def _bound_of_ssm_scan(e: Example) -> Bound:
    """The recurrence on magnitudes and the errors it carries: exp(step a) errs by its argument, a step by softplus' two functions."""
    state, x, dt, a, b, c, ids = (e.decoded[n] for n in ("state", "x", "dt", "a", "b", "c", "ids"))
    assert state is not None and x is not None and dt is not None and a is not None and b is not None and c is not None and ids is not None
    shared = x.shape[2] // max(b.shape[2], 1)
    size = np.abs(state[np.clip(ids, 0, len(state) - 1)])
    error, products, states = np.zeros_like(size), np.zeros_like(x), [(size, np.zeros_like(size))]
    for k in range(x.shape[1]):
        step = np.logaddexp(0, dt[:, k])[..., None]
        argument = np.abs(step * a)[:, :, None]
        kept = np.exp(-argument)
        put = np.abs(np.repeat(b[:, k], shared, 1)[:, :, None] * (step * x[:, k])[..., None])
        error = kept * error + 3 * (1 + argument) * kept * size + 4 * put + TINY / EPS
        size = kept * size + put
        products[:, k] = np.einsum("shpn,shn->shp", size + error, np.abs(np.repeat(c[:, k], shared, 1)))
        states.append((size, error))
    last = [(s + r).reshape(-1) for s, r in states[: -e.params["snapshots"] - 1 : -1]]
    return Bound(np.concatenate([products.reshape(-1), *last]), max(x.shape[3], e.sizes["n"], 1))


FACTS: dict[str, Facts] = {
    "rms_norm": Facts(params={"eps": st.sampled_from([1e-5, 1e-6])}, decades={"x": (-30, 16)}, bound=_bound_of_rms_norm),
    "soft_max": Facts(shorter(("ma", "a"), ("mh", "h")), params={"factor": exact(1, 0.125, 0, -2), "max_bias": exact(0, 0, 8)},
                      values={"mask": mask_values}, decades={"sinks": (-6, 2)}, bound=_bound_of_soft_max),
    "rope": Facts(_rotated, params={"neox": st.sampled_from([0, 1]), "magnitude": exact(1, 1, 1.25)}, extents={"p": (1, 2, 4)},
                  values={"pos": _positions, "freqs": _frequencies, "axes": _split}, specials="nan", bound=_bound_of_rope),
    "flash_attn_ext": Facts(
        _shared_heads, extents={"d": _HEADS, "e": _HEADS, "blocks": (0, 1, 2, 3, 9), "kv": (1, 2, 3), "s": (1, 1, 2)},
        params={"factor": exact(1, 0.125, -0.5), "cap": exact(0, 0, 5), "max_bias": exact(0, 0, 8)}, values={"mask": mask_values},
        specials="", decades={"q": (-6, 2), "k": (-4, 2), "v": (-4, 4), "sinks": (-6, 2)}, bound=_bound_of_attention),
    "pack_keys": Facts(_packed, bound=bound_of_copies),
    "mul_mat_id": Facts(_experts, decades={"w": (-15, 15), "x": (-15, 15)}, values={"ids": _expert_ids}, bound=_bound_of_mul_mat_id),
    "ssm_conv": Facts(_windows, extents={"w": (1, 2, 4, 5)}, decades={"x": (-15, 15), "c": (-15, 15)}, specials="nan",
                      bound=_bound_of_ssm_conv),
    "ssm_scan": Facts(_scanned, extents={"g": (1, 2), "n": (1, 3, 8, 16, 17, 33), "s": (1, 2, 0), "t": (1, 2, 5, 0)},
                      values={"a": _decays, "dt": _steps, "ids": _rows_of_states}, specials="",
                      decades={n: (-6, 4) for n in ("state", "x", "b", "c")}, bound=_bound_of_ssm_scan),
}
