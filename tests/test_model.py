"""A model and its contexts: what fits and what does not, failures that change nothing, starting over, closing, interrupting."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.dtypes import F32, Q8_0
from engine.errors import ChatTemplateError, ClosedError, ContextError, InterruptedRun, LanewiseError, ModelError, TokenizerError
from engine.gguf import quantize
from engine.model import Context, Model
from engine.runtime import load

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "models")]

from float64_models import GEMMA, LLAMA, weights, write  # noqa: E402
from tiny_model import TOKENS, metadata, tensors, write_tiny_model  # noqa: E402

LONG = np.random.default_rng(3).integers(0, 96, 1700).tolist()
IDS = LONG[:600]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", tensors("q8_0"))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with load(path, devices="none") as opened:
        yield opened


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Layers with a window of 8 tokens, on a ring of 768 cells."""
    target = tmp_path_factory.mktemp("model") / "windowed.gguf"
    write(target, GEMMA, weights(GEMMA))
    with load(target, devices="none") as opened:
        yield opened


def after(model: Model, ids: list[int], **options: int) -> np.ndarray:
    """Logits after these tokens, from a context of its own."""
    with model.context(1024, **options) as context:  # type: ignore[arg-type]
        return context.decode(ids)


# -- what fits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ctx", [1, 31, 32, 255, 256, 257])
def test_a_context_holds_exactly_its_tokens(model: Model, n_ctx: int) -> None:
    with model.context(n_ctx) as context:
        assert context.n_ctx == n_ctx
        with pytest.raises(ContextError, match=f"{n_ctx + 1} more tokens do not fit: 0 of {n_ctx} are used"):
            context.decode(IDS[: n_ctx + 1])
        if n_ctx > 1:
            context.decode(IDS[: n_ctx - 1])
        last = context.decode(IDS[n_ctx - 1 : n_ctx])
        assert context.n_past == n_ctx
        assert np.array_equal(last, after(model, IDS[:n_ctx]))
        with pytest.raises(ContextError, match=f"1 more tokens do not fit: {n_ctx} of {n_ctx} are used"):
            context.decode([1])
        context.reset()
        assert np.array_equal(context.decode(IDS[:n_ctx]), last)


def test_the_length_of_a_context_is_the_models_own_by_default(model: Model) -> None:
    with model.context() as context:
        assert context.n_ctx == model.hparams.n_ctx_train == 512


@pytest.mark.parametrize(
    "options",
    [{"n_ctx": -1}, {"n_ctx": 2.5}, {"n_ctx": 1 << 31}, {"n_ubatch": 0}, {"n_ubatch": -3}, {"kv_type": "q4_0"}, {"kv_type_k": "f64"}],
    ids=str,
)
def test_impossible_contexts_are_refused(model: Model, options: dict[str, object]) -> None:
    with pytest.raises(ContextError):
        model.context(**options).close()  # type: ignore[arg-type]


def test_logits_of_all_tokens_and_of_the_last(model: Model) -> None:
    with model.context(64) as context:
        every = context.decode(IDS[:20], logits="all")
        assert every.dtype == np.float32 and every.shape == (20, len(TOKENS))
        context.reset()
        last = context.decode(np.array(IDS[:20]))  # an array does as well
        assert last.dtype == np.float32 and last.shape == (len(TOKENS),)
        assert np.array_equal(last, every[-1])


def test_results_are_the_callers_own(model: Model) -> None:
    with model.context(64) as context:
        first = context.decode(IDS[:5])
        kept = first.copy()
        context.decode(IDS[5:9])
        assert np.array_equal(first, kept)
        first[:] = 0
        context.reset()
        assert np.array_equal(context.decode(IDS[:5]), kept)


