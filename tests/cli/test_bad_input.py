"""Bad input: one clear line and exit status 1 or 2 on the command line, a typed exception in Python; never a traceback."""

from __future__ import annotations

import io
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import TOKENS, metadata, tensors, write_tiny_model

import engine
from engine.dtypes import F32
from engine.errors import ContextError, GgufError, LanewiseError, ModelError, SamplingError, SettingError, TokenizerError
from engine.gguf import write_gguf


def retyped(path, name: bytes, type_id: int) -> None:
    """Give a tensor another type id, in the file's table."""
    raw = bytearray(path.read_bytes())
    at = raw.index(name) + len(name)
    at += 4 + 8 * struct.unpack_from("<I", raw, at)[0]
    struct.pack_into("<I", raw, at, type_id)
    path.write_bytes(raw)


def make_bad(kind: str, folder):
    """A file, or no file, with one thing wrong."""
    path = folder / "bad.gguf"
    weights = tensors()
    if kind == "folder":
        return folder
    if kind == "not a gguf":
        path.write_bytes(b"<!doctype html><title>404</title>")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(write_tiny_model(path).read_bytes()[:-5000])
    elif kind == "truncated metadata":
        path.write_bytes(write_tiny_model(path).read_bytes()[:700])
    elif kind == "missing tensor":
        del weights["blk.1.ffn_up.weight"]
        write_tiny_model(path, weights)
    elif kind == "wrong shape":
        weights["blk.0.attn_k.weight"] = (F32, (31, 64), np.zeros((31, 64), np.float32))
        write_tiny_model(path, weights)
    elif kind == "unknown type":
        retyped(write_tiny_model(path), b"blk.0.attn_q.weight", 77)
    elif kind == "type without kernel":
        retyped(write_tiny_model(path), b"blk.0.attn_q.weight", 9)
    elif kind != "missing":
        write_tiny_model(path, **CHANGES[kind])
    return path


CHANGES = {
    "unknown architecture": {"general__architecture": "mamba9"},
    "no architecture": {"general__architecture": None},
    "unknown tokenizer": {"tokenizer__ggml__model": "sentencewise"},
    "no tokens": {"tokenizer__ggml__tokens": None},
    "missing key": {"llama__block_count": None},
    "key of the wrong type": {"llama__embedding_length": "many"},
    "size of zero": {"llama__attention__head_count": 0},
}
BAD = {  # what is wrong -> the exception, and words of its message
    "missing": (GgufError, "there is no such file"),
    "folder": (GgufError, "this is a folder"),
    "not a gguf": (GgufError, "not a GGUF file"),
    "empty": (GgufError, "the file is empty"),
    "truncated": (GgufError, "cut short"),
    "truncated metadata": (GgufError, "cut short"),
    "unknown architecture": (ModelError, "mamba9"),
    "no architecture": (ModelError, "architecture"),
    "missing tensor": (ModelError, "blk.1.ffn_up.weight"),
    "wrong shape": (ModelError, "[31, 64]"),
    "unknown type": (ModelError, "type 77"),
    "type without kernel": (ModelError, "q8_1"),
    "unknown tokenizer": (TokenizerError, "sentencewise"),
    "no tokens": (TokenizerError, "tokens"),
    "missing key": (ModelError, "llama.block_count"),
    "key of the wrong type": (ModelError, "'many'"),
    "size of zero": (ModelError, "head_count"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file(cli, tmp_path, kind) -> None:
    error, word = BAD[kind]
    path = make_bad(kind, tmp_path)
    with pytest.raises(error) as caught:
        engine.load(path)
    assert word in str(caught.value) and "\n" not in str(caught.value)
    cli("generate", "on", "-m", path, "-n", 1).failed(1, word)


@pytest.mark.parametrize("command", ["inspect", "tokenize", "explain", "chat"])
@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "truncated metadata"])
def test_a_bad_file_in_other_commands(cli, tmp_path, command, kind, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"on\n")))
    cli(command, "-m", make_bad(kind, tmp_path)).failed(1, BAD[kind][1])


USAGE = [
    ("-n", "many"),
    ("-n", "-5"),
    ("-c", "1.5"),
    ("-t", "two"),
    ("--temp", "hot"),
    ("-s", "x"),
    ("-fa", "maybe"),
    ("-ctk", "q8_0"),
    ("-ctv", "f64"),
    ("-ngl", "some"),
    ("-sm", "diagonal"),
    ("-ts", "a,b"),
    ("-mg", "x"),
    ("--nonsense",),
    ("--top-k", "1.5"),
    ("-p", "twice"),
    ("-sys", "no chat"),
]


@pytest.mark.parametrize("options", USAGE, ids=" ".join)
def test_wrong_usage(cli, tiny, options) -> None:
    cli("generate", "on", "-m", tiny, *options).failed(2)


FAILURES = [
    (("-t", "1025"), SettingError, "1,024"),
    (("-t", "-1"), SettingError, "1,024"),
    (("-c", "-1"), ContextError, "-1"),
    (("-c", "9" * 30), ContextError, "999"),
    (("-b", "0"), ContextError, "batch"),
    (("-ub", "-3"), ContextError, "batch"),
    (("--temp", "nan"), SamplingError, "temperature"),
    (("--temp", "inf"), SamplingError, "temperature"),
    (("--top-p", "2"), SamplingError, "top_p"),
    (("--min-p", "-1"), SamplingError, "min_p"),
    (("--repeat-penalty", "0"), SamplingError, "repeat_penalty"),
    (("-s", "-2"), SamplingError, "seed"),
    (("--repeat-last-n", "-2"), SamplingError, "repeat_last_n"),
    (("--device", "abacus"), LanewiseError, "abacus"),
    (("--device", "none,cpu"), LanewiseError, "none"),
    (("--device", ","), LanewiseError, "no device is named"),
    (("--chat", "--chat-template", "nope"), LanewiseError, "nope"),
    (("--chat", "--chat-template", "{{ broken"), LanewiseError, "template"),
    (("-c", "2"), ContextError, "the context holds 2"),
    (("-f", "no such file"), None, "no such file"),
]


