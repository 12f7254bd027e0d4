"""Byte-pair models on the `tokenizers` library: byte-level ("gpt2") and SentencePiece ("llama") ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import TokenizerError
from engine.tokenizer.merges import Merge, merges_from_scores, split_merges, usable
from engine.tokenizer.vocab import KEY, TokenType, Vocabulary, read_array

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Pipeline

log = logging.getLogger(__name__)

SPACE = "▁"
Segment = Callable[[str], list[int]]

# Kinds whose splitting or alphabet is more than a list of expressions over byte-level pieces.
UNSUPPORTED_KINDS = frozenset({"afmoe", "kimi_k2", "gemma4", "sarvam_moe", "whitespace"})


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before byte-level merging, and the flags that come with the choice."""

    name: str
    kind: str
    split: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


@cache
def pre_tokenizers() -> dict[str, PreTokenizer]:
    """All known values of `tokenizer.ggml.pre`."""
    table = json.loads(files(__package__).joinpath("pre_tokenizers.json").read_text(encoding="utf-8"))
    return {
        name: PreTokenizer(
            name, row["type"], tuple(row["split"]), row.get("ignore_merges", False), row.get("add_bos", False)
        )
        for name, row in table.items()
    }


def choose_pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The one the file names; `default`, with a warning, if it names none or an unknown one."""
    name = metadata.get(KEY + "pre")
    chosen = pre_tokenizers().get(name) if isinstance(name, str) else None
    if chosen is None:
        what = "is missing" if name is None or (isinstance(name, str) and not name) else f"= {name!r} is unknown"
        log.warning("%spre %s: using 'default', so answers may be worse; convert the model again", KEY, what)
        return pre_tokenizers()["default"]
    if chosen.kind in UNSUPPORTED_KINDS:
        names = ", ".join(sorted(n for n, p in pre_tokenizers().items() if p.kind not in UNSUPPORTED_KINDS))
        raise TokenizerError(f"{KEY}pre = {name!r} is not supported; supported are {names}")
    return chosen


def byte_level(vocab: Vocabulary, metadata: Mapping[str, Any], pre: PreTokenizer) -> Segment:
    """A segmenter for byte-level BPE: split by `pre`, map bytes to letters, merge."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    lines = metadata.get(KEY + "merges")
    if not isinstance(lines, Sequence) or isinstance(lines, str):
        raise TokenizerError(f"{KEY}merges is missing; convert the model again with its vocabulary")
    hidden = (TokenType.CONTROL, TokenType.UNKNOWN)
    ids = np.flatnonzero(~np.isin(vocab.file_types, hidden)).tolist()
    words = token_ids(vocab.tokens, ids)
    options = {"ignore_merges": pre.ignore_merges}
    pipeline = Tokenizer(make_bpe(models.BPE, words, split_merges(lines), options))
    try:
        splits = [pre_tokenizers.Split(Regex(r), "isolated") for r in pre.split]
    except Exception as error:  # the library raises plain Exception for an expression it cannot compile
        raise TokenizerError(f"{KEY}pre = {pre.name!r} is not supported ({error})") from None
    bytes_to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_to_letters])
    return segmenter(pipeline)


def sentencepiece(vocab: Vocabulary, metadata: Mapping[str, Any], cache_dir: Path | None) -> Segment:
    """A segmenter for SentencePiece BPE. It expects text whose spaces are already written as `SPACE`."""
    from tokenizers import Tokenizer, models

    scores = read_array(metadata, "scores", len(vocab.tokens), np.float32, 0.0)
    if np.isnan(scores).any():
        raise TokenizerError(f"{KEY}scores holds {int(np.isnan(scores).sum())} NaN; convert the model again")
    # Control and byte tokens are never the result of a merge: their spelling in a text is plain text.
    mergeable = (TokenType.NORMAL, TokenType.UNUSED, TokenType.UNDEFINED)
    ids = np.array([i for i in vocab.of_type(*mergeable) if vocab.tokens[i]], dtype=np.int64)
    merges = merges_from_scores(vocab.tokens, ids, scores, cache_dir)
    words = token_ids(vocab.tokens, ids.tolist() + vocab.of_type(TokenType.BYTE))
    options: dict[str, Any] = {"byte_fallback": True}
    if vocab.unknown_id is not None:
        unknown = vocab.tokens[vocab.unknown_id]
        words.setdefault(unknown, vocab.unknown_id)
        options["unk_token"] = unknown
    return segmenter(Tokenizer(make_bpe(models.BPE, words, merges, options)))


def token_ids(tokens: Sequence[str], ids: Sequence[int]) -> dict[str, int]:
    """Text to id for `ids`; of equal texts the lowest id wins. Those that are not UTF-8 are left out."""
    words = {tokens[i]: i for i in reversed(ids)}
    words.pop("", None)
    return words if is_unicode("".join(words)) else {text: i for text, i in words.items() if is_unicode(text)}


def is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogates (a reader may use them for bytes that are not UTF-8)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def make_bpe(
    model: Callable[..., Any], words: dict[str, int], merges: list[Merge], options: Mapping[str, Any]
) -> Any:
    """The library's model; merges it refuses because a part is no token are dropped."""
    try:
        return model(words, merges, **options)
    except Exception as error:  # the library raises plain Exception for a merge outside the vocabulary
        kept = usable(merges, words)
        log.debug("%d of %d merges left out: %s", len(merges) - len(kept), len(merges), error)
    try:
        return model(words, kept, **options)
    except Exception as error:
        raise TokenizerError(f"the vocabulary cannot be used: {error}") from None


def segmenter(pipeline: Pipeline) -> Segment:
    """Text to ids, without special tokens."""

    def segment(text: str) -> list[int]:
        return pipeline.encode(text, add_special_tokens=False).ids

    return segment
