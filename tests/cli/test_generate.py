"""`lanewise generate`: what it prints, where, and with which options."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

import engine

FIELDS = {"model", "prompt", "prompt_tokens", "tokens", "text", "finish_reason", "timings", "placement"}
TIMES = {"load_s", "compile_s", "prompt_s", "prompt_tps", "decode_s", "decode_tps"}
GREEDY = ("--temp", 0, "-n", 12)


@pytest.fixture(scope="module")
def expected(tiny):
    """What the Python surface generates, greedily."""
    with engine.load(tiny) as model:
        made = model.generate("on the way", max_tokens=12, temperature=0)
        text = "".join(made)
        return text, made.tokens, made.prompt_tokens


def feed(monkeypatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


def test_streams_text_on_stdout_and_the_rest_on_stderr(cli, tiny, expected) -> None:
    got = cli("generate", "on the way", "-m", tiny, *GREEDY, "-t", 1)
    assert (got.status, got.out) == (0, expected[0] + "\n")
    assert "Tiny, llama, 2 layers" in got.err and "cpu: 42 nodes" in got.err and "1 thread," in got.err
    assert "end: length" in got.err


def test_json_is_one_document_with_these_fields(cli, tiny, expected) -> None:
    got = cli("generate", "on the way", "-m", tiny, *GREEDY, "--json")
    said = json.loads(got.out)
    assert set(said) == FIELDS and set(said["timings"]) == TIMES
    assert (said["text"], said["tokens"], said["prompt_tokens"]) == expected
    assert (said["model"], said["prompt"], said["finish_reason"]) == (str(tiny), "on the way", "length")
    assert said["placement"].startswith("cpu: 42 nodes")
    assert all(value >= 0 for value in said["timings"].values())


@pytest.mark.parametrize("given", [("on the way",), ("-p", "on the way"), ("-f", "PATH"), ("-",), ("-f", "-"), ()], ids=str)
def test_the_prompt_comes_from_an_argument_a_file_or_stdin(cli, tiny, expected, given, tmp_path, monkeypatch) -> None:
    (tmp_path / "prompt.txt").write_text("on the way\n")
    feed(monkeypatch, b"on the way\n")
    words = [str(tmp_path / "prompt.txt") if w == "PATH" else w for w in given]
    assert cli("generate", "-m", tiny, *GREEDY, *words).out == expected[0] + "\n"


def test_escapes_are_read_only_when_asked(cli, tiny) -> None:
    plain = json.loads(cli("generate", r"a\nb\\", "-m", tiny, "-n", 0, "--json").out)
    escaped = json.loads(cli("generate", "-e", r"a\nb\\", "-m", tiny, "-n", 0, "--json").out)
    assert (plain["prompt"], escaped["prompt"]) == (r"a\nb\\", "a\nb\\")


def test_zero_tokens_and_all_that_fit(cli, tiny) -> None:
    none = json.loads(cli("generate", "on", "-m", tiny, "-n", 0, "--json").out)
    assert (none["tokens"], none["text"], none["finish_reason"]) == ([], "", "length")
    full = cli("generate", "on", "-m", tiny, "-n", -1, "-c", 40, "--temp", 0, "--json", "--ignore-eos")
    said = json.loads(full.out)
    assert said["finish_reason"] == "context" and full.status == 0
    assert "the context of 40 tokens is full" in full.err
    assert len(said["prompt_tokens"]) + len(said["tokens"]) in (40, 41)  # the last token needs no place in the context


def test_a_stop_string_ends_the_text_before_it(cli, tiny, expected) -> None:
    stop = expected[0][2:4]
    for flag in ("--stop", "-r", "--reverse-prompt"):
        got = json.loads(cli("generate", "on the way", "-m", tiny, *GREEDY, "--json", flag, "nothing", flag, stop).out)
        assert (got["text"], got["finish_reason"]) == (expected[0][: expected[0].index(stop)], "stop")


def test_a_seed_repeats_a_text(cli, tiny) -> None:
    texts = [cli("generate", "on", "-m", tiny, "-n", 16, "--temp", 2, "-s", seed).out for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_options_arrive(cli, tiny, expected) -> None:
    likeliest = cli("generate", "on the way", "-m", tiny, "-n", 12, "--temp", 5, "--top-k", 1)
    assert likeliest.out == expected[0] + "\n"
    told = (
        "--top-p",
        0.9,
        "--min-p",
        0.1,
        "--repeat-penalty",
        1.3,
        "--repeat-last-n",
        8,
        "--presence-penalty",
        0.5,
        "--frequency-penalty",
        0.5,
    )
    assert cli("generate", "on the way", "-m", tiny, *GREEDY, *told).status == 0


@pytest.mark.parametrize(
    "options",
    [
        ("-ctk", "f32", "-ctv", "f32"),
        ("-ctk", "f32"),
        ("-ub", 2, "-b", 3),
        ("-t", 3),
        ("--device", "none"),
        ("--device", "blas,cpu"),
        ("--strict",),
        ("--strict", "--device", "blas,cpu"),
        ("-fa", "on"),
        ("-c", 64),
    ],
    ids=str,
)
def test_options_that_change_how_it_runs_keep_the_text(cli, tiny, expected, options) -> None:
    got = cli("generate", "on the way", "-m", tiny, *GREEDY, *options)
    assert (got.status, got.out) == (0, expected[0] + "\n")


def test_composed_attention_runs(cli, tiny) -> None:
    got = cli("generate", "on the way", "-m", tiny, *GREEDY, "-fa", "off", "--explain")
    assert got.status == 0 and "soft_max" in got.err


def test_explain_goes_to_stderr(cli, tiny, expected) -> None:
    got = cli("generate", "on the way", "-m", tiny, *GREEDY, "--explain")
    assert got.out == expected[0] + "\n" and "Qcur-0: mul_mat(" in got.err


def test_chat_uses_the_template(cli, tiny) -> None:
    got = json.loads(cli("generate", "on", "-m", tiny, "-n", 2, "--chat", "-sys", "in", "--json").out)
    assert got["prompt"] == "<|im_start|>system\nin<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    other = json.loads(cli("generate", "on", "-m", tiny, "-n", 2, "-cnv", "--chat-template", "gemma", "--json").out)
    assert other["prompt"] == "<start_of_turn>user\non<end_of_turn>\n<start_of_turn>model\n"


def test_the_prompt_is_displayed_on_request(cli, tiny, expected) -> None:
    assert cli("generate", "on the way", "-m", tiny, *GREEDY, "--display-prompt").out == "on the way" + expected[0] + "\n"
    assert cli("generate", "on the way", "-m", tiny, *GREEDY, "--no-display-prompt").out == expected[0] + "\n"


def test_flags_for_gpus_are_accepted_and_said_to_be_ignored(cli, tiny, expected) -> None:
    one = cli("generate", "on the way", "-m", tiny, *GREEDY, "-ngl", 99)
    assert one.out == expected[0] + "\n" and "lanewise: no usable GPU found, -ngl is ignored\n" in one.err
    every = ("-ngl", "all", "-sm", "row", "-ts", "3,1", "-mg", 0, "-nkvo", "--no-op-offload", "-ot", "exps=CPU")
    assert "-ngl, -sm, -ts, -mg, -nkvo, --no-op-offload, -ot are ignored" in cli("generate", "on", "-m", tiny, "-n", 1, *every).err


def test_a_trace_has_an_event_for_each_launch(cli, tiny, tmp_path) -> None:
    assert cli("generate", "on the way", "-m", tiny, *GREEDY, "--trace", tmp_path / "t.json").status == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [e["name"] for e in events]
    assert names.count("logits") == 12 and "Qcur-1" in names  # the prompt, then 11 tokens
    assert all(e["ph"] == "X" and e["dur"] >= 0 and e["ts"] >= 0 and e["args"]["op"] for e in events)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in zip(events, events[1:]))


def test_verbosity_has_steps(cli, tiny) -> None:
    quiet, more, most = (cli("generate", "on", "-m", tiny, "-n", 1, *v).err for v in ((), ("-v",), ("-vv",)))
    assert "on blas, cpu" not in quiet and "on blas, cpu" in more and len(most) >= len(more)


def test_a_reader_that_leaves_is_no_error(start, tiny) -> None:
    run = start("generate", "on", "-m", tiny, "--ignore-eos", "-c", 500)
    run.stdout.read(1)
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait(60) == 1 and "Traceback" not in err and "Error" not in err


def test_bytes_that_the_terminal_cannot_show_end_nothing(start, tiny) -> None:
    run = start("generate", "on the way", "-m", tiny, *GREEDY, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0 and out and "Traceback" not in err


def test_a_warm_run_needs_no_compiler(cli, tiny) -> None:
    cli("generate", "on", "-m", tiny, *GREEDY)
    code = (
        "import sys; from engine.cli import main; "
        f"status = main(['generate', 'on', '-m', {str(tiny)!r}, '-n', '12', '--temp', '0']); "
        "sys.exit(status or 3 * any(name in sys.modules for name in ('numba', 'rich', 'pyopencl', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=os.getcwd(), timeout=120).returncode == 0


def test_strict_refuses_what_the_device_cannot_run(cli, tiny) -> None:
    cli("generate", "on", "-m", tiny, "-n", 1, "--strict", "--device", "blas").failed(1, "no backend runs", "blas")
