"""The CUDA backend: kernels printed as Python for numba.cuda, one backend per GPU; Numba's CUDA simulator where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from weakref import WeakSet

from engine.backend import Backend, BufferType, Event, HostBuffer, KernelRow
from engine.backends.cuda.compiler import Compiler
from engine.backends.cuda.device import CudaEvent, Gpu, find_gpus
from engine.backends.cuda.lowering import CompileResult, compile_only
from engine.backends.cuda.memory import CudaBuffer, CudaBufferType, PackedCudaBufferType, PinnedBufferType, place_of
from engine.backends.cuda.plan import MAX_BLOCKS, CudaPlan, Launch, build
from engine.backends.cuda.table import CudaTable
from engine.errors import UnsupportedOp
from engine.lang.binding import bind
from engine.object_cache import ObjectCache
from engine.op import Op, Step
from engine.rewrite import rewrite
from engine.settings import settings
from engine.tensor import Tensor

LANES = 32  # a warp


class CudaBackend(Backend):
    """A stream on one GPU.

    Args:
        ops: what its kernel table holds.
        gpu: the device.
        lanes: threads of a group: a warp, or a larger power of two; the simulator takes smaller ones too.
        max_blocks: blocks of one launch; larger ones are folded.
    """

    name = "cuda"

    def __init__(self, ops: Sequence[Op], gpu: Gpu, *, lanes: int = LANES, max_blocks: int = MAX_BLOCKS) -> None:
        self.name = "cuda" if gpu.number == 0 else gpu.name
        self.gpu, self.device = gpu, gpu.device
        self.table = CudaTable(ops, lanes)
        self.buffer_type: BufferType = CudaBufferType(gpu)
        self.packed, self.pinned = PackedCudaBufferType(gpu, lanes), PinnedBufferType(gpu)
        self.compiler = Compiler(gpu, ObjectCache(settings().cache_dir / "cuda", settings().cache_limit_mb << 20))
        self._max_blocks = max_blocks
        self._plans: WeakSet[CudaPlan] = WeakSet()

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return [cls(ops, gpu) for gpu in find_gpus()]

    @staticmethod
    def compile_only(ops: Sequence[Op], wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Mapping[str, object]]:
        """Every row whose name (op, types and variant, joined by "-") is wanted, compiled without a GPU."""
        only = lambda op, key, variant: wanted("-".join((op.name, *key[1], variant)))  # noqa: E731
        return (result.row() for result in compile_only(ops, only=only))

    @property
    def weight_types(self) -> Sequence[BufferType]:
        """Interleaved first: a row a lane reads whole lines too, once for several columns, and slices of k make groups enough."""
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

    def prepare(self, steps: Sequence[Step]) -> CudaPlan:
        launches = [one for step in steps for one in self.launches(step, self.table.forced.get(step.out))]
        plan = build(launches, self.compiler, self._max_blocks)
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
        """Queue a copy between this GPU and the host or another GPU; only between tensors that lie alike.

        Pinned memory of the host must stay as it is until the copy is done.
        """
        source, target = src.root.buffer, dst.root.buffer
        if not _alike(src, dst):
            return False
        if isinstance(source, HostBuffer) and isinstance(target, CudaBuffer) and target.gpu is self.gpu:
            part = source.memory[place_of(src) : place_of(src) + src.nbytes]
            self.gpu.write(target.memory, place_of(dst), part, wait=False)
        elif isinstance(source, CudaBuffer) and source.gpu is self.gpu and isinstance(target, HostBuffer):
            part = target.memory[place_of(dst) : place_of(dst) + dst.nbytes]
            self.gpu.read(source.memory, place_of(src), part, wait=False)
        elif isinstance(source, CudaBuffer) and isinstance(target, CudaBuffer) and target.gpu is self.gpu:
            self.gpu.move(source.memory, place_of(src), target.memory, place_of(dst), src.nbytes)
        else:
            return False
        return True

    # -- order --------------------------------------------------------------------------------------------------

    def record(self) -> Event:
        return CudaEvent(self, self.gpu)

    def wait(self, event: Event) -> None:
        """In the stream for an event of any GPU, else on the host."""
        if isinstance(event, CudaEvent):
            self.gpu.wait_for(event.cuda)
        else:
            event.wait()

    def synchronize(self) -> None:
        self.gpu.finish()

    def close(self) -> None:
        self.gpu.close()


def _alike(src: Tensor, dst: Tensor) -> bool:
    """Whether one run of bytes is right: no gaps, or the same gaps in memory that belongs to `dst` alone."""
    if src.dtype is not dst.dtype or src.shape != dst.shape:
        return False
    return (src.is_contiguous and dst.is_contiguous) or (src.strides == dst.strides and dst.view_of is None)


__all__ = ["CompileResult", "CudaBackend", "compile_only"]
