"""The commands that look at things, and what holds for all."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from tiny_model import TOKENS, metadata, write_tiny_model

import engine
from engine.cli import COMMANDS
from engine.gguf import write_gguf
from engine.settings import override


def test_version(cli) -> None:
    got = cli("--version")
    assert (got.status, got.out) == (0, f"lanewise {engine.__version__}\n")


def test_version_loads_nothing_large() -> None:
    large = ("numpy", "llvmlite", "numba", "rich")
    code = f"import sys; from engine.cli import main; main(['--version']); sys.exit(any(n in sys.modules for n in {large}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.speed
def test_version_is_quick() -> None:
    """Beside starting Python itself: absolute times say nothing about another machine."""
    times: dict[str, list[float]] = {"engine": [], "empty": []}
    for _ in range(7):
        for name, command in (("engine", ["-m", "engine", "--version"]), ("empty", ["-c", "import argparse"])):
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            times[name].append(time.perf_counter() - started)
    assert min(times["engine"]) < 6 * min(times["empty"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help(cli, command) -> None:
    got = cli(command, "--help")
    assert got.status == 0 and got.out.startswith("usage: lanewise ") and command in got.out


def test_no_command_shows_the_commands(cli) -> None:
    got = cli()
    assert got.status == 2 and got.out == "" and all(c in got.err for c in COMMANDS)


def test_the_module_is_the_command(start) -> None:
    out, _ = start("devices").communicate(timeout=60)
    assert "cpu [CPU]" in out


# -- devices ----------------------------------------------------------------------------------------------------


def test_devices_hides_those_for_tests(cli) -> None:
    plain, every = cli("devices").out.splitlines(), cli("devices", "--all").out.splitlines()
    assert not any("[TEST]" in line for line in plain) and any("[CPU]" in line for line in plain)
    assert "[TEST]" in [line for line in every if "unavailable" not in line][-1]


def test_devices_as_json(cli) -> None:
    rows = json.loads(cli("devices", "--all", "--json").out)
    usable = [r for r in rows if r["available"]]
    assert [r["index"] for r in usable] == list(range(len(usable)))
    types = [r["type"] for r in usable]
    assert types.index("TEST") == len(types) - types.count("TEST")
    cpu = next(r for r in rows if r["name"] == "cpu")
    assert cpu["total"] > 0 and cpu["default"] and set(cpu["capabilities"]) >= {"asynchronous", "mmap"}


def test_an_absent_backend_says_why(cli, tmp_path) -> None:
    (tmp_path / "broken.py").write_text(
        "from engine.backend import Backend\n\nclass Broken(Backend):\n    pass\n\nraise ImportError('no driver')\n"
    )
    with override(plugins=tmp_path):
        assert "-  broken: unavailable, because ImportError: no driver" in cli("devices").out
        row = next(r for r in json.loads(cli("devices", "--json").out) if r["name"] == "broken")
    assert not row["available"] and row["index"] is None and "no driver" in row["reason"]


# -- explain ----------------------------------------------------------------------------------------------------


def test_explain_covers_prompt_and_token(cli, tiny) -> None:
    got = cli("explain", "-m", tiny, "-n", 16)
    assert "prefill, 16 tokens: " in got.out and "decode, 1 token: cpu: 42 nodes" in got.out and "Qcur-1: mul_mat" in got.out


def test_explain_as_json_adds_up(cli, tiny) -> None:
    said = json.loads(cli("explain", "-m", tiny, "--json").out)
    assert (said["prefill"]["n_tokens"], said["decode"]["n_tokens"]) == (512, 1)
    for part in (said["prefill"], said["decode"]):
        assert sum(b["n_nodes"] for b in part["backends"]) + part["n_views"] == part["n_nodes"] == len(part["nodes"])
        assert all(n["cause"] for n in part["nodes"])
    assert next(b for b in said["prefill"]["backends"] if b["name"] == "blas")["n_nodes"] > 0


def test_explain_refuses_sizes_that_do_not_fit(cli, tiny) -> None:
    cli("explain", "-m", tiny, "-n", 513).failed(2, "1 to 512")
    cli("explain", "-m", tiny, "-n", -1).failed(2, "1 to 512")


# -- inspect ----------------------------------------------------------------------------------------------------


def test_inspect_shows_keys_and_tensors(cli, tiny) -> None:
    out = cli("inspect", tiny).out
    assert "general.architecture (str) = 'llama'" in out
    assert f"tokenizer.ggml.tokens (arr[str,{len(TOKENS)}]) = ['!', '\"', '#', '$', '%', '&', \"'\", '(', ...]" in out
    assert "blk.1.ffn_down.weight: f32 [64, 128], 32768 bytes at " in out
    assert f"{TOKENS[200]!r}, {TOKENS[201]!r}" in cli("inspect", tiny, "--full").out


def test_inspect_as_json(cli, tiny) -> None:
    said = json.loads(cli("inspect", "-m", tiny, "--json").out)
    assert said["metadata"]["llama.block_count"] == 2 and len(said["tensors"]) == 21
    assert said["metadata"]["tokenizer.ggml.tokens"] == {"type": "arr[str,288]", "length": 288, "first": list(TOKENS[:8])}
    assert json.loads(cli("inspect", tiny, "--json", "--full").out)["metadata"]["tokenizer.ggml.tokens"] == list(TOKENS)


def test_inspect_survives_odd_values(cli, tmp_path) -> None:
    odd = write_tiny_model(tmp_path / "odd.gguf", a__nan=float("nan"), a__bytes="a\udcffb", a__lines="x\ny")
    assert cli("inspect", odd).out.count("\n") == 1 + len(metadata()) + 3 + 21
    said = json.loads(cli("inspect", odd, "--json").out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert said["metadata"]["a.nan"] == "nan" and said["metadata"]["a.bytes"] == "a\\udcffb"


def test_a_vocabulary_file_is_enough_for_inspect_and_tokenize(cli, tmp_path) -> None:
    path = tmp_path / "vocab.gguf"
    write_gguf(path, metadata(), {})
    assert "0 tensors" in cli("inspect", path).out
    assert cli("tokenize", "-m", path, "--ids", "on the way").out == "[261, 262, 266, 64, 88]\n"
    cli("generate", "on", "-m", path).failed(1, "token_embd.weight")


# -- tokenize ---------------------------------------------------------------------------------------------------


def test_tokenize(cli, tiny, tmp_path) -> None:
    (tmp_path / "text").write_text("on the<|im_end|>\n")
    assert cli("tokenize", "-m", tiny, "on the").out == "   261 -> 'on'\n   262 -> ' the'\n"
    assert cli("tokenize", "-m", tiny, "-f", tmp_path / "text", "--ids").out == "[261, 262, 287]\n"
    assert len(json.loads(cli("tokenize", "-m", tiny, "-f", tmp_path / "text", "--ids", "--no-parse-special").out)) > 3
    said = json.loads(cli("tokenize", "-m", tiny, "on é", "--json").out)
    assert said["tokens"][0] == 261 and "".join(said["pieces"][:2]) == "on " and said["text"] == "on é"
    assert cli("tokenize", "-m", tiny, "", "--ids").out == "[]\n"


def test_tokenize_without_bos(cli, tmp_path) -> None:
    model = write_tiny_model(tmp_path / "bos.gguf", tokenizer__ggml__add_bos_token=True)
    assert cli("tokenize", "-m", model, "on", "--ids").out == f"[{TOKENS.index('<|im_start|>')}, 261]\n"
    assert cli("tokenize", "-m", model, "on", "--ids", "--no-bos").out == "[261]\n"


# -- cache ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cache_is_filled_used_and_cleared(start, tiny, tmp_path) -> None:
    import os

    env = {**os.environ, "LANEWISE_CACHE_DIR": str(tmp_path / "cache")}

    def run(*argv: object) -> tuple[str, str]:
        out, err = (process := start(*argv, env=env)).communicate(timeout=280)
        assert process.returncode == 0, err
        return out, err

    assert json.loads(run("cache", "--json")[0])["entries"] == 0
    filled, told = run("cache", "--warm", tiny, "--json")
    assert json.loads(filled)["entries"] > 10 and told.count("compiling kernels for this machine, once") == 1
    for prompt in ("on", "on the way", "the way " * 20):
        assert "compiling" not in run("generate", prompt, "-m", tiny, "-n", 4)[1]
    assert "entries removed" in run("cache", "--clear")[1]
    assert json.loads(run("cache", "--json")[0])["nbytes"] == 0


def test_cache_says_where_it_is(cli, tmp_path) -> None:
    with override(cache_dir=tmp_path):
        assert cli("cache").out.splitlines() == [f"{tmp_path / folder}: 0 entries {what}, 0.0 MB of at most 1074 MB" for folder, what in (
            ("kernels", "for the CPU"), ("opencl", "for OpenCL devices"), ("cuda", "for CUDA devices"))]
    cli("cache", "--clear", "--warm", "demo").failed(2, "do not go together")
