"""The same bits: for any number of threads, on repeated runs, however a prompt is cut. Quantised weights, so that rounding would show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from float64_models import GEMMA, LLAMA, Small, weights, write

from engine.model import Context, Model
from engine.runtime import load
from engine.settings import override

TYPES = {
    "attn_q": "q4_1",
    "attn_k": "q5_0",
    "attn_v": "q8_0",
    "attn_output": "q4_k",
    "ffn_gate": "q5_k",
    "ffn_up": "q6_k",
    "ffn_down": "q4_0",
    "token_embd": "q8_0",
}
WIDE = {"n_embd": 256, "n_ff": 512, "head_k": 64, "head_v": 64, "n_rot": 64, "n_vocab": 160}
SMALL = {"llama": replace(LLAMA, **WIDE), "gemma3": replace(GEMMA, **WIDE)}
IDS = np.random.default_rng(7).integers(0, 160, 600).tolist()


@pytest.fixture(
    scope="module", params=[(a, f) for a in SMALL for f in (True, False)], ids=lambda p: f"{p[0]}-{'flash' if p[1] else 'composed'}"
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    name, flash = request.param
    s: Small = SMALL[name]
    path = tmp_path_factory.mktemp("bits") / "small.gguf"
    write(path, s, weights(s), TYPES)
    with load(path, devices="none", flash=flash) as opened:
        yield opened


def run(context: Context, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of every token, from calls of these sizes, the last one repeated."""
    rows, at = [], 0
    for n in [*sizes, *[sizes[-1]] * len(ids)]:
        if at < len(ids):
            rows.append(context.decode(ids[at : at + n], logits="all"))
            at += n
    return np.concatenate(rows)


def fresh(model: Model, ids: list[int], sizes: list[int], **options: int) -> np.ndarray:
    with model.context(1024, **options) as context:  # type: ignore[arg-type]
        return run(context, ids, sizes)


@pytest.fixture(scope="module")
def whole(model: Model) -> np.ndarray:
    """All of IDS in one call, 512 and 88 at a time."""
    return fresh(model, IDS, [len(IDS)])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads(model: Model, whole: np.ndarray, threads: int) -> None:
    assert np.array_equal(fresh(model, IDS[:300], [270, 1], threads=threads), whole[:300])


def test_fused_or_not(model: Model, whole: np.ndarray) -> None:
    with override(fuse=False), model.context(1024) as context:
        assert np.array_equal(run(context, IDS[:300], [270, 1]), whole[:300])
        assert not any(s.fused for s in context.explain(1).splits)
    with model.context(1024) as context:
        assert {f.op for s in context.explain(1).splits for f in s.fused} >= {"rms_norm_mul_quantize", "rope_set_keys"}


def test_repeated_runs(model: Model, whole: np.ndarray) -> None:
    with model.context(1024) as context:
        for _ in range(3):
            assert np.array_equal(run(context, IDS[:200], [150, 50]), whole[:200])
            context.reset()


@pytest.mark.parametrize("sizes", [[1], [7], [32], [512], [255, 1], [256, 1], [257, 1], [254, 2, 2, 300], [511, 1, 1, 87]], ids=str)
def test_any_calls(model: Model, whole: np.ndarray, sizes: list[int]) -> None:
    n = 300 if sizes[-1] == 1 else len(IDS)
    assert np.array_equal(fresh(model, IDS[:n], sizes), whole[:n])


@pytest.mark.parametrize("n_ubatch", [3, 31, 32, 33, 600])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_any_micro_batch(model: Model, whole: np.ndarray, n_ubatch: int, extra: int) -> None:
    n = min(4 * n_ubatch + extra, len(IDS))
    assert np.array_equal(fresh(model, IDS[:n], [n], n_ubatch=n_ubatch), whole[:n])


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "composed"])
def test_any_micro_batch_past_the_ring_of_a_window(flash: bool, tmp_path: Path) -> None:
    write(tmp_path / "small.gguf", SMALL["gemma3"], weights(SMALL["gemma3"]), TYPES)
    ids = IDS * 3
    with load(tmp_path / "small.gguf", devices="none", flash=flash) as model:
        runs = []
        for n_ubatch in (512, 200, 16):
            with model.context(2048, n_ubatch=n_ubatch) as context:
                assert context.cache.ring.size == 768
                runs.append(context.decode(ids, logits="all"))
    assert np.array_equal(runs[0], runs[1]) and np.array_equal(runs[0], runs[2])


def test_last_is_the_last_of_all(model: Model, whole: np.ndarray) -> None:
    with model.context(1024) as context:
        assert np.array_equal(context.decode(IDS[:90]), whole[89])
        assert np.array_equal(context.decode(IDS[90:91]), whole[90])
        assert np.array_equal(context.decode(IDS[91:]), whole[-1])


def test_the_size_of_the_context_changes_nothing(model: Model, whole: np.ndarray) -> None:
    for n_ctx in (60, 256, 700):
        with model.context(n_ctx) as context:
            assert np.array_equal(context.decode(IDS[:60], logits="all"), whole[:60])


@pytest.mark.slow
def test_smollm2_gives_the_same_bits(smollm2: Model) -> None:
    ids = smollm2.tokenize("The quick brown fox jumps over the lazy dog, and 東京 is a city. " * 3)[:45]
    with smollm2.context(512) as context:
        want = context.decode(ids, logits="all")
    for threads, sizes in ((1, [45]), (3, [20, 1]), (5, [7])):
        assert np.array_equal(fresh(smollm2, ids, sizes, threads=threads), want)
    with override(fuse=False):
        assert np.array_equal(fresh(smollm2, ids, [45]), want)
