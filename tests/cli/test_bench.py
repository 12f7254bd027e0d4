"""`lanewise bench`: what is printed in each format, grids, and refusals. No figure is compared with another."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys

import pytest

from engine.cli.bench import numbers
from kernels import OPS

MODEL = ("-p", 8, "-n", 3, "-r", 2, "-dev", "none")
OP = ("--op", "rms_norm", "--shapes", "c=3,n=64", "--seconds", 0, "-t", 2)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]


# -- lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "want"), [
    ("7", [7]), ("1,4,2", [1, 4, 2]), ("1-4", [1, 2, 3, 4]), ("0-512+256", [0, 256, 512]), ("1-9*2", [1, 2, 4, 8]),
    ("0,8-16*2", [0, 8, 16])])
def test_lists_of_numbers(text, want) -> None:
    assert numbers(text) == want


@pytest.mark.parametrize("text", ["", "a", "4-1", "1-4*1", "0-4*2", "1-4+0", "-3", "1,,2"])
def test_lists_that_are_none(text) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        numbers(text)


# -- bench model ------------------------------------------------------------------------------------------------


def test_model_table(cli, tiny) -> None:
    got = cli("bench", "model", "-m", tiny, *MODEL, "-pg", "4,2", "-d", "0,5")
    assert got.status == 0
    lines = got.out.splitlines()
    assert cells(lines[0]) == ["model", "size", "params", "backend", "threads", "dev", "test", "t/s"]
    tests = ["pp8", "pp8 @ d5", "tg3", "tg3 @ d5", "pp4+tg2", "pp4+tg2 @ d5"]
    assert [cells(line)[6] for line in lines[2:8]] == tests
    assert cells(lines[2])[:4] == ["llama 0M F32", "0.42 MiB", "0.11 M", "CPU"] and " ± " in cells(lines[2])[7]
    assert lines[8] == "" and lines[9].startswith("build: ")


def test_model_columns_that_vary(cli, tiny) -> None:
    grid = ("-fa", "on,off", "-ctk", "f32", "-t", "1,2", "-ub", "4,8")
    got = cli("bench", "model", "-m", tiny, "-p", 8, "-n", 0, "-r", 1, *grid)
    lines = got.out.splitlines()
    assert cells(lines[0])[4:9] == ["threads", "n_ubatch", "type_k", "fa", "test"]
    rows = [tuple(cells(line)[4:9]) for line in lines[2:10]]
    assert rows == [(t, ub, "f32", fa, "pp8") for fa in "10" for ub in "48" for t in "12"]


def test_model_json(cli, tiny) -> None:
    got = cli("bench", "model", "-m", tiny, *MODEL, "-o", "json")
    rows = json.loads(got.out)
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows] == [(8, 0, 0), (0, 3, 0)]
    assert all(len(r["samples_ns"]) == 2 and r["avg_ts"] > 0 and r["model_filename"] == str(tiny) and r["backends"] == "CPU" for r in rows)
    assert all(r["compile_s"] >= 0 and r["build_commit"] and r["cpu_info"] and "numba" in r["versions"] for r in rows)


def test_model_jsonl_and_csv(cli, tiny) -> None:
    rows = [json.loads(line) for line in cli("bench", "model", "-m", tiny, *MODEL, "-o", "jsonl").out.splitlines()]
    table = list(csv.DictReader(io.StringIO(cli("bench", "model", "-m", tiny, *MODEL, "-o", "csv").out)))
    assert len(rows) == len(table) == 2
    assert set(table[0]) == set(rows[0]) - {"samples_ns", "samples_ts"}
    assert [t["n_prompt"] for t in table] == ["8", "0"] and [t["checksum"] for t in table] == [r["checksum"] for r in rows]


def test_several_models_and_no_warmup(cli, tiny, tmp_path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny.read_bytes())
    got = cli("bench", "model", "-m", f"{tiny},{other}", "-p", 4, "-n", 0, "-r", 1, "--no-warmup", "--progress", "-o", "jsonl")
    assert [json.loads(line)["model_filename"] for line in got.out.splitlines()] == [str(tiny), str(other)]
    assert "tiny.gguf, pp4, 1 repetitions" in got.err and "other.gguf, pp4, 1 repetitions" in got.err


def test_flags_for_a_gpu_are_named(cli, tiny) -> None:
    got = cli("bench", "model", "-m", tiny, "-p", 4, "-n", 0, "-r", 1, "-dev", "none", "-ngl", 99, "-sm", "layer")
    assert got.status == 0 and "-ngl, -sm are ignored" in got.err


@pytest.mark.parametrize(("words", "status", "said"), [
    (("-p", 0, "-n", 0), 2, "nothing to measure"), (("-p", "x"), 2, "'x'"), (("-ctk", "q9"), 2, "q9"), (("-r", 0), 2, "1 or more"),
    (("-fa", "perhaps"), 2, "perhaps"), (("-pg", "7"), 2, "512,128"), (("-t", 2000), 1, "2000 threads"),
    (("-dev", "nowhere"), 1, "nowhere"), (("-o", "xml"), 2, "xml")])
def test_model_refusals(cli, tiny, words, status, said) -> None:
    cli("bench", "model", "-m", tiny, *words).failed(status, said)


def test_no_such_model(cli) -> None:
    cli("bench", "model", "-m", "/nowhere.gguf").failed(1, "/nowhere.gguf")


def test_bench_of_what(cli) -> None:
    cli("bench").failed(2, "WHAT")
    assert "--types" in cli("bench", "op", "--help").out and "-ctk" in cli("bench", "model", "--help").out


# -- bench op ---------------------------------------------------------------------------------------------------


def test_op_table(cli) -> None:
    got = cli("bench", "op", *OP)
    lines = got.out.splitlines()
    assert got.status == 0, got.err
    assert cells(lines[0])[:5] == ["op", "types", "shape", "backend", "threads"] and "of roofline" in lines[0]
    assert cells(lines[2])[:5] == ["rms_norm", "f32->f32", "c=3,n=64", "CPU", "2"]
    assert lines[4].startswith("build: ") and lines[5].startswith("roofline with 2 threads: ") and lines[6].startswith("cpu: ")


def test_op_json(cli) -> None:
    rows = json.loads(cli("bench", "op", *OP, "-o", "json").out)
    assert [r["op"] for r in rows] == ["rms_norm"] and rows[0]["n_runs"] >= 3 and set(rows[0]["reads_gb_s"]) == {"1", "2"}
    figures = "median_us p10_us p90_us gb_s gflop_s share read_gb_s fma_gflop_s dot8_gflop_s"
    assert all(rows[0][name] > 0 for name in figures.split())


def test_op_csv_and_jsonl(cli) -> None:
    table = list(csv.DictReader(io.StringIO(cli("bench", "op", *OP, "-o", "csv").out)))
    row = json.loads(cli("bench", "op", *OP, "-o", "jsonl").out)
    assert len(table) == 1 and set(table[0]) == set(row) - {"reads_gb_s"} and table[0]["shape"] == row["shape"] == "c=3,n=64"


def test_threads_make_a_grid(cli) -> None:
    rows = json.loads(cli("bench", "op", "--op", "rms_norm", "--shapes", "n=64 n=32", "--seconds", 0, "-t", "1,2", "-o", "json").out)
    assert [(r["n_threads"], r["shape"]) for r in rows] == [(1, "n=64"), (1, "n=32"), (2, "n=64"), (2, "n=32")]


def test_wrong_numbers_fail(cli) -> None:
    cli("bench", "op", *OP, "--device", "null").failed(1, "rms_norm", "wrong numbers")


def test_wrong_numbers_beside_right_ones(cli, monkeypatch) -> None:
    monkeypatch.setattr(OPS["silu"], "_reference", lambda x: x)
    got = cli("bench", "op", "--op", "silu,rms_norm", "--shapes", "c=3,n=64", "--seconds", 0, "-o", "jsonl")
    assert got.status == 1 and json.loads(got.out)["op"] == "rms_norm" and "silu" in got.err and "wrong numbers" in got.err


@pytest.mark.parametrize(("words", "status", "said"), [
    (("--op", "nothing"), 2, "'nothing'"), (("--op", "mul_mat,rms_norm", "--shapes", "c=3"), 2, "mul_mat has no 'c'"),
    (("--op", "mul_mat", "--types", "q4_0", "--shapes", "m=3,k=5"), 2, "q4_0"),
    (("--op", "rms_norm", "--types", "q4_0"), 2, "q4_0"), (("--op", "rms_norm", "--device", "nowhere"), 1, "nowhere"),
    (("--op", "rms_norm", "--device", "blas"), 1, "blas"), (("--op", "rms_norm", "--plot", "x.gif"), 2, "x.gif"),
    (("--types", "q9_9"), 2, "--op"), (("--op", "rms_norm", "-t", "2000"), 1, "2000 threads")])
def test_op_refusals(cli, words, status, said) -> None:
    cli("bench", "op", *words).failed(status, said)


def test_a_plot_without_matplotlib(cli, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    cli("bench", "op", "--op", "mul_mat", "--plot", tmp_path / "x.png").failed(1, "lanewise[plots]")


def test_a_plot(cli, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plots] is not installed")
    file = tmp_path / "x.png"
    words = ("--op", "mul_mat", "--types", "q4_0", "--shapes", "m=64,k=64", "--seconds", 0, "--plot", file)
    assert cli("bench", "op", *words).status == 0 and file.read_bytes().startswith(b"\x89PNG")
