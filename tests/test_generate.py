"""Generation on models whose next token is known: what stops it, what is streamed, and what a seed repeats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.dtypes import F32
from engine.errors import ChatTemplateError, ContextError, SamplingError, TokenizerError
from engine.model import Model
from engine.runtime import load

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "models")]

from float64_models import LLAMA, weights, write  # noqa: E402
from tiny_model import N_EMBD, TOKENS, tensors, write_tiny_model  # noqa: E402

END = TOKENS.index("<|im_end|>")
SCRIPT = "Sing: 🚀 東京, né!"  # no byte of it stands there twice but the space
UNITS = ["S", "i", "n", "g", ":", " ", "🚀", "東", "京", ",", "é", "!"]


def letter_ids(model: Model, text: str) -> list[int]:
    """A token for each byte of a text."""
    return [
        model.tokenize(chr(b) if b < 128 else "?", add_special=False)[0] if b < 128 else model.tokenizer.vocab.tokens.index(_letter(b))
        for b in text.encode()
    ]


def _letter(byte: int) -> str:
    """The letter byte-level vocabularies write for a byte, as GPT-2 defined it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return chr(byte) if byte in plain else chr(256 + others.index(byte))


def write_script(path: Path, chain: list[int], **changes: object) -> Path:
    """A model that answers each token of `chain` with the next: nothing is mixed in, and each embedding points at its successor."""
    made = tensors()
    for name, (kind, shape, values) in made.items():
        if "attn_output" in name or "ffn_down" in name:
            made[name] = (kind, shape, np.zeros_like(values))
        if "norm" in name:
            made[name] = (kind, shape, np.ones_like(values))
    directions = np.linalg.qr(np.random.default_rng(0).standard_normal((N_EMBD, N_EMBD)))[0].astype(np.float32)
    embedding, output = np.zeros((2, len(TOKENS), N_EMBD), np.float32)
    assert len(set(chain[:-1])) == len(chain) - 1 <= N_EMBD
    for direction, here, there in zip(directions, chain[:-1], chain[1:], strict=False):
        embedding[here] = direction
        output[there] += direction
    shape = (len(TOKENS), N_EMBD)
    return write_tiny_model(path, made | {"token_embd.weight": (F32, shape, embedding), "output.weight": (F32, shape, output)}, **changes)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Answers "S" with the rest of the units, then the end token."""
    folder = tmp_path_factory.mktemp("script")
    with load(write_tiny_model(folder / "any.gguf"), devices="none") as any_model:
        chain = [*letter_ids(any_model, "".join(UNITS)), END]
    with load(write_script(folder / "script.gguf", chain), devices="none") as model:
        yield model


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Answers with "abcdef" over and over."""
    folder = tmp_path_factory.mktemp("endless")
    with load(write_tiny_model(folder / "any.gguf"), devices="none") as any_model:
        chain = letter_ids(any_model, "abcdefa")
    with load(write_script(folder / "endless.gguf", chain), devices="none") as model:
        yield model


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with load(write_tiny_model(tmp_path_factory.mktemp("random") / "random.gguf"), devices="none") as model:
        yield model


# -- why it ends ------------------------------------------------------------------------------------------------


def test_it_ends_with_the_end_token(script: Model) -> None:
    answer = script.generate("S", temperature=0)
    pieces = list(answer)
    assert answer.finish_reason == "stop"
    assert answer.text == "".join(pieces) == "".join(UNITS[1:])
    assert len(answer.tokens) == len("".join(UNITS[1:]).encode()) and END not in answer.tokens
    assert answer.prompt_tokens == script.tokenize("S")


def test_the_end_token_can_be_ignored(script: Model) -> None:
    answer = script.generate("!", temperature=0, ignore_end=True, max_tokens=1)
    assert "".join(answer) == "" and answer.tokens == [END] and answer.finish_reason == "length"


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_it_ends_after_max_tokens(endless: Model, n: int) -> None:
    answer = endless.generate("a", max_tokens=n, temperature=0)
    assert "".join(answer) == "bcdefab"[:n]
    assert len(answer.tokens) == n and answer.finish_reason == "length"


@pytest.mark.parametrize("n_ctx", [2, 16, 33])
def test_it_ends_when_the_context_is_full(endless: Model, n_ctx: int) -> None:
    """Every token but the last one has to be fed: one more is generated than fits."""
    with endless.context(n_ctx) as context:
        answer = endless.generate("a", context=context, temperature=0, max_tokens=-1)
        text = "".join(answer)
        assert answer.finish_reason == "context"
        assert len(answer.tokens) == n_ctx and context.n_past == n_ctx
        assert text == ("abcdef" * 9)[1 : n_ctx + 1]


