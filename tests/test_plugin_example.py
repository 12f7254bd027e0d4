"""A backend in a package of its own: found by its entry point, tested by its author with three lines, and by `lanewise check`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backend import Backend
from engine.testing import conformance_tests

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "tests" / "plugin_example"
FAULTY = """
import numpy as np
from lanewise_numpy import KERNELS, NumpyBackend


class FaultyBackend(NumpyBackend):
    name = "faulty"
    kernels = {**KERNELS, "silu": lambda x: x / (1 + np.exp(-x)) + np.float32(1e-3)}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The example as `pip install` leaves it: the package, and beside it the metadata that names its entry points."""
    place = tmp_path / "site-packages"
    shutil.copytree(EXAMPLE / "lanewise_numpy", place / "lanewise_numpy", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = place / "lanewise_numpy-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lanewise-numpy\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[engine.backends]\nnumpy = lanewise_numpy:NumpyBackend\n")
    return place


def run(place: Path, *argv: str, **settings: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(place), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=240, cwd=place,
                          env={**os.environ, "PYTHONPATH": path, **settings})


def test_the_project_file_declares_the_entry_point() -> None:
    assert 'numpy = "lanewise_numpy:NumpyBackend"' in (EXAMPLE / "pyproject.toml").read_text()


def test_three_lines_of_pytest_run_the_whole_suite(installed: Path) -> None:
    lines = [line for line in (EXAMPLE / "test_lanewise_numpy.py").read_text().splitlines() if line]
    assert len(lines) == 3
    shutil.copy(EXAMPLE / "test_lanewise_numpy.py", installed)
    done = run(installed, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(installed), "test_lanewise_numpy.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("add-f32-f32-f32-numpy", "mul_mat-f32-f32-f32-numpy", "silu-claims", "graphs"):
        assert f"test_numpy[{name}] PASSED" in done.stdout


def test_lanewise_check_finds_it_by_its_entry_point(installed: Path) -> None:
    done = run(installed, "-m", "engine", "check", "-b", "numpy", "--seed", "5", "--json", "-o", "silu,add")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] and told["seed"] == 5 and [d["name"] for d in told["devices"]] == ["numpy"]
    assert {c["name"] for c in told["devices"][0]["checks"]} == {"silu-f32-f32-numpy", "silu-claims", "add-f32-f32-f32-numpy", "add-claims"}


def test_a_faulty_one_in_the_plugin_folder_fails_and_can_be_run_again(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "faulty.py").write_text(FAULTY)
    done = run(installed, "-m", "engine", "check", "-b", "faulty", "-p", "silu-f32", "--json", LANEWISE_PLUGINS=str(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)["devices"][0]["checks"]
    assert found["status"] == "mismatch" and "Traceback" not in done.stderr
    call = found["reason"].rpartition("--call '")[2].partition("'")[0]
    for device, status in (("faulty", 1), ("numpy", 0)):
        again = run(installed, "-m", "engine", "check", "-b", device, "--call", call, "--variant", "numpy", LANEWISE_PLUGINS=str(folder))
        assert again.returncode == status, again.stdout + again.stderr


def test_conformance_tests_take_a_backend_its_class_or_its_name(cpu: Backend) -> None:
    from engine.backends.sim import SimBackend

    for given in (SimBackend, "sim", SimBackend.discover(())[0]):
        made = conformance_tests(given, examples=1)
        assert made.pytestmark[0].name == "parametrize"  # type: ignore[attr-defined]
