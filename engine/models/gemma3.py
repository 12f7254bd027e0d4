"""Gemma 3 (arXiv:2503.19786): norms around each part, norms of Q and K, GeGLU, most layers with a sliding window and its own rope base."""

from __future__ import annotations

from math import sqrt

from engine.models.blocks import Inputs, Parts
from engine.models.cache import KvCache
from engine.tensor import Tensor
from kernels.activations import geglu, tanh_rows
from kernels.arithmetic import add, scaled

NEOX = True
WINDOW_PATTERN = 6
N_LAYER_27B = 62  # the one size that scales queries by the embedding instead of the head


def build(p: Parts, inputs: Inputs, cache: KvCache) -> Tensor:
    """The graph of one batch; its logits [n_out, n_vocab]."""
    h = p.h
    factor = 1 / sqrt(h.n_embd / h.n_head) if h.n_layer == N_LAYER_27B else h.attention_scale
    x = scaled(p.embed(inputs), factor=sqrt(h.n_embd), name="embd_scaled")
    for il in range(h.n_layer):
        normed = p.norm(x, "attn_norm", il)
        q = p.heads(p.linear(normed, "attn_q", il, h.n_head * h.head_k, "Qcur"), h.n_head)
        k = p.heads(p.linear(normed, "attn_k", il, h.n_head_kv * h.head_k, "Kcur"), h.n_head_kv)
        v = p.heads(p.linear(normed, "attn_v", il, h.n_head_kv * h.head_v, "Vcur"), h.n_head_kv)
        q = p.rotate(p.norm(q, "attn_q_norm", il, h.head_k), inputs.positions, h.windowed[il], f"Qrope-{il}")
        k = p.rotate(p.norm(k, "attn_k_norm", il, h.head_k), inputs.positions, h.windowed[il], f"Krope-{il}")
        attended = p.linear(p.attention(q, k, v, cache, inputs, il, factor), "attn_output", il, h.n_embd)
        x = add(p.norm(attended, "post_attention_norm", il), x, name=f"sa_out-{il}")
        normed = p.norm(x, "ffn_norm", il)
        gated = geglu(p.linear(normed, "ffn_gate", il, h.n_ff), p.linear(normed, "ffn_up", il, h.n_ff), name=f"ffn_geglu-{il}")
        x = add(p.norm(p.linear(gated, "ffn_down", il, h.n_embd), "post_ffw_norm", il), x, name=f"l_out-{il}")
    logits = p.logits(x, inputs)
    if h.logit_cap:
        logits = scaled(tanh_rows(scaled(logits, factor=1 / h.logit_cap)), factor=h.logit_cap, name="logits_capped")
    return logits
