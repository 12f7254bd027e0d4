"""Lanewise: a JIT-compiled kernel engine. Operators are written once, in a many-lanes language, and run on every backend."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.errors import LanewiseError
    from engine.generate import Generation
    from engine.model import Context, Model
    from engine.runtime import array, compute, devices, load, quantize
    from engine.sample import SamplerSettings
    from engine.tensor import Tensor

__version__ = "0.1.0"
__all__ = ["Context", "Generation", "LanewiseError", "Model", "SamplerSettings", "Tensor", "__version__", "array", "compute", "devices",
           "load", "quantize"]

_HOME = {"Context": "model", "Model": "model", "Generation": "generate", "LanewiseError": "errors", "SamplerSettings": "sample",
         "Tensor": "tensor", "array": "runtime", "compute": "runtime", "devices": "runtime", "load": "runtime", "quantize": "runtime"}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import engine` stays light."""
    if name in _HOME:
        return getattr(importlib.import_module(f"engine.{_HOME[name]}"), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


def _require_own_kernels() -> None:
    """Another distribution installs a package called `kernels` too: say so at once."""
    found = importlib.util.find_spec("kernels")
    places = [Path(p).resolve() for p in (found.submodule_search_locations or [])] if found else []
    own = Path(__file__).resolve().parent.parent / "kernels"
    if own not in places:
        where = places[0] if places else "nowhere"
        raise ImportError(f"Lanewise's package `kernels` is hidden: Python finds {where} instead of {own}; uninstall the other one")


_require_own_kernels()
