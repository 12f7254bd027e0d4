"""Device memory as buffers: the file's layout, and quantised weights interleaved for lanes. Only bytes of the tensor itself are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.backend import Buffer, BufferType
from engine.backends.opencl.stream import Memory, Stream
from engine.layouts import PackedBufferType, deinterleave, file_rows, interleave, pieces
from engine.tensor import Tensor

PIECE_NBYTES = 16 << 20  # of a strided tensor brought to the host at a time
Piece = tuple[tuple[int, ...], int, tuple[int, ...]]  # index in front, first byte, remaining shape


class OpenCLBufferType(BufferType):
    """Memory of one device, in the file's layout."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.name = stream, stream.name
        self.alignment, self.max_nbytes = alignment(stream), stream.found.cl.max_mem_alloc_size

    def allocate(self, nbytes: int, usage: str = "compute") -> OpenCLBuffer:
        return OpenCLBuffer(self, self.stream.allocate(nbytes), usage)

    def __repr__(self) -> str:
        return f"<buffer type {self.name}>"


class PackedOpenCLBufferType(PackedBufferType):
    """Memory of one device in which quantised matrices lie interleaved by `lanes` rows."""

    def __init__(self, stream: Stream, lanes: int) -> None:
        super().__init__(lanes)
        self.stream, self.name = stream, f"{stream.name}@{lanes}"
        self.alignment, self.max_nbytes = alignment(stream), stream.found.cl.max_mem_alloc_size

    def allocate(self, nbytes: int, usage: str = "weights") -> PackedOpenCLBuffer:  # type: ignore[override]
        return PackedOpenCLBuffer(self, self.stream.allocate(nbytes), usage)

    def __repr__(self) -> str:
        return f"<buffer type {self.name}>"


def alignment(stream: Stream) -> int:
    """Bytes at which the device wants buffers to start (it tells bits)."""
    wanted = max(64, stream.found.cl.mem_base_addr_align // 8)
    return 1 << (wanted - 1).bit_length()


class DeviceBuffer(Buffer):
    """What both layouts have in common: a piece of device memory."""

    def __init__(self, type: BufferType, memory: Memory, usage: str) -> None:
        super().__init__(type, memory.nbytes, usage)
        self.memory, self.stream = memory, memory.stream


class OpenCLBuffer(DeviceBuffer):
    """The file's layout. `set` and `get` wait for what the queue was given before."""

    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        source, at = np.ascontiguousarray(data).reshape(-1).view(np.uint8), place_of(tensor)
        if tensor.is_contiguous:
            self.stream.write(self.memory, at, source)
            return
        blocks = source.reshape(*_blocks(tensor), tensor.dtype.nbytes)
        for index, start, shape in _pieces(tensor):
            around, inner = self._piece(tensor, at + start, shape)
            inner[...] = blocks[index]
            self.stream.write(self.memory, at + start, around)

    def get(self, tensor: Tensor) -> np.ndarray:
        at = place_of(tensor)
        blocks = np.empty((*_blocks(tensor), tensor.dtype.nbytes), np.uint8)
        if tensor.is_contiguous:
            self.stream.read(self.memory, at, blocks.reshape(-1))
            return blocks.reshape(-1)
        for index, start, shape in _pieces(tensor):
            blocks[index] = self._piece(tensor, at + start, shape)[1]
        return blocks.reshape(-1)

    def _piece(self, tensor: Tensor, at: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The bytes from the first to the last block of a piece, and in them the piece as uint8 [*shape, block bytes]."""
        strides = tensor.strides[len(tensor.shape) - len(shape) :]
        around = np.empty(_span(shape, strides, tensor.dtype.nbytes), np.uint8)
        self.stream.read(self.memory, at, around)
        return around, np.ndarray((*shape, tensor.dtype.nbytes), np.uint8, around.data, 0, (*strides, 1))


class PackedOpenCLBuffer(DeviceBuffer):
    """Interleaved on the host piece by piece."""

    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        source, lanes = file_rows(tensor, data), self._lanes
        for rows, start, stop in pieces(tensor, lanes):
            packed = np.empty(stop - start, np.uint8)
            interleave(source[rows], tensor.dtype, lanes, packed)
            self.stream.write(self.memory, tensor.buffer_offset + start, packed)

    def get(self, tensor: Tensor) -> np.ndarray:
        out, lanes = np.empty_like(file_rows(tensor)), self._lanes
        n_blocks = tensor.shape[-1] // tensor.dtype.block_size
        for rows, start, stop in pieces(tensor, lanes):
            packed = np.empty(stop - start, np.uint8)
            self.stream.read(self.memory, tensor.buffer_offset + start, packed)
            out[rows] = deinterleave(packed, tensor.dtype, lanes, n_blocks)[: rows.stop - rows.start]
        return out.reshape(-1)

    @property
    def _lanes(self) -> int:
        assert isinstance(self.type, PackedOpenCLBufferType)
        return self.type.lanes


def place_of(tensor: Tensor) -> int:
    """The byte of its buffer at which a tensor begins."""
    return tensor.root.buffer_offset + tensor.root_offset


def _blocks(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape[:-1], tensor.shape[-1] // tensor.dtype.block_size)


def _span(shape: Sequence[int], strides: Sequence[int], nbytes: int) -> int:
    """Bytes from the first to behind the last block."""
    return nbytes + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0


def _pieces(tensor: Tensor) -> Iterator[Piece]:
    """A tensor cut along its first dimensions until a piece spans few enough bytes."""

    def cut(index: tuple[int, ...], start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[Piece]:
        if len(shape) == 1 or _span(shape, strides, tensor.dtype.nbytes) <= PIECE_NBYTES:
            if 0 not in shape:
                yield index, start, shape
            return
        for i in range(shape[0]):
            yield from cut((*index, i), start + i * strides[0], shape[1:], strides[1:])

    return cut((), 0, _blocks(tensor), tensor.strides)
