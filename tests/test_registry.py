"""The registry: order, selection by name, and reasons instead of exceptions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.backend import Backend, DeviceType
from engine.backends.null import NullBackend
from engine.errors import DeviceError
from engine.registry import Registry, Unavailable


@dataclass
class Point:
    """An entry point that was not installed."""

    name: str
    load: Callable[[], object]


def point(name: str, type: DeviceType = DeviceType.TEST, *, score: int = 1, device_id: str = "", count: int = 1, probe=None) -> Point:
    """A backend class with devices of `type`; `probe` is raised when they are looked for."""

    class Made(NullBackend):
        @classmethod
        def score(cls) -> int:
            return score

        @classmethod
        def discover(cls, ops) -> list[Backend]:
            if probe is not None:
                raise probe
            return [NullBackend(ops, name if count == 1 else f"{name}{i}", device_type=type, device_id=device_id) for i in range(count)]

    Made.name = name
    Made.__qualname__ = f"{name.title()}Score{score}"
    return Point(name, lambda: Made)


CPU = point("cpu", DeviceType.CPU)


def names(backends: list[Backend]) -> list[str]:
    return [b.name for b in backends]


def test_order_and_default() -> None:
    r = Registry((), found=[point("null"), CPU, point("blas", DeviceType.ACCEL), point("pocl", DeviceType.CPU),
                            point("meta", DeviceType.META), point("igpu", DeviceType.IGPU), point("cuda", DeviceType.GPU, count=2)])
    assert names(r.all) == ["cuda0", "cuda1", "igpu", "meta", "blas", "pocl", "cpu", "null"]
    assert names(r.backends) == ["cuda0", "cuda1", "igpu", "blas", "cpu"]
    assert r.unavailable == []


def test_failures_are_kept_with_their_reason() -> None:
    def broken() -> object:
        raise ImportError("No module named 'pyopencl'")

    def quits() -> object:
        raise SystemExit("a module that calls exit")

    r = Registry((), found=[CPU, Point("opencl", broken), point("cuda", probe=DeviceError("no CUDA driver: install one")),
                            point("odd", probe=RuntimeError("boom\nand more")), point("empty", count=0), point("avx512", score=0),
                            Point("silly", lambda: 42), Point("quits", quits)])
    assert names(r.backends) == ["cpu"]
    assert r.unavailable == [
        Unavailable("opencl", "ImportError: No module named 'pyopencl'"),
        Unavailable("silly", "the entry point names 42, which is no Backend class"),
        Unavailable("quits", "SystemExit: a module that calls exit"),
        Unavailable("cuda", "no CUDA driver: install one"),
        Unavailable("odd", "RuntimeError: boom"),
        Unavailable("empty", "it found no device"),
        Unavailable("avx512", "not on this machine: every variant scores 0")]


def test_the_highest_score_wins() -> None:
    low, high, zero = (point("cpu", DeviceType.CPU, score=s, device_id=f"score {s}") for s in (2, 7, 0))
    r = Registry((), found=[low, high, zero])
    assert [b.device.id for b in r.all] == ["score 7"] and r.unavailable == []


def test_one_device_through_two_drivers_is_used_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        r = Registry((), found=[CPU, point("cuda", DeviceType.GPU, device_id="0000:01:00.0"),
                                point("opencl", DeviceType.GPU, device_id="0000:01:00.0")])
        assert names(r.backends) == ["cuda", "cpu"]
    assert names(r.all) == ["cuda", "opencl", "cpu"]
    assert "opencl is the same device as cuda (0000:01:00.0)" in caplog.text
    assert names(r.select(["opencl"])) == ["opencl", "cpu"]


def test_get_ignores_case_and_lists_the_known() -> None:
    r = Registry((), found=[CPU, point("CUDA", DeviceType.GPU, count=2), point("gone", probe=DeviceError("unplugged"))])
    assert r.get("cuda0") is r.get("CUDA0")
    with pytest.raises(DeviceError, match="no device 'vulkan'; there is CUDA0, CUDA1, cpu"):
        r.get("vulkan")
    with pytest.raises(DeviceError, match="'Gone' is unavailable: unplugged"):
        r.get("Gone")


def test_select() -> None:
    r = Registry((), found=[CPU, point("blas", DeviceType.ACCEL), point("cuda", DeviceType.GPU), point("null")])
    assert names(r.select()) == ["cuda", "blas", "cpu"]
    assert names(r.select(["blas"])) == ["blas", "cpu"]
    assert names(r.select("blas, CUDA")) == ["blas", "cuda", "cpu"]
    assert names(r.select(["null", "cpu"])) == ["null", "cpu"]
    assert names(r.select(["cpu", "blas"])) == ["cpu", "blas"]
    assert names(r.select(["none"])) == names(r.select("NONE")) == ["cpu"]
    assert names(r.select(["cuda"], strict=True)) == ["cuda"]
    assert names(r.select(["cuda", "CUDA"])) == ["cuda", "cpu"]
    for wrong in (["none", "cuda"], [], ["tpu"]):
        with pytest.raises(DeviceError):
            r.select(wrong)


def test_without_a_cpu_the_reason_is_told() -> None:
    r = Registry((), found=[point("cpu", probe=RuntimeError("llvmlite is broken")), point("cuda", DeviceType.GPU)])
    assert names(r.backends) == ["cuda"]
    with pytest.raises(DeviceError, match="'cpu' is unavailable: RuntimeError: llvmlite is broken"):
        r.select(["none"])


PLUGIN = '''
from engine.backend import DeviceType
from engine.backends.null import NullBackend

class MyBackend(NullBackend):
    name = "mine"

    @classmethod
    def discover(cls, ops):
        return [cls(ops, "mine", device_type=DeviceType.GPU)]
'''


def test_plugin_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "foreign.py").write_text("raise SystemExit('this must not run')")
    (tmp_path / "garbage.py").write_bytes(b"\x00\xff not python (")
    (tmp_path / "broken.py").write_text("import no_such_module\nfrom engine.backend import Backend\nclass B(Backend): pass\n")
    (tmp_path / "notes.txt").write_text("not a module")
    with caplog.at_level(logging.DEBUG):
        r = Registry((), found=[CPU], plugins=tmp_path)
    assert names(r.backends) == ["mine", "cpu"]
    assert r.unavailable == [Unavailable("broken", "ModuleNotFoundError: No module named 'no_such_module'")]
    assert "foreign.py defines no backend: skipped" in caplog.text
    assert not [x for x in caplog.records if x.levelno > logging.DEBUG]


def test_a_plugin_competes_by_score(tmp_path: Path) -> None:
    (tmp_path / "faster.py").write_text(PLUGIN.replace('"mine"', '"cpu"').replace("DeviceType.GPU", "DeviceType.CPU")
                                        + "\n    @classmethod\n    def score(cls):\n        return 9\n")
    r = Registry((), found=[CPU], plugins=tmp_path)
    assert [type(b).__name__ for b in r.all] == ["MyBackend"]


def test_a_missing_plugin_folder_is_told(tmp_path: Path) -> None:
    r = Registry((), found=[CPU], plugins=tmp_path / "absent")
    assert r.unavailable == [Unavailable(str(tmp_path / "absent"), "this plug-in folder does not exist")]


def test_installed_entry_points_do_not_raise() -> None:
    assert isinstance(Registry(()).all, list)


def test_what_is_never_used_by_default_is_looked_for_when_it_is_named() -> None:
    looked: list[str] = []
    slow = point("slow", DeviceType.CPU)
    cls = slow.load()

    class Slow(cls):
        @classmethod
        def may_be_default(kind) -> bool:
            return False

        @classmethod
        def discover(kind, ops) -> list[Backend]:
            looked.append("slow")
            return super().discover(ops)

    slow.load = lambda: Slow
    r = Registry((), found=[CPU, slow])
    assert names(r.select(None)) == ["cpu"] and r.get("cpu") and not looked
    assert names(r.select("slow")) == ["slow", "cpu"] and looked == ["slow"]
    assert names(r.all) == ["slow", "cpu"] and looked == ["slow"]
