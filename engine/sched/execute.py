"""A graph made ready to run: placed, rewritten, given memory, prepared; then copies, launches and events in split order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from engine.backend import Backend, BufferType, Plan
from engine.errors import AllocationError, ClosedError, ShapeError
from engine.graph import Graph
from engine.op import Step
from engine.sched.alloc import MemoryPlan, Pool, Use, is_pooled, plan_memory
from engine.sched.explain import Explanation, explain
from engine.sched.passes import Schedule, schedule
from engine.tensor import Tensor

# Note [Waiting]: backends may run behind our back. Before a backend starts, and before a copy, we wait for every other busy backend that
# touches the same memory, where "touches" is: can read it, or copies from it. So a result never depends on whether a backend is
# asynchronous, and memory is not used again under a running split. One backend's own work is in order by contract.


@dataclass(frozen=True)
class Copy:
    """`src` lies in memory the split's backend cannot read; `dst` is its twin in the backend's own."""

    src: Tensor
    dst: Tensor
    type: BufferType  # of the memory `src` lies in


@dataclass
class Stage:
    """A split on its way to being run."""

    backend: Backend
    copies: list[Copy]
    steps: list[Step]  # as they run: operands replaced by their copies
    made: list[Step]  # as the backend rewrote them
    plan: Plan | None = None


class Executable:
    """A graph on some backends, ready to run.

    Use it in `with`, or `close()` it: a graph belongs to one executable at a time.

    Attributes:
        schedule: the placement with its causes, and the splits.
        memory: where each tensor lies, and how much memory that takes.
        trace: runs the plan of each split instead of us, to watch it; None for none.
    """

    trace: Callable[[Stage], None] | None = None

    def __init__(self, backends: Sequence[Backend], graph: Graph, *, pins: Mapping[Tensor, Backend] | None = None, offload: bool = True,
                 strict: bool = False, allowed: Sequence[Backend] | None = None, pool: Pool | None = None,
                 id_limits: Mapping[Tensor, int] | None = None, reuse: bool = True) -> None:
        """Place, allocate and prepare.

        Args:
            backends: best first, the floor (CPU) last.
            pins: tensors whose home the user decides; they hold over every `reserve`.
            offload, strict, allowed: as in `schedule`.
            pool: compute memory shared with other executables; they take turns, and inputs are set anew after each turn.
            id_limits: for inputs that hold row ids, the number of rows; ids out of range are refused by `set`.
            reuse: whether tensors may share memory or be left out. Without it every tensor of the graph can be read after a run.

        Raises:
            Unplaceable: a node nobody takes.
            AllocationError: memory that is missing.
        """
        self.backends, self.graph, self.pool = tuple(backends), graph, pool or Pool()
        self.pins = dict(pins or {})
        self.id_limits = dict(id_limits or {})
        self._options: dict[str, Any] = {"offload": offload, "strict": strict, "allowed": allowed}
        self._reuse = reuse
        self.memory = MemoryPlan()
        self._stages: list[Stage] = []
        self._closed = False
        self._set: set[Tensor] = set()
        self._turn = object()  # who we are in the pool
        self._inputs = frozenset(graph.inputs)
        self._refuse_foreign_memory()
        self.reserve()

    def _refuse_foreign_memory(self) -> None:
        taken = next((t for t in self.graph.tensors if t.buffer is not None and is_pooled(t.buffer)), None)
        if taken is not None:
            self._closed = True
            raise AllocationError(f"tensor '{taken.name}' already has its memory in another executable: close() that one first")

    # -- making ready -------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Place, allocate and prepare (again). Pins hold; inputs have to be set again."""
        self._require_open()
        self._release()
        self.schedule: Schedule = schedule(self.graph, self.backends, pins=self.pins, **self._options)
        self._stages = _stages(self.schedule, self._reuse)
        self.memory = plan_memory(self._uses(), [(t, self._home(t)) for t in self.graph.inputs], self.graph.outputs, reuse=self._reuse)
        self._kept = self._roots_kept()
        self._touches = self._touched()
        self.memory.apply(self.pool)
        try:
            for stage in self._stages:
                stage.plan = stage.backend.prepare(stage.steps)
        except BaseException:
            self._release()
            raise

    def _home(self, t: Tensor) -> BufferType:
        """The memory a tensor without a buffer gets; one that a backend added lies with the backend."""
        type = self.schedule.placement.memory_of(t)
        assert type is not None, f"{t} has no home"
        return type

    def _uses(self) -> list[Use]:
        uses: list[Use] = []
        for stage in self._stages:
            own = stage.backend.buffer_type
            uses += [Use(c.dst, (c.src,), own) for c in stage.copies]
            for step in stage.steps:
                reads = tuple(s for s in step.srcs if s is not None)
                type = self.schedule.placement.memory_of(step.out) or own
                uses.append(Use(step.out, reads, type, _inplace_operand(step)))
        return uses

    def _roots_kept(self) -> set[Tensor]:
        """Roots that hold their content after a run: outputs, inputs, and without reuse everything."""
        if not self._reuse:
            return set(self.memory.places)
        return {t.root for t in self.graph.outputs} | self._inputs

    def _touched(self) -> dict[Backend, set[BufferType]]:
        """Note [Waiting]: the buffer types of this run that each backend reads or copies from."""
        types = {b.buffer_type for b in self.backends} | {t.buffer.type for t in self.graph.leaves if t.buffer is not None}
        touches = {b: {type for type in types if b.reads(type)} for b in self.backends}
        for stage in self._stages:
            touches[stage.backend] |= {c.type for c in stage.copies}
        return touches

    # -- data in and out ----------------------------------------------------------------------------------------

    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        """Fill an input: the tensor's shape (blocks counted in the last dimension) and NumPy type, bf16 as uint16.

        Raises:
            ShapeError: not an input of this graph, another shape or type, or ids out of range. Nothing has been changed then.
        """
        self._require_open()
        if tensor not in self._inputs:
            raise ShapeError(f"tensor '{tensor.name}' is no input of this graph; its inputs are "
                             f"{', '.join(t.name for t in self.graph.inputs) or 'none'}")
        _check_data(tensor, data)
        if (limit := self.id_limits.get(tensor)) is not None and data.size and not (0 <= data.min() and data.max() < limit):
            wrong = data.min() if data.min() < 0 else data.max()
            raise ShapeError(f"input '{tensor.name}' holds the id {wrong}: 0 to {limit - 1} are possible")
        assert tensor.buffer is not None
        self._take_turn()
        self._wait_for(tensor.buffer.type)
        tensor.buffer.set(tensor, data)
        self._set.add(tensor)

    def get(self, tensor: Tensor) -> np.ndarray:
        """A copy of an output, an input, or a tensor in lasting memory, as elements (bf16 as uint16) or block records.

        Raises:
            AllocationError: the tensor's memory is used again during a run, or by another executable of the pool.
        """
        self._require_open()
        root = tensor.root
        if (buffer := root.buffer) is None or (root in self.memory.places and root not in self._kept):
            raise AllocationError(f"tensor '{tensor.name}' does not outlive a run: make it an output of the graph to read it")
        if root in self.memory.places and self.pool.owner is not self._turn:
            raise AllocationError(f"tensor '{tensor.name}' holds nothing of this graph yet, or no longer: set() its inputs and run() it")
        self._wait_for(buffer.type)
        blocks = tensor.shape[-1] // tensor.dtype.block_size
        return buffer.get(tensor).view(tensor.dtype.numpy).reshape(*tensor.shape[:-1], blocks).copy()

    # -- running ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the splits in order. May return before an asynchronous backend is done; `get`, `set` and `synchronize` wait.

        Raises:
            ShapeError: an input was not set since this graph's turn began.
        """
        self._require_open()
        self._take_turn()
        if missing := [t.name for t in self.graph.inputs if t not in self._set and t in self.memory.places]:
            raise ShapeError(f"input {', '.join(missing)} has no value: set() it before run() (again, after another graph used the pool)")
        try:
            for stage in self._stages:
                self._run_stage(stage)
        except BaseException:
            self.pool.synchronize()
            raise

    def _run_stage(self, stage: Stage) -> None:
        assert stage.plan is not None
        for type in self._touches[stage.backend] if self.pool.busy else ():
            self._wait_for(type, but=stage.backend)
        for copy in stage.copies:
            self._copy(copy, stage.backend)
        if self.trace is None:
            stage.plan.run()
        else:
            self.trace(stage)
        self._started(stage.backend)

    def _copy(self, copy: Copy, here: Backend) -> None:
        """Asynchronously where `here` can, else both sides are done first. Other backends have been waited for: Note [Waiting]."""
        if here.device.capabilities.asynchronous and here.copy_async(copy.src, copy.dst):
            self._started(here)
            return
        if here.device.capabilities.asynchronous:  # its own work, and the events it was told to wait for
            here.synchronize()
            self.pool.busy.pop(here, None)
        here.copy(copy.src, copy.dst)

    def _started(self, backend: Backend) -> None:
        capabilities = backend.device.capabilities
        if capabilities.asynchronous:
            self.pool.busy[backend] = backend.record() if capabilities.events else None

    def _wait_for(self, type: BufferType, but: Backend | None = None) -> None:
        """Wait for busy backends that touch this memory. A stream of our own can wait for an event; the host waits for the backend."""
        for backend in [b for b in self.pool.busy if b is not but and type in self._touches.get(b, (type,))]:
            event = self.pool.busy[backend]
            if event is not None and but is not None and but.device.capabilities.asynchronous:
                but.wait(event)
            else:
                backend.synchronize()
                self.pool.busy.pop(backend, None)

    def synchronize(self) -> None:
        """Wait until everything is done."""
        self.pool.synchronize()

    # -- life cycle ---------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        if self.pool.owner is not self._turn:
            self.pool.synchronize()
            self._set.clear()
            self.pool.owner = self._turn

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this executable was closed: build another")

    def _release(self) -> None:
        if self.memory.places:
            self.pool.synchronize()
            self.memory.release()
            self.memory = MemoryPlan()
        self._stages = []
        self._set.clear()

    def close(self) -> None:
        """Wait for what runs and give the graph's tensors free. A second close does nothing."""
        if not self._closed:
            self._release()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def explain(self) -> Explanation:
        """What runs where and why, with the variants that run."""
        return explain(self.schedule, [stage.made for stage in self._stages])


