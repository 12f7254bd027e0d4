"""Operators of other packages: the entry-point group `engine.ops`."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from engine import runtime
from engine.op import Op
from engine.settings import settings

ROOT = Path(__file__).parents[1]
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
SOURCE = next(b for b in README if b.startswith("# kernels/relu_squared.py"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package that brings the README's op."""
    (tmp_path / "squares.py").write_text(SOURCE, encoding="utf-8")
    info = tmp_path / "squares-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: squares\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[engine.ops]\nrelu_squared = squares\n", encoding="utf-8")
    return tmp_path


def run(package: Path, *command: str) -> str:
    environment = {"PATH": "", "HOME": str(package), "PYTHONPATH": f"{package}:{ROOT}", "LANEWISE_CACHE_DIR": str(settings().cache_dir)}
    done = subprocess.run([sys.executable, *command], cwd=package, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_op_of_a_package_is_in_every_table_and_in_the_suite(package: Path) -> None:
    rows = json.loads(run(package, "-m", "engine", "ops", "--op", "relu_squared", "--json"))
    assert "cpu" in json.dumps(rows)
    report = json.loads(run(package, "-m", "engine", "check", "-b", "cpu,sim", "--op", "relu_squared", "--examples", "20", "--json"))
    assert "relu_squared" in json.dumps(report)


def test_an_op_of_a_package_computes(package: Path) -> None:
    code = "import engine, numpy, squares; print(engine.compute(squares.relu_squared(engine.array(numpy.float32([[-2, 3]])))).tolist())"
    assert run(package, "-c", code).strip() == "[[0.0, 9.0]]"


class Point:
    """An entry point that loads, or fails."""

    name = value = "broken"

    def __init__(self, loaded: object) -> None:
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.mark.parametrize(("loaded", "why"), [(ImportError("no squares"), "no squares"), (42, "an Op or a module"),
                                             (runtime, "an Op or a module")])
def test_a_package_that_brings_no_ops_is_left_out_with_the_reason(loaded: object, why: str, monkeypatch: pytest.MonkeyPatch,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Point(loaded)] if group == "engine.ops" else [])
    with caplog.at_level(logging.WARNING):
        assert runtime.ops.__wrapped__() == runtime.OPS
    assert why in caplog.text


def test_an_op_with_a_name_that_is_taken_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    other = Op("rms_norm", "x[a, b, c, n] -> y[a, b, c, n]", params={})
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Point(other)] if group == "engine.ops" else [])
    assert runtime.ops.__wrapped__()["rms_norm"] is runtime.OPS["rms_norm"]
    assert "another op of this name" in caplog.text
