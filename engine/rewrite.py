"""Rewritings of a split that several backends share: graph nodes in, steps out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.backend import KernelTable, ThroughRow
from engine.op import Op, Step
from engine.tensor import Tensor


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
