"""The CPU backend: Numba-compiled lane kernels on a team of threads. Always there, always last, supports everything in `kernels/`."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.backend import HOST, Backend, BufferType, Capabilities, Device, DeviceType, KernelRow, KernelTable
from engine.backends.cpu.compile import Compiler
from engine.backends.cpu.features import features
from engine.backends.cpu.plan import CpuPlan, Launch, build
from engine.backends.cpu.team import Native, Team, allowed_threads, thread_count
from engine.errors import ClosedError
from engine.lang.binding import bind
from engine.layouts import PackedBufferType
from engine.object_cache import ObjectCache
from engine.op import Op, Step
from engine.rewrite import rewrite
from engine.settings import settings
from engine.tensor import Tensor


class CpuBackend(Backend):
    """One team of threads on the cores this process may use.

    Args:
        ops: what its kernel table holds.
        threads: 1 to 1,024, 0 for the setting or all allowed cores.
        lanes: SIMD width, 0 for the CPU's own.
    """

    name = "cpu"

    def __init__(self, ops: Sequence[Op], threads: int = 0, lanes: int = 0) -> None:
        self.features = features(lanes)
        self.table = KernelTable(ops, self.features.lanes)
        self.packed = PackedBufferType(self.features.lanes)
        self.buffer_type: BufferType = HOST
        self.device = Device("cpu", _description(), DeviceType.CPU, "cpu:0",
                             Capabilities(buffer_from_host_memory=True, mmap=True), _memory)
        self._asked: int | None = None
        self.set_threads(threads)
        cache = ObjectCache(settings().cache_dir / "kernels", settings().cache_limit_mb << 20)
        self.compiler = Compiler(cache)
        self._native: Native | None = None
        self._closed = False
        self._teams: dict[int, Team] = {}

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return [cls(ops)]

    @property
    def team(self) -> Team:
        """The team of `n_threads`; teams of other sizes are kept for when they are wanted again."""
        if self._closed:
            raise ClosedError("the CPU backend is closed")
        if self.n_threads not in self._teams:
            if self._native is None:
                self._native = Native(self.compiler.cache)
            self._teams[self.n_threads] = Team(self.n_threads, self._native)
        return self._teams[self.n_threads]

    def set_threads(self, n: int) -> None:
        if n != self._asked:
            self.n_threads, self._asked = thread_count(n or settings().threads), n

    def interrupt(self) -> None:
        for team in list(self._teams.values()):
            team.abort()

    @property
    def weight_types(self) -> Sequence[BufferType]:
        return (self.packed, HOST)

    def reads(self, type: BufferType) -> bool:
        return type is HOST or type is self.packed

    def optimize(self, nodes: Sequence[Tensor], needed: Collection[Tensor] = ()) -> list[Step]:
        return rewrite(self.table, nodes, needed)

    def launches(self, step: Step, variant: str | None = None) -> list[Launch]:
        """The launches of a step, with the variant its table picks or the one asked for."""
        call = self.table.call(step)
        row, why = self.table.lookup(call, variant)
        assert isinstance(row, KernelRow), f"{step.out}: {why}"
        work = max(call.flop, call.nbytes)
        return [Launch(step, row.name, b, work) for b in bind(call, row.variant)]

    def prepare(self, steps: Sequence[Step]) -> CpuPlan:
        _ = self.team  # its native part is compiled now, not in the first run
        launches = [one for step in steps for one in self.launches(step, self.table.forced.get(step.out))]
        return build(launches, self.compiler, lambda: self.team, self.features)

    def close(self) -> None:
        self._closed = True
        for team in self._teams.values():
            team.close()
        self._teams.clear()


def _description() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {allowed_threads()} of {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.machine()}, {allowed_threads()} of {os.cpu_count()} cores"


def _memory() -> tuple[int | None, int | None]:
    """Total and available bytes of the machine."""
    try:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return tuple(int(facts[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        return None, None
