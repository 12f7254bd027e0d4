"""Rewritings of a split that several backends share: graph nodes in, steps out. Conversions are inserted, then steps are fused.

Note [Fusion]: a step whose ops are those of a fused op's pattern takes the place of the last of them, under these conditions. What is no
longer written (the results of the inner ops) has one reader, no view on it that is read, and no reader outside the split. What the
inner ops read is the same at their new place: nothing between writes into it, and the fused op itself does not. The table has a kernel
for the fused call. No node has a variant the user decides. So the unfused graph is the meaning, and a graph without fused ops is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from engine.backend import KernelTable, ThroughRow
from engine.errors import ShapeError
from engine.op import Op, Step
from engine.pattern import Pattern
from engine.settings import settings
from engine.tensor import Tensor


def rewrite(table: KernelTable, nodes: Sequence[Tensor], needed: Collection[Tensor] = (), *, fused: bool | None = None) -> list[Step]:
    """Nodes (views left out) as steps, with what the table's kernels want: operands converted, ops fused.

    Args:
        needed: nodes that something outside reads: they are still written.
        fused: whether to fuse ops; as the settings say by default.
    """
    steps = insert_conversions(table, nodes)
    return fuse(table, steps, needed) if (settings().fuse if fused is None else fused) else steps


# -- conversions ------------------------------------------------------------------------------------------------


def insert_conversions(table: KernelTable, nodes: Sequence[Tensor]) -> list[Step]:
    """Nodes (views left out) as steps; where a node runs through a conversion of one operand, the converting step goes before it.

    An operand that several nodes convert in the same way is converted once. A converting step replaces no node: its `out` is a new
    tensor, which needs memory like any other.
    """
    steps: list[Step] = []
    converted: dict[tuple[Tensor, Op], Tensor] = {}
    for node in nodes:
        if node.is_view_op:
            continue
        step = Step.of(node)
        row, _ = table.lookup(table.call(node))
        if isinstance(row, ThroughRow):
            step = _through(row, step, converted, steps)
        steps.append(step)
    return steps


def _through(row: ThroughRow, step: Step, converted: dict[tuple[Tensor, Op], Tensor], steps: list[Step]) -> Step:
    """The step on a converted operand; the conversion is appended to `steps` where it is new."""
    at = next(i for i, o in enumerate(step.op.contract.operands) if o.name == row.operand)
    src = step.srcs[at]
    assert src is not None, f"{step.op.name}: operand {row.operand} is missing"
    if (src, row.convert) not in converted:
        made = row.convert(src, name=f"{src.name} ({row.dtype})")
        assert made.dtype == row.dtype, f"{row.convert.name} makes {made.dtype}, {row.dtype} is expected"
        converted[src, row.convert] = made
        steps.append(replace(Step.of(made), replaces=()))
    return replace(step, srcs=(*step.srcs[:at], converted[src, row.convert], *step.srcs[at + 1 :]))


# -- fusion -----------------------------------------------------------------------------------------------------


def fuse(table: KernelTable, steps: Sequence[Step], needed: Collection[Tensor] = ()) -> list[Step]:
    """Fused steps in place of the steps they stand for, the largest patterns first: Note [Fusion]."""
    kept = list(steps)
    for op in table.fused:
        kept = _Fusion(table, op, kept, needed).run()
    return kept


@dataclass
class _Match:
    """What a pattern's names stand for, and the positions of the steps it replaces."""

    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)


class _Fusion:
    """One fused op over the steps of a split."""

    def __init__(self, table: KernelTable, op: Op, steps: list[Step], needed: Collection[Tensor]) -> None:
        self.table, self.op, self.steps, self.needed = table, op, steps, needed
        self.written = {s.out: i for i, s in enumerate(steps) if s.out.view_of is None}
        self.readers = Counter(t for s in steps for src in s.srcs for t in _seen_through(src))

    def run(self) -> list[Step]:
        assert self.op.fuses is not None
        made: dict[int, Step] = {}
        gone: set[int] = set()
        for i, step in enumerate(self.steps):
            if step.op is self.op.fuses.op and (step_made := self._fused(i)) is not None:
                made[i], inner = step_made
                gone |= inner
        return [made.get(i, step) for i, step in enumerate(self.steps) if i not in gone]

    def _fused(self, i: int) -> tuple[Step, set[int]] | None:
        """The step that stands for the one at `i` and those it swallows, or None."""
        match, pattern, last = _Match(), self.op.fuses, self.steps[i]
        assert pattern is not None
        if not self._binds(pattern, i, match) or self._disturbed(match) or any(self.steps[k].out in self.table.forced for k in match.at):
            return None
        replaced = tuple(node for k in sorted(match.at) for node in self.steps[k].replaces)
        srcs = tuple(match.tensors.get(o.name) for o in self.op.contract.operands)
        step = Step(self.op, srcs, last.out, {**self.op.params, **match.params}, replaced)
        return (step, set(match.at) - {i}) if self._runs(step) else None

    def _binds(self, pattern: Pattern, i: int, match: _Match) -> bool:
        """Whether the step at `i` is what the pattern says; its names are noted in `match`."""
        step = self.steps[i]
        if step.op is not pattern.op:
            return False
        match.at.append(i)
        for own, value in step.params.items():
            name = pattern.params.get(own)
            want = pattern.op.params[own] if name is None else match.params.setdefault(name, value)
            if value != want:
                return False
        return all(self._operand(part, src, match) for part, src in zip_longest(pattern.operands, step.srcs))

    def _operand(self, part: Pattern | str | None, src: Tensor | None, match: _Match) -> bool:
        if part is None:
            return src is None
        if isinstance(part, str):
            return match.tensors.setdefault(part, src) is src
        inside = src is not None and src in self.written and src not in self.needed and self.readers[src] == 1
        return inside and self._binds(part, self.written[src], match)  # type: ignore[index]

    def _disturbed(self, match: _Match) -> bool:
        """Whether something is written, before the fused step or by it, into what a swallowed step reads."""
        last = max(match.at)
        for k in match.at:
            reads = {s.root for s in self.steps[k].srcs if s is not None}
            if k != last and any(s.out.view_of is not None and s.out.root in reads for s in self.steps[k + 1 : last + 1]):
                return True
        return False

    def _runs(self, step: Step) -> bool:
        """Whether the operands meet the contract and the table has a kernel of its own for them."""
        try:
            call = self.table.call(step)
        except ShapeError:
            return False
        row, _ = self.table.lookup(call)
        return row is not None and not isinstance(row, ThroughRow) and not (self.op.check and self.op.check(call))


def _seen_through(t: Tensor | None) -> Iterator[Tensor]:
    """The tensor an operand names, and those it is a view of."""
    while t is not None:
        yield t
        t = t.view_of
