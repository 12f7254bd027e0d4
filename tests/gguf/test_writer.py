"""Writing GGUF: what is written is read back, by us and by the `gguf` package, byte for byte."""

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.dtypes import BF16, DTYPES, F16, F32, I32, Q4_0, Q4_K, Q8_0, Q8_X
from engine.errors import GgufError
from engine.gguf import dequantize, quantize, read_gguf, write_gguf

METADATA = {
    "general.architecture": "llama",
    "small": 7,
    "negative": -7,
    "large": 2**33,
    "largest": 2**64 - 1,
    "least": -(2**63),
    "ratio": 0.25,
    "yes": True,
    "exact": np.float64(0.1),
    "short": np.uint16(9),
    "byte": np.int8(-3),
    "flag": np.bool_(False),
    "names": ["a", "", "héllo ▁"],
    "counts": [1, -2, 3],
    "bigs": [1, 2**32],
    "hugest": [0, 2**64 - 1],
    "floats": [1, 0.5],
    "bools": [True, False],
    "scores": np.array([0.5, -1.5], np.float32),
    "big_endian": np.array([1, 2], ">i8"),
    "no_names": np.array([], str),
    "no_counts": np.array([], np.int32),
}
TYPES = {
    "general.architecture": "str",
    "small": "u32",
    "negative": "i32",
    "large": "i64",
    "largest": "u64",
    "least": "i64",
    "ratio": "f32",
    "yes": "bool",
    "exact": "f64",
    "short": "u16",
    "byte": "i8",
    "flag": "bool",
    "names": "arr[str,3]",
    "counts": "arr[i32,3]",
    "bigs": "arr[i64,2]",
    "hugest": "arr[u64,2]",
    "floats": "arr[f32,2]",
    "bools": "arr[bool,2]",
    "scores": "arr[f32,2]",
    "big_endian": "arr[i64,2]",
    "no_names": "arr[str,0]",
    "no_counts": "arr[i32,0]",
}


def tensors():
    r = np.random.default_rng(0)
    w = r.standard_normal((3, 64)).astype(np.float32)
    return {
        "f32": (F32, (2, 3), np.arange(6, dtype=np.float32).reshape(2, 3)),
        "f16": (F16, (5,), np.arange(5, dtype=np.float16)),
        "bf16": (BF16, (1, 3, 1, 2), np.arange(6, dtype=np.uint16)),
        "i32": (I32, (), np.int32(-5).tobytes()),
        "q8_0": (Q8_0, (3, 64), quantize(w, Q8_0)),
        "q4_k": (Q4_K, (2, 256), bytes(range(144)) * 2),
    }


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 1, 32, 256])
def test_what_is_written_is_read_back(tmp_path, version, alignment):
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, tensors(), version=version, alignment=alignment)
    with read_gguf(path) as file:
        assert (file.version, file.alignment) == (version, alignment or 32)
        assert [k for k in file.metadata if k != "general.alignment"] == list(METADATA)
        for key, value in METADATA.items():
            assert plain(file.metadata[key]) == plain(value), key
            assert file.metadata.type_of(key) == TYPES[key]
        assert ("general.alignment" in file.metadata) == (alignment not in (None, 32))
        assert list(file.tensors) == list(tensors())
        for name, (dtype, shape, raw) in tensors().items():
            info = file.tensors[name]
            assert (info.dtype, info.shape) == (dtype, shape)
            assert info.offset % file.alignment == 0
            assert file.data(name).tobytes() == (raw if isinstance(raw, bytes) else raw.tobytes())


def test_the_gguf_package_reads_it(tmp_path):
    oracle = pytest.importorskip("gguf", reason="the test extra `gguf` is not installed")
    path = tmp_path / "model.gguf"
    written = {k: v for k, v in METADATA.items() if not k.startswith("no_")}  # it cannot show empty arrays
    write_gguf(path, written, tensors(), alignment=64)
    reader = oracle.GGUFReader(path)
    for key, value in written.items():
        assert reader.fields[key].contents() == plain(value), key
    with read_gguf(path) as file:
        for theirs in reader.tensors:
            info = file.tensors[theirs.name]
            assert info.shape == tuple(int(n) for n in theirs.shape[::-1]) or info.shape == ()
            assert (info.offset, info.nbytes) == (theirs.data_offset, theirs.n_bytes)
            assert info.ggml_type_id == theirs.tensor_type


def test_the_bytes_of_a_small_file(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, {"k": 5}, {"x": (F32, (2, 1), b"abcdefgh")})
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 5)
    head += struct.pack("<Q", 1) + b"x" + struct.pack("<IQQIQ", 2, 1, 2, 0, 0)
    head += bytes(-len(head) % 32)
    assert path.read_bytes() == head + b"abcdefgh" + bytes(24)


def test_nothing_at_all(tmp_path):
    path = tmp_path / "empty.gguf"
    write_gguf(path, {}, {})
    with read_gguf(path) as file:
        assert (len(file.metadata), len(file.tensors)) == (0, 0)


def test_quantised_values_survive(tmp_path):
    path = tmp_path / "model.gguf"
    values = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    write_gguf(path, {}, {"w": (Q4_0, (4, 32), quantize(values, Q4_0))})
    with read_gguf(path) as file:
        got = dequantize(file.data("w").reshape(4, -1), Q4_0)
    assert np.abs(got - values).max() < 0.5


