"""`Tokenizer`: text to token ids and back, built from GGUF metadata alone."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import TokenizerError
from engine.tokenizer.build import SPACE, Segment, byte_level, choose_pre_tokenizer, is_unicode, sentencepiece
from engine.tokenizer.vocab import KEY, TokenType, Vocabulary, read_flag

SUPPORTED_MODELS = ("gpt2", "llama")
WHITESPACE = " \t\n\v\f\r"
SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}


class Tokenizer:
    """Text to token ids and back.

    `bos_id`, `eos_id` and `eot_id` are None where the file has none; `end_ids` are all ids that end a
    generation; `n_vocab` is the number of tokens; `bos_token` and `eos_token` are texts for chat templates.
    """

    def __init__(
        self, vocab: Vocabulary, segment: Segment, *, bytes_as_letters: bool, add_bos: bool, add_eos: bool,
        add_space_prefix: bool, right_strip: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.vocab = vocab
        self.n_vocab = len(vocab.tokens)
        self.bos_id, self.eos_id, self.eot_id = vocab.bos_id, vocab.eos_id, vocab.eot_id
        self.bos_token, self.eos_token = vocab.text(vocab.bos_id), vocab.text(vocab.eos_id)
        self.end_ids = vocab.end_ids
        self.add_bos, self.add_eos, self.add_space_prefix = add_bos, add_eos, add_space_prefix
        self._segment = segment
        self._bytes_as_letters = bytes_as_letters
        self._right_strip = right_strip
        self._hidden = frozenset(vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
        special = sorted({*self._hidden, *vocab.of_type(TokenType.USER_DEFINED)})
        longest_first = sorted(special, key=lambda i: -len(vocab.tokens[i].encode("utf-8", "surrogatepass")))
        self._special = [(vocab.tokens[i], i) for i in longest_first if vocab.tokens[i]]
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def from_metadata(metadata: Mapping[str, Any], cache_dir: Path | None = None) -> Tokenizer:
        """Build the tokenizer a GGUF file describes. Derived tables are kept in `cache_dir`."""
        model = metadata.get(KEY + "model", "none")
        if not isinstance(model, str):
            raise TokenizerError(f"{KEY}model = {model!r} is no name; supported are {', '.join(SUPPORTED_MODELS)}")
        if model in ("none", "no_vocab"):
            return NoTokenizer(metadata)
        if model == "gpt2":
            return _byte_level_tokenizer(metadata)
        if model == "llama":
            return _sentencepiece_tokenizer(metadata, cache_dir)
        supported = ", ".join(SUPPORTED_MODELS)
        raise TokenizerError(f"{KEY}model = {model!r} is not supported; supported are {supported}")

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds the begin and end tokens the model asks for; `parse_special` reads the text of
        control tokens as these tokens, else it is plain text.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text must be a str, not {type(text).__name__}")
        if not is_unicode(text):
            raise TokenizerError("text holds bytes that are not UTF-8 (lone surrogates); decode it first")
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        after_special = True
        for part in self._partition(text, parse_special):
            if isinstance(part, str):
                ids += self._segment(self._prepare(part, after_special))
            else:
                ids.append(part)
            after_special = not isinstance(part, str)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of `ids`; control tokens only if `special`. Bytes that are not UTF-8 become U+FFFD.

        The space that `encode` put before the text is taken away again.
        """
        checked = [self._checked(i) for i in ids]
        pieces = [self.token_bytes(i, special) for i in checked]
        first = 1 if checked[:1] == [self.bos_id] else 0
        if self.add_space_prefix and len(checked) > first and self._is_normal(checked[first]):
            pieces[first] = pieces[first].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for; a control token stands for none unless `special`."""
        token = self._checked(token)
        if token in self._hidden and not special:
            return b""
        if token not in self._bytes:
            self._bytes[token] = self._spell(token)
        return self._bytes[token]

    def _is_normal(self, token: int) -> bool:
        return bool(self.vocab.types[token] == TokenType.NORMAL)

    def _checked(self, token: int) -> int:
        try:
            i = operator.index(token)
        except TypeError:
            raise TokenizerError(f"token id {token!r} is not an integer") from None
        if not 0 <= i < self.n_vocab:
            raise TokenizerError(f"token id {i} is outside the vocabulary: expected 0 to {self.n_vocab - 1}")
        return i

    def _spell(self, token: int) -> bytes:
        text, kind = self.vocab.tokens[token], self.vocab.types[token]
        if kind in (TokenType.UNUSED, TokenType.UNDEFINED):
            return b""
        if kind == TokenType.BYTE and len(text) == 6:
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        if kind == TokenType.NORMAL:
            if self._bytes_as_letters:
                return letters_to_bytes(text)
            text = text.replace(SPACE, " ")
        return text.encode("utf-8", "surrogateescape")

    def _prepare(self, text: str, after_special: bool) -> str:
        if self._bytes_as_letters:
            return text
        return (" " + text if self.add_space_prefix and after_special else text).replace(" ", SPACE)

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut `text` at special tokens, the longest token first, each from left to right."""
        parts: list[str | int] = [text] if text else []
        for spelling, token in self._special:
            if spelling in text and (parse_special or token not in self._hidden):
                cuts = [self._cut(p, spelling, token) if isinstance(p, str) else [p] for p in parts]
                parts = [part for cut in cuts for part in cut]
        return parts

    def _cut(self, text: str, spelling: str, token: int) -> list[str | int]:
        pieces = text.split(spelling)
        if token in self._right_strip:
            pieces[1:] = [p.lstrip(WHITESPACE) for p in pieces[1:]]
        parts: list[str | int] = []
        for piece in pieces:
            parts += [piece, token] if piece else [token]
        return parts[:-1]


