"""The OpenCL backend: kernels printed as OpenCL C, one backend per device. It stands in for every GPU that has no backend of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakSet

from engine.backend import Backend, BufferType, DeviceType, Event, HostBuffer, KernelRow, KernelTable
from engine.backends.opencl.buffers import OpenCLBuffer, OpenCLBufferType, PackedOpenCLBufferType, place_of
from engine.backends.opencl.compiler import Compiler
from engine.backends.opencl.devices import Found, find_devices, may_hold_gpus
from engine.backends.opencl.plan import MAX_ITEMS, Launch, OpenCLPlan, build
from engine.backends.opencl.stream import OpenCLEvent, Stream
from engine.errors import UnsupportedOp
from engine.lang.binding import bind
from engine.object_cache import ObjectCache
from engine.op import Op, Step
from engine.rewrite import rewrite
from engine.settings import settings
from engine.tensor import Tensor

GPU_LANES = 32
CPU_LANES = 16


class OpenCLBackend(Backend):
    """A queue on one OpenCL device.

    Nothing is made on the device before it is first used.

    Args:
        ops: what its kernel table holds.
        found: the device.
        lanes: work-items of a group, 0 for the device's own.
        max_items: work-items of one launch; larger ones are folded.
    """

    name = "opencl"

    def __init__(self, ops: Sequence[Op], found: Found, *, lanes: int = 0, max_items: int = MAX_ITEMS) -> None:
        self.name = found.device.name
        self.device = found.device
        self.lanes = min(lanes or lanes_of(found.device.type), 1 << (found.cl.max_work_group_size.bit_length() - 1))
        self.table = KernelTable(ops, self.lanes)
        self.stream = Stream(found)
        self.buffer_type: BufferType = OpenCLBufferType(self.stream)
        self.packed = PackedOpenCLBufferType(self.stream, self.lanes)
        self.compiler = Compiler(found, ObjectCache(settings().cache_dir / "opencl", settings().cache_limit_mb << 20))
        self._max_items = max_items
        self._plans: WeakSet[OpenCLPlan] = WeakSet()

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return [cls(ops, found) for found in find_devices()]

    @classmethod
    def may_be_default(cls) -> bool:
        return may_hold_gpus()

    @property
    def weight_types(self) -> Sequence[BufferType]:
        return (self.packed, self.buffer_type)

    def reads(self, type: BufferType) -> bool:
        return type is self.buffer_type or type is self.packed

    # -- plans --------------------------------------------------------------------------------------------------

    def optimize(self, nodes: Sequence[Tensor], needed: Collection[Tensor] = ()) -> list[Step]:
        return rewrite(self.table, nodes, needed)

    def launches(self, step: Step, variant: str | None = None) -> list[Launch]:
        """The launches of a step, with the variant the table picks or the one asked for."""
        call = self.table.call(step)
        row, why = self.table.lookup(call, variant)
        if not isinstance(row, KernelRow):
            reason = why if row is None else f"{row.name}: the conversion has not been inserted; use optimize()"
            raise UnsupportedOp(step.out.name, step.op.name, call.types, {self.name: reason})
        return [Launch(step, row.name, b) for b in bind(call, row.variant)]

    def prepare(self, steps: Sequence[Step]) -> OpenCLPlan:
        _ = self.stream.queue  # ClosedError comes before anything is built
        launches = [one for step in steps for one in self.launches(step, self.table.forced.get(step.out))]
        plan = build(launches, self.compiler, self.stream, self.lanes, self._max_items)
        self._plans.add(plan)
        return plan

    def interrupt(self) -> None:
        for plan in list(self._plans):
            plan.stop = True

    # -- copies -------------------------------------------------------------------------------------------------

    def copy(self, src: Tensor, dst: Tensor) -> None:
        if self.copy_async(src, dst):
            self.synchronize()
        else:
            super().copy(src, dst)

    def copy_async(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy between this device and the host, or another device of its context; only between tensors that lie alike.

        Memory of the host must stay as it is until the copy is done.
        """
        source, target = src.root.buffer, dst.root.buffer
        if not _alike(src, dst):
            return False
        if isinstance(source, HostBuffer) and self._owns(target):
            part = source.memory[place_of(src) : place_of(src) + src.nbytes]
            self.stream.write(target.memory, place_of(dst), part, wait=False)  # type: ignore[union-attr]
        elif self._owns(source) and isinstance(target, HostBuffer):
            part = target.memory[place_of(dst) : place_of(dst) + dst.nbytes]
            self.stream.read(source.memory, place_of(src), part, wait=False)  # type: ignore[union-attr]
        elif self._shares(source) and self._shares(target) and (self._owns(source) or self._owns(target)):
            self.stream.move(source.memory, place_of(src), target.memory, place_of(dst), src.nbytes)  # type: ignore[union-attr]
        else:
            return False
        return True

    def _owns(self, buffer: object) -> bool:
        return isinstance(buffer, OpenCLBuffer) and buffer.stream is self.stream

    def _shares(self, buffer: object) -> bool:
        return isinstance(buffer, OpenCLBuffer) and buffer.stream.found.shared is self.stream.found.shared

    # -- order --------------------------------------------------------------------------------------------------

    def record(self) -> Event:
        return OpenCLEvent(self, self.stream)

    def wait(self, event: Event) -> None:
        """In the queue where the event is of the same context, else on the host."""
        if isinstance(event, OpenCLEvent) and event.stream.found.shared is self.stream.found.shared:
            self.stream.wait_for(event.cl)
        else:
            event.wait()

    def synchronize(self) -> None:
        self.stream.finish()

    def close(self) -> None:
        self.stream.close()


def lanes_of(type: DeviceType) -> int:
    """LANES of the kernel table: a warp on GPUs, a vector on CPUs."""
    return CPU_LANES if type is DeviceType.CPU else GPU_LANES


def _alike(src: Tensor, dst: Tensor) -> bool:
    """Whether one run of bytes is right: no gaps, or the same gaps in memory that belongs to `dst` alone."""
    if src.dtype is not dst.dtype or src.shape != dst.shape:
        return False
    return (src.is_contiguous and dst.is_contiguous) or (src.strides == dst.strides and dst.view_of is None)
