"""Interleaved weights: what is set is got back byte for byte, and lies where kernels look for it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend import HOST, place
from engine.dtypes import F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, Q8_X, UNIT_NBYTES, WEIGHT_BLOCKS, DType
from engine.errors import AllocationError
from engine.layouts import ROWS_A_STEP, PackedBuffer, PackedBufferType, deinterleave, interleave
from engine.tensor import Tensor, leaf

TYPES = pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
LANES = pytest.mark.parametrize("lanes", [4, 8, 16, 32])


def weight(dtype: DType, *shape: int) -> tuple[Tensor, np.ndarray]:
    """A weight of so many rows and blocks, and random bytes for it."""
    t = leaf(dtype, (*shape[:-1], shape[-1] * dtype.block_size), "w")
    return t, np.random.default_rng(sum(shape)).integers(0, 256, t.nbytes).astype(np.uint8)


def packed(t: Tensor, lanes: int, before: int = 0) -> PackedBuffer:
    """Memory for the tensor, and `before` bytes in front of it and behind."""
    type = PackedBufferType(lanes)
    buffer = type.allocate(type.nbytes_of(t) + 2 * before)
    buffer.memory[:] = 0xAA
    place(t, buffer, before)
    return buffer


@TYPES
@LANES
def test_set_and_get_round_trip(dtype: DType, lanes: int) -> None:
    for rows in range(1, 2 * lanes + 2):
        t, data = weight(dtype, rows, 3)
        buffer = packed(t, lanes, 64)
        buffer.set(t, data)
        assert np.array_equal(buffer.get(t), data)
        assert (buffer.memory[:64] == 0xAA).all() and (buffer.memory[-64:] == 0xAA).all()


@TYPES
@pytest.mark.parametrize("shape", [(3,), (2, 5, 2), (2, 3, 9, 1), (1, 1, 1, 1), (4, 16, 2), (0, 2), (3, 0, 2), (0, 3, 2), (3, 0)], ids=str)
def test_several_matrices(dtype: DType, shape: tuple[int, ...]) -> None:
    t, data = weight(dtype, *shape)
    buffer = packed(t, 8)
    buffer.set(t, data)
    assert np.array_equal(buffer.get(t), data)
    rows = shape[-2] if len(shape) > 1 else 1
    n_matrices = int(np.prod(shape[:-2], dtype=int)) if len(shape) > 2 else 1
    assert buffer.type.nbytes_of(t) == n_matrices * -(-rows // 8) * 8 * shape[-1] * dtype.nbytes


@TYPES
@LANES
def test_unit_k_of_a_field_lies_once_for_each_row_side_by_side(dtype: DType, lanes: int) -> None:
    rows, blocks = lanes + 2, 2
    t, data = weight(dtype, rows, blocks)
    buffer = packed(t, lanes)
    buffer.set(t, data)
    file = data.reshape(rows, blocks, dtype.nbytes)
    memory = buffer.memory[: buffer.type.nbytes_of(t)].reshape(-1, blocks, dtype.nbytes * lanes)
    for row in (0, 1, lanes - 1, lanes, rows - 1):
        for f in dtype.fields:
            size = UNIT_NBYTES[f.unit]
            for k in (0, f.count - 1):
                in_file = file[row, :, f.offset + k * size : f.offset + (k + 1) * size]
                at = f.offset * lanes + (k * lanes + row % lanes) * size
                assert np.array_equal(memory[row // lanes, :, at : at + size], in_file)


@LANES
def test_padded_rows_are_zero_blocks(lanes: int) -> None:
    t, data = weight(Q4_K, lanes + 1, 2)
    buffer = packed(t, lanes)
    buffer.set(t, data)
    rows = deinterleave(buffer.memory[: buffer.type.nbytes_of(t)], Q4_K, lanes, 2)
    assert len(rows) == 2 * lanes and np.array_equal(rows[: lanes + 1].reshape(-1), data) and not rows[lanes + 1 :].any()


def test_more_rows_than_are_packed_at_a_time() -> None:
    t, data = weight(Q4_0, 2 * ROWS_A_STEP + 5, 1)
    buffer = packed(t, 8)
    buffer.set(t, data)
    assert np.array_equal(buffer.get(t), data)


def test_interleave_undoes_itself_for_misaligned_rows() -> None:
    """Rows of a mapped file begin anywhere."""
    raw = np.random.default_rng(0).integers(0, 256, 8 * 4 * Q6_K.nbytes + 1).astype(np.uint8)[1:]
    rows = raw.reshape(8, 4 * Q6_K.nbytes)
    out = np.empty(raw.size, np.uint8)
    interleave(rows, Q6_K, 8, out)
    assert np.array_equal(deinterleave(out, Q6_K, 8, 4), rows)


def test_set_takes_records_and_bytes() -> None:
    t, data = weight(Q8_0, 9, 2)
    buffer = packed(t, 4)
    buffer.set(t, data.view(Q8_0.numpy).reshape(9, 2))
    assert np.array_equal(buffer.get(t), data)


def test_only_weight_blocks_lie_interleaved() -> None:
    type = PackedBufferType(16)
    assert type.name == "cpu@16" and not type.is_host
    assert {type.layout_of(t) for t in WEIGHT_BLOCKS} == {"lanes16"}
    assert [type.layout_of(t) for t in (F32, F16, Q8_X)] == ["plain"] * 3
    assert HOST.layout_of(Q4_0) == "plain"


def test_what_cannot_lie_interleaved_is_refused() -> None:
    plain = leaf(F32, (8, 32), "plain")
    buffer = packed(plain, 8)
    for method in (lambda: buffer.get(plain), lambda: buffer.set(plain, np.zeros(1024, np.uint8))):
        with pytest.raises(AllocationError, match="'plain' .* cannot lie interleaved"):
            method()
    whole, data = weight(Q4_0, 8, 2)
    buffer = packed(whole, 8)
    buffer.set(whole, data)
    with pytest.raises(AllocationError, match="whole quantised weights can"):
        buffer.get(whole[:4])
