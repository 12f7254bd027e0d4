"""A legal call of an op: shapes, how operands lie, contents from a seed, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.dtypes import DTYPES, FLOATS, Q8_X, DType
from engine.errors import ShapeError
from engine.op import Key, Op, padded
from engine.tensor import leaf
from engine.testing.data import generate
from engine.testing.values import QUIET, Array, elements, quantize_activations, values

if TYPE_CHECKING:
    from engine.testing.facts import Facts


@dataclass(frozen=True)
class Layout:
    """How an operand lies in memory, in elements (of blocks: in blocks).

    Attributes:
        order: dimensions from the outermost to the innermost in memory.
        steps: distance of neighbours, in places of the next inner dimension.
        pads: places left free behind each dimension.
        offset: places in front of the first element.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    offset: int

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides of a tensor of `shape`, in places."""
        out, pitch = [0] * len(shape), 1
        for d in reversed(self.order):
            out[d] = pitch * self.steps[d]
            pitch = out[d] * max(shape[d], 1) + self.pads[d]
        return tuple(out)


def _joined(by: str, numbers: Sequence[int]) -> str:
    return by.join(str(n) for n in numbers)


def _layout_text(layout: Layout | None) -> str:
    if layout is None:
        return ""
    return f"@{'/'.join(_joined('.', part) for part in (layout.order, layout.steps, layout.pads))}/{layout.offset}"


def _parsed(text: str) -> tuple[tuple[int, ...], Layout | None, str]:
    """An operand's shape, layout and kind from "5,64@0.1/1.1/0.3/2:mild"."""
    place, _, kind = text.partition(":")
    shape, at, layout = place.partition("@")
    extents = tuple(int(n) for n in shape.split(","))
    if not at:
        return extents, None, kind or "mild"
    *parts, offset = layout.split("/")
    order, steps, pads = (tuple(int(n) for n in part.split(".")) for part in parts)
    return extents, Layout(order, steps, pads, int(offset)), kind or "mild"


