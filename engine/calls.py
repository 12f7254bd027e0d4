"""A legal call of any row of a kernel table: what a kernel is compiled for where no graph asks for it."""

from __future__ import annotations

import random
from collections.abc import Mapping

from engine.backend import KernelRow
from engine.dtypes import DTYPES
from engine.errors import LanewiseError
from engine.op import Call, Key, Op, Step, Variant
from engine.tensor import Tensor, leaf

EXTENTS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
LONG = (512,)  # where many tries have shown that those do not suffice
TRIES, SHORT_TRIES = 4000, 1000


def a_call(op: Op, key: Key, variant: Variant, lanes: int) -> Call | None:
    """A call of small extents that the variant takes, or None after many tries. The same at each run."""
    rng = random.Random(f"{key} {variant.name}")
    row = KernelRow(op, variant)
    types = dict(zip((o.name for o in op.contract.views), key[1], strict=True))
    layouts = {n: f"lanes{lanes}" if layout == "lanes" else layout for n, layout in variant.layouts.items()}
    for n in range(TRIES):
        try:
            node = _node(op, types, rng, n)
            call = Call.of(Step.of(node), layouts, lanes)
            if call.types == key[1] and row.refusal(call) is None and all(e > 0 for e in call.dims.values()):
                return call
        except (LanewiseError, ZeroDivisionError, KeyError):
            continue
    return None


def _node(op: Op, types: Mapping[str, str], rng: random.Random, attempt: int) -> Tensor:
    """The op on leaves; the first attempts give equal extents, later ones any."""
    extents: dict[str, int] = {}
    pool = EXTENTS[: 2 + attempt % len(EXTENTS)] + (LONG if attempt >= SHORT_TRIES else ())
    srcs: list[Tensor | None] = []
    for o in op.contract.operands:
        dtype, shape = DTYPES[types[o.name]], []
        for at, d in enumerate(o.dims):
            block = dtype.block_size if at == len(o.dims) - 1 else 1
            if isinstance(d, int):
                shape.append(d)
                continue
            if extents.get(d, 0) % block or d not in extents:
                extents[d] = block * rng.choice(pool)
            shape.append(extents[d])
        srcs.append(leaf(dtype, shape, o.name))
    params = {"dtype": types[op.contract.result.name]} if "dtype" in op.params else {}
    return op(*srcs, **params)
