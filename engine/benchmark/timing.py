"""Timing, and what a figure depends on beside the code that is measured: the machine and the build."""

from __future__ import annotations

import math
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from engine import __version__
from engine.backend import Backend
from engine.backends.cpu.features import host_features
from engine.errors import LanewiseError


class WrongResult(LanewiseError):
    """What was timed is not what the reference says, or not a number."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition, in order."""

    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def stddev(self) -> float:
        """The sample's standard deviation, 0 for a single repetition."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    def quantile(self, q: float) -> float:
        """The value below which a share of `q` lies, interpolated."""
        return float(np.quantile(self.samples, q))


def measure(run: Callable[[], object], *, seconds: float = 0.2, least: int = 3, most: int = 1000, calls: int = 1) -> Timing:
    """Time `run` after a warm-up until `seconds` have passed: `least` to `most` times. `calls` is how many calls one run stands for."""
    run()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < least or (len(samples) < most and time.perf_counter() < end):
        started = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - started) / 1e9 / calls)
    return Timing(tuple(samples))


# -- where it ran -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a figure depends on beside the code that is measured.

    Attributes:
        build_commit, build_number: of this source tree; the version and 0 for an installed package. "+" marks uncommitted changes.
        features: special instruction sets that kernels may use here.
    """

    build_commit: str
    build_number: int
    cpu_info: str
    features: str
    versions: str


@cache
def machine() -> Machine:
    """This machine and this build."""
    commit, number = _build()
    return Machine(commit, number, _cpu_name(), " ".join(sorted(host_features())), _versions())


def _build() -> tuple[str, int]:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__, 0
    try:
        commit, number = _git(root, "rev-parse --short HEAD"), _git(root, "rev-list --count HEAD")
        changed = _git(root, "status --porcelain -uno -- engine kernels")
    except (OSError, subprocess.CalledProcessError):
        return __version__, 0
    return commit + "+" * bool(changed), int(number)


def _git(root: Path, words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words.split()], capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> str:
    found = [f"lanewise {__version__}", f"python {platform.python_version()}"]
    for name in ("numpy", "numba", "llvmlite"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


@cache
def cache_nbytes() -> int:
    """Bytes of the last-level cache, 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if m := re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip()):
            sizes.append(int(m[1]) << {"": 0, "K": 10, "M": 20}[m[2]])
    return max(sizes, default=32 << 20)


def compile_seconds(backends: Iterable[Backend]) -> float:
    """Seconds these backends have spent compiling kernels so far."""
    return sum(compiler.seconds for b in backends if (compiler := getattr(b, "compiler", None)) is not None)


def rounded(value: Any) -> Any:
    """A float with six digits, for output; anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