def _number(text: str) -> Any:
    """A parameter: a number where it is one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text == "True" if text in ("True", "False") else text


@dataclass(frozen=True, eq=False)
class Example:
    """A legal call of an op: its shape is drawn, its data comes from `seed`.

    Attributes:
        shapes: operand -> extents in elements; operands left out are missing.
        layouts: operand -> how it lies, None for dense.
        kinds: operand -> what its values look like.
        given: operand -> stored elements that replace the generated ones.
    """

    op: Op
    key: Key
    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    layouts: Mapping[str, Layout | None]
    kinds: Mapping[str, str]
    params: Mapping[str, Any]
    seed: int
    given: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, op: Op, key: Key, operands: Mapping[str, Array], layouts: Mapping[str, Layout] = MappingProxyType({}), /,
           **params: Any) -> Example:
        """A call on these stored elements (block records for block types)."""
        dtypes = dict(zip((o.name for o in op.contract.views), (DTYPES[t] for t in key[1]), strict=True))
        shapes = {n: (*a.shape[:-1], a.shape[-1] * dtypes[n].block_size) for n, a in operands.items()}
        sizes = op.match({o.name: leaf(dtypes[o.name], shapes[o.name], o.name) if o.name in shapes else None for o in op.contract.operands})
        return cls(op, key, sizes, shapes, {n: layouts.get(n) for n in shapes}, {}, {**op.params, **params}, 0, dict(operands))

    @property
    def dtypes(self) -> dict[str, DType]:
        """Types by operand, the result's included."""
        return {o.name: DTYPES[t] for o, t in zip(self.op.contract.views, self.key[1], strict=True)}

    @cached_property
    def operands(self) -> dict[str, Array]:
        """Stored elements of each operand that is there, dense, in operand order."""
        facts, out = self._facts, {}
        if self.encodes(facts.encoded):
            facts = replace(facts, specials="")
        for i, o in enumerate(self.op.contract.operands):
            if o.name in self.given:
                out[o.name] = self.given[o.name]
            elif o.name in self.shapes:
                rng = np.random.default_rng([self.seed, i])
                out[o.name] = generate(rng, self, o.name, facts)
        return out

    @cached_property
    def decoded(self) -> dict[str, Array | None]:
        """Operands as the reference takes them; activations quantised where a backend will do so."""
        return self.decode(converted=True)

    def decode(self, converted: bool) -> dict[str, Array | None]:
        """Operands in float64 with the contract's number of dimensions, after or before the conversion some keys ask for."""
        out: dict[str, Array | None] = {}
        for o in self.op.contract.operands:
            if (stored := self.operands.get(o.name)) is None:
                out[o.name] = None
                continue
            dtype = self.dtypes[o.name]
            if converted and self.is_converted(o.name):
                dtype = self.op.through[o.name][1]
                stored = elements(stored, dtype)
            array = values(stored, dtype)
            if self.encodes(o.name) and o.name == self._facts.encoded:
                array = values(elements(array, self.result_dtype), self.result_dtype)
            out[o.name] = array.reshape(padded(array.shape, len(o.dims), 1))
        return out

    @property
    def _facts(self) -> Facts:
        from engine.testing.facts import FACTS, Facts  # families are written in terms of an Example

        return FACTS.get(self.op.name, Facts())

    def encodes(self, operand: str) -> bool:
        """Are this operand's floats stored as blocks?"""
        return operand in self.shapes and self.dtypes[operand] in FLOATS and self.result_dtype.is_block

    def is_converted(self, operand: str) -> bool:
        """Does a backend convert this operand first (MUL_MAT of quantised weights with float activations)?"""
        return operand in self.op.through and self.key not in self.op.keys()

    @cached_property
    def want(self) -> Array:
        """The reference's result in float64."""
        with QUIET(all="ignore"):
            out = np.asarray(self.op.reference_of(list(self.decoded.values()), self.params), np.float64)
        return values(quantize_activations(out), Q8_X) if self.result_dtype is Q8_X else out

    @property
    def result_dtype(self) -> DType:
        return self.dtypes[self.op.contract.result.name]

    def dense(self) -> Example:
        """The same call on contiguous copies."""
        return self.with_data(**self.operands, layouts=dict.fromkeys(self.layouts))

    def with_data(self, layouts: Mapping[str, Layout | None] | None = None, **given: Array) -> Example:
        """The same call on other stored elements."""
        return replace(self, given={**self.given, **given}, layouts=self.layouts if layouts is None else layouts)

    @property
    def text(self) -> str:
        """The call as one line that `parse` reads: "mul_mat[q4_0,f32,f32] w=5,64:codes x=2,64@1.0/1.1/0.3/2:mild seed=7".

        `@order/steps/pads/offset` is a layout, `:kind` what values look like. Calls on data of one's own have no such line.
        """
        if self.given:
            return ""
        types = ",".join(self.key[1])
        operands = [f"{n}={_joined(',', s)}{_layout_text(self.layouts.get(n))}:{self.kinds.get(n, 'mild')}" for n, s in self.shapes.items()]
        params = [f"{n}={v}" for n, v in self.params.items()]
        return " ".join([f"{self.op.name}[{types}]", *operands, *params, f"seed={self.seed}"])

    @classmethod
    def parse(cls, text: str, ops: Mapping[str, Op]) -> Example:
        """The call that `text` writes down. Raises ValueError that says what is wrong."""
        head, _, rest = text.strip().partition(" ")
        name, bracket, types = head.rstrip("]").partition("[")
        if not bracket or name not in ops:
            raise ValueError(f"{head!r}: a call begins with OP[TYPE,TYPE,...], and the op is one of {', '.join(ops)}")
        op, key = ops[name], (name, tuple(types.split(",")))
        words = dict(word.partition("=")[::2] for word in rest.split())
        if len(key[1]) != len(op.contract.views) or not set(key[1]) <= set(DTYPES):
            raise ValueError(f"{head!r}: {len(op.contract.views)} types are expected, for {op.contract.text}")
        operands = {o.name: _parsed(words.pop(o.name)) for o in op.contract.operands if o.name in words}
        seed = int(words.pop("seed", "0"))
        if unknown := set(words) - set(op.params):
            raise ValueError(f"{sorted(unknown)[0]!r} is neither an operand nor a parameter of {name}: {op.contract.text}")
        shapes = {n: shape for n, (shape, _, _) in operands.items()}
        layouts = {n: layout for n, (_, layout, _) in operands.items()}
        kinds = {n: kind for n, (_, _, kind) in operands.items()}
        dtypes = dict(zip((o.name for o in op.contract.views), key[1], strict=True))
        params = {**op.params, **{n: _number(v) for n, v in words.items()}}
        try:
            sizes = op.match({o.name: leaf(DTYPES[dtypes[o.name]], shapes[o.name], o.name) if o.name in shapes else None
                              for o in op.contract.operands})
        except ShapeError as why:
            raise ValueError(str(why)) from None
        if op.infer:
            sizes |= op.infer(sizes, params)
        return cls(op, key, sizes, shapes, layouts, kinds, params, seed)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n} {self.dtypes[n]}{list(s)}{'' if self.layouts.get(n) is None else '~'} {self.kinds.get(n, '')}".rstrip()
                           for n, s in self.shapes.items())
        return f"{self.op.name}({shapes}; {', '.join(f'{k}={v}' for k, v in self.params.items())}) -> {self.result_dtype}, seed {self.seed}"