def _stages(plan: Schedule, reuse: bool) -> list[Stage]:
    """Each split after its backend's own rewriting, with twins for what it copies in. Without `reuse` no node is left out."""
    twins: dict[tuple[Tensor, Backend], Tensor] = {}
    stages = []
    for part in plan.splits:
        here, copies = part.backend, []
        for src in part.copies:
            type = plan.placement.memory_of(src)
            assert type is not None
            dst = Tensor(src.dtype, src.shape, name=f"{here.name}#{src.name}", strides=src.strides)
            twins[src, here] = dst
            copies.append(Copy(src, dst, type))
        made = here.optimize(part.nodes, part.needed if reuse else frozenset(part.nodes))
        replaced = [n for step in made for n in step.replaces]
        assert len(replaced) == len(part.nodes) and set(replaced) == set(part.nodes), f"{here.name} lost or doubled nodes of its split"
        stages.append(Stage(here, copies, [_with_twins(step, here, twins) for step in made], made))
    return stages


def _with_twins(step: Step, here: Backend, twins: Mapping[tuple[Tensor, Backend], Tensor]) -> Step:
    if not twins:
        return step
    srcs = tuple(twins.get((s, here), s) if s is not None else None for s in step.srcs)
    return replace(step, srcs=srcs) if srcs != step.srcs else step


def _inplace_operand(step: Step) -> Tensor | None:
    if not step.op.inplace:
        return None
    names = [o.name for o in step.op.contract.operands]
    return step.srcs[names.index(step.op.inplace)]


def _check_data(tensor: Tensor, data: np.ndarray) -> None:
    want = (*tensor.shape[:-1], tensor.shape[-1] // tensor.dtype.block_size)
    if not isinstance(data, np.ndarray):
        raise ShapeError(f"input '{tensor.name}' was given a {type(data).__name__}: a NumPy array of shape {list(want)} is expected")
    if data.shape != want:
        raise ShapeError(f"input '{tensor.name}' was given the shape {list(data.shape)}: {list(want)} is expected")
    if data.dtype != tensor.dtype.numpy:
        raise ShapeError(f"input '{tensor.name}' was given {data.dtype}: {tensor.dtype.numpy} ({tensor.dtype}) is expected")
