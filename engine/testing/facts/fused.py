"""Fused ops: the limits of the ops they stand for. In blocks one step more: a value next to where rounding changes takes either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from engine.dtypes import RADIX
from engine.testing.example import Example
from engine.testing.facts import elementwise, structured
from engine.testing.facts.base import Bound, Draw, Facts, Sizes, cells, room, shorter
from engine.testing.values import TINY, Array


def _step(e: Example) -> Array:
    """Distance of neighbouring values of a block, for each element."""
    blocks = np.abs(e.want).reshape(*e.want.shape[:-1], e.want.shape[-1] // 32, 32)
    top = np.broadcast_to(blocks.max(-1, keepdims=True, initial=0), blocks.shape)
    return top.reshape(e.want.shape) / (RADIX * 127 + 126)


def _bound_of_normed(e: Example) -> Bound:
    """What is below the normal range after the norm is multiplied by the weight."""
    w = e.decoded["w"]
    assert w is not None
    largest = np.max(np.abs(np.nan_to_num(w)), axis=(0, 1, 2), initial=0)
    return Bound(np.abs(e.want), e.sizes["n"], TINY * (1 + largest))


def _bound_of_normed_blocks(e: Example) -> Bound:
    bound, step = _bound_of_normed(e), _step(e)
    return Bound(bound.products + step, bound.length, bound.floor + 1.01 * step)


def _bound_of_normed_sum(e: Example) -> Bound:
    bound, u = _bound_of_normed(e), e.decoded["u"]
    assert u is not None
    return Bound(np.abs(e.want - u) + 2 * np.abs(u), bound.length, bound.floor)


def _bound_of_gate_blocks(e: Example) -> Bound:
    assert e.op.fuses is not None
    gate = next(e.op.fuses.inner).op
    alone = replace(e, given=e.operands, op=gate, key=(gate.name, (*e.key[1][:-1], "f32")))
    bound, step = elementwise.FACTS[gate.name].bound(alone), _step(e)
    return Bound(bound.products + step, bound.length, bound.floor + 1.01 * step)


def _written(draw: Draw, sizes: Sizes) -> None:
    room("blocks", 32)(draw, sizes)
    sizes["half"] = draw(st.sampled_from([sizes["d"] // 2, sizes["d"] // 4]), label="half")


def _bound_of_keys(e: Example) -> Bound:
    """As for ROPE, in the cells that are written."""
    x, ids, y = e.decoded["x"], e.decoded["ids"], e.decoded["y"]
    assert x is not None and ids is not None and y is not None and e.op.fuses is not None
    half = e.sizes["half"]
    one, two = (slice(0, half), slice(half, 2 * half)) if e.params["neox"] else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    out = np.zeros_like(x)
    out[..., one] = out[..., two] = (np.abs(x[..., one]) + np.abs(x[..., two])) * (1 + np.pi)
    products = e.op.fuses.op.reference_of([out, ids, np.zeros_like(y)], {})
    return Bound(products, floor=np.where(products > 0, TINY, 0.0))


_NORM = structured.FACTS["rms_norm"]
_ROPE = structured.FACTS["rope"].values
_REPEATED = shorter(("wa", "a"), ("wb", "b"), ("wc", "c"))


def _norm(bound: Callable[[Example], Bound]) -> Facts:
    """What underflows and is then multiplied by an infinity is NaN in float32 and infinite in float64: no infinities here."""
    return replace(_NORM, relate=_REPEATED, bound=bound, specials="nan")


def _gate(name: str) -> Facts:
    return replace(elementwise.FACTS[name], bound=_bound_of_gate_blocks)


FACTS: dict[str, Facts] = {
    "rms_norm_mul": _norm(_bound_of_normed), "rms_norm_mul_add": _norm(_bound_of_normed_sum),
    "rms_norm_mul_quantize": _norm(_bound_of_normed_blocks), "swiglu_quantize": _gate("swiglu"), "geglu_quantize": _gate("geglu"),
    "rope_set_keys": Facts(_written, extents={"blocks": (1, 2, 3)}, params={"neox": st.sampled_from([0, 1])}, specials="nan",
                           values={"pos": _ROPE["pos"], "freqs": _ROPE["freqs"], "ids": cells("blocks", 32)}, bound=_bound_of_keys),
}
