"""A split as launches whose parameters are in place: running a plan only queues kernels."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from engine.backend import Plan
from engine.backends.cuda import compile as toolchain
from engine.backends.cuda.compiler import Compiler, Kernel
from engine.backends.cuda.device import ALIGNMENT, Gpu, Memory, library
from engine.backends.cuda.memory import DeviceBuffer, place_of
from engine.errors import InterruptedRun
from engine.lang.binding import Binding
from engine.op import Step

MAX_BLOCKS = (1 << 31) - 1  # of the x dimension of a grid; more groups are run by several launches
THREADS = 128  # of a block of several groups
SWITCH_S = 2e-4
_simulator = threading.Lock()  # it runs one kernel at a time


@dataclass(frozen=True)
class Launch:
    """One bound launch and the step it belongs to."""

    step: Step
    variant: str
    binding: Binding


@dataclass(frozen=True)
class Part:
    """A kernel with its parameters: groups `values[0]` and on, `together` of them a block.

    Attributes:
        values: int64 parameters, float32 ones behind them in the low half of a slot.
        pointers: addresses of the slots.
    """

    launch: Launch
    kernel: Kernel
    blocks: int
    together: int
    values: np.ndarray
    pointers: np.ndarray


class CudaPlan(Plan):
    """Launches in order. `run` returns before they are done."""

    def __init__(self, gpu: Gpu, parts: Sequence[Part], scratch: Memory | None) -> None:
        self.gpu, self.parts, self.scratch = gpu, tuple(parts), scratch
        self.stop = False

    def run(self) -> None:
        """Raises InterruptedRun after `interrupt` of the backend: launches after some point were not queued."""
        self.stop = False
        run = self._simulate if self.gpu.simulated else self._queue
        with self.gpu.current("running a plan"):
            for part in self.parts:
                if self.stop:
                    raise InterruptedRun(f"{self.gpu.name}: the run was stopped before {part.launch.step.op.name}")
                run(part)

    def _queue(self, part: Part) -> None:
        self.gpu.launch(part.kernel.code, part.blocks, (part.kernel.program.lanes, part.together), part.pointers.ctypes.data)

    def _simulate(self, part: Part) -> None:
        """The printed text in Numba's simulator, on the memory of this launch's tensors alone."""
        from engine.backends.cuda import sim_words

        program = part.kernel.program
        crowd = sim_words.Crowd(program.lanes)
        tables = {n: w for t in program.tables.values() for n, w in sim_words.table_words(t).items()}
        words = sim_words.words(sim_words.Memory(list(_touched(part.launch.binding, self.scratch))), crowd)
        kernel = library().jit(crowd.guarded(toolchain.function(program, toolchain.namespace(program, words, tables))))
        integers = part.values[: program.n_integers].tolist()
        floats = part.values[program.n_integers :].view(np.float32)[::2]
        with _simulator, _many_threads():
            try:
                kernel[part.blocks, (program.lanes, part.together), self.gpu.stream](*integers, *floats)
            except Exception as why:
                raise (crowd.error or why) from None


@contextmanager
def _many_threads() -> Iterator[None]:
    """The simulator polls its threads, so they take turns often; NumPy says nothing of infinities and NaN."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.setswitchinterval(before)


def build(launches: Sequence[Launch], compiler: Compiler, max_blocks: int = MAX_BLOCKS) -> CudaPlan:
    """Compile what is missing, take scratch memory, put parameters in place."""
    launches = [one for one in launches if one.binding.n_groups]
    kernels = compiler.kernels([one.binding for one in launches])
    need = max((sum(_scratch_nbytes(shape) for shape in one.binding.scratch.values()) for one in launches), default=0)
    scratch = compiler.gpu.allocate(need) if need else None
    parts = [part for one, kernel in zip(launches, kernels, strict=True) for part in _parts(one, kernel, compiler.gpu, scratch, max_blocks)]
    return CudaPlan(compiler.gpu, parts, scratch)


def _parts(one: Launch, kernel: Kernel, gpu: Gpu, scratch: Memory | None, max_blocks: int) -> Iterator[Part]:
    """One launch, or several where the grid has no room for all groups."""
    b = one.binding
    together = groups_together(b.n_groups, kernel.program.lanes, gpu.n_processors)
    for first in range(0, b.n_groups, max_blocks * together):
        blocks = min(max_blocks, -(-(b.n_groups - first) // together))
        values = parameters(b, first, scratch)
        pointers = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        yield Part(one, kernel, blocks, together, values, pointers)


def groups_together(n_groups: int, lanes: int, n_processors: int) -> int:
    """Groups a block: as many as fill it, unless blocks would be too few for all multiprocessors. Results do not depend on it."""
    together = max(1, THREADS // lanes)
    while together > 1 and n_groups < together * n_processors:
        together //= 2
    return together


def parameters(b: Binding, first_group: int, scratch: Memory | None) -> np.ndarray:
    """The order of `printer`: first group, number of groups, views, extents, sizes, float32 scalars."""
    out = [first_group, b.n_groups]
    addresses = dict(_scratch_addresses(b, scratch))
    for name in b.views:
        out.append(addresses[name] if name in addresses else address_of(b, name))
        out += b.strides(name)
    out += [*b.extents, *b.ints.values()]
    out += np.array(list(b.floats.values()), np.float32).view(np.uint32).tolist()
    return np.array(out, np.int64)


def address_of(b: Binding, name: str) -> int:
    t = b.tensors[name]
    buffer = t.root.buffer
    assert isinstance(buffer, DeviceBuffer), f"{t} does not lie in the GPU's memory"
    return buffer.address + place_of(t)


def _scratch_nbytes(shape: Sequence[int]) -> int:
    return -(-prod(shape) * 4 // ALIGNMENT) * ALIGNMENT


def _scratch_addresses(b: Binding, scratch: Memory | None) -> Iterator[tuple[str, int]]:
    at = scratch.address if scratch else 0
    for name, shape in b.scratch.items():
        yield name, at
        at += _scratch_nbytes(shape)


def _touched(b: Binding, scratch: Memory | None) -> Iterator[tuple[int, Any]]:
    """The simulator's memory of each tensor of a launch: address, bytes."""
    for t in b.tensors.values():
        buffer = t.root.buffer
        assert isinstance(buffer, DeviceBuffer)
        at = place_of(t)
        nbytes = t.nbytes if buffer.type.layout_of(t.dtype) == "plain" else buffer.type.nbytes_of(t)
        yield buffer.address + at, buffer.memory.host[at : at + nbytes]
    for (_, at), shape in zip(_scratch_addresses(b, scratch), b.scratch.values(), strict=True):
        if nbytes := 4 * prod(shape):
            assert scratch is not None
            yield at, scratch.host[at - scratch.address :][:nbytes]
