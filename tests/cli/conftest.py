"""A command line run in this process or in one of its own, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.cli import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_model import write_tiny_model  # noqa: E402  # found through the line above


@dataclass
class Result:
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str

    def failed(self, status: int, *words: str) -> None:
        """Check that it failed with one clear line that has these words, and printed no result."""
        assert self.status == status, self
        assert self.out == ""
        told = [line for line in self.err.splitlines() if " compiling kernels " not in line]
        assert len(told) == 1 and told[0].startswith("lanewise: "), self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in told[0], self.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command in this process."""

    def run(*argv: object) -> Result:
        capsys.readouterr()
        status = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return Result(status, out, err)

    return run


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start a command in a process of its own."""

    def popen(*argv: object, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "engine", *(str(a) for a in argv)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        return subprocess.Popen(command, **(pipes | options))  # type: ignore[call-overload,no-any-return]

    return popen


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's file."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
