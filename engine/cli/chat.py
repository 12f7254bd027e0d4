"""`lanewise chat`: a conversation, one line at a time. It is kept in the context; only what is new is computed."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

from engine.cli.options import add_chat, add_model, add_running, add_sampling, sampling_of
from engine.cli.session import Running, note, placed, running, session
from engine.errors import ContextError, InterruptedRun
from engine.generate import Generation
from engine.model import Context
from engine.sample import SamplerSettings

HELP = "/exit or Ctrl-D ends, /clear forgets the conversation, Ctrl-C stops an answer"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_chat(parser)
    add_sampling(parser)
    add_running(parser)


def run(args: argparse.Namespace) -> int:
    settings = SamplerSettings(**sampling_of(args))
    with session(args) as context:
        context.model.chat([{"role": "user", "content": "?"}])  # a file without a template is refused here
        with running(context) as now:
            now.say(placed(context))
        is_terminal = sys.stdin.isatty()
        note(HELP)
        talk = Conversation(context, settings, args)
        for line in iter(_reader(is_terminal), None):
            line = line.removesuffix("\n")
            if line.strip() in ("/exit", "/quit"):
                break
            if line.strip() == "/clear":
                talk.clear()
            elif line.strip() and not talk.say(line) and not is_terminal:
                return 1
    return 0


def _reader(is_terminal: bool) -> Callable[[], str | None]:
    """What gives the next line, None at the end; with line editing on a terminal."""
    if not (is_terminal and sys.stdout.isatty()):
        return lambda: sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines once it is loaded

    def ask() -> str | None:
        try:
            return input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return None

    return ask


class Conversation:
    """Messages so far, and the tokens of them that the context holds."""

    def __init__(self, context: Context, settings: SamplerSettings, args: argparse.Namespace) -> None:
        self.context, self.settings, self.args = context, settings, args
        self.clear()

    def clear(self) -> None:
        """Start over, with the system message alone."""
        system = self.args.system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        self.held: list[int] = []
        self.context.reset()

    def say(self, text: str) -> bool:
        """Answer a message, on stdout; False if it does not fit and was left out."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            generation = self._generation(messages)
        except ContextError as error:
            note(f"{error}; or /clear")
            return False
        with running(self.context) as now:
            _print(generation, now)
        self.held = [*self.held, *generation.prompt_tokens, *generation.tokens][: self.context.n_past]
        self.messages = [*messages, {"role": "assistant", "content": generation.text}]
        if generation.finish_reason == "context":
            note(f"the context of {self.context.n_ctx} tokens is full, so the answer ends here: /clear, or start with a larger one (-c)")
        return True

    def _generation(self, messages: list[dict[str, Any]]) -> Generation:
        """Continue where the text of `messages` and what the context holds part."""
        model = self.context.model
        ids = _ids(self.context, model.chat(messages))
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.held, ids)))
        self.context.rewind(min(same, len(ids) - 1))  # one token at least is computed: its logits are needed
        self.held = self.held[: self.context.n_past]
        return Generation(
            self.context,
            ids[len(self.held) :],
            max_tokens=self.args.predict,
            stop=self.args.stop,
            settings=self.settings,
            ignore_end=self.args.ignore_eos,
        )


def _ids(context: Context, prompt: str) -> list[int]:
    bos = context.model.tokenizer.bos_token
    return context.model.tokenize(prompt, add_special=not (bos and prompt.startswith(bos)))


def _print(generation: Generation, now: Running) -> None:
    try:
        for piece in generation:
            now.emit(piece)
    except (KeyboardInterrupt, InterruptedRun):
        generation.finish_reason = "interrupted"
    sys.stdout.write("\n")
    sys.stdout.flush()
