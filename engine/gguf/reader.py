"""GGUF files, read in place: header, metadata and the table of tensors; tensor bytes stay in the memory map.

    with read_gguf("model.gguf") as file:
        file.metadata["general.architecture"]   # "llama"
        file.tensors["output.weight"].shape     # (n_vocab, n_embd): NumPy order
        file.data("output.weight")              # uint8 view, nothing copied

A file comes from strangers. Everything that later code relies on is checked when it is opened, and whatever
is wrong raises one `GgufError` of one line. Time and memory are bounded by the size of the file: a count is
compared with the bytes that are left before anything is made or walked.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.dtypes import DTYPES, DType, by_ggml_id
from engine.errors import ClosedError, GgufError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
STRING, ARRAY, BOOL = 8, 9, 7
# Value type id -> (name, NumPy type, struct letter). Strings (8) and arrays (9) have no fixed size.
SCALARS: dict[int, tuple[str, str, str]] = {
    0: ("u8", "<u1", "B"),
    1: ("i8", "<i1", "b"),
    2: ("u16", "<u2", "H"),
    3: ("i16", "<i2", "h"),
    4: ("u32", "<u4", "I"),
    5: ("i32", "<i4", "i"),
    6: ("f32", "<f4", "f"),
    BOOL: ("bool", "<u1", "?"),
    10: ("u64", "<u8", "Q"),
    11: ("i64", "<i8", "q"),
    12: ("f64", "<f8", "d"),
}

Value: TypeAlias = int | float | bool | str | list[str] | NDArray[np.generic]

_PACKED = {i: struct.Struct("<" + letter) for i, (_, _, letter) in SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LEAST_KEY_NBYTES = 8 + 4 + 1  # length of the key, type, a value of one byte
_LEAST_TENSOR_NBYTES = 8 + 4 + 4 + 8  # length of the name, number of dimensions, type, offset
_MAX_ELEMENTS = 2**63 - 1
_DAMAGED = "the file is cut short or damaged: download or convert it again"
# ggml's other types: id -> (name, elements of a block, its bytes). Their tensors are listed, not read.
_UNREAD_TYPES: dict[int, tuple[str, int, int]] = {9: ("q8_1", 32, 36), 15: ("q8_k", 256, 292), 28: ("f64", 1, 8)}
# What people pass instead of a GGUF file: (first bytes, in lower case) -> what it is and what to do.
_LOOKALIKES: tuple[tuple[bytes, str], ...] = (
    (b"<!do", "this is a web page: download the file itself, not the page about it"),
    (b"<htm", "this is a web page: download the file itself, not the page about it"),
    (b"version https://git-lfs", "this is a Git LFS pointer: run `git lfs pull` to fetch the file"),
    (b"pk\x03\x04", "this is a zip or PyTorch file: convert it to GGUF"),
    (b"lmgg", "this is a GGML file from before GGUF: convert it again"),
    (b"fmgg", "this is a GGMF file from before GGUF: convert it again"),
    (b"tjgg", "this is a GGJT file from before GGUF: convert it again"),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it holds.

    Attributes:
        name: the tensor's name in the file.
        shape: extents in NumPy order, the longest stride first (the file's `ne` turned round); () is one
            element.
        dtype: None where the type is not one the engine knows; `GgufFile.data` then raises.
        ggml_type_id: the type's number in the file.
        offset: the first byte, counted from the start of the file.
        nbytes: size in bytes. For a type id ggml itself does not know: the room up to the next tensor or the
            end of the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType | None
    ggml_type_id: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        """The type's name ("q4_1"), or "type 77" where nobody knows it."""
        if self.dtype is not None:
            return self.dtype.name
        return _UNREAD_TYPES.get(self.ggml_type_id, (f"type {self.ggml_type_id}", 0, 0))[0]


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that was walked but not decoded: its own copy of the bytes, so that it outlives the map."""

    type_id: int
    count: int
    payload: bytes

    def decode(self) -> list[str] | NDArray[np.generic]:
        if self.type_id == STRING:
            return list(_strings(self.payload, self.count))
        values = np.frombuffer(self.payload, SCALARS[self.type_id][1], self.count)
        if self.type_id == BOOL:
            values = values != 0
            values.flags.writeable = False
        return values


def _strings(payload: bytes, count: int) -> Iterator[str]:
    at, length_at = 0, _U64.unpack_from
    for _ in range(count):
        start = at + 8
        at = start + length_at(payload, at)[0]
        yield payload[start:at].decode("utf-8", "surrogateescape")


class Metadata(Mapping[str, Value]):
    """A file's keys and values, in file order; usable after the file is closed.

    Scalars are int, float, bool or str; an array of strings is a `list[str]`; an array of numbers or bools is
    a read-only, one-dimensional NumPy array of the type in the file. Arrays are decoded when first asked for,
    then kept. Bytes that are not UTF-8 become lone surrogates ("surrogateescape"), so that no token is lost.
    """

    def __init__(self, entries: dict[str, tuple[int, Value | _Array]]) -> None:
        self._entries = entries
        self._decoded: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        value = self._entries[key][1]
        if not isinstance(value, _Array):
            return value
        if key not in self._decoded:
            self._decoded[key] = value.decode()
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self) -> None:
        """Drop the decoded arrays: what is asked for again is decoded again."""
        self._decoded.clear()

    def type_of(self, key: str) -> str:
        """The type of a value in the file, without decoding it: "u32", "str", "arr[str,262144]"."""
        type_id, value = self._entries[key]
        if isinstance(value, _Array):
            return f"arr[{_type_name(value.type_id)},{value.count}]"
        return _type_name(type_id)


class GgufFile:
    """An open GGUF file; made by `read_gguf`, usable in `with`.

    Attributes:
        path: where it was opened.
        version: the format's version, 2 or 3.
        alignment: tensors start at multiples of this, in bytes.
        metadata: keys and values (see `Metadata`).
        tensors: name -> `TensorInfo`, in file order.
    """

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        cursor = _Cursor(path, memory)
        self.path = path
        self.version, n_tensors, n_keys = _read_header(cursor)
        self.metadata = _read_metadata(cursor, n_keys)
        _refuse_split(cursor, self.metadata)
        self.alignment = _alignment(cursor, self.metadata)
        self.tensors = _place(cursor, _read_tensors(cursor, n_tensors), self.alignment)
        self._memory: mmap.mmap | None = memory
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: uint8 [nbytes], read-only, a view into the map.

        Raises:
            GgufError: no tensor has this name, or the engine does not know its type.
            ClosedError: the file was closed.
        """
        info = self._info(name)
        if info.dtype is None:
            known = ", ".join(t.name for t in DTYPES.values() if t.ggml_id is not None)
            raise GgufError(
                f"{self.path}: tensor {_show(name)} holds {info.type_name} (id {info.ggml_type_id}), which "
                f"cannot be read; known are {known}: use a file quantised to one of these"
            )
        if self._bytes is None:
            raise self._closed()
        return self._bytes[info.offset : info.offset + info.nbytes]

    def release(self, name: str | None = None) -> None:
        """Give back the memory of the pages wholly inside a tensor, or of all; touched again, they are read again.

        Raises:
            GgufError: no tensor has this name.
            ClosedError: the file was closed.
        """
        if self._memory is None:
            raise self._closed()
        if name is None:
            self._memory.madvise(mmap.MADV_DONTNEED)
            return
        info = self._info(name)
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Give back the memory. Views from `data` stay valid (the last one unmaps); closing twice is fine."""
        memory, self._memory, self._bytes = self._memory, None, None
        if memory is None:
            return
        memory.madvise(mmap.MADV_DONTNEED)
        with suppress(BufferError):  # views are still held: the map goes with the last of them
            memory.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GgufFile({str(self.path)!r}: {len(self.metadata)} keys, {len(self.tensors)} tensors)"

    def _info(self, name: str) -> TensorInfo:
        if (info := self.tensors.get(name)) is None:
            said = f"there is no tensor {_show(name)} among its {len(self.tensors)}; `tensors` lists them"
            raise GgufError(f"{self.path}: {said}")
        return info

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self.path}: the file was closed; open it again with read_gguf")


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file, version 2 or 3, little endian; tensor bytes are not touched.

    Raises:
        GgufError: the file is missing, is not GGUF, is damaged or cut short, or is one part of several.
    """
    path = Path(path)
    memory = _map(path)
    try:
        return GgufFile(path, memory)
    except BaseException:
        memory.close()
        raise


