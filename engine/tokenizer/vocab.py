"""The vocabulary of a GGUF file: tokens, their types, special ids and which of them end a generation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import TokenizerError

log = logging.getLogger(__name__)

KEY = "tokenizer.ggml."


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says about a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Files often leave the end-of-turn id out: these texts stand for it, first match first.
END_OF_TURN_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)

# Texts that end a generation whatever the file's own ids say.
END_TEXTS = frozenset(END_OF_TURN_TEXTS) | {
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|eom_id|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "[e~[",
    # Padding and file borders of fill-in-the-middle models: what follows is another file.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
}

# Texts that are control tokens even where the file types them as normal ones.
CONTROL_TEXTS = END_TEXTS | {
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
}

# The channel markers of the harmony format are part of the visible answer.
VISIBLE_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of one file. `types` holds the types in force, `file_types` those written in the file."""

    tokens: Sequence[str]
    file_types: NDArray[np.int32]
    types: NDArray[np.int32]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], defaults: Mapping[str, int]) -> Vocabulary:
        """Read the token list and the special ids; `defaults` are used for ids the file does not give."""
        tokens = read_tokens(metadata)
        n = len(tokens)
        file_types = read_array(metadata, "token_type", n, np.int32, TokenType.NORMAL)
        ids = {name: read_id(metadata, name, n, defaults.get(name)) for name in ("bos", "eos", "eot", "eom")}
        ids["unknown"] = read_id(metadata, "unknown", n, defaults.get("unknown"))
        by_text = positions(tokens, CONTROL_TEXTS.union(VISIBLE_TEXTS))
        if ids["eot"] is None:
            ids["eot"] = next((by_text[t] for t in END_OF_TURN_TEXTS if t in by_text), None)
        ends = {by_text[t] for t in END_TEXTS if t in by_text}
        ends |= {i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None}
        types = effective_types(file_types, by_text)
        if {"<|return|>", "<|call|>", "<|end|>"} <= by_text.keys():
            # In the harmony format <|end|> only closes a message; the turn goes on.
            ends.discard(by_text["<|end|>"])
            types[by_text["<|end|>"]] = TokenType.USER_DEFINED
        return cls(
            tokens, file_types, types, ids["bos"], ids["eos"], ids["eot"], ids["unknown"], frozenset(ends)
        )

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of the tokens whose type in force is one of `types`, in order."""
        return [int(i) for i in np.flatnonzero(np.isin(self.types, types))]

    def text(self, token: int | None) -> str:
        """The token's text as the file spells it; empty for None."""
        return "" if token is None else self.tokens[token]


def read_tokens(metadata: Mapping[str, Any]) -> Sequence[str]:
    """The list `tokenizer.ggml.tokens`, checked."""
    tokens = metadata.get(KEY + "tokens")
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or len(tokens) == 0:
        raise TokenizerError(f"{KEY}tokens is missing or empty; convert the model again with its vocabulary")
    tokens = list(tokens)
    if not all(isinstance(t, str) for t in tokens):
        raise TokenizerError(f"{KEY}tokens must hold strings only; convert the model again")
    return tokens


def read_array(
    metadata: Mapping[str, Any], name: str, n: int, dtype: type[np.generic], default: float
) -> NDArray[Any]:
    """An array with a value per token; `default` everywhere if the file has none."""
    values = metadata.get(KEY + name)
    if values is None:
        return np.full(n, default, dtype=dtype)
    try:
        array = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TokenizerError(f"{KEY}{name} does not hold numbers ({error})") from None
    if array.ndim != 1 or len(array) < n:
        raise TokenizerError(f"{KEY}{name} has shape {array.shape}; expected a value for each of {n} tokens")
    return array[:n]


def read_id(metadata: Mapping[str, Any], name: str, n: int, default: int | None) -> int | None:
    """A special token id, or `default` (if that is in the vocabulary) where the file's is absent or wrong."""
    fallback = default if default is not None and default < n else None
    value = metadata.get(f"{KEY}{name}_token_id")
    if value is None:
        return fallback
    if not isinstance(value, int) or not 0 <= value < n:
        log.warning("%s%s_token_id = %r is outside the vocabulary of %d tokens: ignored", KEY, name, value, n)
        return fallback
    return value


def read_flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean key of the tokenizer, or `default` where the file's is absent or no truth value."""
    value = metadata.get(KEY + name)
    if value is None:
        return default
    if not isinstance(value, (bool, int)):
        log.warning("%s%s = %r is no truth value: ignored", KEY, name, value)
        return default
    return bool(value)


def positions(tokens: Sequence[str], texts: Iterable[str]) -> dict[str, int]:
    """Where each of `texts` stands in the vocabulary; the lowest id of equal ones."""
    wanted = frozenset(texts)
    found = [(token, i) for i, token in enumerate(tokens) if token in wanted]
    return dict(reversed(found))


def effective_types(file_types: NDArray[np.int32], by_text: Mapping[str, int]) -> NDArray[np.int32]:
    """The types in force: control-looking texts are control tokens, harmony markers are visible."""
    types = file_types.copy()
    for text, i in by_text.items():
        types[i] = TokenType.USER_DEFINED if text in VISIBLE_TEXTS else TokenType.CONTROL
    return types
