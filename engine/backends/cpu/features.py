"""What this CPU can do: the width of the lanes and the special instructions the words may use."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm

from engine.backends.cpu.words import Features
from engine.errors import SettingError
from engine.settings import settings

SPECIAL = ("ssse3", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avxvnni")


@cache
def host_features() -> frozenset[str]:
    """The special instruction sets of this CPU that words ask for."""
    try:
        found = llvm.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(n for n in SPECIAL if found.get(n))


def features(lanes: int = 0) -> Features:
    """The target in force: `lanes`, or the setting, or AVX-512 16, AVX2 8, else 4; special forms as far as settings allow them."""
    names = host_features()
    if settings().features:
        allowed = {n.strip() for n in settings().features.split(",")}
        if unknown := allowed - set(SPECIAL):
            raise SettingError(f"LANEWISE_FEATURES names {sorted(unknown)[0]!r}: {', '.join(SPECIAL)} are known")
        names &= allowed
    wanted = lanes or settings().lanes
    if not wanted:
        wanted = 16 if {"avx512f", "avx512bw", "avx512vl"} <= names else 8 if "avx2" in names else 4
    return Features(wanted, frozenset() if settings().portable else names)
