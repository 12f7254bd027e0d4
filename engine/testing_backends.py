"""Backends made for tests: one that refuses what a test wants refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from engine.backend import Backend, BufferType, Device, Event, KernelTable, Plan, Row
from engine.backends.null import PrivateBufferType
from engine.op import Call, Op, Step
from engine.tensor import Tensor

Refuse = Callable[[Call], str | None]


class FilteredTable(KernelTable):
    """Another table, less the calls that `refuse` gives a reason for."""

    def __init__(self, table: KernelTable, refuse: Refuse) -> None:
        super().__init__((), table.lanes, native=table.rows)
        self._table, self._refuse = table, refuse

    def first(self, call: Call, variant: str | None = None) -> tuple[Row | None, str, str]:
        if why := self._refuse(call):
            return None, "", why
        return self._table.first(call, variant)


class FilteredBackend(Backend):
    """`inner`, refusing some calls: how a partial backend looks to the scheduler, on kernels that are known to be right.

    Args:
        refuse: gives the reason for which a call is refused, or None.
    """

    def __init__(self, inner: Backend, refuse: Refuse, name: str = "") -> None:
        self.inner, self.name = inner, name or inner.name
        self.device, self.buffer_type = inner.device, inner.buffer_type
        self.table = FilteredTable(inner.table, refuse)

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return []  # made by tests, never found

    @classmethod
    def score(cls) -> int:
        return 0

    def reads(self, type: BufferType) -> bool:
        return self.inner.reads(type)

    @property
    def weight_types(self) -> Sequence[BufferType]:
        return self.inner.weight_types

    def wants_offload(self, node: Tensor) -> bool:
        return self.inner.wants_offload(node)

    def optimize(self, nodes: Sequence[Tensor], needed: Collection[Tensor] = ()) -> list[Step]:
        return self.inner.optimize(nodes, needed)

    def prepare(self, steps: Sequence[Step]) -> Plan:
        return self.inner.prepare(steps)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        self.inner.copy(src, dst)

    def copy_async(self, src: Tensor, dst: Tensor) -> bool:
        return self.inner.copy_async(src, dst)

    def record(self) -> Event | None:
        return self.inner.record()

    def wait(self, event: Event) -> None:
        self.inner.wait(event)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def close(self) -> None:
        self.inner.close()


class VirtualBackend(FilteredBackend):
    """A device of its own made of another: `inner`'s kernels, refusing some calls, and with `private` in memory that nobody else reads.

    Args:
        private: only for an `inner` that works in the host's memory.
    """

    def __init__(self, inner: Backend, name: str, refuse: Refuse = lambda call: None, *, private: bool = False) -> None:
        super().__init__(inner, refuse, name)
        old = inner.device
        self.device = Device(name, f"{old.description}, as a device of its own", old.type, f"{old.id}/{name}", old.capabilities, old.memory)
        self.private = private
        if private:
            self.buffer_type = PrivateBufferType(name)

    def reads(self, type: BufferType) -> bool:
        return type is self.buffer_type if self.private else super().reads(type)

    @property
    def weight_types(self) -> Sequence[BufferType]:
        return (self.buffer_type,) if self.private else super().weight_types