class NoTokenizer(Tokenizer):
    """The tokenizer of a file that has none: ids go in and out of the model, its text methods raise."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        architecture = metadata.get("general.architecture", "")
        size = metadata.get(f"{architecture}.vocab_size", 0)
        self.n_vocab = size if isinstance(size, int) else 0
        self.bos_id = self.eos_id = self.eot_id = None
        self.bos_token = self.eos_token = ""
        self.add_bos = self.add_eos = self.add_space_prefix = False
        self.end_ids = frozenset()

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Raises `TokenizerError`."""
        raise self._error()

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Raises `TokenizerError`."""
        raise self._error()

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """Raises `TokenizerError`."""
        raise self._error()

    @staticmethod
    def _error() -> TokenizerError:
        return TokenizerError("this file has no tokenizer; use token ids, or a file with a vocabulary")


def _byte_level_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    vocab = Vocabulary.from_metadata(metadata, {})
    pre = choose_pre_tokenizer(metadata)
    add_bos, add_eos = _border_flags(metadata, vocab, pre.add_bos)
    return Tokenizer(
        vocab, byte_level(vocab, metadata, pre), bytes_as_letters=True, add_bos=add_bos, add_eos=add_eos,
        add_space_prefix=False,
    )  # fmt: skip


def _sentencepiece_tokenizer(metadata: Mapping[str, Any], cache_dir: Path | None) -> Tokenizer:
    vocab = Vocabulary.from_metadata(metadata, SENTENCEPIECE_DEFAULTS)
    add_bos, add_eos = _border_flags(metadata, vocab, True)
    return Tokenizer(
        vocab, sentencepiece(vocab, metadata, cache_dir), bytes_as_letters=False, add_bos=add_bos,
        add_eos=add_eos, add_space_prefix=read_flag(metadata, "add_space_prefix", True),
        right_strip=_right_strip(metadata, vocab),
    )  # fmt: skip


def _border_flags(metadata: Mapping[str, Any], vocab: Vocabulary, add_bos: bool) -> tuple[bool, bool]:
    """Whether `encode` adds the begin and the end token; `add_bos` is the model type's habit."""
    flags = read_flag(metadata, "add_bos_token", add_bos), read_flag(metadata, "add_eos_token", False)
    for name, flag, token in zip(("bos", "eos"), flags, (vocab.bos_id, vocab.eos_id), strict=True):
        if flag and token is None:
            raise TokenizerError(f"{KEY}add_{name}_token is true, but {KEY}{name}_token_id is not set")
    return flags


def _right_strip(metadata: Mapping[str, Any], vocab: Vocabulary) -> frozenset[int]:
    """Special tokens that swallow the white space after them: Phi-3's, and no key of the file says so."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    return frozenset(i for i in special if vocab.tokens[i] not in ("<unk>", "<s>", "<|endoftext|>"))


def _letter_table() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable letter: Latin-1's own, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


LETTERS = _letter_table()


def letters_to_bytes(text: str) -> bytes:
    """Bytes of a byte-level token; a letter outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([LETTERS[letter] for letter in text])
    except KeyError:
        return text.encode("utf-8", "surrogateescape")