@pytest.mark.parametrize("options, error, word", FAILURES, ids=lambda x: " ".join(x)[:40] if isinstance(x, tuple) else "")
def test_values_that_cannot_be_used(cli, tiny, options, error, word) -> None:
    prompt = () if "-f" in options else ("on the way",)
    cli("generate", *prompt, "-m", tiny, "-n", "2", *options).failed(1, word)


def test_huge_contexts_are_refused_before_memory_is_touched(cli, tiny) -> None:
    cli("generate", "on", "-m", tiny, "-n", "1", "-c", str(2**31)).failed(1, "2147483648")


def test_no_prompt(cli, tiny, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    cli("generate", "-m", tiny).failed(2, "empty")
    cli("generate", "", "-m", tiny).failed(2, "empty")
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    cli("generate", "-m", tiny, "-f", tmp_path / "latin1").failed(2, "not UTF-8")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    cli("generate", "-m", tiny).failed(2, "there is no text")


def test_argument_bytes_that_are_no_text(start, tiny) -> None:
    run = start("generate", b"caf\xe9".decode("utf-8", "surrogateescape"), "-m", tiny, "-n", "1")
    out, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "not UTF-8" in err and "Traceback" not in err


@pytest.mark.parametrize("n_prompt, ok", [(15, True), (16, False), (17, False)])
def test_prompts_at_the_end_of_the_context(cli, tiny, n_prompt, ok) -> None:
    got = cli("generate", "!" * n_prompt, "-m", tiny, "-c", 16, "-n", 1, "--ignore-eos")
    if ok:
        assert got.status == 0
    else:
        got.failed(1, f"the prompt has {n_prompt} tokens", "the context holds 16")


def test_bad_values_in_python(tiny) -> None:
    with engine.load(tiny) as model, model.context(n_ctx=16) as context:
        context.decode([1, 2, 3])
        for tokens in ([], [-1], [len(TOKENS)], [2**40], [0] * 14, [0.5], ["a"], [[1]]):
            with pytest.raises(ContextError):
                context.decode(tokens)
        assert context.n_past == 3
        for bad in ("", [], [len(TOKENS)], [-1]):
            with pytest.raises(LanewiseError):
                list(model.generate(bad, max_tokens=1))
        for option in ({"n_ctx": -1}, {"n_ctx": 2**31}, {"n_ubatch": 0}, {"kv_type": "q4_0"}, {"kv_type_k": "q8_0"}):
            with pytest.raises(ContextError):
                model.context(**option)
        with pytest.raises(ContextError):
            model.generate("on", max_tokens=-2)
        with pytest.raises(SamplingError):
            model.generate("on", temperature=float("nan"))
        with pytest.raises(TokenizerError):
            model.detokenize([len(TOKENS)])
    for threads in (-1, 1025):
        with pytest.raises(SettingError):
            engine.load(tiny, threads=threads)


ODD = st.sampled_from(["", "x", -1, 0, 1, 3, 7, 255, 2**31 - 1, 2**40, float("nan"), float("inf"), -0.5, 1e30, True, ["a"], [1, 2], [0.5]])


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("value", [[1, 2], ["a"], "x", float("nan")], ids=str)
def test_a_flag_that_is_no_truth_value_is_ignored_with_a_warning(tmp_path, caplog, key: str, value: object) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, {**metadata(), f"tokenizer.ggml.{key}": value}, tensors())
    with engine.load(path, devices="none") as model:
        assert model.tokenize("on the way")
    assert f"tokenizer.ggml.{key}" in caplog.text


ARRAYS_AND_NANS = [("tokenizer.ggml.model", [1, 2]), ("tokenizer.ggml.pre", [1, 2]), ("llama.rope.scaling.type", [1, 2]),
                   ("llama.attention.sliding_window", float("nan")), ("llama.attention.sliding_window", float("inf")),
                   ("llama.attention.sliding_window", -1)]


@pytest.mark.parametrize(("key", "value"), ARRAYS_AND_NANS, ids=str)
def test_an_array_or_a_nan_in_place_of_a_value(tmp_path, key: str, value: object) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, {**metadata(), key: value}, tensors())
    if key == "tokenizer.ggml.pre":
        engine.load(path, devices="none").close()  # unknown: `default`, with a warning
        return
    with pytest.raises(LanewiseError, match=key.rpartition(".")[2].replace("type", "rope scaling")):
        engine.load(path, devices="none")


@settings(deadline=None)
@given(st.sampled_from(sorted(metadata())), ODD)
def test_any_odd_key_gives_a_model_or_a_typed_error(tmp_path_factory, key, value) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.gguf"
    write_gguf(path, {**metadata(), key: value}, tensors())
    try:
        with engine.load(path, devices="none") as model:
            model.context().close()
            model.chat([{"role": "user", "content": "on"}])
    except LanewiseError as error:
        assert "\n" not in str(error)


@settings(deadline=None)
@given(st.integers(0, 8000), st.binary(min_size=1, max_size=8))
def test_any_damage_to_the_header_gives_a_model_or_a_typed_error(tiny, tmp_path_factory, at, damage) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    raw = bytearray(tiny.read_bytes())
    raw[at : at + len(damage)] = damage
    path.write_bytes(raw)
    try:
        with engine.load(path, devices="none") as model:
            model.tokenize("on the way")
    except LanewiseError:
        pass
