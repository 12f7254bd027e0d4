"""A tiny Llama with random weights and a byte-level vocabulary: a whole model in a few hundred kilobytes, made in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.dtypes import DTYPES
from engine.gguf import quantize, write_gguf
from engine.tokenizer.tokenizer import LETTERS

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_LAYER = 64, 128, 4, 2, 2
MERGES = (
    "Ġ t",
    "h e",
    "i n",
    "Ġ a",
    "r e",
    "o n",
    "Ġt he",
    "e r",
    "Ġ s",
    "a t",
    "Ġ w",
    "e n",
    "o r",
    "Ġ c",
    "i s",
    "o u",
    "in g",
    "e s",
    "Ġ o",
    "l l",
    "a n",
    "Ġ b",
    "e d",
    "a l",
    "Ġ m",
    "Ġ p",
    "i t",
    "Ġo n",
    "Ġ f",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*LETTERS, *(m.replace(" ", "") for m in MERGES), *SPECIAL)  # 288 of them
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Tensors = dict[str, tuple[Any, tuple[int, ...], np.ndarray]]


def metadata(**changes: Any) -> dict[str, Any]:
    """The keys of the model. Keyword names have `__` for `.`; a value of None leaves the key out."""
    keys = {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "llama.context_length": 512,
        "llama.embedding_length": N_EMBD,
        "llama.block_count": N_LAYER,
        "llama.feed_forward_length": N_FF,
        "llama.attention.head_count": N_HEAD,
        "llama.attention.head_count_kv": N_HEAD_KV,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - len(SPECIAL)) + [3] * len(SPECIAL),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": TOKENS.index("<|im_start|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in keys.items() if value is not None}


def tensors(type: str = "f32", seed: int = 0) -> Tensors:
    """The weights: random, vectors in float32, matrices in `type`."""
    random = np.random.default_rng(seed)
    head = N_EMBD // N_HEAD
    shapes = {"token_embd": (len(TOKENS), N_EMBD), "output": (len(TOKENS), N_EMBD), "output_norm": (N_EMBD,)}
    for il in range(N_LAYER):
        shapes |= {
            f"blk.{il}.{name}": shape
            for name, shape in {
                "attn_norm": (N_EMBD,),
                "attn_q": (N_EMBD, N_EMBD),
                "attn_k": (N_HEAD_KV * head, N_EMBD),
                "attn_v": (N_HEAD_KV * head, N_EMBD),
                "attn_output": (N_EMBD, N_EMBD),
                "ffn_norm": (N_EMBD,),
                "ffn_gate": (N_FF, N_EMBD),
                "ffn_up": (N_FF, N_EMBD),
                "ffn_down": (N_EMBD, N_FF),
            }.items()
        }
    made: Tensors = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32) * np.float32(0.2) + np.float32(len(shape) == 1)
        kind = DTYPES[type if len(shape) == 2 else "f32"]
        made[f"{name}.weight"] = (kind, shape, values if kind.name == "f32" else quantize(values, kind))
    return made


def write_tiny_model(path: Path, weights: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write the model, with some metadata keys changed or weights of one's own."""
    write_gguf(path, metadata(**changes), tensors() if weights is None else weights)
    return path
