"""Both architectures against a float64 forward pass: every switch of the builders, sliding windows past the ring, batches cut anyhow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from float64_models import GEMMA, LLAMA, Small, forward, nmse, weights, write

from engine.model import Context
from engine.runtime import load

LIMIT = 1e-6
CASES = {
    "llama": LLAMA,
    "llama, own output": replace(LLAMA, is_tied=False),
    "llama, part of a head rotated": replace(LLAMA, n_rot=8),
    "llama, positions stretched": replace(LLAMA, scale=4.0),
    "llama, YaRN": replace(LLAMA, scale=4.0, yarn_ctx=256),
    "llama, factors for each frequency": replace(LLAMA, has_factors=True, base=5e5),
    "llama, biases": replace(LLAMA, has_bias=True),
    "llama, one KV head": replace(LLAMA, n_head_kv=1),
    "llama, a KV head for each": replace(LLAMA, n_head_kv=4),
    "llama, three heads share": replace(LLAMA, n_head=6, n_head_kv=2, n_embd=96),
    "llama, values wider than keys": replace(LLAMA, head_v=24),
    "llama, odd sizes": replace(LLAMA, n_vocab=101, n_embd=60, n_ff=77, head_k=20, head_v=20, n_rot=20),
    "gemma3": GEMMA,
    "gemma3, capped logits": replace(GEMMA, cap=3.0),
    "gemma3, positions stretched": replace(GEMMA, scale=8.0),
    "gemma3, YaRN": replace(GEMMA, scale=8.0, yarn_ctx=128),
    "gemma3, own base in windows": replace(GEMMA, base_windowed=500.0),
    "gemma3, no window": replace(GEMMA, windows=(0, 0, 0)),
    "gemma3, windows only": replace(GEMMA, windows=(5, 5, 5)),
}


def ids_of(s: Small, n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, s.n_vocab, n).tolist()


def in_pieces(context: Context, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of all tokens, given in calls of these sizes, over and over."""
    rows, at, turn = [], 0, 0
    while at < len(ids):
        n = sizes[turn % len(sizes)]
        rows.append(context.decode(ids[at : at + n], logits="all"))
        at, turn = at + n, turn + 1
    return np.concatenate(rows)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "composed"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_float64(name: str, flash: bool, tmp_path: Path) -> None:
    s = CASES[name]
    held = write(tmp_path / "small.gguf", s, weights(s))
    ids = ids_of(s, 37)
    want = forward(s, held, ids)
    with load(tmp_path / "small.gguf", devices="none", flash=flash) as model, model.context(64, kv_type="f32") as context:
        assert nmse(in_pieces(context, ids, [24, 1, 1, 7]), want) < LIMIT


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_precision_weights(kind: str, tmp_path: Path) -> None:
    s = replace(LLAMA, is_tied=False)
    held = write(
        tmp_path / "small.gguf",
        s,
        weights(s),
        dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output"), kind),
    )
    ids = ids_of(s, 30)
    with load(tmp_path / "small.gguf", devices="none") as model, model.context(64, kv_type="f32") as context:
        assert nmse(context.decode(ids, logits="all"), forward(s, held, ids)) < LIMIT


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "composed"])
@pytest.mark.parametrize("n_ubatch", [3, 64, 512])
@pytest.mark.slow
def test_a_window_sees_the_right_tokens_long_after_its_ring_is_full(n_ubatch: int, flash: bool, tmp_path: Path) -> None:
    held = write(tmp_path / "small.gguf", GEMMA, weights(GEMMA))
    ids = ids_of(GEMMA, 1700)
    want = forward(GEMMA, held, ids)
    with load(tmp_path / "small.gguf", devices="none", flash=flash) as model:
        context = model.context(2048, kv_type="f32", n_ubatch=n_ubatch)
        assert context.cache.ring.size == 768
        got = in_pieces(context, ids, [130, 1, 63, 257, 2, 600])
    assert nmse(got, want) < LIMIT
    assert max(nmse(g, w) for g, w in zip(got, want)) < 10 * LIMIT  # no single position is wrong


def test_windows_default_to_all_but_every_sixth_layer(tmp_path: Path) -> None:
    s = replace(GEMMA, n_layer=7, windows=(8, 8, 8, 8, 8, 0, 8))
    held = write(tmp_path / "small.gguf", s, weights(s), gemma3__attention__sliding_window_pattern=None, gemma3__rope__freq_base_swa=None)
    ids = ids_of(s, 40)
    with load(tmp_path / "small.gguf", devices="none") as model, model.context(64, kv_type="f32") as context:
        assert model.hparams.windowed == (True,) * 5 + (False, True)
        assert nmse(context.decode(ids, logits="all"), forward(s, held, ids)) < LIMIT


@pytest.mark.parametrize("kinds", [("f16", "f16"), ("f16", "f32"), ("f32", "f16")])
def test_a_half_precision_cache_rounds_keys_and_values_only(kinds: tuple[str, str], tmp_path: Path) -> None:
    held = write(tmp_path / "small.gguf", LLAMA, weights(LLAMA))
    ids = ids_of(LLAMA, 60)
    want = forward(LLAMA, held, ids)
    with load(tmp_path / "small.gguf", devices="none") as model:
        context = model.context(64, kv_type_k=kinds[0], kv_type_v=kinds[1])
        assert nmse(context.decode(ids, logits="all"), want) < 1e-5  # (2^-11)^2 = 2.4e-7 a rounding
