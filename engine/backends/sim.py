"""The meaning of the lane language as a backend: every kernel is run as text, checked at every access. Slow, for conformance tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from engine.backend import HOST, Backend, Device, DeviceType, KernelRow, KernelTable, Plan
from engine.errors import UnsupportedOp
from engine.op import Call, Op, Step, Variant
from engine.rewrite import rewrite
from engine.tensor import Tensor


def host_memory(tensor: Tensor) -> tuple[np.ndarray, int]:
    """The host memory a tensor lies in, as uint8, and the byte of its first element."""
    memory = getattr(tensor.root.buffer, "memory", None)  # interleaved buffers of other backends have it too
    assert isinstance(memory, np.ndarray), f"{tensor} has no host memory"
    return memory, tensor.root.buffer_offset + tensor.root_offset


class SimPlan(Plan):
    """Calls with the variants that run them."""

    def __init__(self, launches: Sequence[tuple[Call, Variant]]) -> None:
        self.launches = tuple(launches)

    def run(self) -> None:
        from engine.lang import sim  # a large module, which most processes that look for backends never need

        for call, variant in self.launches:
            sim.launch(call, variant, host_memory)


class SimBackend(Backend):
    """A TEST device on the host's memory, with any number of lanes.

    Args:
        lanes: lanes of a group.
    """

    name = "sim"
    buffer_type = HOST

    def __init__(self, ops: Iterable[Op], *, lanes: int = 4) -> None:
        self.table = KernelTable(ops, lanes)
        self.device = Device("sim", f"the language itself, {lanes} lanes", DeviceType.TEST, "sim")

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return [cls(ops)]

    def optimize(self, nodes: Sequence[Tensor], needed: Collection[Tensor] = ()) -> list[Step]:
        """The split's nodes as steps, each conversion of an operand inserted once, ops fused."""
        return rewrite(self.table, nodes, needed)

    def prepare(self, steps: Sequence[Step]) -> SimPlan:
        return SimPlan([self._launch(step) for step in steps])

    def _launch(self, step: Step) -> tuple[Call, Variant]:
        call = self.table.call(step)
        row, why = self.table.lookup(call, self.table.forced.get(step.out))
        if not isinstance(row, KernelRow):
            reason = why if row is None else f"{row.name}: the conversion has not been inserted; use optimize()"
            raise UnsupportedOp(step.out.name, step.op.name, call.types, {self.name: reason})
        return call, row.variant

    def synchronize(self) -> None:
        """Nothing is ever pending: a plan's `run` returns when the work is done."""
