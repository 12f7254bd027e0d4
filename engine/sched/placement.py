"""Who runs what, and why: the state the passes work on. It answers questions; the passes decide."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from engine.backend import AsIf, Backend, Buffer, BufferType, Support, no, yes
from engine.errors import DeviceError, Unplaceable
from engine.graph import Graph
from engine.op import Op
from engine.tensor import Tensor

log = logging.getLogger(__name__)

# Note [Writes into views]: the result of an op that writes one of its operands is a view, so the op runs where that memory is. The memory
# of a tensor computed in the graph is settled by whoever computes it; therefore a writer is placed after its root, and a root goes only
# where everyone who writes into it later can follow.


class Placement:
    """The home of every tensor.

    Attributes:
        backends: best first; the last one (CPU) is the floor.
        ops: the nodes that compute something, in order.
        tensors: leaves, then nodes.
        at: who runs a node, or holds a leaf.
        cause: why: "user", or the pass and its rule ("1.weight", "2.spread", ...).
    """

    def __init__(self, graph: Graph, backends: Sequence[Backend], pins: Mapping[Tensor, Backend] | None = None) -> None:
        if not backends:
            raise DeviceError("there is no backend to place the graph on: give at least the CPU")
        self.graph, self.backends = graph, tuple(backends)
        self.accelerators = self.backends[:-1]
        self.tensors = graph.tensors
        self.ops = [t for t in graph.nodes if not t.is_view_op]
        self.at: dict[Tensor, Backend] = {}
        self.cause: dict[Tensor, str] = {}
        self.writers: dict[Tensor, list[Tensor]] = {}
        for t in self.ops:
            if t.view_of is not None:
                self.writers.setdefault(t.root, []).append(t)
        self._answers: dict[Backend, dict[Tensor, Support]] = {b: {} for b in self.backends}
        self.pins = self._known_pins(pins or {})

    def _known_pins(self, pins: Mapping[Tensor, Backend]) -> dict[Tensor, Backend]:
        """The pins of this graph's tensors. Views lie where their root lies: a pin on one says nothing."""
        inside = set(self.tensors)
        kept = {t: b for t, b in pins.items() if t in inside and not t.is_view_op}
        for t, b in kept.items():
            if b not in self.backends:
                raise DeviceError(f"tensor '{t.name}' is pinned to {b.name}, which is not among {_names(self.backends)}")
        if len(kept) < len(pins):
            log.debug("%d pins name views or tensors outside the graph", len(pins) - len(kept))
        return kept

    def put(self, t: Tensor, backend: Backend, cause: str) -> None:
        self.at[t], self.cause[t] = backend, cause

    # -- what a backend can run ---------------------------------------------------------------------------------

    def answer(self, t: Tensor, backend: Backend) -> Support:
        """`backend.supports(t)`, asked once, together with whether the writers of `t` could follow it there."""
        known = self._answers[backend]
        if (got := known.get(t)) is None:
            got = known[t] = self._ask(t, backend)
        return got

    def _ask(self, t: Tensor, backend: Backend) -> Support:
        if not isinstance(t.op, Op):
            return yes("none")
        said = backend.supports(t, self._as_if(t, backend))
        if said and t in self.writers and t.buffer is None:
            return self._with_writers(t, backend, said)
        return said

    def _as_if(self, t: Tensor, backend: Backend) -> AsIf:
        """Weights that would be copied over are judged as they will lie then."""
        moved = {}
        for src in t.srcs:
            if src is not None and (held := src.root.buffer) is not None and not backend.reads(held.type):
                moved[src.root] = backend.buffer_type
        return moved

    def _with_writers(self, root: Tensor, backend: Backend, said: Support) -> Support:
        """`said`, or a refusal where some writer into `root` could not run in `backend`'s memory: Note [Writes into views]."""
        for w in self.writers[root]:
            able = [b for b in self.backends if b.reads(backend.buffer_type) and self.answer(w, b)]
            if not able or (w in self.pins and self.pins[w] not in able):
                op = w.op.name if w.op is not None else "none"
                return no(f"'{w.name}' ({op}) writes into it and cannot run in {backend.buffer_type.name} memory")
        return said

    def takes(self, t: Tensor, backend: Backend) -> Support:
        """Whether `t` may be put there now: the answer, and for a write whether its target lies there."""
        said = self.answer(t, backend)
        if not said or t.is_view_op:
            return said
        root = t.root if t.view_of is not None else t
        if root.buffer is not None:
            if not backend.reads(root.buffer.type):
                return no(f"'{root.name}' lies in {root.buffer.type.name} memory, which {backend.name} does not read and which cannot move")
        elif root is not t:
            memory = self.memory_of(root)
            if memory is None and root.op is not None:
                return no(f"it writes into '{root.name}', which has no place yet")
            if memory is not None and not backend.reads(memory):
                return no(f"it writes into '{root.name}' in {memory.name} memory, which {backend.name} does not read")
        return said

    def able(self, t: Tensor) -> list[Backend]:
        return [b for b in self.backends if self.takes(t, b)]

    # -- where memory is ----------------------------------------------------------------------------------------

    def memory_of(self, t: Tensor) -> BufferType | None:
        """The buffer type `t` lies in, or will; None while that is open."""
        root = t.root if t.view_of is not None else t
        if root.buffer is not None:
            return root.buffer.type
        home = self.at.get(root)
        return home.buffer_type if home is not None else None

    def readable(self, t: Tensor, backend: Backend) -> bool:
        """Can `backend` read `t` where it lies?"""
        memory = self.memory_of(t)
        return memory is not None and backend.reads(memory)

    def reader_of(self, buffer: Buffer, runs: Tensor) -> Backend | None:
        """The first backend that reads this memory and runs the tensor; what needs no kernel goes to the last, the memory's plain owner."""
        order = self.backends if isinstance(runs.op, Op) else self.backends[::-1]
        return next((b for b in order if b.reads(buffer.type) and self.takes(runs, b)), None)

    def better_than(self, backend: Backend) -> tuple[Backend, ...]:
        return self.backends[: self.backends.index(backend)]

    def inputs_readable(self, node: Tensor, backend: Backend) -> int:
        return sum(self.readable(s, backend) for s in node.srcs if s is not None)

    def reads_all_inputs(self, node: Tensor, backend: Backend) -> bool:
        return all(self.readable(s, backend) for s in node.srcs if s is not None)

    def deciding_weight(self, node: Tensor) -> Tensor | None:
        """The first source in weights memory. Optional operands (rope factors, attention sinks) are too small to decide a placement."""
        if isinstance(node.op, Op):
            for operand, src in zip(node.op.contract.operands, node.srcs, strict=True):
                if src is not None and not operand.optional and src.is_weight:
                    return src
        return None

    # -- checks -------------------------------------------------------------------------------------------------

    def unplaceable(self, t: Tensor, among: Iterable[Backend] | None = None) -> Unplaceable:
        """The error for a tensor that nobody (of `among`) takes, with everyone's reason."""
        return Unplaceable(t.name, t.op.name if t.op is not None else "none", t.types,
                           {b.name: self._refusal(t, b) for b in (self.backends if among is None else among)})

    def _refusal(self, t: Tensor, backend: Backend) -> str:
        if not (said := self.takes(t, backend)):
            return said.reason
        return f"could run it, but it went to {self.at[t].name} ({self.cause[t]})" if t in self.at else "could run it"

    def verify(self) -> None:
        """Every tensor has a home, and every node's home takes it.

        Raises:
            Unplaceable: with tensor, op, types and each backend's reason.
        """
        for t in self.tensors:
            if t not in self.at or not self.takes(t, self.at[t]):
                raise self.unplaceable(t)

    def verify_strict(self, allowed: Sequence[Backend]) -> None:
        """No node runs elsewhere than on `allowed`, unless the user pinned it.

        Raises:
            Unplaceable: for the first that does; the reasons count and name the others.
        """
        strays = [t for t in self.ops if self.at[t] not in allowed and self.cause[t] != "user"]
        if strays:
            error = self.unplaceable(strays[0], allowed)
            listed = ", ".join(t.name for t in strays[:8]) + (", ..." if len(strays) > 8 else "")
            raise Unplaceable(error.tensor, error.op, error.types,
                              {**error.reasons, "strict": f"{len(strays)} nodes would leave {_names(allowed)}: {listed}"})


def _names(backends: Iterable[Backend]) -> str:
    return ", ".join(b.name for b in backends) or "none"
