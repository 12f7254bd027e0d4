"""Small random models of both architectures: their files, and their forward pass in plain float64 NumPy, all positions at once.

The pass shares nothing with the engine: no cache, no batches, whole masks. It is the truth the engine is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.dtypes import DTYPES
from engine.gguf import dequantize, quantize, write_gguf

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]


@dataclass(frozen=True)
class Small:
    """Sizes and switches of a model. `windows[il]` is the sliding window of a layer, 0 for none."""

    architecture: str = "llama"
    n_vocab: int = 96
    n_ctx: int = 1024
    n_embd: int = 64
    n_layer: int = 2
    n_ff: int = 96
    n_head: int = 4
    n_head_kv: int = 2
    head_k: int = 16
    head_v: int = 16
    n_rot: int = 16
    eps: float = 1e-5
    base: float = 10000.0
    base_windowed: float = 10000.0
    scale: float = 1.0  # positions are divided by it, where there is no window
    yarn_ctx: int = 0  # YaRN from this context length on, 0 for none
    windows: tuple[int, ...] = (0, 0)
    cap: float = 0.0
    is_tied: bool = True
    has_bias: bool = False
    has_factors: bool = False

    @property
    def is_gemma(self) -> bool:
        return self.architecture == "gemma3"


LLAMA = Small()
GEMMA = Small("gemma3", n_layer=3, n_embd=96, n_head_kv=1, head_k=32, head_v=32, n_rot=32, eps=1e-6, base=1e6, windows=(8, 8, 0))


def weights(s: Small, seed: int = 0) -> Weights:
    """Random weights by the names files give them, float32."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return random.standard_normal((rows, columns), np.float32) * np.float32(1.5 / columns**0.5)

    def vector(n: int, mean: float = 1.0) -> Array:
        return (random.standard_normal(n) * 0.1 + mean).astype(np.float32)

    made = {"token_embd": matrix(s.n_vocab, s.n_embd), "output_norm": vector(s.n_embd)}
    if not s.is_tied:
        made["output"] = matrix(s.n_vocab, s.n_embd)
    if s.has_factors:
        made["rope_freqs"] = random.uniform(1, 8, s.n_rot // 2).astype(np.float32)
    for il in range(s.n_layer):
        layer = {
            "attn_norm": vector(s.n_embd),
            "attn_q": matrix(s.n_head * s.head_k, s.n_embd),
            "attn_k": matrix(s.n_head_kv * s.head_k, s.n_embd),
            "attn_v": matrix(s.n_head_kv * s.head_v, s.n_embd),
            "attn_output": matrix(s.n_embd, s.n_head * s.head_v),
            "ffn_norm": vector(s.n_embd),
            "ffn_gate": matrix(s.n_ff, s.n_embd),
            "ffn_up": matrix(s.n_ff, s.n_embd),
            "ffn_down": matrix(s.n_embd, s.n_ff),
        }
        if s.is_gemma:
            layer |= {"attn_q_norm": vector(s.head_k), "attn_k_norm": vector(s.head_k)}
            layer |= {"post_attention_norm": vector(s.n_embd), "post_ffw_norm": vector(s.n_embd)}
        made |= {f"blk.{il}.{name}": w for name, w in layer.items()}
        if s.has_bias:
            products = {name: w for name, w in layer.items() if w.ndim == 2}
            made |= {f"blk.{il}.{name}.bias": vector(len(w), 0.0) for name, w in products.items()}
    return {name if name.endswith(".bias") else f"{name}.weight": w for name, w in made.items()}


def metadata(s: Small, **changes: Any) -> dict[str, Any]:
    """The keys of a model without a tokeniser. A value of None leaves a key out; names have `__` for `.`."""
    a = s.architecture
    keys: dict[str, Any] = {
        "general.architecture": a,
        f"{a}.context_length": s.n_ctx,
        f"{a}.embedding_length": s.n_embd,
        f"{a}.block_count": s.n_layer,
        f"{a}.feed_forward_length": s.n_ff,
        f"{a}.attention.head_count": s.n_head,
        f"{a}.attention.head_count_kv": s.n_head_kv,
        f"{a}.attention.key_length": s.head_k,
        f"{a}.attention.value_length": s.head_v,
        f"{a}.attention.layer_norm_rms_epsilon": s.eps,
        f"{a}.rope.dimension_count": s.n_rot,
        f"{a}.rope.freq_base": s.base,
        "tokenizer.ggml.model": "none",
    }
    if any(s.windows):
        keys[f"{a}.attention.sliding_window"] = max(s.windows)
        keys[f"{a}.attention.sliding_window_pattern"] = [bool(w) for w in s.windows]
        keys[f"{a}.rope.freq_base_swa"] = s.base_windowed
    if s.scale != 1:
        keys |= {f"{a}.rope.scaling.type": "yarn" if s.yarn_ctx else "linear", f"{a}.rope.scaling.factor": s.scale}
    if s.yarn_ctx:
        keys[f"{a}.rope.scaling.original_context_length"] = s.yarn_ctx
    if s.cap:
        keys[f"{a}.final_logit_softcapping"] = s.cap
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in keys.items() if value is not None}


