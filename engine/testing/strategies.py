"""Hypothesis strategies: any legal call of an op."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from engine.dtypes import DTYPES, WEIGHT_BLOCKS, DType
from engine.op import Key, Op, Operand
from engine.testing.data import BLOCK_KINDS, KINDS
from engine.testing.example import Example, Layout
from engine.testing.facts import FACTS, Facts
from engine.testing.facts.base import Draw, Sizes


def _wide_extents(lanes: int) -> st.SearchStrategy[int]:
    """Extents that lanes run over: small ones, primes, and those around multiples of the width."""
    pool = [1, 2, 3, 5, 7, 13, lanes - 1, lanes, lanes + 1, 2 * lanes + 1, 3 * lanes + 2, 2 * lanes, 31, 67]
    return st.sampled_from([n for n in dict.fromkeys(pool) if n > 0])


_FEW = st.sampled_from([1, 2, 3, 4, 5, 6])  # with divisors, which batches are broadcast along
_BLOCKS = st.sampled_from([1, 2, 3])
_ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 67, 257])
_LARGE = st.sampled_from([32, 33, 40, 67])  # of calls that are worth a library


def _sizes(draw: Draw, op: Op, dtypes: Mapping[str, DType], facts: Facts, lanes: int, budget: int, large: bool) -> Sizes:
    """Extents of all dimensions: whole blocks where blocks lie along one, at most `budget` in their product."""
    sizes: Sizes = {}
    unit: dict[str, int] = {}
    last = {o.dims[-1] for o in op.contract.views} | {"m"}
    rows = {o.dims[-2] for o in op.contract.views if len(o.dims) > 1}
    for o in op.contract.views:
        if isinstance(o.dims[-1], str):
            through = op.through[o.name][1].block_size if o.name in op.through and any(t.is_block for t in dtypes.values()) else 1
            unit[o.dims[-1]] = math.lcm(unit.get(o.dims[-1], 1), dtypes[o.name].block_size, through)
    for d in op.contract.dims:
        if d in facts.extents:
            sizes[d] = draw(st.sampled_from([n for n in facts.extents[d] if n]), label=d)
        elif unit.get(d, 1) > 1:
            sizes[d] = unit[d] * draw(_BLOCKS, label=f"{d} in blocks")
        elif large and d in last | rows:
            sizes[d] = draw(_LARGE, label=d)
        else:
            sizes[d] = draw(_wide_extents(lanes) if d in last else _ROWS if d in rows else _FEW, label=d)
    _shrink(sizes, [d for d in sizes if unit.get(d, 1) == 1 and d not in facts.extents], budget)
    if not large and draw(st.integers(0, 14), label="14: an empty extent") == 14:
        sizes[draw(st.sampled_from([d for d in sizes if 0 in facts.extents.get(d, (0,))]), label="empty")] = 0
    facts.relate(draw, sizes)
    return sizes


def _shrink(sizes: Sizes, free: Sequence[str], budget: int) -> None:
    """Halve the largest extents until their product is no more than `budget`."""
    while free and math.prod(max(n, 1) for n in sizes.values()) > budget:
        largest = max(free, key=lambda d: sizes[d])
        if sizes[largest] <= 1:
            return
        sizes[largest] //= 2


def _layout(draw: Draw, shape: Sequence[int], is_block: bool) -> Layout | None:
    """Dense, dense behind an odd offset, rows with gaps, every dimension with gaps (the last one too), or permuted; behind an offset."""
    kind = draw(st.sampled_from(["dense", "rows", "strided", "permuted", "shifted", "dense"]), label="layout")
    n = len(shape)
    if kind == "dense":
        return None
    if kind == "shifted":
        return Layout(tuple(range(n)), (1,) * n, (0,) * n, draw(st.sampled_from([1, 3, 5]), label="offset"))
    gaps = st.sampled_from([1, 2, 3])
    steps = [draw(gaps) if kind == "strided" else 1 for _ in range(n)]
    if is_block:
        steps[-1] = 1
    pads = [draw(st.sampled_from([0, 1, 3, 8])) for _ in range(n)]
    order = draw(st.permutations(range(n - 1 if is_block else n))) if kind == "permuted" else list(range(n))
    if is_block and kind == "permuted":
        order = [*order, n - 1]
    return Layout(tuple(order), tuple(steps), tuple(pads), draw(st.sampled_from([0, 1, 2, 5]), label="offset"))


def _shape(o: Operand, sizes: Mapping[str, int], trim: bool) -> tuple[int, ...]:
    shape = [d if isinstance(d, int) else sizes[d] for d in o.dims]
    while trim and len(shape) > 1 and shape[0] == 1:
        shape.pop(0)
    return tuple(shape)


def _params(draw: Draw, op: Op, facts: Facts, sizes: Sizes, result: DType) -> dict[str, Any]:
    """A value for each parameter; the one that decides the result's type gives the key's."""
    params = dict(op.params)
    for name, values in facts.params.items():
        params[name] = draw(values(sizes) if callable(values) else values, label=name)
    if "dtype" in params:
        params["dtype"] = result.name
    return params


@st.composite
def examples(draw: Draw, op: Op, key: Key, *, lanes: int = 8, budget: int = 20_000, whole: Collection[str] = (),
             kinds: Mapping[str, str] = MappingProxyType({}), large: bool = False) -> Example:
    """Any legal call of `op` with the types of `key`.

    Args:
        lanes: the width that extents are chosen around.
        budget: about the most places a launch may have.
        whole: operands that lie dense (weights in packed memory).
        kinds: operand -> the kind of its values, instead of any.
        large: dense operands of 32 rows and columns or more.
    """
    facts = FACTS.get(op.name, Facts())
    dtypes = {o.name: DTYPES[t] for o, t in zip(op.contract.views, key[1], strict=True)}
    sizes = _sizes(draw, op, dtypes, facts, lanes, budget, large)
    trim = draw(st.booleans(), label="leading ones dropped")
    shapes: dict[str, tuple[int, ...]] = {}
    layouts: dict[str, Layout | None] = {}
    drawn: dict[str, str] = {}
    for o in op.contract.operands:
        if o.optional and dtypes[o.name] is op.types[o.name][0] and draw(st.booleans(), label=f"without {o.name}"):
            continue
        shapes[o.name] = _shape(o, sizes, trim)
        blocks = dtypes[o.name].is_block
        units = (*shapes[o.name][:-1], shapes[o.name][-1] // dtypes[o.name].block_size)
        layouts[o.name] = None if large or o.name in whole else _layout(draw, units, blocks)
        pool = BLOCK_KINDS if dtypes[o.name] in WEIGHT_BLOCKS else KINDS
        drawn[o.name] = kinds.get(o.name) or draw(st.sampled_from(pool), label=f"kind of {o.name}")
    params = _params(draw, op, facts, sizes, dtypes[op.contract.result.name])
    return Example(op, key, sizes, shapes, layouts, drawn, params, draw(st.integers(0, 2**32 - 1), label="seed"))
