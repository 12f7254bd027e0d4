"""Tokenizers built from small vocabularies made here: round trips, special tokens, flags, errors."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TokenizerError
from engine.tokenizer import NoTokenizer, Tokenizer
from engine.tokenizer.tokenizer import LETTERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """256 letters, a few merges, three control tokens and one user-defined token."""
    letters = sorted(LETTERS)
    merged = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "Ġworld"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
    tokens = [*letters, *merged, "ld", "<s>", "<|im_end|>", "<unk>", "<tool>"]
    types = [NORMAL] * (len(tokens) - 4) + [CONTROL, CONTROL, UNKNOWN, USER_DEFINED]
    ids = {text: i for i, text in enumerate(tokens)}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids["<s>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Control tokens, 256 bytes, the letters of a few words, and their joins with falling scores."""
    words = ["▁", *"helowrd", "he", "ll", "hell", "▁hell", "▁hello", "or", "▁w", "▁wor", "ld", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, "  ", "<note>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED, USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0, 0.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


BYTE_LEVEL = Tokenizer.from_metadata(byte_level_metadata())
SENTENCEPIECE = Tokenizer.from_metadata(sentencepiece_metadata())
NO_PREFIX = Tokenizer.from_metadata(sentencepiece_metadata(add_space_prefix=False))


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.vocab.tokens[i] for i in ids]


@given(unicode_text)
def test_byte_level_round_trip(text):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, parse_special=False)) == text


@given(unicode_text)
def test_byte_level_round_trip_with_special_tokens(text):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), special=True) == text


@given(unicode_text)
@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, NO_PREFIX], ids=["prefix", "no-prefix"])
def test_sentencepiece_round_trip(tokenizer, text):
    text = text.replace("▁", "_")  # SentencePiece cannot tell it from a space
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@given(st.lists(st.sampled_from(["hello", " world", "<s>", "<|im_end|>", "<tool>", "é", " "])))
def test_encoding_is_the_same_for_the_decoded_text(parts):
    ids = BYTE_LEVEL.encode("".join(parts))
    assert BYTE_LEVEL.encode(BYTE_LEVEL.decode(ids, special=True)) == ids


def test_merges_apply():
    assert texts(BYTE_LEVEL, BYTE_LEVEL.encode("hello world")) == ["hello", "Ġworld"]
    assert texts(SENTENCEPIECE, SENTENCEPIECE.encode("hello world")) == ["<s>", "▁hello", "▁world"]


def test_unknown_characters_fall_back_to_bytes():
    assert texts(NO_PREFIX, NO_PREFIX.encode("é", add_special=False)) == ["<0xC3>", "<0xA9>"]


def test_special_text_is_plain_text_when_not_parsed():
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        special = tokenizer.bos_id
        assert special in tokenizer.encode("a<s>b", add_special=False)
        assert special not in tokenizer.encode("a<s>b", add_special=False, parse_special=False)


def test_byte_token_text_is_plain_text():
    newline = SENTENCEPIECE.vocab.tokens.index("<0x0A>")
    assert newline not in SENTENCEPIECE.encode("<0x0A>")


def test_user_defined_tokens_are_found_always():
    for parse_special in (True, False):
        ids = BYTE_LEVEL.encode("he<tool>he", parse_special=parse_special)
        assert texts(BYTE_LEVEL, ids) == ["he", "<tool>", "he"]


def test_longest_special_token_first():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<tool><tool>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], USER_DEFINED]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert texts(tokenizer, tokenizer.encode("<tool><tool><tool>")) == ["<tool><tool>", "<tool>"]


def test_space_prefix_after_each_special_token():
    ids = SENTENCEPIECE.encode("hello</s>hello")
    assert texts(SENTENCEPIECE, ids) == ["<s>", "▁hello", "</s>", "▁hello"]


def test_empty_text():
    assert BYTE_LEVEL.encode("") == []
    assert SENTENCEPIECE.encode("") == [1]
    assert SENTENCEPIECE.encode("", add_special=False) == []
    assert SENTENCEPIECE.decode([]) == ""


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_border_tokens(add_bos, add_eos):
    for metadata in (byte_level_metadata, sentencepiece_metadata):
        tokenizer = Tokenizer.from_metadata(metadata(add_bos_token=add_bos, add_eos_token=add_eos))
        ids = tokenizer.encode("hello")
        assert (ids[0] == tokenizer.bos_id) == add_bos
        assert (ids[-1] == tokenizer.eos_id) == add_eos
        assert tokenizer.encode("hello", add_special=False) == ids[add_bos : len(ids) - add_eos]


def test_border_defaults_per_model_type():
    assert (SENTENCEPIECE.add_bos, SENTENCEPIECE.add_eos) == (True, False)
    assert (BYTE_LEVEL.add_bos, BYTE_LEVEL.add_eos) == (False, False)
    assert Tokenizer.from_metadata(byte_level_metadata(pre="llama-bpe")).add_bos


def test_special_ids_and_end_ids():
    tokens = BYTE_LEVEL.vocab.tokens
    assert (BYTE_LEVEL.bos_token, BYTE_LEVEL.eos_token) == ("<s>", "<|im_end|>")
    assert BYTE_LEVEL.eot_id == tokens.index("<|im_end|>")
    assert BYTE_LEVEL.end_ids == {tokens.index("<|im_end|>")}
    assert (SENTENCEPIECE.bos_id, SENTENCEPIECE.eos_id, SENTENCEPIECE.eot_id) == (1, 2, None)
    assert SENTENCEPIECE.end_ids == {2}
    assert SENTENCEPIECE.n_vocab == len(SENTENCEPIECE.vocab.tokens)


