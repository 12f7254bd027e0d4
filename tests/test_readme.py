"""The README is true: its snippets run, and what it lists exists."""

from __future__ import annotations

import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import runtime
from engine.backend import Backend
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.cli import COMMANDS
from engine.errors import GgufError
from engine.op import Op
from engine.settings import Settings, override
from engine.testing import conformance

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_model import write_tiny_model  # noqa: E402  # found through the line above

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SCRIPTS = [b for b in BLOCKS if not b.startswith("# ")]
FILES = {b.partition("\n")[0].removeprefix("# "): b for b in BLOCKS if b.startswith("# ")}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model stands in for the demo model where that is not installed."""
    try:
        runtime.demo_model()
    except GgufError:
        tiny = write_tiny_model(tmp_path / "tiny.gguf")
        monkeypatch.setattr(runtime, "demo_model", lambda: tiny)


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_every_kind_of_snippet_is_there() -> None:
    assert len(SCRIPTS) == 5 and set(FILES) == {"kernels/relu_squared.py", "plugins/numpy_add.py"}


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_snippet_runs(number: int, demo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(write(tmp_path, "snippet.py", SCRIPTS[number])))
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("backend", [CpuBackend, SimBackend])
def test_the_op_is_right(backend: type[Backend], tmp_path: Path) -> None:
    made = runpy.run_path(str(write(tmp_path, "relu_squared.py", FILES["kernels/relu_squared.py"])))
    ops = [value for value in made.values() if isinstance(value, Op)]
    report = conformance(backend.discover(ops)[0], ops)
    assert report.ok and [op.name for op in ops] == ["relu_squared"], report


def test_the_backend_is_found_and_runs(tmp_path: Path) -> None:
    from kernels.arithmetic import add

    write(tmp_path, "numpy_add.py", FILES["plugins/numpy_add.py"])
    with override(plugins=tmp_path):
        assert "numpy" in [d["name"] for d in engine.devices() if d["available"]]
        one = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert (engine.compute(add(engine.array(one), engine.array(one)), device="numpy") == 2 * one).all()
        with pytest.raises(engine.LanewiseError, match="differ"):
            engine.compute(add(engine.array(one), engine.array(one[:1])), device="numpy")


def test_commands_settings_and_targets_are_those_there_are() -> None:
    assert set(re.findall(r"^\| `lanewise (\w+)", TEXT, re.MULTILINE)) == set(COMMANDS)
    listed = set(re.findall(r"^\| `LANEWISE_(\w+)`", TEXT, re.MULTILINE)) - {"PROFILE"}
    assert listed == {f.name.upper() for f in fields(Settings)}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", TEXT)) <= targets
