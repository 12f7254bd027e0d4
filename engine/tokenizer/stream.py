"""Text as it is generated: whole UTF-8 characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Turns token ids, one at a time, into text; a character split over tokens comes with its last one."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        """With `special`, control tokens are spelt out; else they give no text."""
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is complete with this token, possibly empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, self._special))

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StopStrings:
    """Cuts a stream of text before the first stop string.

    Text that could be the beginning of a stop string is withheld until more text decides. `hit` is the
    stop string that was found, None before.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Empty strings among `stops` are ignored."""
        self.stops = tuple(stop for stop in stops if stop)
        self.hit: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of all text so far that is now certain to come before any stop string."""
        if self.hit is not None:
            return ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            cut, _, self.hit = min(found)
            out, self._held = self._held[:cut], ""
            return out
        cut = len(self._held) - self._undecided()
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """Text still withheld at the end of the stream: no stop string came of it."""
        out, self._held = self._held, ""
        return out

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self.stops), default=0)
        for n in range(min(longest - 1, len(self._held)), 0, -1):
            tail = self._held[-n:]
            if any(stop.startswith(tail) for stop in self.stops):
                return n
        return 0