def _map(path: Path) -> mmap.mmap:
    try:
        status = path.stat()  # before open(): opening a pipe would wait for a writer
        if stat.S_ISDIR(status.st_mode):
            raise GgufError(f"{path}: this is a folder; name the .gguf file inside it")
        if not stat.S_ISREG(status.st_mode):
            raise GgufError(
                f"{path}: this is not a regular file; a GGUF file is memory-mapped, so save it to disk first"
            )
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GgufError(f"{path}: the file is empty (0 bytes); download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GgufError(f"{path}: there is no such file; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL inside the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise GgufError(
            f"{_show(str(path), 200)}: the file cannot be opened ({reason}); check the path and its rights"
        ) from None


class _Cursor:
    """Reads values in file order; a read past the end is an error that names what was being read."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path, self.memory, self.at, self.end = path, memory, 0, len(memory)

    def error(self, message: str) -> GgufError:
        return GgufError(f"{self.path}: {message}")

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.at:
            raise self.error(
                f"{what} needs {nbytes} bytes at byte {self.at}, the file has {self.end} bytes: {_DAMAGED}"
            )

    def read(self, packed: struct.Struct, what: str) -> int | float:
        self.need(packed.size, what)
        value: int | float = packed.unpack_from(self.memory, self.at)[0]
        self.at += packed.size
        return value

    def u32(self, what: str) -> int:
        return int(self.read(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.read(_U64, what))

    def take(self, nbytes: int, what: str) -> bytes:
        self.need(nbytes, what)
        self.at += nbytes
        return self.memory[self.at - nbytes : self.at]

    def text(self, what: str) -> bytes:
        return self.take(self.u64(f"the length of {what}"), what)

    def name(self, what: str) -> str:
        raw = self.text(what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(
                f"{what} is not UTF-8: {_show(raw)} ({error.reason} at its byte {error.start}); {_DAMAGED}"
            ) from None

    def strings(self, count: int, what: str) -> bytes:
        """The bytes of `count` strings, each with its length in front: walked, not decoded."""
        self.need(8 * count, f"{what}, {count} strings,")
        start, at, last = self.at, self.at, self.end - 8
        memory, length_at = self.memory, _U64.unpack_from
        for i in range(count):
            if at > last:
                raise self.error(
                    f"{what} ends in its string {i} of {count}, past the file's {self.end} bytes: {_DAMAGED}"
                )
            at += 8 + length_at(memory, at)[0]
        return self.take(at - start, what)


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata keys."""
    start = cursor.memory[:24]
    if start[:4] != MAGIC:
        advice = next(
            (said for first, said in _LOOKALIKES if start.lower().startswith(first)),
            "check which file this is",
        )
        raise cursor.error(
            f"this is not a GGUF file: it starts with {_show(start[:16])}, expected 'GGUF'; {advice}"
        )
    cursor.at = len(MAGIC)
    version = cursor.u32("the header")
    if version and not version & 0xFFFF:
        raise cursor.error(
            "this is a big-endian GGUF file, expected little-endian: convert it with gguf_convert_endian"
        )
    if version not in VERSIONS:
        raise cursor.error(f"the GGUF version is {version}, expected 2 or 3: convert the model again")
    n_tensors, n_keys = cursor.u64("the header"), cursor.u64("the header")
    if n_keys * _LEAST_KEY_NBYTES + n_tensors * _LEAST_TENSOR_NBYTES > cursor.end - cursor.at:
        raise cursor.error(
            f"the header announces {n_keys} metadata keys and {n_tensors} tensors, more than the file's "
            f"{cursor.end} bytes can hold: {_DAMAGED}"
        )
    return version, n_tensors, n_keys


def _read_metadata(cursor: _Cursor, count: int) -> Metadata:
    entries: dict[str, tuple[int, Value | _Array]] = {}
    for i in range(count):
        key = cursor.name(f"metadata key {i} of {count}")
        if not key:
            raise cursor.error(f"metadata key {i} of {count} is empty; {_DAMAGED}")
        if key in entries:
            raise cursor.error(f"the metadata key {_show(key)} stands there twice; {_DAMAGED}")
        type_id = cursor.u32(f"the type of {_show(key)}")
        entries[key] = (type_id, _read_value(cursor, f"the value of {_show(key)}", type_id))
    return Metadata(entries)


def _read_value(cursor: _Cursor, what: str, type_id: int) -> Value | _Array:
    if type_id == STRING:
        return cursor.text(what).decode("utf-8", "surrogateescape")
    if type_id == ARRAY:
        return _read_array(cursor, what)
    if type_id not in SCALARS:
        raise cursor.error(f"{what} has type {type_id}, expected 0 to 12; {_DAMAGED}")
    value = cursor.read(_PACKED[type_id], what)
    return bool(value) if type_id == BOOL else value


def _read_array(cursor: _Cursor, what: str) -> _Array:
    type_id, count = cursor.u32(what), cursor.u64(what)
    if type_id == STRING:
        return _Array(type_id, count, cursor.strings(count, what))
    if type_id == ARRAY:
        raise cursor.error(
            f"{what} is an array of arrays, which ggml does not read either: write it as one array"
        )
    if type_id not in SCALARS:
        raise cursor.error(f"{what} is an array of type {type_id}, expected 0 to 12; {_DAMAGED}")
    return _Array(
        type_id,
        count,
        cursor.take(count * _PACKED[type_id].size, f"{what}, {count} x {_type_name(type_id)},"),
    )


def _refuse_split(cursor: _Cursor, metadata: Metadata) -> None:
    count, index = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if isinstance(count, int) and count > 1:
        part = index + 1 if isinstance(index, int) else "?"
        raise cursor.error(
            f"this is part {part} of {count} of a split model; join the parts with `llama-gguf-split --merge`"
        )


def _alignment(cursor: _Cursor, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    alignment, kind = metadata[key], metadata.type_of(key)
    if kind != "u32" or not isinstance(alignment, int) or alignment == 0 or alignment & (alignment - 1):
        said = kind if kind != "u32" else f"{alignment}"
        raise cursor.error(f"{key} is {said}, expected a power of two as u32; {_DAMAGED}")
    return alignment


def _read_tensors(cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
    """The table of tensors; offsets still count from the start of the data."""
    tensors: dict[str, TensorInfo] = {}
    for i in range(count):
        name = cursor.name(f"the name of tensor {i} of {count}")
        if name in tensors:
            raise cursor.error(f"the tensor {_show(name)} stands there twice; {_DAMAGED}")
        what = f"the description of tensor {_show(name)}"
        n_dims = cursor.u32(what)
        if n_dims > MAX_DIMS:
            raise cursor.error(
                f"tensor {_show(name)} has {n_dims} dimensions, expected at most {MAX_DIMS}; {_DAMAGED}"
            )
        shape = tuple(cursor.u64(what) for _ in range(n_dims))[::-1]
        type_id, offset = cursor.u32(what), cursor.u64(what)
        nbytes = _nbytes(cursor, name, shape, type_id)
        tensors[name] = TensorInfo(name, shape, by_ggml_id(type_id), type_id, offset, nbytes)
    return tensors


def _nbytes(cursor: _Cursor, name: str, shape: Sequence[int], type_id: int) -> int:
    """Bytes of a tensor, 0 where the type is unknown to ggml too."""
    if 0 in shape or prod(shape) > _MAX_ELEMENTS:
        raise cursor.error(
            f"tensor {_show(name)} has shape {tuple(shape)}, expected extents of 1 or more, fewer than 2^63 "
            f"elements; {_DAMAGED}"
        )
    dtype = by_ggml_id(type_id)
    if dtype is None and type_id not in _UNREAD_TYPES:
        return 0
    kind, size, nbytes = (dtype.name, dtype.block_size, dtype.nbytes) if dtype else _UNREAD_TYPES[type_id]
    row = shape[-1] if shape else 1
    if row % size:
        raise cursor.error(
            f"tensor {_show(name)} has rows of {row}, expected a multiple of {size} for {kind}; {_DAMAGED}"
        )
    return prod(shape) // size * nbytes


def _place(cursor: _Cursor, tensors: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Turn offsets into places in the file, and check that each tensor lies inside it, alone."""
    if not tensors:
        return tensors
    start = -(-cursor.at // alignment) * alignment
    in_order = sorted(tensors.values(), key=lambda info: info.offset)
    ends = [start + info.offset for info in in_order[1:]] + [cursor.end]
    placed: dict[str, TensorInfo] = {}
    for info, end in zip(in_order, ends, strict=True):
        if info.offset % alignment:
            raise cursor.error(
                f"tensor {_show(info.name)} has offset {info.offset}, expected a multiple of {alignment}; "
                f"{_DAMAGED}"
            )
        offset = start + info.offset
        stop = offset + info.nbytes
        if stop > cursor.end or offset >= cursor.end:
            raise cursor.error(
                f"the file has {cursor.end} bytes, tensor {_show(info.name)} ends at byte {stop}: {_DAMAGED}"
            )
        if stop > end or offset == end:
            after = in_order[len(placed) + 1]
            raise cursor.error(
                f"tensors {_show(info.name)} and {_show(after.name)} overlap at byte {end}; {_DAMAGED}"
            )
        placed[info.name] = TensorInfo(
            info.name, info.shape, info.dtype, info.ggml_type_id, offset, info.nbytes or end - offset
        )
    return {name: placed[name] for name in tensors}


def _type_name(type_id: int) -> str:
    return "str" if type_id == STRING else SCALARS[type_id][0]


def _show(text: str | bytes, limit: int = 64) -> str:
    """A name from the file on one line, in quotes, cut to `limit` characters."""
    if isinstance(text, bytes):
        text = text[: limit + 1].decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= limit else text[:limit] + "...")
