"""A Lanewise backend that computes with NumPy, in the host's memory: what a plug-in has to have, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backend import HOST, Backend, Device, DeviceType, HostBuffer, KernelTable, Plan, Row
from engine.op import Call, Key, Op, Step
from engine.tensor import Tensor

Array = np.ndarray[Any, Any]


def add(x: Array, w: Array) -> Array:
    return x + _tiled(w, x)


def mul(x: Array, w: Array) -> Array:
    return x * _tiled(w, x)


def scale(x: Array, factor: float, bias: float) -> Array:
    return x * np.float32(factor) + np.float32(bias)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rms_norm(x: Array, eps: float) -> Array:
    mean = np.square(x, dtype=np.float64).sum(-1, keepdims=True) / max(x.shape[-1], 1)
    return (x / np.sqrt(mean + eps)).astype(np.float32)


def mul_mat(w: Array, x: Array) -> Array:
    """w[..., m, k], x[..., n, k] -> [..., n, m]; a batch of w serves whole runs of the batches of x."""
    rank = max(w.ndim, x.ndim, 2)
    w, x = (np.ascontiguousarray(_ranked(a, rank)) for a in (w, x))  # BLAS rounds views in another way
    for axis in range(rank - 2):
        w = np.repeat(w, x.shape[axis] // max(w.shape[axis], 1), axis)
    return np.matmul(x, w.swapaxes(-1, -2))


def _tiled(w: Array, x: Array) -> Array:
    """The smaller operand, repeated as a whole along each dimension."""
    w = _ranked(w, x.ndim)
    return np.tile(w, [n // max(m, 1) for n, m in zip(_ranked(x, w.ndim).shape, w.shape, strict=True)])


def _ranked(array: Array, rank: int) -> Array:
    """The same elements with extents of 1 in front."""
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


KERNELS: Mapping[str, Callable[..., Array]] = {
    "add": add, "mul": mul, "scale": scale, "silu": silu, "rms_norm": rms_norm, "mul_mat": mul_mat}
F32 = "f32"
KEYS: tuple[Key, ...] = (
    ("add", (F32, F32, F32)), ("mul", (F32, F32, F32)), ("scale", (F32, F32)), ("silu", (F32, F32)), ("rms_norm", (F32, F32)),
    ("mul_mat", (F32, F32, F32)))


@dataclass(frozen=True)
class HostRow(Row):
    """A line of the table. What `refusal` lets through must run and be right."""

    name: str = "numpy"

    def refusal(self, call: Call) -> str | None:
        if call.layouts:
            return f"{', '.join(call.layouts)} lies interleaved, this backend reads plain rows"
        return None


class NumpyPlan(Plan):
    """Steps with their kernels; memory is looked up at each run."""

    def __init__(self, backend: NumpyBackend, steps: Sequence[Step]) -> None:
        self.steps = [(backend.kernels[s.op.name], s) for s in steps]
        self.array = backend.array

    def run(self) -> None:
        for kernel, step in self.steps:
            operands = [self.array(t) if t is not None else None for t in step.srcs]
            self.array(step.out)[...] = kernel(*operands, **step.params).reshape(step.out.shape)


class NumpyBackend(Backend):
    """A device that shares the host's memory with the CPU backend."""

    name = "numpy"
    buffer_type = HOST
    device = Device("numpy", f"NumPy {np.__version__}", DeviceType.ACCEL, "numpy:0")
    kernels = KERNELS

    def __init__(self) -> None:
        self.table = KernelTable((), lanes=1, native={key: (HostRow(),) for key in KEYS})

    @classmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        return [cls()]

    @staticmethod
    def array(t: Tensor) -> Array:
        """The tensor as a NumPy array over its memory, whatever its strides."""
        buffer = t.root.buffer
        assert isinstance(buffer, HostBuffer)
        return buffer.array(t)

    def prepare(self, steps: Sequence[Step]) -> NumpyPlan:
        return NumpyPlan(self, steps)
