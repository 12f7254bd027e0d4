"""A TEST device that supports every op it was given and computes nothing: for scheduler tests and for overhead measurements."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine.backend import Backend, BufferType, Device, DeviceType, HostBuffer, HostBufferType, KernelTable, Plan
from engine.errors import AllocationError
from engine.op import Op, Step


class PrivateBufferType(HostBufferType):
    """Memory of this process that passes for a device's own: other backends cannot read it."""

    is_host = False

    def __init__(self, name: str, alignment: int = 64, max_nbytes: int = 1 << 62) -> None:
        self.name, self.alignment, self.max_nbytes = name, alignment, max_nbytes

    def allocate(self, nbytes: int, usage: str = "compute") -> HostBuffer:
        if nbytes > self.max_nbytes:
            raise AllocationError(f"{self.name} has buffers of at most {self.max_nbytes} bytes; {nbytes} were asked for")
        return super().allocate(nbytes, usage)

    def __repr__(self) -> str:
        return f"<buffer type {self.name}>"


class NullPlan(Plan):
    """Steps that are counted, not run."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps, self.n_runs = tuple(steps), 0

    def run(self) -> None:
        self.n_runs += 1


class NullBackend(Backend):
    """Supports what its ops declare, computes nothing. Several, each with memory of its own, make a many-device machine for tests.

    Args:
        buffer_type: its memory; one of its own by default. Two backends with the same one share memory.
        reads: buffer types it reads besides.
    """

    name = "null"

    def __init__(self, ops: Iterable[Op], name: str = "null", *, buffer_type: BufferType | None = None,
                 reads: Collection[BufferType] = (), device_type: DeviceType = DeviceType.TEST, device_id: str = "",
                 lanes: int = 1) -> None:
        self.name = name
        self.table = KernelTable(ops, lanes)
        self.buffer_type = buffer_type or PrivateBufferType(name)
        self.device = Device(name, "computes nothing", device_type, device_id or f"null:{name}")
        self._reads = (self.buffer_type, *reads)

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return [cls(ops)]

    def reads(self, type: BufferType) -> bool:
        return any(type is own for own in self._reads)

    def prepare(self, steps: Sequence[Step]) -> Plan:
        return NullPlan(steps)
