"""A GPU's memory as buffers: the file's layout, quantised weights interleaved for lanes, and pinned memory of the host."""

from __future__ import annotations

import numpy as np

from engine.backend import Buffer, BufferType, HostBuffer, HostBufferType
from engine.backends.cuda.device import ALIGNMENT, Gpu, Memory
from engine.layouts import PackedBufferType, deinterleave, file_rows, interleave, pieces
from engine.tensor import Tensor


class CudaBufferType(BufferType):
    """Memory of one GPU, in the file's layout."""

    alignment = ALIGNMENT

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.name = gpu, gpu.name

    def allocate(self, nbytes: int, usage: str = "compute") -> CudaBuffer:
        return CudaBuffer(self, self.gpu.allocate(nbytes), usage)

    def __repr__(self) -> str:
        return f"<buffer type {self.name}>"


class PackedCudaBufferType(PackedBufferType):
    """Memory of one GPU in which quantised matrices lie interleaved by `lanes` rows."""

    alignment = ALIGNMENT

    def __init__(self, gpu: Gpu, lanes: int) -> None:
        super().__init__(lanes)
        self.gpu, self.name = gpu, f"{gpu.name}@{lanes}"

    def allocate(self, nbytes: int, usage: str = "weights") -> PackedCudaBuffer:  # type: ignore[override]
        return PackedCudaBuffer(self, self.gpu.allocate(nbytes), usage)

    def __repr__(self) -> str:
        return f"<buffer type {self.name}>"


class PinnedBufferType(HostBufferType):
    """Host memory that a GPU copies from and to while the host goes on."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.name = gpu, f"{gpu.name} host"

    def allocate(self, nbytes: int, usage: str = "compute") -> HostBuffer:
        return HostBuffer(self, self.gpu.pinned(nbytes), usage)


class DeviceBuffer(Buffer):
    """What both layouts have in common: a piece of a GPU's memory."""

    def __init__(self, type: BufferType, memory: Memory, usage: str) -> None:
        super().__init__(type, memory.nbytes, usage)
        self.memory, self.gpu = memory, memory.gpu

    @property
    def address(self) -> int:
        return self.memory.address


class CudaBuffer(DeviceBuffer):
    """The file's layout. `set` and `get` wait for what the stream was given before."""

    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        """Bytes between the elements of a strided tensor stay what they were."""
        source, at = np.ascontiguousarray(data).reshape(-1).view(np.uint8), place_of(tensor)
        if tensor.is_contiguous:
            self.gpu.write(self.memory, at, source)
        elif source.size:
            around, inside = self._around(tensor, at)
            inside[...] = source.reshape(inside.shape)
            self.gpu.write(self.memory, at, around)

    def get(self, tensor: Tensor) -> np.ndarray:
        at = place_of(tensor)
        if tensor.is_contiguous:
            out = np.empty(tensor.nbytes, np.uint8)
            self.gpu.read(self.memory, at, out)
            return out
        if not tensor.n_elements:
            return np.empty(0, np.uint8)
        return np.ascontiguousarray(self._around(tensor, at)[1]).reshape(-1)

    def _around(self, tensor: Tensor, at: int) -> tuple[np.ndarray, np.ndarray]:
        """The bytes from the first to behind the last element, and in them the tensor as uint8 [*units, unit bytes]."""
        around = np.empty(tensor.nbytes, np.uint8)
        self.gpu.read(self.memory, at, around)
        units = (*tensor.shape[:-1], tensor.shape[-1] // tensor.dtype.block_size, tensor.dtype.nbytes)
        return around, np.ndarray(units, np.uint8, around.data, 0, (*tensor.strides, 1))


class PackedCudaBuffer(DeviceBuffer):
    """Interleaved on the host, some rows at a time."""

    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        source, lanes = file_rows(tensor, data), self._lanes
        for rows, start, stop in pieces(tensor, lanes):
            packed = np.empty(stop - start, np.uint8)
            interleave(source[rows], tensor.dtype, lanes, packed)
            self.gpu.write(self.memory, tensor.buffer_offset + start, packed)

    def get(self, tensor: Tensor) -> np.ndarray:
        out, lanes = np.empty_like(file_rows(tensor)), self._lanes
        n_blocks = tensor.shape[-1] // tensor.dtype.block_size
        for rows, start, stop in pieces(tensor, lanes):
            packed = np.empty(stop - start, np.uint8)
            self.gpu.read(self.memory, tensor.buffer_offset + start, packed)
            out[rows] = deinterleave(packed, tensor.dtype, lanes, n_blocks)[: rows.stop - rows.start]
        return out.reshape(-1)

    @property
    def _lanes(self) -> int:
        assert isinstance(self.type, PackedCudaBufferType)
        return self.type.lanes


def place_of(tensor: Tensor) -> int:
    """The byte of its buffer at which a tensor begins."""
    return tensor.root.buffer_offset + tensor.root_offset
