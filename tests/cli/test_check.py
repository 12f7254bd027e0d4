"""`lanewise check` and `lanewise ops`: exit status, what is printed where, and the lines that repeat a call."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels import OPS

N_SILU = len(OPS["silu"].keys())  # rows that share the calls of the op
CLI = Callable[..., Any]


def test_a_device_is_checked_and_the_seed_repeats_it(cli: CLI) -> None:
    done = cli("check", "-b", "sim", "--op", "silu,rms_norm", "--examples", "6", "--seed", "7", "--json")
    assert done.status == 0, done
    told = json.loads(done.out)
    assert told["ok"] and told["seed"] == 7
    (sim,) = told["devices"]
    assert sim["name"] == "sim" and sim["ok"] and sim["counts"] == {"ok": len(sim["checks"]), "mismatch": 0, "refused": 0, "broken": 0}
    assert {c["op"] for c in sim["checks"] if "op" in c} == {"silu", "rms_norm"} and all(c["n_calls"] >= 3 for c in sim["checks"])
    assert cli("check", "-b", "sim", "-o", "silu,rms_norm", "--examples", "6", "--seed", "7", "--json").out == done.out


def test_text_has_a_line_for_each_op_and_progress_goes_elsewhere(cli: CLI) -> None:
    done = cli("check", "-b", "sim", "-o", "silu", "-p", "silu-f32", "--examples", "12", "--seed", "1")
    assert done.status == 0 and done.out.splitlines() == [f"sim silu: 1 checks, {-(-12 // N_SILU)} calls: 1 ok", "seed 1: ok"]
    assert "1 of 1 checks" in done.err


@pytest.mark.parametrize("options", [("-p", "no such name"), ("-b", "blas", "-o", "silu")], ids=str)
def test_nothing_run_is_a_failure(cli: CLI, options: tuple[str, ...]) -> None:
    done = cli("check", "-b", "sim", *options)
    assert done.status == 1 and "nothing was run" in done.out and "FAILED" in done.out


def test_a_device_that_computes_nothing_fails(cli: CLI) -> None:
    done = cli("check", "-b", "null", "-p", "silu-f32", "--json")
    assert done.status == 1
    (found,) = json.loads(done.out)["devices"][0]["checks"]
    assert found["status"] == "mismatch" and "--call" in found["reason"]


def test_one_call_is_run_again(cli: CLI) -> None:
    call = "mul_mat[q4_0,f32,f32] w=2,1,9,64:codes x=2,3,2,64@0.1.2.3/1.1.1.1/0.0.3.0/2:wide seed=32568993"
    done = cli("check", "-b", "sim,cpu", "--call", call)
    assert done.status == 0 and done.out.splitlines()[-1] == "seed 32568993: ok", done
    for variant in ("mul_mat_rows", "mul_mat_along_k"):
        assert cli("check", "-b", "sim", "--call", call, "--variant", variant).status == 0
    refused = cli("check", "-b", "blas", "--call", call)
    assert refused.status == 1 and "w is q4_0" in refused.out


@pytest.mark.parametrize(("options", "word"), [
    (("-b", "nothing"), "no device"), (("-o", "nothing"), "no op"), (("-p", "("), "regular expression"), (("--examples", "0"), "1 or more"),
    (("--call", "silu x=3"), "OP[TYPE"), (("--call", "silu[f32,f32] x=3 y=4"), "neither an operand"),
    (("--call", "add[f32,f32,f32] x=3 w=2,2,2,2,2"), "dimensions"), (("--compile-only",), "name the backend"),
    (("--compile-only", "-b", "sim"), "on its device only")], ids=str)
def test_wrong_usage(cli: CLI, options: tuple[str, ...], word: str) -> None:
    done = cli("check", *options)
    done.failed(1 if word == "no device" else 2, word)


# -- ops --------------------------------------------------------------------------------------------------------


def test_the_matrix_in_each_form(cli: CLI) -> None:
    rows = json.loads(cli("ops", "-b", "cpu,blas", "--json").out)
    assert {r["op"] for r in rows} == set(OPS)
    product = next(r for r in rows if r["op"] == "mul_mat" and r["types"] == {"w": "f16", "x": "f32", "y": "f32"})
    assert product["blas"] == ["sgemm of widened slabs"] and product["cpu"]
    table = list(csv.reader(io.StringIO(cli("ops", "-b", "cpu,blas", "-o", "mul_mat", "--csv").out)))
    assert table[0] == ["op", "types", "cpu", "blas"] and ["w f32, x f32, y f32", "sgemm"] in [[r[1], r[3]] for r in table]
    markdown = cli("ops", "-o", "silu", "--markdown").out.splitlines()
    assert markdown[1].startswith("| --- |") and markdown[2].startswith("| silu | x f32")
    assert cli("ops", "-b", "blas", "-o", "mul_mat").out.splitlines()[0].split() == ["op", "types", "blas"]


def test_what_a_model_would_need(cli: CLI, tiny: Path) -> None:
    told = json.loads(cli("ops", "--missing", tiny, "-b", "blas", "--json").out)
    reasons = {r["op"]: r["reason"] for r in told["missing"]}
    assert reasons["get_rows"] == "no kernel for get_rows" and all(r["n_nodes"] > 0 for r in told["missing"])
    assert "nothing: every node of" in cli("ops", "--missing", tiny, "-b", "sim").out
    cli("ops", "--missing", tiny, "--csv").failed(2, "--missing prints text or --json")
