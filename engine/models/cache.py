"""The KV cache: K in blocks of 32 keys `[kv head, n / 32, head_dim, 32]`, V row-major `[kv head, n, head_dim]`, a tensor of each a layer.

Layers with a sliding window share a ring of cells, the others have a cell for each position. Memory is zeroed lazily by the system; what is
not written is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import Backend, BufferType, place
from engine.dtypes import DTYPES, DType
from engine.errors import ContextError
from engine.models.hparams import Hparams
from engine.tensor import Tensor, leaf

PAD = 256  # attention sees a multiple of this many cells, so that graphs repeat
N_UBATCH = 512  # tokens of a batch, where nothing else is asked for
KV_TYPES = ("f16", "f32")


def kv_dtype(name: str) -> DType:
    """The type of this name for K or V. Raises ContextError if the cache has no such type."""
    if str(name).lower() not in KV_TYPES:
        raise ContextError(f"the KV cache has no type {name!r}: {', '.join(KV_TYPES)} are supported")
    return DTYPES[str(name).lower()]


@dataclass
class Cells:
    """The cells one kind of layer writes to: `position[c]` is the position in cell c, -1 for none; `window` 0 sees everything."""

    size: int
    window: int
    position: np.ndarray

    def place(self, positions: np.ndarray) -> np.ndarray:
        """int32: the cells these positions are written to."""
        return (positions % self.size).astype(np.int32)

    def visible(self, n_past: int, n: int) -> int:
        """Cells attention looks at: a multiple of PAD that covers everything written."""
        return min(self.size, -(-(n_past + n) // PAD) * PAD)

    def mask(self, positions: np.ndarray, n_kv: int) -> np.ndarray:
        """float16 [n, n_kv]: 0 where a token sees a cell, -inf where not."""
        have = self.position[:n_kv][None, :]
        at = positions[:, None]
        seen = (have >= 0) & (have <= at)
        if self.window:
            seen &= at - have < self.window
        return np.where(seen, np.float16(0), np.float16(-np.inf))

    def write(self, positions: np.ndarray) -> None:
        self.position[positions % self.size] = positions

    def holds(self, positions: range) -> bool:
        """Whether no later token has taken the cell of one of these positions."""
        wanted = np.asarray(positions, np.int32)
        return bool((self.position[wanted % self.size] == wanted).all())

    def forget(self, n: int) -> None:
        """Free the cells of position `n` and later ones."""
        self.position[self.position >= n] = -1


def padded(n: int) -> int:
    return -(-n // PAD) * PAD


class KvCache:
    """K and V of every layer, for one sequence of up to `n_ctx` tokens.

    Attributes:
        keys, values: one tensor a layer.
        full, ring: the cells of layers without and with a window.
    """

    def __init__(self, h: Hparams, n_ctx: int, n_ubatch: int, type_k: DType, type_v: DType, homes: list[Backend]) -> None:
        self.h = h
        self.full = _cells(padded(n_ctx), 0)
        ring = padded(min(n_ctx, h.window + max(n_ubatch, N_UBATCH)))  # cells are added up in order: one size, the same bits
        self.ring = _cells(ring, h.window)
        self.keys, self.values = [], []
        for il, home in enumerate(homes):
            size = self.cells(il).size
            self.keys.append(_tensor(type_k, (h.n_head_kv, size // 32, h.head_k, 32), f"cache_k_l{il}", home.buffer_type))
            self.values.append(_tensor(type_v, (h.n_head_kv, size, h.head_v), f"cache_v_l{il}", home.buffer_type))

    def cells(self, il: int) -> Cells:
        return self.ring if self.h.windowed[il] else self.full

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))


def _cells(size: int, window: int) -> Cells:
    return Cells(size, window, np.full(size, -1, np.int32))


def _tensor(dtype: DType, shape: tuple[int, ...], name: str, type: BufferType) -> Tensor:
    t = leaf(dtype, shape, name)
    return place(t, type.allocate(t.nbytes, "cache"))