@pytest.mark.parametrize("n,reason", [(15, "length"), (16, "length"), (17, "context")])
def test_what_just_fits_is_no_full_context(endless: Model, n: int, reason: str) -> None:
    with endless.context(16) as context:
        answer = endless.generate("a", context=context, temperature=0, max_tokens=n)
        assert len("".join(answer)) == min(n, 16) and answer.finish_reason == reason


@pytest.mark.parametrize("length,fits", [(14, True), (15, True), (16, False), (17, False)])
def test_a_prompt_must_leave_room_for_a_token(endless: Model, length: int, fits: bool) -> None:
    with endless.context(16) as context:
        if fits:
            answer = endless.generate([5] * (length - 1) + endless.tokenize("a"), context=context, temperature=0)
            assert len("".join(answer)) == 16 - length + 1
        else:
            with pytest.raises(ContextError, match=f"the prompt has {length} tokens, the context holds 16"):
                endless.generate([5] * length, context=context)
            assert context.n_past == 0


# -- stop strings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stop,text",
    [(["cd"], "b"), (["fab"], "bcde"), (["x", "e", "de"], "bc"), (["bcdefabcd"], ""), (["b"], ""), (["zz"], None), ([""], None)],
)
def test_stop_strings_reach_over_tokens_and_are_not_shown(endless: Model, stop: list[str], text: str | None) -> None:
    answer = endless.generate("a", stop=stop, max_tokens=20, temperature=0)
    pieces = list(answer)
    if text is None:
        assert answer.finish_reason == "length" and answer.text == "".join(pieces) == ("abcdef" * 9)[1:21]
    else:
        assert answer.finish_reason == "stop" and answer.text == "".join(pieces) == text


def test_the_beginning_of_a_stop_string_is_shown_at_the_end(endless: Model) -> None:
    answer = endless.generate("a", stop=["efZ"], max_tokens=5, temperature=0)
    assert "".join(answer) == answer.text == "bcdef" and answer.finish_reason == "length"


def test_a_stop_string_of_many_bytes(script: Model) -> None:
    answer = script.generate("S", stop=["東京"], temperature=0)
    assert "".join(answer) == "ing: 🚀" and answer.finish_reason == "stop"


# -- streaming --------------------------------------------------------------------------------------------------


def test_characters_are_streamed_whole(script: Model) -> None:
    pieces = list(script.generate("S", temperature=0))
    assert pieces == UNITS[1:]


def test_a_character_cut_off_at_the_end_becomes_a_replacement(script: Model) -> None:
    answer = script.generate("S", temperature=0, max_tokens=len(b"ing: ") + 2)  # two of four bytes
    assert list(answer) == ["i", "n", "g", ":", " ", "\ufffd"]
    assert answer.text == "ing: \ufffd"


def test_nothing_runs_before_the_first_piece_is_asked_for(endless: Model) -> None:
    with endless.context(32) as context:
        answer = endless.generate("a", context=context, temperature=0)
        assert context.n_past == 0 and answer.finish_reason == ""
        next(answer)
        assert answer.text == "b" and answer.tokens and answer.finish_reason == ""
        assert next(answer) == "c"


def test_a_finished_generation_stays_finished(endless: Model) -> None:
    answer = endless.generate("a", max_tokens=2, temperature=0)
    assert "".join(answer) == "bc" and list(answer) == [] and answer.text == "bc"


# -- prompts ----------------------------------------------------------------------------------------------------


def test_a_prompt_of_ids(endless: Model) -> None:
    ids = endless.tokenize("xya")
    for prompt in (ids, tuple(ids), np.array(ids)):
        assert "".join(endless.generate(prompt, max_tokens=4, temperature=0)) == "bcde"


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(endless: Model, prompt: object) -> None:
    with endless.context(16) as context:
        for _ in range(2):  # the second time there is something to continue, but nothing to compute logits from
            with pytest.raises(ContextError, match="prompt is empty"):
                endless.generate(prompt, context=context)  # type: ignore[arg-type]
            context.decode([1])


def test_ids_outside_the_vocabulary_are_refused(endless: Model) -> None:
    with pytest.raises(ContextError, match="outside the vocabulary"):
        "".join(endless.generate([1, 5000]))


@pytest.mark.parametrize("n", [-2, 1.5, "7", True])
def test_impossible_lengths_are_refused(endless: Model, n: object) -> None:
    with pytest.raises(ContextError, match="max_tokens"):
        endless.generate("a", max_tokens=n)


def test_each_generation_starts_over_unless_a_context_is_given(endless: Model) -> None:
    assert ["".join(endless.generate("a", max_tokens=3, temperature=0)) for _ in range(2)] == ["bcd", "bcd"]
    with endless.context(64) as context:
        "".join(endless.generate("a", context=context, max_tokens=3, temperature=0))
        seen = context.n_past
        assert "".join(endless.generate("c", context=context, max_tokens=2, temperature=0)) == "de"
        assert context.n_past > seen


def test_a_chat(script: Model) -> None:
    text = script.chat([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert script.tokenize(text)[0] == TOKENS.index("<|im_start|>")
    assert script.chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_begin_token_is_not_doubled(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "bos.gguf", tokenizer__ggml__add_bos_token=True)
    begin = TOKENS.index("<|im_start|>")
    with load(path, devices="none") as model:
        assert model.generate("Hi").prompt_tokens == [begin, *model.tokenize("Hi", add_special=False)]
        assert model.generate("<|im_start|>Hi").prompt_tokens == [begin, *model.tokenize("Hi", add_special=False)]


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "plain.gguf", tokenizer__chat_template=None)
    with load(path, devices="none") as model, pytest.raises(ChatTemplateError):
        model.chat([{"role": "user", "content": "Hi"}])


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "plain.gguf", tokenizer__chat_template=None)
    with load(path, devices="none", chat_template="{{ messages[0].content }}!") as model:
        assert model.chat([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_without_a_tokeniser_ids_are_generated(tmp_path: Path) -> None:
    write(tmp_path / "mute.gguf", LLAMA, weights(LLAMA))
    with load(tmp_path / "mute.gguf", devices="none") as model:
        with pytest.raises(TokenizerError):
            model.generate("Hi")
        answer = model.generate([1, 2, 3], max_tokens=5, temperature=0)
        assert list(answer) == [] and answer.text == ""
        assert len(answer.tokens) == 5 and answer.finish_reason == "length"
        with model.context(32) as context:
            want, logits = [], context.decode([1, 2, 3])
            for _ in range(5):
                want.append(int(logits.argmax()))
                logits = context.decode(want[-1:])
        assert answer.tokens == want


# -- sampling ---------------------------------------------------------------------------------------------------


def test_a_seed_repeats_an_answer(random_model: Model) -> None:
    def tokens(seed: int, **options: float) -> list[int]:
        answer = random_model.generate("Hello", max_tokens=30, temperature=1.5, ignore_end=True, seed=seed, **options)
        "".join(answer)
        return answer.tokens

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(seed)) for seed in range(5)}) == 5
    assert tokens(2, top_k=1) == tokens(3, top_k=1)  # one candidate leaves nothing to chance


def test_the_seed_of_an_answer_is_known(random_model: Model) -> None:
    first = random_model.generate("Hello", max_tokens=20, temperature=1.5)
    text = "".join(first)
    again = random_model.generate("Hello", max_tokens=20, temperature=1.5, seed=first.sampler.seed)
    assert "".join(again) == text and again.tokens == first.tokens


def test_penalties_see_prompt_and_answer(endless: Model) -> None:
    tokens = endless.generate("a", max_tokens=12, temperature=0)
    assert "".join(tokens) == "bcdefabcdefa"
    answer = endless.generate("a", max_tokens=12, temperature=0, presence_penalty=1e6, ignore_end=True)
    "".join(answer)
    assert len(set(answer.tokens) | set(answer.prompt_tokens)) == 13  # nothing twice


def test_nan_is_an_error_and_never_text(tmp_path: Path) -> None:
    made = tensors()
    kind, shape, values = made["output_norm.weight"]
    broken = np.array(values)
    broken[3] = np.nan
    with load(write_tiny_model(tmp_path / "nan.gguf", made | {"output_norm.weight": (kind, shape, broken)}), devices="none") as model:
        for temperature in (0.0, 1.0):
            answer, pieces = model.generate("Hello", temperature=temperature), []
            with pytest.raises(SamplingError, match=f"{len(TOKENS)} of {len(TOKENS)} logits are NaN"):
                pieces.extend(answer)
            assert pieces == [] and answer.text == "" and answer.tokens == []


def test_timings_and_placement(endless: Model) -> None:
    answer = endless.generate("abc", max_tokens=6, temperature=0)
    "".join(answer)
    said = answer.timings.as_dict()
    assert set(said) == {"load_s", "compile_s", "prompt_s", "prompt_tps", "decode_s", "decode_tps"}
    assert all(v >= 0 for v in said.values()) and said["prompt_tps"] > 0 and said["decode_tps"] > 0
    assert answer.placement.startswith("cpu: ")
