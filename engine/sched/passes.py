"""The five passes: pin, spread, upgrade, settle, split. The rules are those of ggml's backend scheduler; each records its cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.backend import Backend
from engine.graph import Graph
from engine.sched.placement import Placement
from engine.tensor import Tensor


@dataclass
class Split:
    """Consecutive nodes that run on one backend.

    Attributes:
        nodes: what is computed, views left out.
        copies: tensors in memory this backend cannot read, copied in before the first node.
        needed: nodes that something outside the split reads, results of the graph and writes into views included.
    """

    backend: Backend
    nodes: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    needed: frozenset[Tensor] = frozenset()


@dataclass(frozen=True)
class Schedule:
    """A placed graph, cut into splits that run in order."""

    graph: Graph
    placement: Placement
    splits: tuple[Split, ...]


def schedule(graph: Graph, backends: Sequence[Backend], *, pins: Mapping[Tensor, Backend] | None = None, offload: bool = True,
             strict: bool = False, allowed: Sequence[Backend] | None = None) -> Schedule:
    """Decide who runs each node. `backends` is best first; the last one (CPU) is the floor.

    Args:
        pins: nodes and leaves whose home the user decides.
        offload: whether a better backend may take nodes whose weights lie in host memory, when it says that this pays.
        strict: refuse every node that would leave `allowed` (by default: every backend but the floor).

    Raises:
        Unplaceable: a node nobody takes, or one that strict mode refuses.
    """
    p = Placement(graph, backends, pins)
    pin(p, offload)  # 1. run where the data already is
    spread(p)        # 2. grow each accelerator's region, then everyone's
    upgrade(p)       # 3. orphans go nearest their inputs; others move up when that costs no copy
    settle(p)        # 4. views follow their root, leftover inputs follow their reader
    p.verify()       #    every node has a home that supports it, or Unplaceable names the reasons
    if strict:
        p.verify_strict(allowed if allowed is not None else p.accelerators or p.backends)
    return Schedule(graph, p, tuple(split(p)))  # 5. cut at each change of backend and list what must be copied in


def pin(p: Placement, offload: bool = True) -> None:
    for t, backend in p.pins.items():
        p.put(t, backend, "user")
    for t in p.tensors:
        if t in p.at:
            continue
        if (held := t.root.buffer) is not None:
            if (owner := p.reader_of(held, runs=t)) is None:
                raise p.unplaceable(t)  # memory that exists cannot move
            p.put(t, owner, "1.data")
        elif t.is_input:
            p.put(t, p.backends[-1], "1.input")
        elif (w := p.deciding_weight(t)) is not None:
            _pin_to_weight(p, t, w, offload)


def _pin_to_weight(p: Placement, node: Tensor, weight: Tensor, offload: bool) -> None:
    buffer = weight.root.buffer
    assert buffer is not None
    owner = p.reader_of(buffer, runs=node)
    if offload and buffer.type.is_host and (taker := offloader(p, node, owner)) is not None:
        p.put(node, taker, "1.offload")
    elif owner is not None:
        p.put(node, owner, "1.weight")


def offloader(p: Placement, node: Tensor, owner: Backend | None) -> Backend | None:
    """The first better backend for which copying this node's host weights over pays (a large batch, say)."""
    better = p.better_than(owner) if owner is not None else p.backends
    return next((b for b in better if b.wants_offload(node) and p.takes(node, b)), None)


def spread(p: Placement) -> None:
    for pool in (p.accelerators, p.backends):
        for order in (p.ops, p.ops[::-1]):
            carried = None
            for node in order:
                if node in p.at:
                    carried = p.at[node] if p.at[node] in pool else None
                elif carried is not None and p.takes(node, carried):
                    p.put(node, carried, "2.spread")


def upgrade(p: Placement) -> None:
    for node in p.ops:
        if node not in p.at:
            if not (able := p.able(node)):
                raise p.unplaceable(node)
            p.put(node, max(able, key=lambda b: p.inputs_readable(node, b)), "3.nearest")
        elif p.cause[node] != "user":
            _move_up(p, node)


def _move_up(p: Placement, node: Tensor) -> None:
    here = p.at[node]
    for b in p.better_than(here):
        if b.buffer_type is here.buffer_type and p.takes(node, b) and p.reads_all_inputs(node, b):
            p.put(node, b, "3.upgrade")
            return


def settle(p: Placement) -> None:
    for node in p.ops:
        for src in node.srcs:
            if src is not None and (root := src.root) not in p.at:
                p.put(root, p.at[node], "4.follow")
    for t in p.tensors:
        if t not in p.at and t.view_of is None:
            p.put(t, p.backends[-1], "4.follow")  # a leaf nobody computes with
    for t in p.tensors:
        if t not in p.at:
            p.put(t, p.at[t.root], "4.view")


def split(p: Placement) -> list[Split]:
    splits: list[Split] = []
    copied: set[tuple[Tensor, Backend]] = set()
    for node in p.ops:
        here = p.at[node]
        if not splits or splits[-1].backend is not here or streams_weight(p, node, splits[-1], copied):
            splits.append(Split(here))
        splits[-1].nodes.append(node)
        for src in node.srcs:
            if src is not None and (src, here) not in copied and not p.readable(src, here):
                splits[-1].copies.append(src)
                copied.add((src, here))
        if node.view_of is not None:  # copies taken before this write are out of date
            copied = {(t, b) for t, b in copied if t.root is not node.root}
    _mark_needed(p, splits)
    return splits


def streams_weight(p: Placement, node: Tensor, last: Split, copied: Collection[tuple[Tensor, Backend]]) -> bool:
    """Whether `node` starts a split: it reads a weight that is still to be copied over, and earlier copies' memory can be used again."""
    if not last.copies:
        return False
    return any(s is not None and s.is_weight and (s, last.backend) not in copied and not p.readable(s, last.backend) for s in node.srcs)


def _mark_needed(p: Placement, splits: list[Split]) -> None:
    """Fill in each split's `needed`: a backend's rewriting must not swallow these nodes."""
    home = {node: i for i, part in enumerate(splits) for node in part.nodes}
    needed: list[set[Tensor]] = [set() for _ in splits]

    def mark(t: Tensor | None, reader: int) -> None:
        while t is not None:
            if (i := home.get(t, reader)) != reader:
                needed[i].add(t)
            t = t.view_of

    for node, i in home.items():
        for src in node.srcs:
            mark(src, i)
        if node.view_of is not None:
            needed[i].add(node)
    for t in p.graph.outputs:
        mark(t, -1)
    for part, kept in zip(splits, needed, strict=True):
        part.needed = frozenset(kept)
