"""Write GGUF files: metadata with the value types their Python types imply, and tensors as raw bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.dtypes import DType
from engine.errors import GgufError
from engine.gguf.reader import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, SCALARS, STRING, VERSIONS

Tensor = tuple[DType, tuple[int, ...], bytes | NDArray[np.generic]]

_IDS = {np.dtype(kind).newbyteorder("="): i for i, (_, kind, _) in SCALARS.items() if i != BOOL} | {
    np.dtype(bool): BOOL
}
_INTEGERS = ((5, -(2**31), 2**31), (4, 0, 2**32), (11, -(2**63), 2**63), (10, 0, 2**64))  # i32, u32, i64, u64


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    alignment: int | None = None,
) -> None:
    """Write a GGUF file, whole or not at all: it appears under its name when it is complete.

    Args:
        path: the file to make or replace.
        metadata: str, bool, int (u32, or the first of i32, i64, u64 that holds it) and float (f32); a NumPy
            scalar keeps its own type. A list is an array of strings, bools, integers (the first of i32, u32,
            i64, u64) or floats (f32); a NumPy array keeps its type, and is the only way to write an empty
            array.
        tensors: name -> (dtype, shape in NumPy order, bytes of the blocks in row-major order).
        version: 2 or 3.
        alignment: bytes, a power of two; by default what `general.alignment` in `metadata` says, or 32.

    Raises:
        GgufError: a value, a shape or a size that GGUF cannot hold, or a file that cannot be written.
    """
    path = Path(path)
    if version not in VERSIONS:
        raise GgufError(f"{path}: the GGUF version is {version}, expected 2 or 3")
    metadata, alignment = _aligned(path, metadata, alignment)
    keys = [_string(key) + _value(path, key, value) for key, value in metadata.items()]
    raw = {name: _raw(path, name, tensor) for name, tensor in tensors.items()}
    head = MAGIC + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys)
    table, at = [], 0
    for name, (dtype, shape, _) in tensors.items():
        table.append(
            _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], dtype.ggml_id, at)
        )
        at += -(-raw[name].nbytes // alignment) * alignment
    _replace(path, [head + b"".join(table), *(r.data for r in raw.values())], alignment)


def _replace(path: Path, parts: Iterable[bytes | memoryview], alignment: int) -> None:
    """Write `parts`, each padded, beside `path`, then move: whoever maps the old file keeps its bytes."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
                file.write(bytes(-len(part) % alignment))
        partial.replace(path)
    except OSError as error:
        raise GgufError(
            f"{path}: the file cannot be written ({error.strerror}); check the folder, its rights and space"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _aligned(
    path: Path, metadata: Mapping[str, object], alignment: int | None
) -> tuple[Mapping[str, object], int]:
    """The metadata and the alignment, made to agree."""
    key = "general.alignment"
    said = metadata.get(key, alignment or DEFAULT_ALIGNMENT)
    wanted = said if alignment is None else alignment
    if not isinstance(said, int) or said != wanted or said <= 0 or said & (said - 1) or said >= 2**32:
        raise GgufError(
            f"{path}: the alignment is {wanted!r} and {key} is {said!r}, expected one power of two"
        )
    if said != DEFAULT_ALIGNMENT and key not in metadata:
        metadata = {**metadata, key: said}
    return metadata, said


def _raw(path: Path, name: str, tensor: Tensor) -> NDArray[np.uint8]:
    dtype, shape, data = tensor
    row = shape[-1] if shape else 1
    if dtype.ggml_id is None:
        raise GgufError(f"{path}: tensor {name!r} has type {dtype}, which never stands in a file")
    if len(shape) > MAX_DIMS or min(shape, default=1) < 1 or row % dtype.block_size:
        raise GgufError(
            f"{path}: tensor {name!r} has shape {shape}, expected 0 to {MAX_DIMS} extents of 1 or more, the "
            f"last a multiple of {dtype.block_size} for {dtype}"
        )
    if isinstance(data, np.ndarray) and data.dtype not in (np.uint8, dtype.numpy):
        raise GgufError(
            f"{path}: tensor {name!r} is given as {data.dtype}, expected uint8 or {dtype.numpy} for {dtype}"
        )
    raw = np.frombuffer(np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data, np.uint8)
    nbytes = prod(shape) // dtype.block_size * dtype.nbytes
    if raw.nbytes != nbytes:
        raise GgufError(
            f"{path}: tensor {name!r} comes with {raw.nbytes} bytes, expected {nbytes} for {dtype} {shape}"
        )
    return raw


def _value(path: Path, key: str, value: object) -> bytes:
    """A value with its type id in front."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list | tuple | np.ndarray):
        return struct.pack("<I", ARRAY) + _array(path, key, value)
    if isinstance(value, np.generic):
        number, type_id = np.asarray(value), _IDS.get(value.dtype)
    else:
        number, type_id = _typed(value, (4, 0, 2**32), *_INTEGERS)
    if type_id is None:
        raise GgufError(f"{path}: {key!r} is {type(value).__name__} {value!r}, which GGUF cannot hold")
    return struct.pack("<I", type_id) + number.astype(SCALARS[type_id][1]).tobytes()


def _array(path: Path, key: str, values: list[object] | tuple[object, ...] | NDArray[np.generic]) -> bytes:
    """Element type, count and elements of an array."""
    if isinstance(values, np.ndarray):
        array, type_id = (
            values,
            STRING if values.dtype.kind == "U" else _IDS.get(values.dtype.newbyteorder("=")),
        )
    elif values and all(isinstance(v, str) for v in values):
        array, type_id = np.asarray(values, object), STRING
    else:
        array, type_id = _typed(list(values), *_INTEGERS) if values else (np.empty(0), None)
    if type_id is None or array.ndim != 1:
        raise GgufError(
            f"{path}: {key!r} is not a flat array of strings, bools or numbers (empty: pass a NumPy array)"
        )
    head = struct.pack("<IQ", type_id, len(array))
    if type_id == STRING:
        return head + b"".join(_string(str(v)) for v in array)
    return head + array.astype(SCALARS[type_id][1]).tobytes()


def _typed(values: object, *integers: tuple[int, int, int]) -> tuple[NDArray[np.generic], int | None]:
    """Python numbers as an array and their type id: the first of `integers` that holds them, else f32."""
    kinds = {type(v) for v in values} if isinstance(values, list) else {type(values)}
    if kinds == {bool}:
        return np.asarray(values), BOOL
    if kinds == {int}:
        whole = np.asarray(values, object)
        low, high = whole.min(), whole.max()
        return whole, next((i for i, least, end in integers if least <= low and high < end), None)
    if kinds <= {int, float}:
        return np.asarray(values, np.float64), 6
    return np.empty(0), None


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw
