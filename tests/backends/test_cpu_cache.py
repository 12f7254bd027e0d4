# ruff: noqa: F821 (kernels: free names are constants)
"""Compiled kernels are kept: hits are cheap, damage is repaired, keys see every change, and the folder stays within its limit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu.compile import ENTRY, Compiler, Request
from engine.backends.cpu.features import features
from engine.backends.cpu.words import Features
from engine.dtypes import F16, F32, Q4_1
from engine.lang.function import Function
from engine.lang.tree import Table, ViewType
from engine.lang.words import DECODERS, codes, f32, function, lanes, ubyte
from engine.object_cache import MAGIC, ObjectCache

ROOT = Path(__file__).parents[2]
FACTOR = 3


@function
def grown(v):
    return v * FACTOR


def kernel(row, x, y, n):
    for i in lanes(n):
        y[row, i] = grown(x[row, i]) + BY


def request(fn: Any = kernel, **changes: Any) -> Request:
    views = {"x": ViewType(F32, 2), "y": ViewType(F32, 2)}
    made = Request(fn if isinstance(fn, Function) else Function(fn), views, ("row",), ("n",), (), {"LANES": 8, "BY": 1}, features(8))
    return replace(made, **changes)


def result(compiler: Compiler, r: Request) -> list[float]:
    (address,) = compiler.addresses([r])
    x, y = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    params = np.array([x.ctypes.data, 20, 4, y.ctypes.data, 20, 4, 1, 5], np.int64)
    ENTRY(address)(params.ctypes.data, 0, 1)
    return y.tolist()


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As in a new process: no kernel is in memory yet."""

    def clear() -> None:
        monkeypatch.setattr("engine.backends.cpu.compile._addresses", {})

    clear()
    return clear


WANTED = [1.0, 4.0, 7.0, 10.0, 13.0]


# -- entries ----------------------------------------------------------------------------------------------------


def test_what_is_put_is_got(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "kernels")
    assert cache.get("a") is None
    cache.put("a", b"code")
    assert cache.get("a") == b"code"
    assert [p.name for p in (tmp_path / "kernels").iterdir()] == ["a.o"]
    assert cache.clear() == 1 and cache.get("a") is None


def test_no_folder_keeps_nothing() -> None:
    cache = ObjectCache(None)
    cache.put("a", b"code")
    assert cache.get("a") is None and cache.clear() == 0 and list(cache.entries()) == []


@pytest.mark.parametrize("damage", [
    lambda data: data[:20], lambda data: b"", lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    lambda data: b"XXXX" + data[4:], lambda data: MAGIC + bytes(32) + data[36:]],
    ids=["head cut", "empty", "end cut", "one bit", "other magic", "other checksum"])
def test_a_damaged_entry_is_removed(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = ObjectCache(tmp_path)
    cache.put("a", b"some object code")
    path = tmp_path / "a.o"
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert cache.get("a") is None
    assert "damaged" in caplog.text and not path.exists()


def test_the_limit_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit=3500)
    for k, name in enumerate("abc"):
        cache.put(name, bytes(1000))
        os.utime(tmp_path / f"{name}.o", (k, k))
    cache.get("a")  # used just now: b is the oldest
    cache.put("d", bytes(1000))
    assert sorted(p.stem for p, _, _ in cache.entries()) == ["a", "c", "d"]


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    old, new = tmp_path / ".new-old", tmp_path / ".new-now"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.put("a", b"code")
    assert not old.exists() and new.exists()


def test_a_file_in_place_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").write_text("no folder")
    compiler = Compiler(ObjectCache(tmp_path / "kernels"))
    with caplog.at_level(logging.WARNING):
        assert result(compiler, request()) == WANTED
        assert result(compiler, request(constants={"LANES": 8, "BY": 2})) == [v + 1 for v in WANTED]
    told = [r for r in caplog.records if "cannot be kept" in r.message]
    assert len(told) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("read-only")

    cache = ObjectCache(tmp_path)
    cache.put("a", b"code")
    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    monkeypatch.setattr("os.utime", refuse)
    cache.put("b", b"code")
    assert cache.get("a") == b"code" and cache.get("b") is None


def test_nothing_is_left_of_an_entry_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", refuse)
    ObjectCache(tmp_path).put("a", b"code")
    assert list(tmp_path.iterdir()) == []


# -- the compiler -----------------------------------------------------------------------------------------------


def test_a_kernel_is_compiled_once(tmp_path: Path, forget: Callable[[], None]) -> None:
    first, told = Compiler(ObjectCache(tmp_path)), []
    first.on_compile = lambda left, name: told.append((left, name))
    assert result(first, request()) == WANTED and result(first, request()) == WANTED
    assert (first.compiled, first.loaded) == (1, 0) and told == [(1, "kernel")] and first.seconds > 0
    forget()
    second = Compiler(ObjectCache(tmp_path), on_compile=first.on_compile)
    assert result(second, request()) == WANTED
    assert (second.compiled, second.loaded) == (0, 1) and len(told) == 1


def test_equal_requests_are_compiled_once_and_counted_down(tmp_path: Path) -> None:
    told: list[int] = []
    compiler = Compiler(ObjectCache(tmp_path), on_compile=lambda left, name: told.append(left))
    other = request(constants={"LANES": 8, "BY": 2})
    a, b, c = compiler.addresses([request(), other, request()])
    assert a == c != b and told == [2, 1]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "foreign"])
def test_the_compiler_recovers(tmp_path: Path, damage: str, forget: Callable[[], None]) -> None:
    result(Compiler(ObjectCache(tmp_path)), request())
    (path,) = tmp_path.glob("*.o")
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        path.write_bytes(data[:100] + bytes([data[100] ^ 255]) + data[101:])
    elif damage == "deleted":
        path.unlink()
    else:  # a sound entry that is no object code
        ObjectCache(tmp_path).put(path.stem, b"not an object file" * 10)
    forget()
    compiler = Compiler(ObjectCache(tmp_path))
    assert result(compiler, request()) == WANTED
    assert compiler.compiled == 1 and path.exists()


def test_the_folder_may_vanish_while_it_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    compiler = Compiler(ObjectCache(folder))
    assert result(compiler, request()) == WANTED
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert result(compiler, request()) == WANTED
    assert result(compiler, request(constants={"LANES": 8, "BY": 2})) == [v + 1 for v in WANTED]


# -- keys -------------------------------------------------------------------------------------------------------


def test_equal_requests_have_equal_keys() -> None:
    assert request().key() == request().key()


def other_text(row, x, y, n):
    for i in lanes(n):
        y[row, i] = grown(x[row, i]) - BY


X, Y = ViewType(F32, 2), ViewType(F32, 2)
CHANGES: dict[str, Mapping[str, Any]] = {
    "text": {"function": Function(other_text)}, "constant": {"constants": {"LANES": 8, "BY": 2}},
    "more constants": {"constants": {"LANES": 8, "BY": 1, "MORE": 1}}, "features": {"features": Features(8, frozenset())},
    "lanes": {"features": Features(16, features(8).names)}, "type": {"views": {"x": ViewType(F16, 2), "y": Y}},
    "stride": {"views": {"x": ViewType(F32, 2, False), "y": Y}}, "dimensions": {"views": {"x": ViewType(F32, 3), "y": Y}},
    "layout": {"views": {"x": ViewType(F32, 2, layout="lanes8"), "y": Y}}, "order": {"views": {"y": Y, "x": X}},
    "groups": {"groups": ("row", "col")}, "ints": {"ints": ("n", "m")}, "floats": {"floats": ("n",), "ints": ()}}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_key_sees(changes: Mapping[str, Any]) -> None:
    assert request(**changes).key() != request().key()


def test_the_key_sees_a_called_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = request().key()

    def text(v):
        return v * FACTOR + 1.0

    monkeypatch.setitem(globals(), "grown", Function(text))
    assert request().key() != before


def test_the_key_sees_a_constant_of_the_module_even_through_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = request().key()
    monkeypatch.setitem(globals(), "FACTOR", 4)
    assert request().key() != before


def decoding(row, w, y, n):
    for i in lanes(n):
        y[row, i] = f32(ubyte(codes(w[row, i], 0, 0), 0))


def test_the_key_sees_the_decoders_of_its_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    views = {"w": ViewType(Q4_1, 2), "y": ViewType(F32, 2)}

    def first_codes(block, s, t):
        return block.qs[0]

    def second_codes(block, s, t):
        return block.qs[1]

    plain = request().key()
    monkeypatch.setitem(DECODERS, "q4_1", {"codes": Function(first_codes)})
    before = request(decoding, views=views).key()
    monkeypatch.setitem(DECODERS, "q4_1", {"codes": Function(second_codes)})
    assert request(decoding, views=views).key() != before
    assert request().key() == plain  # a kernel without such a block does not care


