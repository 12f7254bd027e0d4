"""Weights from a GGUF file, each in the memory where some backend runs its product fastest.

A weight whose best layout is the file's stays mapped; others are packed tensor by tensor, and the source pages are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.backend import HOST, Backend, BufferType, HostBuffer, place
from engine.dtypes import F32
from engine.errors import ModelError
from engine.gguf import GgufFile
from engine.tensor import Tensor, leaf
from kernels.arithmetic import mul
from kernels.mul_mat import mul_mat

PART_NBYTES = 2 << 20  # of a matrix copied at a time
SMALL_NBYTES = 1 << 16
ROWS_TOGETHER = 64  # so many rows lie in one piece in every layout


@dataclass
class Weights:
    """Named weights of one model. Each look-up checks the shape the architecture wants.

    Attributes:
        packed_nbytes, mapped_nbytes: bytes in memory of our own, and in the mapped file.
    """

    file: GgufFile
    backends: Sequence[Backend]
    packed_nbytes: int = 0
    mapped_nbytes: int = 0
    _plain: dict[str, Tensor] = field(default_factory=dict)
    _product: dict[str, Tensor] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def info(self, name: str, shape: Sequence[int]) -> Tensor:
        """A leaf for this tensor, without memory.

        Raises:
            ModelError: missing, another shape, or a type no kernel reads.
        """
        found = self.file.tensors.get(name)
        if found is None:
            near = [n for n in self.file.tensors if n.split(".")[-2:] == name.split(".")[-2:]][:1]
            raise ModelError(f"the model needs the tensor '{name}' and the file has none"
                             + (f" (it has '{near[0]}')" if near else f" among its {len(self.file.tensors)}") + ": it is incomplete")
        if found.dtype is None:
            raise ModelError(f"tensor '{name}' has the type {found.type_name}, which no kernel reads; requantise the model, e.g. to q4_k_m")
        if tuple(found.shape) != tuple(shape):
            raise ModelError(f"tensor '{name}' has the shape {list(found.shape)}, the hyperparameters ask for {list(shape)}")
        return leaf(found.dtype, found.shape, name)

    def plain(self, name: str, *shape: int) -> Tensor:
        """A weight in the file's layout. Embeddings for GET_ROWS stay mapped; norms and biases lie where a backend multiplies by them."""
        if name not in self._plain:
            t = self.info(name, shape)
            if t.dtype.name not in ("f32", "f16", "bf16") and len(shape) == 1:
                raise ModelError(f"tensor '{name}' is {t.dtype}: vectors are f32, f16 or bf16")
            where = self._beside(t)
            self._plain[name] = self._map(t) if where is HOST else self._copy(t, where)
        return self._plain[name]

    def optional(self, name: str, *shape: int) -> Tensor | None:
        return self.plain(name, *shape) if self.has(name) else None

    def product(self, name: str, rows: int, columns: int) -> Tensor:
        """A matrix for MUL_MAT, in the layout of the first backend that takes it."""
        if name not in self._product:
            t = self.info(name, (rows, columns))
            where = self._best(t)
            if where.layout_of(t.dtype) == "plain" and where is HOST:
                self._product[name] = self._map(t)
            else:
                self._product[name] = self._pack(t, where)
        return self._product[name]

    def _pack(self, t: Tensor, where: BufferType) -> Tensor:
        """Copy a matrix over, a few rows at a time, so that its pages of the file never add up in memory."""
        buffer = where.allocate(where.nbytes_of(t), "weights")
        rows, columns = t.shape
        data = self.file.data(t.name).reshape(rows, -1)
        step, offset = max(1, PART_NBYTES // data.shape[1] // ROWS_TOGETHER) * ROWS_TOGETHER, 0
        for start in range(0, rows, step):
            part = leaf(t.dtype, (min(step, rows - start), columns), t.name)
            buffer.set(place(part, buffer, offset), data[start : start + step])
            offset += where.nbytes_of(part)
            self.file.release(t.name)
        self.packed_nbytes += buffer.nbytes
        return place(t, buffer)

    def _best(self, w: Tensor) -> BufferType:
        probe = mul_mat(w, Tensor(F32, (1, w.shape[-1]), name="x"), name=w.name)
        batch = mul_mat(w, Tensor(F32, (512, w.shape[-1]), name="x"), name=w.name)
        for backend in self.backends:
            for type in backend.weight_types:
                if not type.holds(w.dtype):
                    continue
                if backend.supports(probe, {w: type}) or backend.supports(batch, {w: type}):
                    return type
        return HOST

    def _beside(self, w: Tensor) -> BufferType:
        """The memory of the first backend that takes a vector there; the host's for matrices."""
        if len(w.shape) > 1:
            return HOST
        probe = mul(Tensor(F32, (1, *w.shape), name="x"), w, name=w.name)
        return next((b.buffer_type for b in self.backends if b.supports(probe, {w: b.buffer_type})), HOST)

    def _copy(self, t: Tensor, where: BufferType) -> Tensor:
        buffer = where.allocate(where.nbytes_of(t), "weights")
        buffer.set(place(t, buffer), self.file.data(t.name))
        self.packed_nbytes += t.nbytes
        return t

    def _map(self, t: Tensor) -> Tensor:
        """Leave a tensor in the mapped file; a small one is copied, for the system brings in many pages around each one that is read."""
        data = self.file.data(t.name)
        if data.nbytes < SMALL_NBYTES:
            buffer = HOST.allocate(data.nbytes, "weights")
            buffer.set(place(t, buffer), data)
            self.packed_nbytes += data.nbytes
            return t
        self.mapped_nbytes += data.nbytes
        return place(t, _MappedBuffer(data))


class _MappedBuffer(HostBuffer):
    """A part of the mapped file; read only."""

    def __init__(self, memory: np.ndarray) -> None:
        super().__init__(HOST, memory, "weights")


def constant(data: np.ndarray, name: str) -> Tensor:
    """A float32 table that the graph reads, in host memory."""
    t = leaf(F32, data.shape, name)
    buffer = HOST.allocate(max(1, data.nbytes), "cache")
    place(t, buffer)
    buffer.set(t, data.astype(np.float32))
    return t
