"""Ctrl-C: the run stops within a moment, what was generated stays, the exit status is 130."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model with a long context, and a prompt that takes it a minute."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "prompt.txt").write_text("on the way " * 16000)
    return write_tiny_model(folder / "long.gguf", llama__context_length=1 << 17), folder / "prompt.txt"


def wait_for(run, word: str) -> None:
    while line := run.stderr.readline():
        if word in line:
            return
    raise AssertionError(f"{word!r} was never said; exit status {run.wait()}")


def interrupt(run, patience: float = 5) -> float:
    """Send SIGINT; seconds until the process has ended."""
    run.send_signal(signal.SIGINT)
    started = time.monotonic()
    run.wait(patience)
    return time.monotonic() - started


def test_while_the_prompt_is_read(start, long) -> None:
    run = start("generate", "-m", long[0], "-f", long[1], "-n", 4)
    wait_for(run, "context of 131072")
    time.sleep(1)
    assert run.poll() is None
    assert interrupt(run) < 5 and run.returncode == 130
    out, err = run.communicate()
    assert out.strip() == "" and "Traceback" not in err and "end: interrupted" in err


def test_json_says_that_it_was_interrupted(start, long) -> None:
    run = start("generate", "-m", long[0], "-f", long[1], "-n", 4, "--json")
    wait_for(run, "context of 131072")
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    said = json.loads(run.communicate(timeout=20)[0])  # more than a pipe holds: it has to be read to end
    assert run.returncode == 130 and (said["finish_reason"], said["tokens"]) == ("interrupted", [])


def test_while_tokens_come(start, long) -> None:
    run = start("generate", "on the way", "-m", long[0], "--ignore-eos", "--temp", "0")
    first = run.stdout.read(20)
    assert len(first) == 20 and interrupt(run) < 5 and run.returncode == 130
    out, err = run.communicate()
    assert out.endswith("\n") and "Traceback" not in err and "end: interrupted" in err


def test_while_chatting_only_the_answer_ends(start, long) -> None:
    run = start("chat", "-m", long[0], "--ignore-eos", stdin=subprocess.PIPE)
    run.stdin.write("on the way\n")
    run.stdin.flush()
    run.stdout.read(20)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate("/exit\n", timeout=20)
    assert run.returncode == 0 and "Traceback" not in err
