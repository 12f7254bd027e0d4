"""Lifetimes and memory reuse: every tensor a run writes gets a place, and places are used again after the last reader."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from engine.backend import Backend, Buffer, BufferType, Event, place
from engine.errors import AllocationError
from engine.tensor import Tensor

_pooled: WeakSet[Buffer] = WeakSet()


@dataclass(frozen=True)
class Use:
    """One moment of a run: a tensor is written from others.

    Attributes:
        type: where the written tensor lies if it has no memory of its own.
        inplace: the operand whose memory the result may take over, if nothing else needs it.
    """

    writes: Tensor
    reads: tuple[Tensor, ...]
    type: BufferType
    inplace: Tensor | None = None


@dataclass(frozen=True)
class Place:
    """Bytes `offset` to `offset + nbytes` of chunk number `chunk` of a buffer type."""

    type: BufferType
    chunk: int
    offset: int
    nbytes: int


@dataclass
class Lifetime:
    """The moments of a root tensor: written first at `birth`, touched last at `death`; a kept one never dies."""

    birth: int
    death: int
    kept: bool = False


@dataclass
class MemoryPlan:
    """Where each root tensor lies, and how large each chunk of each buffer type is."""

    places: dict[Tensor, Place] = field(default_factory=dict)
    chunks: dict[BufferType, list[int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes per buffer type."""
        total: dict[str, int] = {}
        for type, sizes in self.chunks.items():
            total[type.name] = total.get(type.name, 0) + sum(sizes)
        return total

    def apply(self, pool: Pool) -> None:
        """Take the memory and give every tensor its place.

        Raises:
            AllocationError: a device does not have it; then no tensor was touched.
        """
        buffers = {type: pool.take(type, sizes) for type, sizes in self.chunks.items()}
        for root, where in self.places.items():
            place(root, buffers[where.type][where.chunk], where.offset)

    def release(self) -> None:
        """Take the places away again."""
        for root in self.places:
            root.buffer, root.buffer_offset = None, 0


class Pool:
    """Compute memory that graphs take turns in: it grows to the largest, and holds what one of them last computed.

    Attributes:
        owner: who ran last; for everybody else the content is gone.
        busy: backends with work that may not be done yet, and an event behind it where the device has one.
    """

    def __init__(self) -> None:
        self._buffers: dict[BufferType, list[Buffer]] = {}
        self.owner: object = None
        self.busy: dict[Backend, Event | None] = {}

    def take(self, type: BufferType, sizes: Sequence[int]) -> list[Buffer]:
        """One buffer of at least each size, the ones there are if they are large enough."""
        have = self._buffers.setdefault(type, [])
        for i, nbytes in enumerate(sizes):
            if i < len(have) and have[i].nbytes >= nbytes:
                continue
            fresh = type.allocate(nbytes, "compute")
            _pooled.add(fresh)
            have[i : i + 1] = [fresh]
        return have[: len(sizes)]

    def synchronize(self) -> None:
        """Wait for everything that runs in this memory."""
        for backend in list(self.busy):
            backend.synchronize()
            self.busy.pop(backend, None)

    def clear(self) -> None:
        """Give the memory back as soon as no executable uses it."""
        self.synchronize()
        self._buffers.clear()
        self.owner = None


def is_pooled(buffer: Buffer) -> bool:
    """Whether a pool made this buffer: its content belongs to one executable, not to a tensor."""
    return buffer in _pooled


def plan_memory(uses: Sequence[Use], inputs: Iterable[tuple[Tensor, BufferType]] = (), outputs: Iterable[Tensor] = (), *,
                reuse: bool = True) -> MemoryPlan:
    """Places for the roots of everything in `uses` and `inputs` that has no buffer, the same for the same graph.

    Inputs and outputs keep theirs to themselves. Without `reuse` all do.

    Raises:
        AllocationError: a tensor is touched that nothing writes and that has no memory.
    """
    given = [(root, type) for root, type in inputs if root.buffer is None]
    lives = lifetimes(uses, [root for root, _ in given], outputs)
    layout = _Layout(lives)
    for root, type in given:
        layout.add(root, type)
    dying: list[list[Tensor]] = [[] for _ in uses]
    for root, life in lives.items():
        if reuse and not life.kept:
            dying[life.death].append(root)
    for now, use in enumerate(uses):
        root = use.writes.root
        if root in lives and root not in layout.plan.places:
            if not (reuse and layout.take_over(use, now)):
                layout.add(root, use.type)
        for dead in dying[now]:
            layout.drop(dead)
    layout.plan.chunks = {type: heap.sizes for type, heap in layout.heaps.items()}
    return layout.plan


