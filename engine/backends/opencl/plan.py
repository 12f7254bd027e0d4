"""A split as kernels with their arguments set, ready to be queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from engine.backend import Plan
from engine.backends.opencl.buffers import DeviceBuffer, place_of
from engine.backends.opencl.compiler import Compiler
from engine.backends.opencl.devices import library, typed
from engine.backends.opencl.stream import Memory, Stream
from engine.errors import InterruptedRun
from engine.lang.binding import Binding
from engine.op import Step

MAX_ITEMS = 1 << 30  # work-items of one launch; more groups are run by several
AHEAD = 64  # launches the host may be ahead by, so that a run can be interrupted
SCRATCH_ALIGNMENT = 64


@dataclass(frozen=True)
class Launch:
    """One bound launch and the step it belongs to."""

    step: Step
    variant: str
    binding: Binding

    @property
    def what(self) -> str:
        return f"{self.step.op.name} ({self.variant}) for tensor '{self.step.out.name}'"


@dataclass(frozen=True)
class Queued:
    """A kernel with its arguments: what is handed to the queue at each run."""

    kernel: Any
    n_items: int
    launch: Launch


class OpenCLPlan(Plan):
    """Launches in order. Running only queues them; it returns before they are done."""

    def __init__(self, stream: Stream, lanes: int, queued: Sequence[Queued], kept: Sequence[Memory]) -> None:
        self.stream, self.queued = stream, tuple(queued)
        self._local, self._kept = (lanes,), tuple(kept)
        self.stop = False

    def run(self) -> None:
        """Raises InterruptedRun after `interrupt` of the backend: launches after some point were not queued."""
        self.stop = False
        queue, enqueue = self.stream.queue, library().enqueue_nd_range_kernel
        ahead: deque[Any] = deque()
        with typed(self.stream.name, "running a plan"):
            for n, one in enumerate(self.queued):
                if self.stop:
                    raise InterruptedRun("the run was interrupted")
                try:
                    event = enqueue(queue, one.kernel, (one.n_items,), self._local)
                except library().Error:
                    with typed(self.stream.name, f"launching {one.launch.what}"):
                        raise
                if n % AHEAD == AHEAD - 1:
                    queue.flush()
                    ahead.append(event)
                    if len(ahead) > 1:
                        ahead.popleft().wait()
            queue.flush()


def build(launches: Sequence[Launch], compiler: Compiler, stream: Stream, lanes: int, max_items: int = MAX_ITEMS) -> OpenCLPlan:
    """Build what is missing, take scratch memory, set every argument."""
    launches = [one for one in launches if one.binding.n_groups]
    scratch = _scratch([one.binding for one in launches], stream)
    folds = [(one, first, n) for one in launches for first, n in folded(one.binding.n_groups, lanes, max_items)]
    kernels = compiler.kernels([compiler.source(one.binding) for one, _, _ in folds])
    queued = []
    for kernel, (one, first, n) in zip(kernels, folds, strict=True):
        with typed(stream.name, f"preparing {one.what}"):
            kernel.set_args(*arguments(one.binding, first, scratch))
        queued.append(Queued(kernel, n * lanes, one))
    return OpenCLPlan(stream, lanes, queued, [scratch] if scratch else [])


def folded(n_groups: int, lanes: int, max_items: int) -> Iterator[tuple[int, int]]:
    """First group and number of groups of each launch."""
    most = max(1, max_items // lanes)
    for first in range(0, n_groups, most):
        yield first, min(most, n_groups - first)


def _scratch(bindings: Sequence[Binding], stream: Stream) -> Memory | None:
    """Memory for the scratch arrays of any one launch; launches run in order, so they share it."""
    needs = [sum(_nbytes(shape) for shape in b.scratch.values()) for b in bindings if b.scratch]
    return stream.allocate(max(needs)) if needs else None


def _nbytes(shape: Sequence[int]) -> int:
    return -(-prod(shape) * 4 // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def arguments(b: Binding, first_group: int, scratch: Memory | None) -> list[Any]:
    """In the order the printer gives them: views (buffer, byte offset, byte strides), extents, first group, sizes, float32 scalars."""
    places, used = {}, 0
    for name, shape in b.scratch.items():
        places[name] = used
        used += _nbytes(shape)
    out: list[Any] = []
    for name in b.views:
        if name in places:
            assert scratch is not None
            memory, at = scratch, places[name]
        else:
            buffer = b.tensors[name].root.buffer
            assert isinstance(buffer, DeviceBuffer), f"{b.tensors[name]} does not lie on an OpenCL device"
            memory, at = buffer.memory, place_of(b.tensors[name])
        out += [memory.cl, np.int64(at), *(np.int64(s) for s in b.strides(name))]
    out += [np.int64(n) for n in (*b.extents, first_group, *b.ints.values())]
    return out + [np.float32(x) for x in b.floats.values()]
