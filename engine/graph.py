"""A compute graph: the nodes behind some results, in an order in which they can run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.tensor import Tensor


class Graph:
    """Nodes in topological order (sources first, in the order they were made) and the leaves they read.

    Attributes:
        nodes: every tensor with an op, views included.
        leaves: every tensor without one: inputs, weights, caches.
        inputs: the leaves that are set before each run.
        outputs: the tensors asked for; their memory is not reused.
    """

    def __init__(self, outputs: Iterable[Tensor]) -> None:
        self.outputs = tuple(outputs)
        seen: dict[Tensor, None] = {}
        for t in self.outputs:
            t.is_output = True
            _collect(t, seen)
        ordered = sorted(seen, key=lambda t: t.serial)  # a node is always made after its sources
        self.nodes = [t for t in ordered if t.op is not None]
        self.leaves = [t for t in ordered if t.op is None]
        self.inputs = [t for t in self.leaves if t.is_input]

    @property
    def tensors(self) -> list[Tensor]:
        """Leaves, then nodes."""
        return [*self.leaves, *self.nodes]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def dump(self) -> str:
        """One line a node: name, op, type, shape, sources."""
        return "\n".join(
            f"{t.name}: {t.op.name} {t.dtype}{list(t.shape)} <- {', '.join(s.name if s is not None else '-' for s in t.srcs)}"
            for t in self.nodes if t.op is not None)


def _collect(t: Tensor, seen: dict[Tensor, None]) -> None:
    """`t` and everything it reads, without recursion: graphs are deep."""
    todo = [t]
    while todo:
        t = todo.pop()
        if t in seen:
            continue
        seen[t] = None
        todo += [s for s in t.srcs if s is not None]
        if t.view_of is not None:
            todo.append(t.view_of)