def test_the_key_sees_the_values_of_tables() -> None:
    def reading(row, y, n):
        for i in lanes(n):
            y[row, i] = f32(ubyte(KEYED[i], 0))

    def key_with(values: list[int]) -> str:
        made = Function(reading)
        made.fn.__globals__["KEYED"] = Table("KEYED", np.array(values, np.uint32))
        try:
            return request(made, views={"y": ViewType(F32, 2)}).key()
        finally:
            del made.fn.__globals__["KEYED"]

    assert key_with([1, 2]) == key_with([1, 2]) != key_with([1, 3])


# -- other processes --------------------------------------------------------------------------------------------

ADD = """
    import sys
    import numpy as np
    from engine.backend import HOST, place
    from engine.backends.cpu import CpuBackend
    from engine.dtypes import F32
    from engine.op import Step
    from engine.tensor import leaf
    from kernels import OPS

    cpu = CpuBackend(list(OPS.values()), threads=2)
    a, b = (place(leaf(F32, (3, 5), name), HOST.allocate(60)) for name in "ab")
    for t in (a, b):
        t.buffer.set(t, np.arange(15, dtype=np.float32))
    node = OPS["add"](a, b)
    place(node, HOST.allocate(60))
    cpu.prepare([Step.of(node)]).run()
    assert np.array_equal(node.buffer.array(node), 2 * np.arange(15, dtype=np.float32).reshape(3, 5))
    print(cpu.compiler.compiled, "numba" in sys.modules, "engine.lang.walk" in sys.modules)
"""


def python(script: str, cache: Path, *paths: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "LANEWISE_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def said(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_a_hit_needs_no_numba_and_no_typing(tmp_path: Path) -> None:
    assert said(python(ADD, tmp_path)) == "1 True True"
    assert said(python(ADD, tmp_path)) == "0 False False"


@pytest.mark.slow
def test_several_processes_fill_one_cache(tmp_path: Path) -> None:
    processes = [python(ADD, tmp_path) for _ in range(4)]
    assert all(said(p).split()[0] in ("0", "1") for p in processes)
    assert said(python(ADD, tmp_path)) == "0 False False"
    assert not list(tmp_path.glob("**/.new-*"))


def test_an_edited_helper_of_another_file_is_seen_by_the_next_process(tmp_path: Path) -> None:
    """Numba's own cache would not see it."""
    (tmp_path / "plugged.py").write_text(textwrap.dedent("""
        from engine.object_cache import ObjectCache
        from engine.backends.cpu.compile import ENTRY, Compiler, Request
        from engine.backends.cpu.features import features
        from engine.dtypes import F32
        from engine.lang.function import Function
        from engine.lang.tree import ViewType
        from engine.lang.words import lanes
        from engine.settings import settings
        from helper import changed
        import numpy as np

        def kernel(row, x, y, n):
            for i in lanes(n):
                y[row, i] = changed(x[row, i])

        request = Request(Function(kernel), {"x": ViewType(F32, 2), "y": ViewType(F32, 2)}, ("row",), ("n",), (), {"LANES": 8}, features(8))
        compiler = Compiler(ObjectCache(settings().cache_dir))
        (address,) = compiler.addresses([request])
        x, y = np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32)
        params = np.array([x.ctypes.data, 12, 4, y.ctypes.data, 12, 4, 1, 3], np.int64)
        ENTRY(address)(params.ctypes.data, 0, 1)
        print(compiler.compiled, y[0, 2])
        """))
    helper = "from engine.lang.words import function\nBY = {by}\n\n@function\ndef changed(v):\n    return v {sign} BY\n"

    def run(sign: str, by: str) -> str:
        (tmp_path / "helper.py").write_text(helper.format(sign=sign, by=by))
        return said(python("import sys; sys.dont_write_bytecode = True; import plugged", tmp_path / "cache", tmp_path))

    assert run("+", "2.0") == "1 3.0"
    assert run("+", "2.0") == "0 3.0"
    assert run("*", "2.0") == "1 2.0"
    assert run("*", "5.0") == "1 5.0"
