"""The roofline of this machine, measured with kernels of the lane language, and a picture of rows under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backend import Backend, DeviceType, place
from engine.backends.cpu import CpuBackend
from engine.benchmark.peaks import dot_bytes, multiply_add, read_rows
from engine.benchmark.plans import buffer_of, memory_of, plan_of
from engine.benchmark.timing import cache_nbytes, measure
from engine.dtypes import F32
from engine.errors import LanewiseError
from engine.tensor import Tensor, leaf

if TYPE_CHECKING:
    from engine.benchmark.ops import OpRow


@dataclass(frozen=True)
class Roofline:
    """What this machine can do at most, measured with kernels of the lane language.

    Attributes:
        n_threads: of the peaks.
        reads: threads -> GB/s of reading memory.
        fma: float32 GFLOP/s, a multiplication and an addition count two.
        dot8: the same of 8-bit products with four-bit codes.
    """

    n_threads: int
    reads: Mapping[int, float]
    fma: float
    dot8: float

    @property
    def read(self) -> float:
        """GB/s with all threads."""
        return self.reads[self.n_threads]

    def bound(self, nbytes: int, flop: int, is_quantised: bool) -> tuple[float, str]:
        """The least seconds that reading `nbytes` and computing `flop` takes, and which of "memory", "fma", "dot8" is the limit."""
        memory = nbytes / (self.read * 1e9)
        compute = flop / ((self.dot8 if is_quantised else self.fma) * 1e9)
        return max(memory, compute), "memory" if memory >= compute else "dot8" if is_quantised else "fma"


def measure_roofline(backend: Backend, *, seconds: float = 0.15, nbytes: int = 0) -> Roofline:
    """Memory reads with 1, 2, 4, ... threads up to the backend's, and the peaks with all of them.

    Args:
        backend: a device that is no host runs these kernels itself; for any other the CPU does.
        nbytes: of memory to read, 0 for four times the last-level cache.
    """
    n_threads = getattr(backend, "n_threads", 0)
    own = _roofline_backend(backend)
    try:
        total = nbytes or min(max(4 * cache_nbytes(), 64 << 20), 512 << 20)
        n = 1 << 14
        rows = -(-total // (4 * n))
        x = _filled(own, np.arange(rows * n, dtype=np.float32).reshape(rows, n))
        counts = _thread_counts(n_threads or own.n_threads) if isinstance(own, CpuBackend) else [1]
        reads = {}
        for count in counts:
            own.set_threads(count)
            reads[count] = rows * n * 4 / _least(own, [read_rows(x)], seconds) / 1e9
        width = own.table.lanes
        ones = _filled(own, np.tile(np.array([0.999, 0.001, *[1.0] * 14], np.float32), (256, 1)))
        loops = 20_000
        fma_s = _least(own, [multiply_add(ones, loops=loops)], seconds)
        dot_s = _least(own, [dot_bytes(ones, loops=loops)], seconds)
        return Roofline(counts[-1], reads, 2 * 12 * width * loops * 256 / fma_s / 1e9, 2 * 8 * 4 * width * loops * 256 / dot_s / 1e9)
    finally:
        own.close()


def _roofline_backend(backend: Backend) -> Any:
    """A backend of the same device that runs the kernels above."""
    ops = (read_rows, multiply_add, dot_bytes)
    if backend.device.type in (DeviceType.GPU, DeviceType.IGPU):
        return next(b for b in type(backend).discover(ops) if b.device.id == backend.device.id)
    return CpuBackend(ops, threads=getattr(backend, "n_threads", 0), lanes=backend.table.lanes if isinstance(backend, CpuBackend) else 0)


def _thread_counts(most: int) -> list[int]:
    return sorted({most, *(1 << k for k in range(11) if 1 << k < most)})


def _filled(backend: Backend, data: np.ndarray) -> Tensor:
    """A float32 leaf in memory the backend reads."""
    t = leaf(F32, data.shape, "x")
    memory = memory_of(backend)
    place(t, memory.allocate(memory.nbytes_of(t)))
    buffer_of(t).set(t, data)
    return t


def _least(backend: Backend, nodes: Sequence[Tensor], seconds: float) -> float:
    """The shortest run of these nodes: a ceiling is what was reached once."""
    return measure(plan_of(backend, nodes).run, seconds=seconds).best


# -- a picture --------------------------------------------------------------------------------------------------


def draw_roofline(rows: Sequence[OpRow], path: str | Path) -> None:
    """Draw rows under their roofline, as PNG or SVG after the name's ending.

    Raises:
        LanewiseError: matplotlib is not installed, or there is nothing to draw.
    """
    figure = pyplot()
    shown = [r for r in rows if r.flop]
    if not shown:
        raise LanewiseError("there is nothing to draw: a roofline shows ops that compute, such as mul_mat")
    peaks, (chart, axes) = shown[0].roofline, figure.subplots(figsize=(9, 6))
    intensity = np.geomspace(0.1, 1e4, 200)
    for name, peak in (("float32 FMA", peaks.fma), ("8-bit dot", peaks.dot8)):
        axes.loglog(intensity, np.minimum(peak, intensity * peaks.read), label=f"{name}: {peak:.0f} GFLOP/s", linewidth=1)
    for name in dict.fromkeys(r.op for r in shown):
        mine = [r for r in shown if r.op == name]
        axes.loglog([r.flop / r.nbytes for r in mine], [r.gflop_s for r in mine], "o", markersize=4, label=name)
    axes.set(xlabel="FLOP per byte", ylabel="GFLOP/s",
             title=f"{shown[0].machine.cpu_info}, {peaks.n_threads} threads, memory reads {peaks.read:.1f} GB/s")
    axes.legend(fontsize="small")
    chart.savefig(path)
    figure.close(chart)


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise LanewiseError("drawing needs matplotlib, which is missing: `pip install 'lanewise[plots]'`, or leave --plot out") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