def lifetimes(uses: Sequence[Use], inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> dict[Tensor, Lifetime]:
    """When each root without a buffer is first and last touched; views count for their root."""
    lives = {root: Lifetime(-1, len(uses) - 1, kept=True) for root in inputs}
    for now, use in enumerate(uses):
        for t in use.reads:
            _touch(lives, t, now, use)
        if use.writes.view_of is None and use.writes.buffer is None:
            lives.setdefault(use.writes, Lifetime(now, now))
        _touch(lives, use.writes, now, use)
    for t in outputs:
        root = t.root
        if root.buffer is None:
            if root not in lives:
                raise AllocationError(f"output '{t.name}' has no memory and nothing writes it: place it in a buffer or mark it as an input")
            lives[root].kept = True
    return lives


def _touch(lives: dict[Tensor, Lifetime], t: Tensor, now: int, use: Use) -> None:
    root = t.root if t.view_of is not None else t
    if root.buffer is not None:
        return
    if root not in lives:
        raise AllocationError(f"'{use.writes.name}' needs tensor '{root.name}', which has no memory and which nothing has written: "
                              "place it in a buffer or mark it as an input")
    lives[root].death = now


class _Layout:
    """A memory plan being made."""

    def __init__(self, lives: dict[Tensor, Lifetime]) -> None:
        self.lives, self.plan = lives, MemoryPlan()
        self.heaps: dict[BufferType, Heap] = {}
        self.taken_over: set[Tensor] = set()

    def add(self, root: Tensor, type: BufferType) -> None:
        if type not in self.heaps:
            self.heaps[type] = Heap(type)
        self.plan.places[root] = self.heaps[type].take(type.nbytes_of(root))

    def drop(self, root: Tensor) -> None:
        if root not in self.taken_over:
            dead = self.plan.places[root]
            self.heaps[dead.type].give(dead)

    def take_over(self, use: Use, now: int) -> bool:
        """Run in place: the result gets the memory of an operand that nobody else needs and that lies just as the result will."""
        old, new = use.inplace, use.writes
        if old is None or (life := self.lives.get(root := old.root)) is None or life.kept or life.death != now:
            return False
        where = self.plan.places[root]
        same = old.shape == new.shape and old.strides == new.strides and old.dtype is new.dtype and new.nbytes == root.nbytes
        alone = sum(t.root is root for t in use.reads) == 1
        if not (same and alone and where.type is use.type and use.type.nbytes_of(new) <= where.nbytes):
            return False
        self.plan.places[new] = where
        self.taken_over.add(root)
        return True


class Heap:
    """Free memory of one buffer type, best fit: the smallest gap that is large enough, else the end of a chunk, else a new chunk.

    Attributes:
        sizes: bytes each chunk needs.
    """

    def __init__(self, type: BufferType) -> None:
        self.type = type
        self.sizes: list[int] = []
        self._ends: list[int] = []  # where each chunk's unused rest begins
        self._gaps: list[tuple[int, int, int]] = []  # (chunk, offset, nbytes), in order, none touching another or a chunk's end

    def take(self, nbytes: int) -> Place:
        need = -(-max(nbytes, 1) // self.type.alignment) * self.type.alignment
        fits = [(size, chunk, offset) for chunk, offset, size in self._gaps if size >= need]
        if fits:
            size, chunk, offset = min(fits)
            self._gaps.remove((chunk, offset, size))
            if size > need:
                insort(self._gaps, (chunk, offset + need, size - need))
        else:
            chunk = self._chunk_with_room(need)
            offset = self._ends[chunk]
            self._ends[chunk] += need
            self.sizes[chunk] = max(self.sizes[chunk], self._ends[chunk])
        return Place(self.type, chunk, offset, need)

    def _chunk_with_room(self, need: int) -> int:
        """A tensor larger than the limit gets a chunk of its own: the device says whether it can."""
        for chunk, end in enumerate(self._ends):
            if end == 0 or end + need <= self.type.max_nbytes:
                return chunk
        self._ends.append(0)
        self.sizes.append(0)
        return len(self._ends) - 1

    def give(self, place: Place) -> None:
        chunk, start, end = place.chunk, place.offset, place.offset + place.nbytes
        at = bisect(self._gaps, (chunk, start, 0))
        if at < len(self._gaps) and self._gaps[at][:2] == (chunk, end):
            end += self._gaps.pop(at)[2]
        if at and self._gaps[at - 1][0] == chunk and sum(self._gaps[at - 1][1:]) == start:
            start = self._gaps.pop(at - 1)[1]
        if end == self._ends[chunk]:
            self._ends[chunk] = start
        else:
            insort(self._gaps, (chunk, start, end - start))