# -- failures change nothing ------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Context], object]] = {
    "nothing": lambda c: c.decode([]),
    "an id too large": lambda c: c.decode([1, len(TOKENS)]),
    "a negative id": lambda c: c.decode([-1]),
    "numbers that are no ids": lambda c: c.decode([0.5]),  # type: ignore[list-item]
    "text": lambda c: c.decode("abc"),  # type: ignore[arg-type]
    "a matrix": lambda c: c.decode(np.zeros((2, 2), int)),
    "too many": lambda c: c.decode([1] * 60),
    "logits of none": lambda c: c.decode([1], logits="none"),  # type: ignore[arg-type]
    "keeping more than there is": lambda c: c.rewind(11),
    "keeping less than nothing": lambda c: c.rewind(-1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_refused_call_leaves_the_context_as_it_was(model: Model, what: str) -> None:
    with model.context(64) as context:
        context.decode(IDS[:10])
        with pytest.raises(ContextError):
            WRONG[what](context)
        assert context.n_past == 10
        assert np.array_equal(context.decode(IDS[10:12]), after(model, IDS[:12]))


def test_an_id_that_is_no_token_is_named(model: Model) -> None:
    with model.context(64) as context, pytest.raises(ContextError, match=f"token id 300 is outside the vocabulary of {len(TOKENS)}"):
        context.decode([1, 300, 2])


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_in_the_middle_of_a_prompt_is_undone(model: Model, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.context(256, n_ubatch=16) as context:
        context.decode(IDS[:10])
        calls = iter(range(100))

        def trace(stage: object) -> None:
            if next(calls) == failing:
                raise MemoryError
            stage.plan.run()  # type: ignore[attr-defined]

        context.trace = trace
        with pytest.raises(MemoryError):
            context.decode(IDS[10:100])
        context.trace = None
        assert context.n_past == 10
        assert np.array_equal(context.decode(IDS[10:30]), after(model, IDS[:30]))


# -- starting over, going back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 40, 255, 256, 299, 300])
def test_going_back(model: Model, kept: int) -> None:
    with model.context(512) as context:
        context.decode(IDS[:300])
        context.rewind(kept)
        assert context.n_past == kept
        other = IDS[400:440]
        assert np.array_equal(context.decode(other), after(model, IDS[:kept] + other))


@pytest.mark.parametrize("n_ubatch", [100, 512])
def test_going_back_never_loses_part_of_a_window(windowed: Model, n_ubatch: int) -> None:
    with windowed.context(2048, n_ubatch=n_ubatch) as context:
        whole = context.decode(LONG, logits="all")
        kept_all = set()
        for kept in (1699, 1500, 941, 940, 939, 900, 7):  # the ring has 768 cells, and a token sees itself and the 7 before
            context.reset()
            context.decode(LONG)
            context.rewind(kept)
            assert context.n_past in (kept, 0)
            kept_all.add((kept, context.n_past == kept))
            assert np.array_equal(context.decode(LONG[context.n_past : kept + 1]), whole[kept]), kept
        assert {(1699, True), (1500, True), (900, False), (7, False)} <= kept_all


def test_a_failure_after_the_ring_was_overwritten_empties_the_context(windowed: Model) -> None:
    """With a ring as small as it can be, the batch in progress already counts."""
    with windowed.context(2048, n_ubatch=760) as context:
        assert context.cache.ring.size == 768
        whole = context.decode(LONG[:850], logits="all")
        context.reset()
        context.decode(LONG[:800])
        calls = iter(range(100))

        def trace(stage: object) -> None:
            if next(calls) == 1:
                raise MemoryError
            stage.plan.run()  # type: ignore[attr-defined]

        context.trace = trace
        with pytest.raises(MemoryError):
            context.decode(LONG[800:1600])
        context.trace = None
        assert context.n_past == 0
        assert np.array_equal(context.decode(LONG[:850]), whole[-1])


def test_two_contexts_do_not_disturb_each_other(model: Model) -> None:
    with model.context(256) as a, model.context(64, kv_type="f32", n_ubatch=8) as b:
        a.decode(IDS[:20])
        b.decode(IDS[100:130])
        mixed = a.decode(IDS[20:22])
        b.decode(IDS[130:131])
        assert np.array_equal(mixed, after(model, IDS[:22]))
        assert a.n_past == 22 and b.n_past == 31


def test_contexts_in_threads_of_their_own(model: Model) -> None:
    want = {k: after(model, IDS[k : k + 60]) for k in range(4)}
    got: dict[int, np.ndarray] = {}

    def work(k: int) -> None:
        with model.context(64) as context:
            context.decode(IDS[k : k + 50])
            for token in IDS[k + 50 : k + 60]:
                got[k] = context.decode([token])

    threads = [threading.Thread(target=work, args=(k,)) for k in want]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(np.array_equal(got[k], want[k]) for k in want)


# -- closing ----------------------------------------------------------------------------------------------------


def test_a_closed_context_says_so(model: Model) -> None:
    context = model.context(64)
    context.decode([1])
    context.close()
    context.close()
    for use in (lambda: context.decode([1]), context.reset, lambda: context.rewind(0), context.explain):
        with pytest.raises(ClosedError, match="context is closed"):
            use()
    context.interrupt()  # comes from a signal handler: harmless


def test_a_closed_model_says_so(path: Path) -> None:
    with load(path, devices="none") as opened:
        context = opened.context(64)
        context.decode([1])
    opened.close()
    uses: list[Callable[[], object]] = [
        opened.context,
        lambda: opened.generate("a"),
        lambda: opened.tokenize("a"),
        lambda: opened.detokenize([1]),
        lambda: opened.chat([{"role": "user", "content": "a"}]),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="tiny.gguf is closed"):
            use()
    with pytest.raises(ClosedError):
        context.decode([1])
    context.close()
    assert opened.metadata["general.name"] == "Tiny"


def test_closing_a_context_lets_go_of_it(model: Model) -> None:
    before = len(model._contexts)
    for _ in range(3):
        model.context(32).close()
    assert len(model._contexts) == before


def test_a_model_that_fails_to_load_leaves_no_file_open(tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken.gguf", {k: v for k, v in tensors().items() if k != "blk.1.ffn_up.weight"})
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        load(broken, devices="none")
    gc.collect()
    assert str(broken) not in Path("/proc/self/maps").read_text()


def resident_mb(field: str = "VmRSS") -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


@pytest.mark.slow
def test_loading_and_closing_gives_memory_and_threads_back(tmp_path: Path) -> None:
    """A model of 30 MB, ten times."""
    made = tensors()
    random = np.random.default_rng(0)
    rows = quantize(random.standard_normal((256, 64), np.float32), Q8_0)
    big = {"token_embd.weight": (Q8_0, (440_000, 64), np.tile(rows, (440_000 // 256 + 1, 1))[:440_000])}
    keys = metadata(tokenizer__ggml__model="none")
    for name in [k for k in keys if k.startswith("tokenizer.ggml.")]:
        keys[name] = None if name != "tokenizer.ggml.model" else "none"
    large = tmp_path / "large.gguf"
    write_tiny_model(
        large,
        {k: v for k, v in made.items() if k not in ("token_embd.weight", "output.weight")} | big,
        **{k.replace(".", "__"): v for k, v in keys.items()},
    )
    nbytes = large.stat().st_size
    resident, threads = [], []
    for _ in range(10):
        with load(large, devices="none", threads=3) as opened, opened.context(512) as context:
            context.decode([1, 2, 3])
            context.decode([4])
        gc.collect()
        resident.append(resident_mb())
        threads.append(threading.active_count())
    assert resident[-1] - resident[2] < 0.5 * nbytes / 2**20, resident
    assert max(threads[2:]) <= threads[1] + 1, threads


# -- interrupting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_a_prompt_can_be_interrupted_from_another_thread(tmp_path: Path, times: int) -> None:
    write(tmp_path / "long.gguf", LLAMA, weights(LLAMA), llama__context_length=1 << 16)
    ids = np.resize(IDS, 60_000).tolist()
    with load(tmp_path / "long.gguf", devices="none") as opened, opened.context(n_ubatch=64) as context:
        context.decode(ids[:100])
        for _ in range(times):
            began = threading.Event()

            def interrupt(began: threading.Event = began) -> None:
                began.wait(60)
                context.interrupt()

            def trace(stage: object, began: threading.Event = began) -> None:
                if context.n_past > 300:
                    began.set()
                stage.plan.run()  # type: ignore[attr-defined]

            context.trace = trace
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(InterruptedRun):
                context.decode(ids[100:])
            thread.join()
            context.trace = None
            assert context.n_past == 100
        assert np.array_equal(context.decode(ids[100:140]), after(opened, ids[:140]))


def test_an_interrupt_between_two_batches_is_heard(model: Model) -> None:
    with model.context(256, n_ubatch=16) as context:

        def trace(stage: object) -> None:
            stage.plan.run()  # type: ignore[attr-defined]
            context.interrupt()  # no backend is running now

        context.trace = trace
        with pytest.raises(InterruptedRun):
            context.decode(IDS[:100])
        context.trace = None
        assert context.n_past == 0
        assert np.array_equal(context.decode(IDS[:20]), after(model, IDS[:20]))


def test_an_interrupt_while_nothing_runs_is_forgotten(model: Model) -> None:
    with model.context(64) as context:
        context.interrupt()
        assert np.array_equal(context.decode(IDS[:20]), after(model, IDS[:20]))


# -- numbers that are none, text without a tokeniser ------------------------------------------------------------


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.ffn_norm.weight", "blk.1.attn_q.weight"])
def test_a_nan_in_a_weight_shows_in_every_logit(tmp_path: Path, name: str) -> None:
    made = tensors()
    values = np.asarray(made[name][2]).copy()
    values.flat[3] = np.nan
    broken = write_tiny_model(tmp_path / "nan.gguf", made | {name: (F32, made[name][1], values)})
    with load(broken, devices="none") as opened, opened.context(32) as context:
        assert np.isnan(context.decode(IDS[:8])).all()


def test_a_nan_scale_of_a_quantised_weight_shows(tmp_path: Path) -> None:
    made = tensors("q8_0")
    kind, shape, raw = made["blk.0.ffn_down.weight"]
    raw = raw.copy()
    raw.reshape(shape[0], -1)[5, :2] = np.array([np.nan], np.float16).view(np.uint8)
    broken = write_tiny_model(tmp_path / "nan.gguf", made | {"blk.0.ffn_down.weight": (kind, shape, raw)})
    with load(broken, devices="none") as opened, opened.context(32) as context:
        assert np.isnan(context.decode(IDS[:8])).all()


def test_a_model_without_a_tokeniser_runs_on_ids(tmp_path: Path) -> None:
    write(tmp_path / "mute.gguf", LLAMA, weights(LLAMA))
    with load(tmp_path / "mute.gguf", devices="none") as opened:
        with opened.context(32) as context:
            assert np.isfinite(context.decode(IDS[:8])).all()
        for use in (lambda: opened.tokenize("hello"), lambda: opened.detokenize([1]), lambda: opened.generate("hello")):
            with pytest.raises(TokenizerError):
                use()
        with pytest.raises((ChatTemplateError, TokenizerError)):
            opened.chat([{"role": "user", "content": "hello"}])


def test_every_typed_error_is_one_line(model: Model, path: Path) -> None:
    with model.context(16) as context:
        for use in WRONG.values():
            with pytest.raises(LanewiseError) as caught:
                use(context)
            assert "\n" not in str(caught.value)
    assert "tiny.gguf" in str(path)
