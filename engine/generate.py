"""Generation: a prompt goes in, pieces of text come out, safe at UTF-8 borders, until a stop, a length, or the context's end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from engine.errors import ContextError
from engine.model import Context
from engine.sample import Sampler, SamplerSettings
from engine.tokenizer import NoTokenizer, StopStrings, TextStream

FinishReason = Literal["", "stop", "length", "context", "interrupted"]


@dataclass
class Timings:
    """Seconds, and tokens per second, of the parts of a generation. Building graphs and compiling count as `compile_s` only."""

    load_s: float = 0.0
    compile_s: float = 0.0
    prompt_s: float = 0.0
    prompt_tps: float = 0.0
    decode_s: float = 0.0
    decode_tps: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {k: round(v, 6) for k, v in asdict(self).items()}


class Generation:
    """An iterable of text pieces; it runs as it is read.

    Attributes:
        prompt_tokens: ids of the prompt. tokens: ids generated so far, the end token left out. text: their text.
        finish_reason: "stop" (end token or stop string), "length" (`max_tokens` reached), "context" (no room left), "interrupted" (Ctrl-C,
            set by whoever caught it).
        timings: seconds and tokens per second.
    """

    def __init__(self, context: Context, prompt: str | Sequence[int], *, max_tokens: int = -1, stop: Sequence[str] = (),
                 settings: SamplerSettings | None = None, add_special: bool = True, ignore_end: bool = False, **sampling: object) -> None:
        """Check everything; nothing runs before the first piece is asked for.

        Args:
            prompt: text, or token ids. It continues what the context holds.
            max_tokens: -1 for as many as the context has room for.
            stop: texts that end generation; they are not part of the output.
            settings: of the sampler; or its fields as keywords (temperature, top_k, top_p, min_p, repeat_penalty, seed, ...).

        Raises:
            ContextError: an empty prompt, or one that leaves no room in the context. SamplingError, TokenizerError.
        """
        self.context, self.model = context, context.model
        self.sampler = Sampler(settings or SamplerSettings(**sampling))  # type: ignore[arg-type]
        self.prompt_tokens = self._ids(prompt, add_special)
        self.max_tokens, self.ignore_end = _checked_length(max_tokens), ignore_end
        self._require_room()
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason = ""
        self.timings = Timings(load_s=self.model.load_s)
        tokenizer = self.model.tokenizer
        self._stream = None if isinstance(tokenizer, NoTokenizer) else TextStream(tokenizer)
        self._stops = StopStrings([s for s in stop if s])
        self._pieces = self._run()

    def _ids(self, prompt: str | Sequence[int], add_special: bool) -> list[int]:
        if isinstance(prompt, str):
            bos = self.model.tokenizer.bos_token
            ids = self.model.tokenize(prompt, add_special=add_special and not (bos and prompt.startswith(bos)))
        else:
            ids = [int(t) for t in prompt]
        if not ids or not len(prompt):  # a begin token alone is no prompt
            raise ContextError("the prompt is empty: give some text, or at least one token")
        return ids

    def _require_room(self) -> None:
        room = self.context.n_ctx - self.context.n_past
        if len(self.prompt_tokens) >= room:
            used = f" ({self.context.n_past} are used already)" if self.context.n_past else ""
            raise ContextError(f"the prompt has {len(self.prompt_tokens)} tokens, the context holds {self.context.n_ctx}{used} and one "
                               "must be left to generate: shorten it, or use a larger context (-c)")

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self) -> Iterator[str]:
        context, history = self.context, list(self.prompt_tokens)
        logits = self._prompt()
        if self.max_tokens == 0:
            self._finish("length")
        while not self.finish_reason:
            token = self.sampler.sample(logits, history)
            if token in self.model.tokenizer.end_ids and not self.ignore_end:
                self._finish("stop")
                break
            self.tokens.append(token)
            history.append(token)
            if piece := self._text_of(token):
                yield piece
            if self.finish_reason:
                break
            if len(self.tokens) == self.max_tokens:
                self._finish("length")
            elif context.n_past >= context.n_ctx:
                self._finish("context")
            else:
                logits = self._next(token)
        if tail := self._flush():
            yield tail

    def _prompt(self) -> np.ndarray:
        started, built = time.perf_counter(), self._made()
        logits = self.context.decode(self.prompt_tokens)
        compiled = self._made() - built
        self.timings.compile_s += compiled
        self.timings.prompt_s = time.perf_counter() - started - compiled
        self.timings.prompt_tps = len(self.prompt_tokens) / max(self.timings.prompt_s, 1e-9)
        return logits

    def _next(self, token: int) -> np.ndarray:
        started, built = time.perf_counter(), self._made()
        logits = self.context.decode([token])
        compiled = self._made() - built
        self.timings.compile_s += compiled
        self.timings.decode_s += time.perf_counter() - started - compiled
        self.timings.decode_tps = len(self.tokens) / max(self.timings.decode_s, 1e-9)
        return logits

    def _made(self) -> float:
        return self.context.build_s

    def _text_of(self, token: int) -> str:
        if self._stream is None:
            return ""
        piece = self._stops.feed(self._stream.feed(token))
        self.text += piece
        if self._stops.hit is not None:
            self._finish("stop")
        return piece

    def _flush(self) -> str:
        if self._stream is None or self._stops.hit is not None:
            return ""
        tail = self._stops.feed(self._stream.flush())
        if self._stops.hit is None:
            tail += self._stops.flush()
        self.text += tail
        return tail

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    @property
    def placement(self) -> str:
        """One line: how many nodes of a single-token batch each backend runs."""
        return self.context.explain().summary


def _checked_length(max_tokens: int) -> int:
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < -1:
        raise ContextError(f"max_tokens={max_tokens!r}: 0 or more are possible, -1 for as many as fit")
    return max_tokens