@pytest.mark.parametrize(
    "text",
    "<end_of_turn> <|im_end|> <|eot_id|> <|end|> <|endoftext|> <eos> </s> <|end_of_text|>".split(),
)
def test_known_end_texts_end_and_are_control_tokens(text):
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [
        text if t == "<tool>" else "<other>" if t == text else t for t in metadata["tokenizer.ggml.tokens"]
    ]
    tokenizer = Tokenizer.from_metadata(metadata)
    end = tokenizer.vocab.tokens.index(text)
    assert end in tokenizer.end_ids
    assert tokenizer.token_bytes(end) == b""
    assert tokenizer.token_bytes(end, special=True) == text.encode()


def test_harmony_end_marker_does_not_end():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *[CONTROL] * 4]
    tokenizer = Tokenizer.from_metadata(metadata)
    n = tokenizer.n_vocab
    assert {n - 4, n - 3} <= tokenizer.end_ids
    assert n - 2 not in tokenizer.end_ids
    assert tokenizer.decode([n - 1]) == "<|channel|>"


def test_decode_of_bytes_and_control_tokens():
    assert SENTENCEPIECE.token_bytes(3 + 0xE2) == b"\xe2"
    assert SENTENCEPIECE.decode([3 + 0xE2]) == "\ufffd"
    assert SENTENCEPIECE.decode([1, 2]) == ""
    assert SENTENCEPIECE.decode([1, 2], special=True) == "<s></s>"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab.tokens.index("Ġworld")) == b" world"


def test_decode_takes_numpy_ids():
    assert BYTE_LEVEL.decode(np.array(BYTE_LEVEL.encode("hello world"), dtype=np.int32)) == "hello world"


@pytest.mark.parametrize("bad", [-1, 10**6, 1.5, "a", None])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["gpt2", "llama"])
def test_ids_out_of_range(tokenizer, bad):
    with pytest.raises(TokenizerError, match="token id"):
        tokenizer.decode([0, bad])
    with pytest.raises(TokenizerError, match="token id"):
        tokenizer.token_bytes(bad)


def test_text_that_is_not_unicode():
    with pytest.raises(TokenizerError, match="UTF-8"):
        BYTE_LEVEL.encode("a\udc80")
    with pytest.raises(TokenizerError, match="str"):
        BYTE_LEVEL.encode(b"a")  # type: ignore[arg-type]


@pytest.mark.parametrize("pre", [None, "", "no-such-split"])
def test_missing_or_unknown_pre_tokenizer_warns_once(caplog, pre):
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.from_metadata(byte_level_metadata(pre=pre))
    assert len(caplog.records) == 1
    assert "tokenizer.ggml.pre" in caplog.text
    default = Tokenizer.from_metadata(byte_level_metadata(pre="default"))
    assert tokenizer.encode("hello 12345, world!") == default.encode("hello 12345, world!")


def test_no_warning_for_a_known_pre_tokenizer(caplog):
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_metadata(byte_level_metadata())
        Tokenizer.from_metadata(sentencepiece_metadata())
    assert not caplog.records


def test_pre_tokenizers_that_need_more_than_expressions_are_refused():
    with pytest.raises(TokenizerError, match="'kimi-k2' is not supported; supported are .*llama-bpe"):
        Tokenizer.from_metadata(byte_level_metadata(pre="kimi-k2"))


def test_unknown_model_is_refused_with_the_supported_ones():
    with pytest.raises(TokenizerError, match="'bert' is not supported; supported are gpt2, llama"):
        Tokenizer.from_metadata({"tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing"),
        ({"tokens": "abc"}, "tokens is missing"),
        ({"tokens": [1, 2]}, "strings only"),
        ({"token_type": [1]}, "a value for each"),
        ({"token_type": ["a"] * 300}, "numbers"),
        ({"merges": None}, "merges is missing"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is not set"),
    ],
)
def test_damaged_metadata(changes, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_metadata(byte_level_metadata(**changes))


def test_nan_scores_are_refused():
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"][300 - 30] = float("nan")
    with pytest.raises(TokenizerError, match="1 NaN"):
        Tokenizer.from_metadata(metadata)


def test_ids_outside_the_vocabulary_are_ignored_with_a_warning(caplog):
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(eos_token_id=10**6))
    assert tokenizer.eos_id is None
    assert "1000000" in caplog.text


def test_merges_outside_the_vocabulary_are_left_out():
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(merges=["h e", "x yz", "q", "", "e l"]))
    assert texts(tokenizer, tokenizer.encode("hell")) == ["he", "l", "l"]


def test_tokens_that_are_not_unicode_are_kept_for_decoding():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["\udcff\udcfe"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b"\xff\xfe"
    assert texts(tokenizer, tokenizer.encode("hello")) == ["hello"]


def test_right_strip_of_phi3_tokens():
    metadata = sentencepiece_metadata() | {"general.name": "Phi-3 mini"}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert texts(tokenizer, tokenizer.encode("<note> \nhello", False)) == ["<note>", "▁hello"]
    assert texts(tokenizer, tokenizer.encode("<s> hello", False)) == ["<s>", "▁", "▁hello"]


@pytest.mark.parametrize("model", ["none", "no_vocab", None])
def test_no_tokenizer(model):
    metadata = {"general.architecture": "llama", "llama.vocab_size": 128}
    if model:
        metadata["tokenizer.ggml.model"] = model
    tokenizer = Tokenizer.from_metadata(metadata)
    assert isinstance(tokenizer, NoTokenizer)
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (128, None, None)
    assert tokenizer.end_ids == frozenset()
    for method, argument in ((tokenizer.encode, "a"), (tokenizer.decode, [1]), (tokenizer.token_bytes, 1)):
        with pytest.raises(TokenizerError, match="no tokenizer"):
            method(argument)
