"""PoCL on CPUs younger than it is.

PoCL asks LLVM for the CPU's name and hands it to Clang. The LLVM 14 of the PyPI wheel answers "generic" for CPUs it does not know, which
its Clang refuses ("unknown target CPU 'generic'"): every build fails (pocl issue 1049). No option or variable overrides the name, so it is
corrected where PoCL keeps it: in the device's record, a string of its own on the heap. Nothing is written unless the record's pointers
lead to exactly one place in writable memory that holds this very name.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

UNKNOWN, KNOWN = b"generic\0", b"haswell\0"  # of equal length
RECORD = 4096  # bytes searched, as far as they are mapped


def name_cpu(device: Any) -> bool:
    """Give PoCL the name of an AVX2 CPU in place of "generic". True if that was needed and done."""
    if "PoCL" not in device.platform.version or platform.machine() != "x86_64" or not _has_avx2():
        return False
    maps = _mapped()
    places = set()
    for at in range(device.int_ptr, device.int_ptr + RECORD, 8):
        if not _lies_in(maps, at, 8, "r"):
            break
        p = ctypes.c_uint64.from_address(at).value
        if _lies_in(maps, p, len(UNKNOWN), "rw") and ctypes.string_at(p, len(UNKNOWN)) == UNKNOWN:
            places.add(p)
    if len(places) != 1:
        return False
    ctypes.memmove(places.pop(), KNOWN, len(KNOWN))
    log.info("%s does not know this CPU; it compiles for an AVX2 one", device.platform.version.strip())
    return True


def _has_avx2() -> bool:
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    except (OSError, StopIteration):
        return False
    return {"avx2", "fma", "bmi2", "f16c"} <= set(flags)


def _mapped() -> list[tuple[int, int, str]]:
    out = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, access = line.split()[:2]
        low, high = (int(x, 16) for x in extent.split("-"))
        out.append((low, high, access))
    return out


def _lies_in(maps: list[tuple[int, int, str]], at: int, nbytes: int, access: str) -> bool:
    return any(low <= at and at + nbytes <= high and all(a in have for a in access) for low, high, have in maps)