def test_strided_arrays_are_written_in_order(tmp_path):
    path = tmp_path / "model.gguf"
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_gguf(path, {}, {"t": (F32, (4, 3), array.T)})
    with read_gguf(path) as file:
        assert np.array_equal(file.data("t").view("<f4").reshape(4, 3), array.T)


def test_metadata_of_a_file_can_be_written_again(tmp_path):
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    odd = b"\xff\xfe".decode("utf-8", "surrogateescape")
    write_gguf(one, {**METADATA, "odd": odd, "odds": [odd, "a"]}, {}, alignment=64)
    with read_gguf(one) as file:
        again = {
            k: file.metadata[k] for k in file.metadata if k not in ("no_names", "exact", "short", "byte")
        }
        write_gguf(two, again, {})
        with read_gguf(two) as copy:
            assert copy.alignment == 64
            assert {k: plain(v) for k, v in copy.metadata.items()} == {k: plain(v) for k, v in again.items()}
            assert [copy.metadata.type_of(k) for k in again] == [file.metadata.type_of(k) for k in again]


def test_a_mapped_file_may_be_replaced(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, {"x": (F32, (1,), b"old!")})
    with read_gguf(path) as file:
        data = file.data("x")
        write_gguf(path, {}, {"x": (F32, (1,), b"new!")})
        assert data.tobytes() == b"old!"
    with read_gguf(path) as file:
        assert file.data("x").tobytes() == b"new!"
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


VALUES = (
    st.text(max_size=20)
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(width=32, allow_nan=False)
    | st.lists(st.text(max_size=9), min_size=1, max_size=5)
    | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5)
    | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5)
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    metadata=st.dictionaries(
        st.text(min_size=1, max_size=30).filter(lambda k: k != "general.alignment"), VALUES, max_size=6
    ),
    sizes=st.lists(st.integers(1, 70), max_size=5),
    alignment=st.sampled_from([1, 4, 32, 128]),
)
def test_anything_legal_comes_back(tmp_path, metadata, sizes, alignment):
    metadata.pop("split.count", None)
    path = tmp_path / "any.gguf"
    parts = {f"t{i}": (DTYPES["i8"], (n,), bytes(range(n))) for i, n in enumerate(sizes)}
    write_gguf(path, metadata, parts, alignment=alignment)
    with read_gguf(path) as file:
        read = {k: plain(v) for k, v in file.metadata.items() if k != "general.alignment"}
        assert read == metadata
        assert {n: file.data(n).tobytes() for n in file.tensors} == {
            n: raw for n, (_, _, raw) in parts.items()
        }


# Misuse: one error, and no file.


@pytest.mark.parametrize(
    ("metadata", "parts", "options", "said"),
    [
        ({}, {}, {"version": 1}, "the GGUF version is 1, expected 2 or 3"),
        ({}, {}, {"alignment": 24}, "the alignment is 24"),
        ({}, {}, {"alignment": 0}, "the alignment is 0"),
        ({}, {}, {"alignment": -32}, "the alignment is -32"),
        ({"general.alignment": 64}, {}, {"alignment": 32}, "the alignment is 32 and general.alignment is 64"),
        ({"general.alignment": "64"}, {}, {}, "general.alignment is '64'"),
        ({"k": 2**64}, {}, {}, "'k' is int 18446744073709551616, which GGUF cannot hold"),
        ({"k": None}, {}, {}, "'k' is NoneType None"),
        ({"k": 1j}, {}, {}, "'k' is complex"),
        ({"k": np.float16(1)}, {}, {}, "'k' is float16"),
        ({"k": []}, {}, {}, "'k' is not a flat array"),
        ({"k": ["a", 1]}, {}, {}, "'k' is not a flat array"),
        ({"k": [[1], [2]]}, {}, {}, "'k' is not a flat array"),
        ({"k": [-1, 2**63]}, {}, {}, "'k' is not a flat array"),
        ({"k": np.zeros((2, 2))}, {}, {}, "'k' is not a flat array"),
        ({}, {"x": (F32, (2,), b"1234")}, {}, "'x' comes with 4 bytes, expected 8 for f32"),
        ({}, {"x": (Q4_0, (33,), bytes(18))}, {}, "a multiple of 32 for q4_0"),
        ({}, {"x": (F32, (1, 1, 1, 1, 1), bytes(4))}, {}, "'x' has shape (1, 1, 1, 1, 1), expected 0 to 4"),
        ({}, {"x": (F32, (0,), b"")}, {}, "'x' has shape (0,)"),
        ({}, {"x": (Q8_X, (32,), bytes(Q8_X.nbytes))}, {}, "'x' has type q8_x, which never stands in a file"),
        (
            {},
            {"x": (F32, (2,), np.zeros(2, np.int32))},
            {},
            "'x' is given as int32, expected uint8 or float32",
        ),
    ],
)
def test_misuse(tmp_path, metadata, parts, options, said):
    path = tmp_path / "model.gguf"
    with pytest.raises(GgufError) as caught:
        write_gguf(path, metadata, parts, **options)
    message = str(caught.value)
    assert said in message and message.startswith(f"{path}: ") and "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(GgufError, match="cannot be written"):
        write_gguf(tmp_path / "absent" / "model.gguf", {}, {})
    (tmp_path / "taken").mkdir()
    with pytest.raises(GgufError, match="cannot be written"):
        write_gguf(tmp_path / "taken", {}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