def write(path: Path, s: Small, made: Weights, types: Mapping[str, str] | None = None, **changes: Any) -> Weights:
    """Write the file; gives the weights as it holds them. `types` maps the last part of a matrix's name to a type, f32 if not listed."""
    tensors, held = {}, {}
    for name, w in made.items():
        kind = DTYPES[(types or {}).get(name.split(".")[-2], "f32") if w.ndim == 2 else "f32"]
        raw = quantize(w, kind)
        tensors[name], held[name] = (kind, w.shape, raw), dequantize(raw, kind)
    write_gguf(path, metadata(s, **changes), tensors)
    return held


def forward(s: Small, held: Weights, ids: Sequence[int] | Array) -> Array:
    """Logits [n, n_vocab] of every position, float64."""
    w = {name: value.astype(np.float64) for name, value in held.items()}
    ids = np.asarray(ids)
    x = w["token_embd.weight"][ids] * (np.sqrt(s.n_embd) if s.is_gemma else 1)
    for il in range(s.n_layer):
        layer = {name.removeprefix(f"blk.{il}."): value for name, value in w.items() if name.startswith(f"blk.{il}.")}
        attended = _attention(s, layer, w.get("rope_freqs.weight"), _norm(s, x, layer["attn_norm.weight"]), s.windows[il])
        x = x + (_norm(s, attended, layer["post_attention_norm.weight"]) if s.is_gemma else attended)
        normed = _norm(s, x, layer["ffn_norm.weight"])
        gate, up = _linear(layer, "ffn_gate", normed), _linear(layer, "ffn_up", normed)
        out = _linear(layer, "ffn_down", (_gelu(gate) if s.is_gemma else gate / (1 + np.exp(-gate))) * up)
        x = x + (_norm(s, out, layer["post_ffw_norm.weight"]) if s.is_gemma else out)
    logits = _norm(s, x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T
    return s.cap * np.tanh(logits / s.cap) if s.cap else logits


def _norm(s: Small, x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + s.eps) * weight


def _linear(layer: Weights, name: str, x: Array) -> Array:
    return x @ layer[f"{name}.weight"].T + layer.get(f"{name}.bias", 0.0)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _attention(s: Small, layer: Weights, factors: Array | None, x: Array, window: int) -> Array:
    n = len(x)
    q = _linear(layer, "attn_q", x).reshape(n, s.n_head, s.head_k)
    k = _linear(layer, "attn_k", x).reshape(n, s.n_head_kv, s.head_k)
    v = _linear(layer, "attn_v", x).reshape(n, s.n_head_kv, s.head_v)
    if s.is_gemma:
        q, k = _norm(s, q, layer["attn_q_norm.weight"]), _norm(s, k, layer["attn_k_norm.weight"])
    q, k = _rotated(s, q, factors, window), _rotated(s, k, factors, window)
    at = np.arange(n)
    distance = at[:, None] - at[None, :]
    seen = (distance >= 0) & ((distance < window) if window else True)
    out = np.empty((n, s.n_head, s.head_v))
    for head in range(s.n_head):
        shared = head // (s.n_head // s.n_head_kv)
        scores = np.where(seen, q[:, head] @ k[:, shared].T / np.sqrt(s.head_k), -np.inf)
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = e / e.sum(axis=-1, keepdims=True) @ v[:, shared]
    return _linear(layer, "attn_output", out.reshape(n, -1))


def _rotated(s: Small, x: Array, factors: Array | None, window: int) -> Array:
    """Pairs (2i, 2i + 1), or for gemma3 (i, i + n_rot / 2), turned by position * base^(-2i / n_rot)."""
    half = s.n_rot // 2
    theta = (s.base_windowed if window else s.base) ** (-2.0 * np.arange(half) / s.n_rot)
    magnitude = 1.0
    if not window:
        own = theta / (1 if factors is None else factors)
        theta = own / s.scale
        if s.yarn_ctx:  # pairs of 32 turns and more within the old context keep their frequency, those below 1 turn are stretched
            fast, slow = (half * np.log(s.yarn_ctx / (n * 2 * np.pi)) / np.log(s.base) for n in (32, 1))
            fast, slow = max(0, np.floor(fast)), min(s.n_rot - 1, np.ceil(slow))
            stretch = np.clip((np.arange(half) - fast) / max(0.001, slow - fast), 0, 1)
            theta, magnitude = theta * stretch + own * (1 - stretch), 1 + 0.1 * np.log(s.scale)
    z = magnitude * np.exp(1j * np.arange(len(x))[:, None] * theta)[:, None]
    first, second = (slice(0, half), slice(half, s.n_rot)) if s.is_gemma else (slice(0, s.n_rot, 2), slice(1, s.n_rot, 2))
    turned = (x[..., first] + 1j * x[..., second]) * z
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def nmse(got: Array, want: Array) -> float:
    """Squared error over the squared values, in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(((got - want) ** 2).sum() / (want**2).sum())
