"""Parts that architectures share: inputs of a batch, norms, attention on the cache, feed-forward networks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.dtypes import F16, I32
from engine.models.cache import KvCache
from engine.models.hparams import Hparams
from engine.models.rotary import table, turns
from engine.models.weights import Weights, constant
from engine.tensor import Tensor, input_tensor
from kernels.arithmetic import add, mul
from kernels.attention import flash_attn_ext
from kernels.copy import cont
from kernels.get_rows import get_rows
from kernels.mul_mat import mul_mat
from kernels.norm import rms_norm
from kernels.rope import rope
from kernels.set_rows import set_keys, set_rows
from kernels.soft_max import soft_max


@dataclass
class Inputs:
    """Leaves that are set for each batch of `n` tokens; `n_kv` and `n_ring` cells are visible, `n_out` tokens give logits."""

    n: int
    n_kv: int
    n_ring: int
    n_out: int
    tokens: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    outputs: Tensor = field(init=False)
    cells: dict[bool, Tensor] = field(init=False)
    masks: dict[bool, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = input_tensor(I32, (self.n,), "tokens")
        self.positions = input_tensor(I32, (self.n,), "positions")
        self.outputs = input_tensor(I32, (self.n_out,), "outputs")
        sizes = {False: self.n_kv, True: self.n_ring}
        self.cells = {w: input_tensor(I32, (self.n,), "ring_cells" if w else "cells") for w in sizes}
        self.masks = {w: input_tensor(F16, (self.n, size), "ring_mask" if w else "mask") for w, size in sizes.items()}


@dataclass
class Parts:
    """What a graph builder works with. `flash` chooses FLASH_ATTN_EXT over the composed graph."""

    h: Hparams
    w: Weights
    neox: bool
    flash: bool = True
    _tables: dict[tuple[float, float], Tensor] = field(default_factory=dict)

    def norm(self, x: Tensor, weight: str, il: int | None = None, n: int = 0) -> Tensor:
        """RMS_NORM, then MUL by its weight."""
        name = weight if il is None else f"blk.{il}.{weight}"
        return mul(rms_norm(x, eps=self.h.eps, name=f"{_short(weight)}-{il}"), self.w.plain(f"{name}.weight", n or self.h.n_embd))

    def linear(self, x: Tensor, weight: str, il: int, rows: int, name: str = "") -> Tensor:
        """MUL_MAT, and ADD where the file has a bias."""
        full = f"blk.{il}.{weight}"
        y = mul_mat(self.w.product(f"{full}.weight", rows, x.shape[-1]), x, name=f"{name or _short(weight)}-{il}")
        bias = self.w.optional(f"{full}.bias", rows)
        return add(y, bias) if bias is not None else y

    def rope_table(self, windowed: bool) -> Tensor:
        """float32 [2, n_rot / 2]: turns per position of each pair, high and low part, made in float64."""
        base, scale = (self.h.rope_base_windowed, 1.0) if windowed else (self.h.rope_base, self.h.rope_scale)
        if (base, scale) not in self._tables:
            half = self.h.n_rot // 2
            factors = None
            if not windowed and self.w.has("rope_freqs.weight"):
                stored = self.w.plain("rope_freqs.weight", half)
                factors = stored.buffer.get(stored).view(np.float32)  # type: ignore[union-attr]
            made = turns(half, base, scale, factors, None if windowed else self.h.yarn)
            self._tables[base, scale] = constant(table(made), f"rope_table_{base:g}")
        return self._tables[base, scale]

    def rotate(self, x: Tensor, positions: Tensor, windowed: bool, name: str) -> Tensor:
        magnitude = self.h.yarn.magnitude(self.h.rope_scale) if self.h.yarn and not windowed else 1.0
        return rope(x, positions, self.rope_table(windowed), neox=int(self.neox), magnitude=magnitude, name=name)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cache: KvCache, inputs: Inputs, il: int, factor: float) -> Tensor:
        """Write K and V of this batch, then attend to the visible cells: q [n, head, d] -> [n, head * e]."""
        windowed = self.h.windowed[il]
        n_kv = inputs.masks[windowed].shape[1]
        cells = inputs.cells[windowed]
        keys = set_keys(k, cells, cache.keys[il], name=f"k_cache-{il}")[:, : n_kv // 32]
        values = set_rows(v.permute(1, 0, 2), cells, cache.values[il], name=f"v_cache-{il}")[:, :n_kv]
        if self.flash:
            out = flash_attn_ext(q, keys, values, inputs.masks[windowed], factor=factor, name=f"attn-{il}")
        else:
            out = self.composed(q, keys, values, inputs.masks[windowed], factor, il)
        return out.reshape(q.shape[0], self.h.n_head * self.h.head_v)

    def composed(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, factor: float, il: int) -> Tensor:
        """The same from MUL_MAT, SOFT_MAX, MUL_MAT: `-fa off`, and what FLASH_ATTN_EXT is compared with."""
        h, n_kv = self.h, mask.shape[1]
        k = cont(keys.permute(0, 1, 3, 2)).reshape(h.n_head_kv, n_kv, h.head_k)
        scores = mul_mat(k, q.permute(1, 0, 2), name=f"kq-{il}")
        p = soft_max(scores, mask.reshape(1, *mask.shape), factor=factor, name=f"kq_soft_max-{il}")
        kqv = mul_mat(values.transpose(), p, name=f"kqv-{il}")
        return cont(kqv.permute(1, 0, 2), name=f"attn-{il}")

    def heads(self, x: Tensor, n_head: int) -> Tensor:
        return x.reshape(x.shape[0], n_head, x.shape[1] // n_head)

    def embed(self, inputs: Inputs) -> Tensor:
        return get_rows(self.w.plain("token_embd.weight", self.h.n_vocab, self.h.n_embd), inputs.tokens, name="embd")

    def logits(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Norm and output product of the tokens that are asked for: [n_out, n_vocab]."""
        if inputs.n_out != inputs.n:
            x = get_rows(x, inputs.outputs, name="result")
        x = self.norm(x, "output_norm")
        tied = "output.weight" if self.w.has("output.weight") else "token_embd.weight"
        return mul_mat(self.w.product(tied, self.h.n_vocab, self.h.n_embd), x, name="logits")


def _short(weight: str) -> str:
    return weight.rsplit(".", 1)[-1]
