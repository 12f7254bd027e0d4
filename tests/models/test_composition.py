"""Backends together: half-precision products of a prompt go to BLAS, everything else to the CPU, and the text stays the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.dtypes import F16
from engine.gguf import dequantize, quantize, read_gguf, write_gguf
from engine.runtime import load

PROMPT = "Once upon a time, in a small village between the mountains and the sea, there lived an old clockmaker. " * 4


def write_half_precision(source: Path, target: Path) -> None:
    """A copy with every matrix as f16."""
    with read_gguf(source) as file:
        tensors = {}
        for name, info in file.tensors.items():
            assert info.dtype is not None
            dtype, raw = info.dtype, file.data(name).reshape(*info.shape[:-1], -1)
            if len(info.shape) == 2:
                dtype, raw = F16, quantize(dequantize(raw, info.dtype), F16)
            tensors[name] = (dtype, info.shape, raw)
        write_gguf(target, dict(file.metadata), tensors)


@pytest.fixture(scope="module")
def half(smollm2_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lanewise-half-") as folder:  # 270 MB: not kept
        write_half_precision(smollm2_path, Path(folder) / "smollm2-f16.gguf")
        yield Path(folder) / "smollm2-f16.gguf"


@pytest.mark.slow
def test_blas_takes_the_products_of_a_prompt_and_the_text_stays_the_same(half: Path) -> None:
    texts, tokens, logits = [], [], []
    for devices in ("blas", "none"):
        with load(half, devices=devices) as model:
            ids = model.tokenize(PROMPT)
            assert len(ids) >= 64
            with model.context(512) as context:
                placed = context.explain(len(ids)).counts
                assert placed.get("blas", 0) > 0 if devices == "blas" else set(placed) == {"cpu"}
                assert context.explain(1).counts.get("blas", 0) == 0  # one column is no work for it
                logits.append(context.decode(ids))
            answer = model.generate(PROMPT, max_tokens=24, temperature=0)
            texts.append("".join(answer))
            tokens.append(answer.tokens)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 24
    assert texts[0] == texts[1] != ""
    assert ((logits[0] - logits[1]) ** 2).sum() / (logits[1] ** 2).sum() < 1e-6
    assert not np.array_equal(logits[0], logits[1])  # BLAS adds in another order: it did run
