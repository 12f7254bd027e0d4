"""What a GPU's kernels cannot take, as reasons: places the loads could not read.

Limits of a launch refuse nothing: blocks lie along x and larger grids are folded; a block of 128 threads has room for 255 registers each on
every GPU; groups of a warp need no shared memory.
"""

from __future__ import annotations

from engine.backend import KernelTable, Row
from engine.op import Call
from engine.tensor import Tensor


class CudaTable(KernelTable):
    """A kernel table that knows that a GPU reads numbers only at multiples of their size."""

    def first(self, call: Call, variant: str | None) -> tuple[Row | None, str, str]:
        row, name, why = super().first(call, variant)
        if row is not None and (reason := misplaced(call)):
            return None, "", reason
        return row, name, why


def misplaced(call: Call) -> str:
    """Which operand lies at addresses that a GPU cannot read it from; empty where none does."""
    for name, t in call.tensors.items():
        if t is not None and (want := alignment_of(t)) > 1:
            steps = [s for n, s in zip(_units(t), t.strides, strict=True) if n > 1]
            if wrong := next((x for x in (t.root_offset, *steps) if x % want), None):
                return f"operand {name} has elements at steps of {wrong} bytes: a GPU reads {t.dtype} at multiples of {want}"
    return ""


def alignment_of(t: Tensor) -> int:
    """Bytes the address of each element or block must be a multiple of."""
    if not t.dtype.is_block:
        return t.dtype.nbytes
    return max(t.dtype.alignment(f) for f in t.dtype.fields)


def _units(t: Tensor) -> tuple[int, ...]:
    return (*t.shape[:-1], t.shape[-1] // t.dtype.block_size)
