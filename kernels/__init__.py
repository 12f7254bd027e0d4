"""The operators. `OPS` holds every Op of this package by name; there is no hand-kept list."""

from __future__ import annotations

import importlib
import pkgutil

from engine.op import Op

OPS: dict[str, Op] = {}
for _info in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_info.name}")
    OPS.update({v.name: v for v in vars(_module).values() if isinstance(v, Op)})

__all__ = ["OPS"]
