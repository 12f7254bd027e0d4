"""Llama (Touvron et al., arXiv:2302.13971) and its relatives: grouped heads, rotary positions, SwiGLU, RMS norms before each part."""

from __future__ import annotations

from engine.models.blocks import Inputs, Parts
from engine.models.cache import KvCache
from engine.tensor import Tensor
from kernels.activations import swiglu
from kernels.arithmetic import add

NEOX = False
WINDOW_PATTERN = 0


def build(p: Parts, inputs: Inputs, cache: KvCache) -> Tensor:
    """The graph of one batch; its logits [n_out, n_vocab]."""
    h = p.h
    x = p.embed(inputs)
    for il in range(h.n_layer):
        normed = p.norm(x, "attn_norm", il)
        q = p.heads(p.linear(normed, "attn_q", il, h.n_head * h.head_k, "Qcur"), h.n_head)
        k = p.heads(p.linear(normed, "attn_k", il, h.n_head_kv * h.head_k, "Kcur"), h.n_head_kv)
        v = p.heads(p.linear(normed, "attn_v", il, h.n_head_kv * h.head_v, "Vcur"), h.n_head_kv)
        q = p.rotate(q, inputs.positions, h.windowed[il], f"Qrope-{il}")
        k = p.rotate(k, inputs.positions, h.windowed[il], f"Krope-{il}")
        attended = p.attention(q, k, v, cache, inputs, il, h.attention_scale)
        x = add(p.linear(attended, "attn_output", il, h.n_embd), x, name=f"ffn_inp-{il}")
        normed = p.norm(x, "ffn_norm", il)
        gated = swiglu(p.linear(normed, "ffn_gate", il, h.n_ff), p.linear(normed, "ffn_up", il, h.n_ff), name=f"ffn_swiglu-{il}")
        x = add(p.linear(gated, "ffn_down", il, h.n_embd), x, name=f"l_out-{il}")
    return p.logits(x, inputs)
