"""A split as a flat array of launches, with every address final: what the team walks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from engine.backend import Plan, aligned_zeros
from engine.backends.cpu.compile import Compiler, Request
from engine.backends.cpu.team import Team
from engine.backends.cpu.words import Features
from engine.lang.binding import Binding
from engine.op import Step
from engine.tensor import Tensor

LAUNCH_WORDS = 16  # Note [plan] in walker.py
MAX_PIECES, FEW_PIECES, MANY_GROUPS = 64, 16, 512  # a piece has a bit of a word; few cost less where there are few groups
SMALL_WORK = 40_000
Range = tuple[int, int]


@dataclass
class Launch:
    """One bound launch and the step it belongs to. `work` is the larger of its FLOP and of the bytes it moves."""

    step: Step
    variant: str
    binding: Binding
    work: int = SMALL_WORK

    @property
    def is_small(self) -> bool:
        """Not worth a barrier: one thread runs it, together with its small neighbours."""
        return self.work < SMALL_WORK


@dataclass
class CpuPlan(Plan):
    """Launches in order. `seconds_of` is filled by a traced run."""

    team: Callable[[], Team]
    launches: list[Launch]
    words: np.ndarray
    blocks: list[np.ndarray]
    scratch: np.ndarray
    ends_ns: list[int] = field(default_factory=list)

    def run(self, trace: bool = False) -> None:
        """Run every launch; with `trace` the end of each is kept, in nanoseconds of the monotonic clock."""
        if not self.launches:
            return
        self.team().run(self.words, len(self.launches), trace)
        if trace:
            self.ends_ns = self.words.reshape(-1, LAUNCH_WORDS)[:, 4].tolist()


def build(launches: Sequence[Launch], compiler: Compiler, team: Callable[[], Team], features: Features) -> CpuPlan:
    """Compile what is missing, lay out parameter blocks, fill the plan."""
    launches = [one for one in launches if one.binding.n_groups]
    addresses = compiler.addresses([request(one.binding, features) for one in launches])
    need = max((sum(_scratch_nbytes(b.scratch[n]) for n in b.scratch) for b in (one.binding for one in launches)), default=0)
    scratch = aligned_zeros(need)
    words = aligned_zeros(len(launches) * LAUNCH_WORDS * 8).view(np.int64)
    blocks = []
    for row, (one, address) in zip(words.reshape(-1, LAUNCH_WORDS), zip(launches, addresses, strict=True), strict=True):
        block = parameter_block(one.binding, scratch)
        blocks.append(block)
        n = one.binding.n_groups
        row[:4] = address, block.ctypes.data, n, min(n, FEW_PIECES if n < MANY_GROUPS else MAX_PIECES)
    mark_phases(words.reshape(-1, LAUNCH_WORDS), launches, scratch)
    return CpuPlan(team, list(launches), words, blocks, scratch)


def request(b: Binding, features: Features) -> Request:
    return Request(b.function, b.views, b.groups, tuple(b.ints), tuple(b.floats), b.constants, features)


def _scratch_nbytes(shape: Sequence[int]) -> int:
    return -(-prod(shape) * 4 // 64) * 64


def parameter_block(b: Binding, scratch: np.ndarray) -> np.ndarray:
    """Views (address, byte strides), group extents, sizes, float32 scalars; see lower.py."""
    out: list[int] = []
    used = 0
    places = {}
    for name, shape in b.scratch.items():
        places[name] = scratch.ctypes.data + used
        used += _scratch_nbytes(shape)
    for name in b.views:
        out.append(places[name] if name in places else address(b.tensors[name]))
        out += b.strides(name)
    out += b.extents
    out += b.ints.values()
    out += np.array(list(b.floats.values()), np.float32).view(np.uint32).tolist()
    return np.array(out, np.int64)


def address(t: Tensor) -> int:
    """Where a tensor's first element lies."""
    root = t.root
    assert root.buffer is not None, f"{t} has no memory"
    return root.buffer.address + root.buffer_offset + t.root_offset  # type: ignore[attr-defined]


def mark_phases(rows: np.ndarray, launches: Sequence[Launch], scratch: np.ndarray) -> None:
    """Chains and barriers, by what launches read and write: Note [plan] in walker.py."""
    units = _units(launches)
    touched = [_merge([touches(one, scratch) for one in launches[a:b]]) for a, b in units]
    start = 0
    for k, (a, b) in enumerate(units):
        rows[a, 5] = b - a if launches[a].is_small else 0
        last = k == len(units) - 1
        if last or any(_depends(touched[j], touched[k + 1]) for j in range(start, k + 1)):
            rows[b - 1, 6], rows[b - 1, 7] = 1, b - 1 - units[start][0]
            start = k + 1


def _units(launches: Sequence[Launch]) -> list[tuple[int, int]]:
    """Ranges of launches: runs of small ones together, every other one alone."""
    units: list[tuple[int, int]] = []
    for i, one in enumerate(launches):
        if units and one.is_small and launches[i - 1].is_small:
            units[-1] = units[-1][0], i + 1
        else:
            units.append((i, i + 1))
    return units


@dataclass
class Touched:
    """Byte ranges of this process's memory."""

    reads: list[Range]
    writes: list[Range]


def touches(one: Launch, scratch: np.ndarray) -> Touched:
    b, result = one.binding, one.step.op.contract.result.name
    reads: list[Range] = []
    writes: list[Range] = []
    for name, t in b.tensors.items():
        span = (address(t), address(t) + t.nbytes)
        (writes if name == result else reads).append(span)
    if b.scratch:
        whole = (scratch.ctypes.data, scratch.ctypes.data + scratch.nbytes)
        reads.append(whole)
        writes.append(whole)
    return Touched(reads, writes)


def _merge(parts: Sequence[Touched]) -> Touched:
    return Touched([r for p in parts for r in p.reads], [w for p in parts for w in p.writes])


def _depends(first: Touched, second: Touched) -> bool:
    """Must `second` wait for `first`: it reads or overwrites what that writes, or writes what that reads."""
    return _overlap(first.writes, second.reads) or _overlap(first.writes, second.writes) or _overlap(first.reads, second.writes)


def _overlap(xs: Sequence[Range], ys: Sequence[Range]) -> bool:
    return any(a < d and c < b for a, b in xs for c, d in ys)
