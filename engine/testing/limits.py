"""Comparison with the reference, element by element. See Note [limits] in engine/testing/facts/base.py."""

from __future__ import annotations

import math

import numpy as np

from engine.dtypes import F16, I8, I16, I32, I64, DType
from engine.testing.example import Example
from engine.testing.facts import FACTS, Facts
from engine.testing.values import EPS, QUIET, Array, elements, values

NMSE = 5e-4  # of a product of quantised weights with float activations
_INTEGERS = (I8, I16, I32, I64)


class Disagreement(AssertionError):
    """A result that is not what the reference says, with everything needed to repeat it."""


def tolerance(example: Example) -> Array:
    """The largest difference allowed for each element, in float64. See Note [limits]."""
    facts = FACTS.get(example.op.name, Facts())
    with QUIET(all="ignore"):
        bound = facts.bound(example)
        limit: Array = example.op.c * EPS * math.sqrt(max(bound.length, 1)) * bound.products + bound.floor
    return np.where(np.isnan(limit), 0, limit)


def limits(example: Example) -> tuple[Array, Array]:
    """The least and the largest value allowed for each element, rounded to the result's type as the result was."""
    wide, dtype = tolerance(example), example.result_dtype
    if dtype in _INTEGERS:
        return example.want, example.want
    if dtype.is_block:
        return example.want - wide, example.want + wide
    with QUIET(all="ignore"):
        ends = [np.where(np.isfinite(example.want), example.want + d, example.want) for d in (-wide, wide)]
        low, high = (values(elements(_toward(end, dtype), dtype), dtype) for end in ends)
    return low, high


def _toward(x: Array, dtype: DType) -> Array:
    """float64 -> what is rounded to `dtype` next. Through float32 as a kernel does, where that is what is stored from."""
    return x.astype(np.float32) if dtype is not F16 else x.astype(np.float32).astype(np.float64)


def assert_close(example: Example, got: Array) -> None:
    """Raise Disagreement, with the worst element, unless the stored result `got` is what the reference allows.

    NaN and infinities must be in the same places.
    """
    have = values(got, example.result_dtype)
    want = example.want.reshape(have.shape)
    low, high = (a.reshape(have.shape) for a in limits(example))
    both_nan = np.isnan(have) & np.isnan(want)
    right = both_nan | ((have >= low) & (have <= high))
    if right.all():
        return
    with QUIET(all="ignore"):
        excess = np.where(right, -1.0, np.nan_to_num(np.maximum(low - have, have - low), nan=np.inf, posinf=np.inf))
    at = np.unravel_index(int(np.argmax(excess)), have.shape)
    raise Disagreement(
        f"{example}\n{int((~right).sum())} of {right.size} elements are wrong; the worst is {[int(i) for i in at]}: got {have[at]!r}, want "
        f"{want[at]!r}, allowed {low[at]!r} .. {high[at]!r}\nkey {example.key}, extents {dict(example.sizes)}, seed {example.seed}")


def agrees_in_mean(example: Example, got: Array, limit: float = NMSE) -> bool:
    """NMSE within `limit` of the product with the float activations as they were given."""
    want = example.op.reference_of(list(example.decode(converted=False).values()), example.params).reshape(-1)
    have = values(got, example.result_dtype).reshape(-1)
    return bool(((have - want) ** 2).sum() <= limit * (want**2).sum())


_STEPS = {"f16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 2.0**-133)}  # of neighbouring numbers: relative, and the smallest


def assert_agree(example: Example, one: Array, other: Array, whose: str) -> None:
    """Raise Disagreement unless two stored results of one call differ by no more than the limit, NaN and infinities in the same places.

    In types narrower than float32, results may lie on both sides of where rounding changes: one step more is allowed.
    """
    dtype = example.result_dtype
    have, want = values(one, dtype), values(other, dtype)
    limit = tolerance(example).reshape(have.shape)
    relative, least = _STEPS.get(dtype.name, (0.0, 0.0))
    with QUIET(all="ignore"):
        limit = limit + np.maximum(np.abs(want) * relative, least)
        right = (np.isnan(have) & np.isnan(want)) | (have == want) | (np.abs(have - want) <= limit)
    if not right.all():
        at = np.unravel_index(int(np.argmin(right)), have.shape)
        raise Disagreement(f"{example}\n{int((~right).sum())} of {right.size} elements differ from those of {whose}; the first is "
                           f"{[int(i) for i in at]}: {have[at]!r} and {want[at]!r}, {limit[at]!r} is allowed")


def assert_same_bits(example: Example, one: Array, other: Array, whose: str) -> None:
    """Raise Disagreement unless two stored results are the same bit for bit; a NaN equals any NaN."""
    if bits(one) != bits(other):
        raise Disagreement(f"{example}\nthe result is not bit for bit that of {whose}")


def bits(stored: Array) -> bytes:
    """The bytes of a result. A NaN counts as a NaN: its sign follows the order of an instruction's operands, which the compiler chooses."""
    out = stored.copy()
    for part in [out[name] for name in out.dtype.names] if out.dtype.names else [out]:
        if part.dtype.kind == "f":
            part[np.isnan(part)] = np.nan
    return out.tobytes()
