"""Programs are built once, kept on disk, and every kind of damage or refusal is survived or told."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.backend import DeviceType
from engine.backends.opencl.compiler import Compiler, Source
from engine.backends.opencl.devices import Found, find_devices, library
from engine.errors import BuildError, DeviceError
from engine.object_cache import ObjectCache

TEXT = "__kernel void twice_kernel(__global float *x)\n{\n    x[get_global_id(0)] *= FACTOR;\n}\n"


def source(factor: str = "2.0f") -> Source:
    return Source(TEXT.replace("FACTOR", factor), "twice_kernel", "twice(x f32[1])")


@pytest.fixture(scope="module")
def found() -> Found:
    try:
        return next(f for f in find_devices() if f.device.type is not DeviceType.TEST)
    except (DeviceError, StopIteration) as why:
        pytest.skip(f"no OpenCL device: {why}")


@pytest.fixture
def compiler(found: Found, tmp_path: Path) -> Callable[[], Compiler]:
    """A compiler as in a new process, on the same folder."""
    return lambda: Compiler(found, ObjectCache(tmp_path / "opencl"))


def result(made: Compiler, s: Source) -> list[float]:
    cl, context = library(), made.found.shared.context
    queue = cl.CommandQueue(context, made.found.cl)
    data = np.arange(4, dtype=np.float32)
    memory = cl.Buffer(context, cl.mem_flags.READ_WRITE, data.nbytes)
    cl.enqueue_copy(queue, memory, data)
    (kernel,) = made.kernels([s])
    kernel.set_args(memory)
    cl.enqueue_nd_range_kernel(queue, kernel, (4,), (1,))
    cl.enqueue_copy(queue, data, memory)
    return [float(x) for x in data]


def test_equal_texts_share_a_program(compiler: Callable[[], Compiler]) -> None:
    made, told = compiler(), []
    made.on_compile = lambda left, name: told.append((left, name))
    kernels = made.kernels([source(), source("3.0f"), source()])
    assert len({k.int_ptr for k in kernels}) == 3 and made.compiled == len(made._programs) == 2
    assert told == [(2, "twice"), (1, "twice")]
    assert result(made, source()) == [0, 2, 4, 6] and made.compiled == 2


def test_a_program_comes_from_the_disk_in_the_next_process(compiler: Callable[[], Compiler]) -> None:
    first, second = compiler(), compiler()
    assert result(first, source()) == result(second, source()) == [0, 2, 4, 6]
    assert (first.compiled, first.loaded, second.compiled, second.loaded) == (1, 0, 0, 1)


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: b"", lambda data: data[:-1] + bytes([data[-1] ^ 1])],
                         ids=["cut", "empty", "one bit"])
def test_a_damaged_entry_is_built_again(compiler: Callable[[], Compiler], tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    result(compiler(), source())
    (path,) = (tmp_path / "opencl").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = compiler()
    assert result(again, source()) == [0, 2, 4, 6] and again.compiled == 1
    assert result(third := compiler(), source()) == [0, 2, 4, 6] and third.loaded == 1


def test_machine_code_the_driver_does_not_want_is_built_again(compiler: Callable[[], Compiler], caplog: pytest.LogCaptureFixture) -> None:
    made = compiler()
    made.cache.put(made.key(source()), b"no machine code at all")
    with caplog.at_level(logging.WARNING):
        assert result(made, source()) == [0, 2, 4, 6]
    assert made.compiled == 1 and "cannot be used" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="uses /proc")
def test_a_folder_that_cannot_be_written_is_survived(found: Found) -> None:
    made = Compiler(found, ObjectCache(Path("/proc/self/opencl")))
    assert result(made, source()) == [0, 2, 4, 6] and made.compiled == 1


def test_two_processes_share_a_folder(tmp_path: Path, found: Found) -> None:
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from engine.backends.opencl.compiler import Compiler, Source
        from engine.backends.opencl.devices import find_devices
        from engine.object_cache import ObjectCache
        found = next(f for f in find_devices() if f.device.name == sys.argv[2])
        made = Compiler(found, ObjectCache(Path(sys.argv[1])))
        made.kernels([Source(f"__kernel void f(__global float *x) {{ x[0] = {k}; }}", "f", "f") for k in range(6)])
        print(made.compiled + made.loaded)
    """)
    command = [sys.executable, "-c", code, str(tmp_path), found.device.name]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [p.communicate(timeout=120)[0].strip() for p in running] == ["6", "6"]
    assert len([p for p in tmp_path.iterdir() if p.suffix == ".o"]) == len(list(tmp_path.iterdir())) == 6


def test_the_key_sees_text_options_and_driver(compiler: Callable[[], Compiler], monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler()
    keys = {made.key(source()), made.key(source("3.0f"))}
    monkeypatch.setattr(Found, "driver", property(lambda self: "another"))
    keys.add(made.key(source()))
    monkeypatch.setattr(Found, "rounds_divisions", property(lambda self: False))
    keys.add(made.key(source()))
    assert len(keys) == 4


def test_options_keep_the_numbers(compiler: Callable[[], Compiler]) -> None:
    made = compiler()
    assert not any("fast" in o or "unsafe" in o or "mad-enable" in o for o in made.options)
    assert ("-cl-fp32-correctly-rounded-divide-sqrt" in made.options) == made.found.rounds_divisions


def test_a_text_that_is_refused_comes_with_log_and_numbered_source(compiler: Callable[[], Compiler]) -> None:
    wrong = source("no_such_name")
    with pytest.raises(BuildError, match=r"twice\(x f32\[1\]\)") as caught:
        compiler().kernels([source(), wrong])
    why = caught.value
    assert "no_such_name" in why.log and why.source == wrong.text
    assert "\n3      x[get_global_id(0)] *= no_such_name;\n" in str(why)
