"""Weights interleaved for lanes: N rows of blocks side by side, field by field and unit by unit.

Block b of the N rows of a group takes N blocks' bytes; unit k of a field lies N times, once a row. Rows are padded to a multiple of N
with zero blocks (scale 0), which `get` leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.backend import Buffer, BufferType, aligned_zeros
from engine.dtypes import UNIT_NBYTES, WEIGHT_BLOCKS, DType
from engine.errors import AllocationError
from engine.tensor import Tensor

ROWS_A_STEP = 1024  # rows packed at a time: a bound on the memory packing takes beside its result


class PackedBufferType(BufferType):
    """Host memory in which quantised matrices lie interleaved by `lanes` rows."""

    is_host = False  # its bytes are not the file's

    def __init__(self, lanes: int) -> None:
        self.lanes, self.name = lanes, f"cpu@{lanes}"

    def holds(self, dtype: DType) -> bool:
        return dtype in WEIGHT_BLOCKS

    def layout_of(self, dtype: DType) -> str:
        return f"lanes{self.lanes}" if dtype in WEIGHT_BLOCKS else "plain"

    def nbytes_of(self, tensor: Tensor) -> int:
        *outer, rows, n = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        padded = -(-rows // self.lanes) * self.lanes
        return int(np.prod(outer, dtype=np.int64)) * padded * tensor.dtype.row_nbytes(n)

    def allocate(self, nbytes: int, usage: str = "weights") -> PackedBuffer:
        return PackedBuffer(self, aligned_zeros(nbytes, self.alignment), usage)


class PackedBuffer(Buffer):
    def __init__(self, type: PackedBufferType, memory: np.ndarray, usage: str) -> None:
        super().__init__(type, memory.nbytes, usage)
        self.lanes, self.memory, self.address = type.lanes, memory, memory.ctypes.data

    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        """Pack the file's bytes."""
        source = file_rows(tensor, data)
        target = self.memory[tensor.buffer_offset : tensor.buffer_offset + self.type.nbytes_of(tensor)]
        for rows, start, stop in pieces(tensor, self.lanes):
            interleave(source[rows], tensor.dtype, self.lanes, target[start:stop])

    def get(self, tensor: Tensor) -> np.ndarray:
        out = np.empty_like(file_rows(tensor))
        source = self.memory[tensor.buffer_offset : tensor.buffer_offset + self.type.nbytes_of(tensor)]
        n_blocks = tensor.shape[-1] // tensor.dtype.block_size
        for rows, start, stop in pieces(tensor, self.lanes):
            out[rows] = deinterleave(source[start:stop], tensor.dtype, self.lanes, n_blocks)[: rows.stop - rows.start]
        return out.reshape(-1)


def file_rows(tensor: Tensor, data: np.ndarray | None = None) -> np.ndarray:
    """The tensor's bytes in the file's layout as uint8 [rows of all matrices, row bytes]; without `data` just memory of that shape.

    Raises:
        AllocationError: a tensor that cannot lie interleaved.
    """
    if tensor.view_of is not None or tensor.dtype not in WEIGHT_BLOCKS:
        raise AllocationError(f"tensor '{tensor.name}' ({tensor.dtype}) cannot lie interleaved: whole quantised weights can")
    shape = (int(np.prod(tensor.shape[:-1], dtype=np.int64)), tensor.dtype.row_nbytes(tensor.shape[-1]))
    return np.empty(shape, np.uint8) if data is None else np.ascontiguousarray(data).reshape(-1).view(np.uint8).reshape(shape)


def pieces(tensor: Tensor, lanes: int) -> Iterator[tuple[slice, int, int]]:
    """Up to ROWS_A_STEP rows of one matrix at a time, and the bytes from `start` to `stop` where they lie interleaved."""
    *outer, n_rows, n = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    row_nbytes, step = tensor.dtype.row_nbytes(n), ROWS_A_STEP // lanes * lanes
    whole = -(-n_rows // lanes) * lanes * row_nbytes
    for matrix in range(int(np.prod(outer, dtype=np.int64)) if n else 0):
        for first in range(0, n_rows, step):
            count = min(step, n_rows - first)
            start = matrix * whole + first * row_nbytes
            yield slice(matrix * n_rows + first, matrix * n_rows + first + count), start, start + -(-count // lanes) * lanes * row_nbytes


def interleave(rows: np.ndarray, dtype: DType, lanes: int, out: np.ndarray) -> None:
    """uint8 [rows, row bytes] in the file's order -> `out`, uint8, rounded up to whole groups of `lanes` rows."""
    n_blocks = rows.shape[1] // dtype.nbytes
    pad = -len(rows) % lanes
    if pad:
        rows = np.concatenate([rows, np.zeros((pad, rows.shape[1]), np.uint8)])
    source = rows.reshape(-1, lanes, n_blocks, dtype.nbytes)
    target = out.reshape(-1, n_blocks, dtype.nbytes * lanes)
    for f in dtype.fields:
        unit = np.dtype(f"V{UNIT_NBYTES[f.unit]}") if UNIT_NBYTES[f.unit] not in (1, 2, 4) else np.dtype(f"u{UNIT_NBYTES[f.unit]}")
        part = source[..., f.offset : f.offset + f.nbytes]
        words = np.lib.stride_tricks.as_strided(part, (*part.shape[:-1], f.count, unit.itemsize), (*part.strides[:-1], unit.itemsize, 1))
        # A field may be misaligned in the file, so its units are copied before they are seen as numbers.
        plain = np.ascontiguousarray(words).reshape(*part.shape[:-1], f.count, unit.itemsize).view(unit)[..., 0]
        place = target[..., f.offset * lanes : (f.offset + f.nbytes) * lanes]
        slot = np.lib.stride_tricks.as_strided(place, (*place.shape[:-1], f.count, lanes, unit.itemsize),
                                               (*place.strides[:-1], lanes * unit.itemsize, unit.itemsize, 1))
        slot[...] = plain.transpose(0, 2, 3, 1)[..., None].view(np.uint8)


def deinterleave(packed: np.ndarray, dtype: DType, lanes: int, n_blocks: int) -> np.ndarray:
    """The file's order again: uint8 [padded rows, row bytes]."""
    source = packed.reshape(-1, n_blocks, dtype.nbytes * lanes)
    out = np.empty((len(source), lanes, n_blocks, dtype.nbytes), np.uint8)
    for f in dtype.fields:
        size = UNIT_NBYTES[f.unit]
        part = source[..., f.offset * lanes : (f.offset + f.nbytes) * lanes].reshape(len(source), n_blocks, f.count, lanes, size)
        out[..., f.offset : f.offset + f.nbytes] = part.transpose(0, 3, 1, 2, 4).reshape(len(source), lanes, n_blocks, f.nbytes)
    return out.reshape(-1, n_blocks * dtype.nbytes)

