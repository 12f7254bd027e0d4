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
from engine.binding import Binding
from engine.op import Step

LAUNCH_WORDS = 16  # Note [plan] in walker.py
MAX_PIECES = 256


@dataclass
class Launch:
    """One bound launch and the step it belongs to."""

    step: Step
    variant: str
    binding: Binding


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
        row[:4] = address, block.ctypes.data, n, -(-n // MAX_PIECES)
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


def address(t: object) -> int:
    """Where a tensor's first element lies."""
    root = t.root  # type: ignore[attr-defined]
    assert root.buffer is not None, f"{t} has no memory"
    return root.buffer.address + root.buffer_offset + t.root_offset  # type: ignore[attr-defined]
