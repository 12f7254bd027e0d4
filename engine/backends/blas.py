"""Large float matrix products by NumPy's own BLAS: an ACCEL device on the host, beside the CPU's kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import ThreadpoolController

from engine.backend import HOST, Backend, Device, DeviceType, HostBuffer, KernelTable, Plan, Row
from engine.errors import DeviceError
from engine.op import Call, Op, Step
from engine.settings import settings
from engine.tensor import Tensor

MIN_EXTENT = 32  # rows, columns and k below which a kernel of our own is at least as fast
SLAB_NBYTES = 4 << 20  # float32 copies of half-precision weights are made this much at a time


@dataclass(frozen=True)
class MatMulRow(Row):
    """MUL_MAT through `np.matmul`. NumPy's float16 product never reaches BLAS, so half-precision weights are widened in slabs."""

    name: str

    def refusal(self, call: Call) -> str | None:
        for operand, t in call.tensors.items():
            if t is not None and (why := _unusable(operand, t, call)):
                return why
        w, x = call.tensors["w"], call.tensors["x"]
        assert w is not None and x is not None
        if any(extent != 1 for extent in w.shape[:-2]):
            return f"w has the shape {list(w.shape)}; BLAS takes one matrix"
        m, k = w.shape[-2] if len(w.shape) > 1 else 1, w.shape[-1]
        columns = x.n_elements // max(k, 1)  # batches of activations are more columns
        for what, extent, unit in (("m", m, "rows"), ("n", columns, "columns"), ("k", k, "elements a row")):
            if extent < MIN_EXTENT:
                return f"{what} = {extent} {unit}; BLAS takes {MIN_EXTENT} or more"
        return None


def _unusable(operand: str, t: Tensor, call: Call) -> str | None:
    if (layout := call.layouts.get(operand, "plain")) != "plain":
        return f"{operand} lies {layout}; BLAS reads plain rows"
    if not t.is_contiguous:
        return f"{operand} is not contiguous; BLAS takes dense matrices"
    if (held := t.root.buffer) is not None and not held.type.is_host:
        return f"{operand} lies in {held.type.name} memory; BLAS reads the host's"
    return None


def native_rows() -> dict[tuple[str, tuple[str, ...]], tuple[Row, ...]]:
    """The whole kernel table: MUL_MAT with F32 and F16 weights. (BF16 products would be rounded differently: not here.)"""
    return {("mul_mat", ("f32", "f32", "f32")): (MatMulRow("sgemm"),),
            ("mul_mat", ("f16", "f32", "f32")): (MatMulRow("sgemm of widened slabs"),)}


class BlasPlan(Plan):
    """Products on arrays that are bound once."""

    def __init__(self, backend: BlasBackend, steps: Sequence[Step]) -> None:
        self._backend = backend
        self._calls = [_bind(s) for s in steps]
        widest = max((_slab_rows(w) * w.shape[1] for w, _, _ in self._calls if w.dtype == np.float16), default=0)
        self._slab = np.empty(widest, np.float32)

    def run(self) -> None:
        with self._backend.threadpools.limit(limits=self._backend.n_threads, user_api="blas"):
            for w, x, y in self._calls:
                if w.dtype == np.float16:
                    _matmul_widened(w, x, y, self._slab)
                else:
                    np.matmul(x, w.T, out=y)


def _bind(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights [m, k], activations [n, k] and result [n, m] of a step, batches of activations side by side."""
    w, x = step.srcs[:2]
    assert w is not None and x is not None
    return _matrix(w), _matrix(x), _matrix(step.out)


def _matrix(t: Tensor) -> np.ndarray:
    buffer = t.root.buffer
    assert isinstance(buffer, HostBuffer), f"{t} is not in host memory"
    return buffer.array(t).reshape(-1, t.shape[-1])


def _slab_rows(w: np.ndarray) -> int:
    return min(w.shape[0], max(1, SLAB_NBYTES // (4 * w.shape[1])))


def _matmul_widened(w: np.ndarray, x: np.ndarray, y: np.ndarray, memory: np.ndarray) -> None:
    rows, k = _slab_rows(w), w.shape[1]
    for start in range(0, w.shape[0], rows):
        half = w[start : start + rows]
        slab = memory[: half.size].reshape(-1, k)
        np.copyto(slab, half)
        np.matmul(x, slab.T, out=y[:, start : start + rows])


class BlasBackend(Backend):
    """Claims F32 and F16 products that are worth it; shares the host's memory with the CPU.

    The library's thread count is set around each run only: a process may use BLAS for other things.
    """

    name = "blas"
    buffer_type = HOST

    def __init__(self, n_threads: int = 0) -> None:
        self.threadpools = ThreadpoolController()
        libraries = [p for p in self.threadpools.info() if p["user_api"] == "blas"]
        if not libraries:
            raise DeviceError("no BLAS library that threadpoolctl knows is loaded: install NumPy's own wheel, which brings OpenBLAS")
        self.n_threads = n_threads or settings().threads or len(os.sched_getaffinity(0))
        self.table = KernelTable((), lanes=1, native=native_rows())
        first = libraries[0]
        about = " ".join(str(first[k]) for k in ("internal_api", "version", "architecture") if first.get(k))
        self.device = Device("blas", f"{about}, {self.n_threads} threads", DeviceType.ACCEL, f"blas:{first['internal_api']}")

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return [cls()] if any(op.name == "mul_mat" for op in ops) else []

    def prepare(self, steps: Sequence[Step]) -> Plan:
        return BlasPlan(self, steps)
