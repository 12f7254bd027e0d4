"""`lanewise chat`: a conversation that is kept in the context."""

from __future__ import annotations

import argparse
import io
import sys

import pytest

import engine
from engine.cli.chat import Conversation
from engine.sample import SamplerSettings


@pytest.fixture
def say(cli, monkeypatch):
    """Run `chat` with these lines on standard input."""

    def run(lines: str, *argv: object):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return cli("chat", *argv)

    return run


def test_answers_each_line_until_exit(say, tiny) -> None:
    got = say("on\n\nin\n/exit\nnever\n", "-m", tiny, "-n", 4, "--temp", 0, "--ignore-eos")
    assert got.status == 0 and got.out.count("\n") >= 2 and "/exit or Ctrl-D" in got.err


def test_ends_with_its_input(say, tiny) -> None:
    assert say("on", "-m", tiny, "-n", 2).status == 0
    assert say("", "-m", tiny).out == ""


def test_a_full_context_is_said(say, tiny) -> None:
    got = say("on\n", "-m", tiny, "-c", 48, "--ignore-eos", "--temp", 0)
    assert got.status == 0 and "the context of 48 tokens is full" in got.err
    got = say("the way is on " * 20 + "\n", "-m", tiny, "-c", 48)
    assert got.status == 1 and "the context holds 48" in got.err and "/clear" in got.err and "Traceback" not in got.err


def test_a_file_without_template_is_refused(say, tmp_path) -> None:
    from tiny_model import write_tiny_model

    plain = write_tiny_model(tmp_path / "plain.gguf", tokenizer__chat_template=None)
    say("on\n", "-m", plain).failed(1, "--chat-template")
    assert say("on\n", "-m", plain, "--chat-template", "chatml", "-n", 2).status == 0


def test_later_answers_are_those_of_the_whole_text(tiny, capsys) -> None:
    """What is kept in the context changes nothing: each answer is the one to the whole conversation, read anew."""
    options = argparse.Namespace(predict=6, stop=[], ignore_eos=True, system="in")
    with engine.load(tiny) as model:
        talk = Conversation(model.context(), SamplerSettings(temperature=0), options)
        for text in ("on", "the way", "in"):
            messages = [*talk.messages, {"role": "user", "content": text}]
            fresh = model.generate(model.chat(messages), max_tokens=6, temperature=0, ignore_end=True)
            expected = "".join(fresh)
            assert talk.say(text) and talk.messages[-1]["content"] == expected
        assert len(talk.held) == talk.context.n_past
        talk.clear()
        assert talk.context.n_past == 0 and talk.messages == [{"role": "system", "content": "in"}]
