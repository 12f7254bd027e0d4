"""A plan as text and as JSON: what runs where, why, with which kernel, and what is copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.backend import Backend
from engine.op import Step
from engine.sched.passes import Schedule, Split
from engine.tensor import Tensor


@dataclass(frozen=True)
class NodeLine:
    """One node: what it is, who runs it, why, and how. `split` is None for views, which compute nothing."""

    name: str
    op: str
    types: tuple[str, ...]
    shape: tuple[int, ...]
    backend: str
    cause: str
    split: int | None
    variant: str
    fused_into: str

    def __str__(self) -> str:
        how = f"{self.fused_into}: {self.variant}" if self.fused_into else self.variant
        return f"{self.name}: {self.op}({', '.join(self.types)}) {list(self.shape)} on {self.backend} [{self.cause}] {how}"


@dataclass(frozen=True)
class CopyLine:
    """A tensor that a split copies into its own memory."""

    tensor: str
    source: str
    nbytes: int


@dataclass(frozen=True)
class FusedLine:
    """A step that stands for several ops: its op, the ops as a pattern of its operands, what it writes, and the nodes it replaces."""

    op: str
    stands_for: str
    writes: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class SplitLine:
    """One split: its backend, how many nodes it stands for, how many steps run, which are fused, which the backend added."""

    backend: str
    n_nodes: int
    n_steps: int
    fused: tuple[FusedLine, ...]
    added: tuple[str, ...]
    copies: tuple[CopyLine, ...]

    @property
    def copied_nbytes(self) -> int:
        return sum(c.nbytes for c in self.copies)


@dataclass(frozen=True)
class Explanation:
    """Where each node of a graph runs, and why. `lines` and `to_json` say the same."""

    nodes: tuple[NodeLine, ...]
    splits: tuple[SplitLine, ...]
    backends: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Computing nodes per backend, every backend named."""
        counts = {name: 0 for name in self.backends}
        for part in self.splits:
            counts[part.backend] += part.n_nodes
        return counts

    @property
    def n_views(self) -> int:
        return sum(n.split is None for n in self.nodes)

    @property
    def summary(self) -> str:
        """"cpu: 301 nodes, blas: 12 nodes, 3 splits": the most loaded backend first; views are counted apart."""
        used = sorted(((n, name) for name, n in self.counts.items() if n), key=lambda pair: -pair[0])
        parts = [f"{name}: {_count(n, 'node')}" for n, name in used]
        views = [f"{_count(self.n_views, 'view')}"] if self.n_views else []
        return ", ".join([*parts, *views, _count(len(self.splits), "split")])

    @property
    def lines(self) -> list[str]:
        """The summary, then per split a head line and a line for each node."""
        out = [self.summary]
        inside: dict[int | None, list[str]] = {}
        for n in self.nodes:
            inside.setdefault(n.split, []).append(f"  {n}")
        for i, part in enumerate(self.splits):
            copies = f", copies in {_size(part.copied_nbytes)}: " + ", ".join(
                f"{c.tensor} from {c.source} ({_size(c.nbytes)})" for c in part.copies) if part.copies else ""
            added = ", added: " + ", ".join(f"{n} x {op}" for op, n in Counter(part.added).items()) if part.added else ""
            out.append(f"split {i}: {part.backend}, {_count(part.n_nodes, 'node')} in {_count(part.n_steps, 'step')}{added}{copies}")
            out += [f"  fused: {n} x {op} = {ops}" for (op, ops), n in Counter((f.op, f.stands_for) for f in part.fused).items()]
            out += inside.get(i, [])
        if self.n_views:
            out += [f"views: {self.n_views}", *inside[None]]
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {
            "summary": self.summary, "n_nodes": len(self.nodes), "n_views": self.n_views, "n_splits": len(self.splits),
            "backends": [{"name": name, "n_nodes": n} for name, n in self.counts.items()],
            "nodes": [{"name": n.name, "op": n.op, "types": list(n.types), "shape": list(n.shape), "backend": n.backend, "cause": n.cause,
                       "split": n.split, "variant": n.variant, "fused_into": n.fused_into or None} for n in self.nodes],
            "splits": [{"index": i, "backend": s.backend, "n_nodes": s.n_nodes, "n_steps": s.n_steps, "added": list(s.added),
                        "fused": [{"op": f.op, "stands_for": f.stands_for, "writes": f.writes, "nodes": list(f.nodes)} for f in s.fused],
                        "copies": [{"tensor": c.tensor, "from": c.source, "nbytes": c.nbytes} for c in s.copies]}
                       for i, s in enumerate(self.splits)],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain(plan: Schedule, steps: Sequence[Sequence[Step]] | None = None) -> Explanation:
    """Explain a schedule. `steps` is what each split's backend made of it, asked here where it is not given."""
    if steps is None:
        steps = [s.backend.optimize(s.nodes, s.needed) for s in plan.splits]
    made: dict[Tensor, tuple[int, Step]] = {}
    for i, part in enumerate(steps):
        made |= {node: (i, step) for step in part for node in step.replaces}
    lines = tuple(_node_line(plan, node, made.get(node)) for node in plan.graph.nodes)
    splits = tuple(_split_line(plan, part, run) for part, run in zip(plan.splits, steps, strict=True))
    return Explanation(lines, splits, tuple(b.name for b in plan.placement.backends))


def _node_line(plan: Schedule, node: Tensor, made: tuple[int, Step] | None) -> NodeLine:
    p = plan.placement
    home = p.at[node]
    split, variant, fused = None, "view", ""
    if made is not None:
        split, step = made
        variant, fused = _variant(home, step), step.op.name if step.op is not node.op else ""
    return NodeLine(node.name, node.op.name if node.op else "none", node.types, node.shape, home.name, p.cause[node], split, variant, fused)


def _variant(backend: Backend, step: Step) -> str:
    said = backend.supports(step)
    return said.variant if said else f"refused: {said.reason}"


def _split_line(plan: Schedule, part: Split, steps: Sequence[Step]) -> SplitLine:
    copies = tuple(CopyLine(t.name, plan.placement.at[t.root].name, part.backend.buffer_type.nbytes_of(t)) for t in part.copies)
    added = tuple(s.op.name for s in steps if not s.replaces)
    return SplitLine(part.backend.name, len(part.nodes), len(steps), tuple(_fused_lines(steps)), added, copies)


def _fused_lines(steps: Sequence[Step]) -> Iterator[FusedLine]:
    for s in steps:
        if s.op.fuses is not None and all(node.op is not s.op for node in s.replaces):
            yield FusedLine(s.op.name, str(s.op.fuses), s.out.name, tuple(node.name for node in s.replaces))


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.1f} KiB"
