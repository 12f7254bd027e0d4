"""Every LANEWISE_* variable, typed; the only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from engine.errors import SettingError


@dataclass(frozen=True)
class Settings:
    """What a user may set from outside.

    Attributes:
        cache_dir: the place of compiled kernels and tokeniser tables.
        cache_limit_mb: the size above which the oldest compiled kernels are removed.
        threads: threads of the CPU team, 0 for all cores this process may use.
        lanes: SIMD width of the CPU target, 0 for the CPU's own (4, 8 or 16).
        portable: use the portable form of every word instead of special instructions.
        features: the only special instruction sets words may use, with commas; empty for all this CPU has.
        plugins: a folder of plug-in backend modules.
        fuse: let backends replace ops that follow each other by one that does the work of all.
        opencl_subdevices: equal parts each OpenCL device is used as, 0 or 1 for the whole.
        opencl_repeats: how often each OpenCL device or part is offered, 0 or 1 for once.
        golden: the folder of golden data the tests compare with.
    """

    cache_dir: Path = Path()
    cache_limit_mb: int = 1024
    threads: int = 0
    lanes: int = 0
    portable: bool = False
    features: str = ""
    plugins: Path | None = None
    golden: Path | None = None
    fuse: bool = True
    opencl_subdevices: int = 0
    opencl_repeats: int = 0


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lanewise"


def _parse(name: str, kind: str, text: str) -> object:
    variable = f"LANEWISE_{name.upper()}"
    if kind.startswith("Path"):
        return Path(text)
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false", "yes", "no", ""):
            raise SettingError(f"{variable}={text!r} is not a truth value: use 0 or 1")
        return text.lower() in ("1", "true", "yes")
    try:
        value = int(text)
    except ValueError:
        raise SettingError(f"{variable}={text!r} is not an integer") from None
    if value < 0:
        raise SettingError(f"{variable}={value} is negative: use 0 for the default")
    return value


def _read() -> Settings:
    values = {}
    for f in fields(Settings):
        text = os.environ.get(f"LANEWISE_{f.name.upper()}")
        if text is not None:
            values[f.name] = _parse(f.name, str(f.type), text)
    values.setdefault("cache_dir", _default_cache())
    settings = Settings(**values)  # type: ignore[arg-type]
    if settings.lanes not in (0, 4, 8, 16):
        raise SettingError(f"LANEWISE_LANES={settings.lanes}: the CPU target has 4, 8 or 16 lanes (0 picks)")
    if settings.threads > 1024:
        raise SettingError(f"LANEWISE_THREADS={settings.threads}: 1 to 1,024 threads (0 picks)")
    return settings


_current: Settings | None = None


def settings() -> Settings:
    """The settings in force, read from the environment once."""
    global _current
    if _current is None:
        _current = _read()
    return _current


def opencl_drivers() -> tuple[Path, ...]:
    """Where OpenCL's loader finds the drivers of this machine: folders of .icd files, and single ones."""
    files = os.environ.get("OCL_ICD_FILENAMES", "").split(os.pathsep)
    return (Path(os.environ.get("OCL_ICD_VENDORS") or "/etc/OpenCL/vendors"), *(Path(f) for f in files if f))


def cuda_simulator() -> bool:
    """Whether Numba was told to run its CUDA simulator instead of GPUs: its own variable, NUMBA_ENABLE_CUDASIM."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


@contextmanager
def override(**values: object) -> Iterator[Settings]:
    """Other settings inside a `with`, for tests."""
    global _current
    before = settings()
    _current = replace(before, **values)  # type: ignore[arg-type]
    try:
        yield _current
    finally:
        _current = before
