"""Architectures by their name in `general.architecture`: each module has `build`, NEOX and WINDOW_PATTERN."""

from __future__ import annotations

from types import ModuleType

from engine.errors import ModelError
from engine.models import gemma3, llama

ARCHITECTURES: dict[str, ModuleType] = {"llama": llama, "gemma3": gemma3}


def architecture(name: str) -> ModuleType:
    """The builder of an architecture. Raises ModelError that lists the known ones."""
    if name not in ARCHITECTURES:
        raise ModelError(f"unknown architecture {name!r}: {', '.join(sorted(ARCHITECTURES))} are supported")
    return ARCHITECTURES[name]
