"""Timing, roofline and rows: what they hold, and that wrong numbers are refused. No figure is compared with another."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.benchmark import (
    SUITE,
    Machine,
    ModelTest,
    Roofline,
    Timing,
    WrongResult,
    bench_model,
    bench_op,
    cache_nbytes,
    cases,
    decode_nbytes,
    draw_roofline,
    machine,
    make_data,
    measure,
    measure_roofline,
    model_type,
    nmse,
    prepare,
)
from engine.errors import ContextError, LanewiseError, ShapeError, UnsupportedOp
from engine.lang.words import lanes
from engine.op import op
from engine.runtime import load
from kernels import OPS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_model import write_tiny_model  # noqa: E402  # found through the line above

ROOF = Roofline(2, {1: 10.0, 2: 20.0}, 100.0, 400.0)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(list(OPS.values()), threads=2)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


# -- timing -----------------------------------------------------------------------------------------------------


def test_timing() -> None:
    t = Timing((3.0, 1.0, 2.0, 4.0))
    assert (t.mean, t.median, t.best, t.quantile(0.0), t.quantile(1.0)) == (2.5, 2.5, 1.0, 1.0, 4.0)
    assert t.stddev == pytest.approx(math.sqrt(5 / 3))
    assert Timing((2.0,)).stddev == 0


def test_measure_warms_up_and_counts() -> None:
    ran: list[int] = []
    t = measure(lambda: ran.append(1), seconds=0, least=4)
    assert len(ran) == 5 and len(t.samples) == 4
    assert len(measure(lambda: None, seconds=60, most=7).samples) == 7


def test_measure_divides_by_the_calls() -> None:
    whole = measure(lambda: sum(range(10_000)), seconds=0)
    assert 0 < measure(lambda: sum(range(10_000)), seconds=0, calls=1000).median < whole.median


def test_machine() -> None:
    found = machine()
    assert found.build_commit and found.cpu_info and "numba" in found.versions and found.build_number >= 0
    assert cache_nbytes() > 1 << 14


# -- the roofline -----------------------------------------------------------------------------------------------


def test_roofline_of_this_machine(cpu) -> None:
    got = measure_roofline(cpu, seconds=0.01, nbytes=1 << 20)
    assert got.n_threads == 2 and set(got.reads) == {1, 2} and got.read == got.reads[2]
    assert all(0.01 < x < 1e6 for x in (*got.reads.values(), got.fma, got.dot8))


def test_bound() -> None:
    assert ROOF.bound(20_000_000_000, 1, True) == (1.0, "memory")
    assert ROOF.bound(0, 100_000_000_000, False) == (1.0, "fma")
    assert ROOF.bound(0, 400_000_000_000, True) == (1.0, "dot8")


# -- cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_cases(name) -> None:
    found = cases(OPS[name])
    assert found and len({(c.type_names, c.shape) for c in found}) == len(found)


def test_the_suite_names_ops_and_loses_no_case() -> None:
    assert set(SUITE) <= set(OPS)
    for name, parts in SUITE.items():
        for types, shapes in parts:
            for kind in types.split(","):
                for shape in shapes.split():
                    assert cases(OPS[name], [kind], [shape])


def test_types_and_shapes() -> None:
    found = cases(OPS["mul_mat"], ["q4_0", "f32"], ["m=8,k=64,n=1/3"])
    shapes = ("m=8,k=64,n=1", "m=8,k=64,n=3")
    assert [(c.type_names, c.shape) for c in found] == [(t, s) for t in ("q4_0,f32->f32", "f32,f32->f32") for s in shapes]
    (copy,) = cases(OPS["cpy"], ["x=f32+y=f16"], ["c=2,n=8"])
    assert copy.type_names == "f32->f16" and copy.node(copy.leaves()).dtype.name == "f16"
    (attention,) = cases(OPS["flash_attn_ext"], ["f16"], ["t=2,h=4,kv=2,d=16,m=64,factor=0.25"])
    assert attention.params == {"factor": 0.25} and attention.sizes["blocks"] == 2 and attention.sizes["e"] == 16


@pytest.mark.parametrize(("types", "shapes", "word"), [
    (["q9_9"], ["m=8,k=64"], "q9_9"), (["q4_0"], ["m=8,k=33"], "q4_0"), (["q4_0"], ["m=8,z=3"], "'z'"),
    (["q4_0"], ["m=8,k=many"], "k=many"), (["y=q4_0"], ["m=8,k=32"], "q4_0")])
def test_impossible_cases(types, shapes, word) -> None:
    with pytest.raises(ShapeError, match=word):
        cases(OPS["mul_mat"], types, shapes)


def test_an_op_outside_the_suite_gets_a_shape() -> None:
    @op("x[r, n] -> y[r, n]", groups="r")
    def doubled(r, x, y, n):
        for i in lanes(n):
            y[r, i] = x[r, i] + x[r, i]

    (found,) = cases(doubled)
    assert found.sizes["n"] == 2048 and found.sizes["r"] == 64


# -- rows of ops ------------------------------------------------------------------------------------------------

SMALL = [("mul_mat", "q4_1", "m=70,k=64,n=1/9"), ("mul_mat", "f16", "m=5,k=40,n=2"), ("quantize_rows", "f32", "n=3,k=64"),
         ("get_rows", "q8_0", "m=50,n=64,r=9"), ("set_rows", "f16", "b=2,r=3,n=16,m=32"), ("set_keys", "f16", "r=3,h=2,d=16,m=64"),
         ("rms_norm", "f32", "c=70,n=33"), ("flash_attn_ext", "f16", "t=3,h=4,kv=2,d=16,m=64"), ("soft_max", "f32", "h=2,r=60,n=64"),
         ("rope", "f32", "t=3,h=2,n=16,neox=1"), ("add", "f32", "c=5,n=17,wc=5"), ("cpy", "x=f32+y=bf16", "c=2,n=19")]


@pytest.mark.parametrize(("name", "kind", "shape"), SMALL)
def test_a_row(cpu, name, kind, shape) -> None:
    for case in cases(OPS[name], [kind], [shape]):
        row = bench_op(cpu, case, ROOF, seconds=0, least=3)
        assert 0 < row.min_us <= row.p10_us <= row.median_us <= row.p90_us and row.n_runs == 3 and row.n_calls > 1
        assert row.gb_s == pytest.approx(row.nbytes / row.median_us / 1e3) and 0 < row.share and row.nmse < 1e-7
        assert (row.op, row.backend, row.n_threads, row.shape) == (name, "cpu", 2, case.shape)
        flat = row.as_dict()
        assert json.loads(json.dumps(flat)) == flat and {f.name for f in dataclasses.fields(Machine)} <= set(flat)


def test_weights_lie_as_a_loader_puts_them(cpu) -> None:
    (case,) = cases(OPS["mul_mat"], ["q4_0"], ["m=64,k=64,n=1"])
    made = prepare(cpu, case, make_data(case))
    assert made.result.srcs[0].buffer.type is cpu.packed and made.n_calls == 1 and made.variant.endswith("mul_mat_rows")


def test_operands_come_from_memory(cpu) -> None:
    (case,) = cases(OPS["mul_mat"], ["q8_0"], ["m=256,k=256,n=1"])
    assert prepare(cpu, case, make_data(case), 1 << 20).n_calls == 15  # 69,632 bytes of weights and 1,024 of x
    assert bench_op(cpu, case, ROOF, seconds=0, cold=False).n_calls == 1


def test_wrong_numbers_are_refused() -> None:
    null = NullBackend(list(OPS.values()))
    (case,) = cases(OPS["rms_norm"], None, ["c=3,n=64"])
    with pytest.raises(WrongResult, match="rms_norm.*null.*wrong"):
        bench_op(null, case, ROOF, seconds=0)


def test_one_wrong_row_is_found(cpu) -> None:
    (case,) = cases(OPS["mul_mat"], ["q4_0"], ["m=1000,k=64,n=600"])
    data = make_data(case)
    made = prepare(cpu, case, data)
    made.run()
    got = made.get()
    assert nmse(case, data, got) < 1e-7
    got[..., -1] += 1e-2
    assert nmse(case, data, got) > 1e-7
    got[..., 0] = np.nan
    assert nmse(case, data, got) == math.inf


def test_what_a_device_does_not_run() -> None:
    few = CpuBackend([OPS["rms_norm"]], threads=1)
    (case,) = cases(OPS["soft_max"], None, ["h=1,r=2,n=32"])
    with pytest.raises(UnsupportedOp, match="soft_max"):
        bench_op(few, case, ROOF)
    few.close()


def test_drawing(cpu, tmp_path, monkeypatch) -> None:
    (case,) = cases(OPS["mul_mat"], ["q4_0"], ["m=64,k=64,n=1"])
    rows = [bench_op(cpu, case, ROOF, seconds=0)]
    if importlib.util.find_spec("matplotlib"):
        for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            draw_roofline(rows, tmp_path / f"roofline.{ending}")
            assert (tmp_path / f"roofline.{ending}").read_bytes().startswith(start)
        with pytest.raises(LanewiseError, match="nothing to draw"):
            draw_roofline([], tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LanewiseError, match=r"lanewise\[plots\]"):
        draw_roofline(rows, tmp_path / "roofline.png")


# -- models -----------------------------------------------------------------------------------------------------


def test_names_of_tests() -> None:
    assert [str(ModelTest(*t)) for t in ((512, 0), (0, 128), (8, 4, 16))] == ["pp512", "tg128", "pp8+tg4 @ d16"]


def test_a_model_row(tiny) -> None:
    with load(tiny, devices="none", threads=2) as model, model.context(n_ctx=64) as context:
        row = bench_model(context, ModelTest(6, 3, 10), repetitions=3)
        assert context.n_past == 19
    assert len(row.samples_ns) == 3 and len(row.samples_ts) == 3 and row.n_threads == 2 and row.test == "pp6+tg3 @ d10"
    assert row.avg_ts == pytest.approx(sum(9e9 / ns for ns in row.samples_ns) / 3, rel=1e-3)
    assert row.model_type == "llama 0M F32" and row.model_n_params == 110_912 and row.model_size == 4 * row.model_n_params
    named = set("""
        build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch n_ubatch n_threads
        type_k type_v n_gpu_layers split_mode main_gpu no_kv_offload flash_attn devices tensor_split tensor_buft_overrides embeddings
        cpu_mask cpu_strict no_op_offload n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns
        samples_ts""".split())
    flat = row.as_dict()
    assert named <= set(flat) and json.loads(json.dumps(flat)) == flat


def test_the_same_logits_for_any_threads_and_repetitions(tiny) -> None:
    found = set()
    with load(tiny, devices="none") as model:
        for threads, repetitions, warmup in ((1, 1, False), (2, 3, True)):
            with model.context(n_ctx=32, threads=threads) as context:
                found.add(bench_model(context, ModelTest(5, 2, 4), repetitions=repetitions, warmup=warmup).checksum)
    assert len(found) == 1


def test_compiling_is_no_part_of_a_sample(tiny, monkeypatch) -> None:
    with load(tiny, devices="none") as model, model.context(n_ctx=32) as context:
        compiler = model.backends[-1].compiler
        decode = context.decode

        def slow(ids: Any) -> Any:
            compiler.seconds += 1000  # as if a kernel had been compiled inside
            return decode(ids)

        monkeypatch.setattr(context, "decode", slow)
        row = bench_model(context, ModelTest(4, 0), repetitions=2)
    assert row.compile_s >= 3000 and max(row.samples_ns) < 0  # 1,000 s were taken off what took less


def test_logits_that_are_no_numbers(tiny, monkeypatch) -> None:
    with load(tiny, devices="none") as model, model.context(n_ctx=32) as context:
        monkeypatch.setattr(context, "decode", lambda ids: np.full(4, np.nan, np.float32))
        with pytest.raises(WrongResult, match="NaN"):
            bench_model(context, ModelTest(4, 0), repetitions=1)


def test_a_context_that_is_too_small(tiny) -> None:
    with load(tiny, devices="none") as model, model.context(n_ctx=8) as context, pytest.raises(ContextError):
        bench_model(context, ModelTest(16, 0))


def test_bytes_of_a_token(tiny) -> None:
    with load(tiny, devices="none") as model:
        assert model_type(model) == "llama 0M F32"
        untied = sum(t.nbytes for n, t in model.weights.file.tensors.items() if n != "token_embd.weight")
        assert decode_nbytes(model, 0) == untied
        assert decode_nbytes(model, 100) - untied == 100 * 2 * 2 * (16 + 16) * 2  # two layers, two KV heads of 16 and 16, f16


# -- comparisons ------------------------------------------------------------------------------------------------


def script(name: str) -> ModuleType:
    """A script of bench/ as a module."""
    if str(ROOT / "bench") not in sys.path:
        sys.path.insert(0, str(ROOT / "bench"))
    return importlib.import_module(name)


def test_requantised_files(tiny, tmp_path) -> None:
    compare = script("compare_llama_cpp")
    path = compare.requantised(tiny, "Q8_0", tmp_path)
    assert set(compare.content(path)) == {"Q8_0", "F32"} and compare.content(path)["Q8_0"] > compare.content(path)["F32"]
    mixed = compare.content(compare.requantised(tiny, "Q4_K_M", tmp_path))
    assert set(mixed) == {"Q5_0", "Q8_0", "F32"}  # rows of 64 and 128 hold no block of 256
    with load(path, devices="none") as model:
        assert model.metadata["general.file_type"] == 7 and model.context(n_ctx=8).decode([1, 2]).shape == (288,)


def test_layers_with_more_bits() -> None:
    assert [il for il in range(30) if script("compare_llama_cpp").more_bits(il, 30)] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]


def test_depths_are_computed_once() -> None:
    decoded: list[int] = []
    tokens = script("compare_llama_cpp").Tokens(100, lambda ids: decoded.append(len(ids)), lambda n: True)
    tokens.seconds("tg", 3, 50)
    assert decoded == [50, 1, 1, 1]
    tokens.seconds("tg", 2, 50)
    assert decoded[4:] == [1, 1] and tokens.past == 52
    tokens.seconds("pp", 8, 0)
    assert decoded[6:] == [8]


@pytest.mark.slow
def test_a_comparison_of_ops(tmp_path) -> None:
    """NumPy is always there; ggml is compared where its wheel is."""
    result = tmp_path / "result.json"
    words = "--op rms_norm --types f32 --shapes c=3,n=64 -r 2 --seconds 0 -t 1 -o".split()
    command = [sys.executable, str(ROOT / "bench" / "compare_ops.py"), *words, str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(result.read_text())["rows"]
    assert len(row["seconds"]["lanewise"]) == len(row["seconds"]["numpy"]) == 2 and max(row["nmse"].values()) < 1e-6
    assert done.stdout.startswith("| op | types | shape |") and "| rms_norm | f32 | c=3,n=64 |" in done.stdout


FAKE_LLAMA_BENCH = """#!{python}
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
n_prompt, n_gen, depth = int(words["-p"]), int(words["-n"]), int(words.get("-d", 0))
if words["-m"].endswith("absent.gguf"):
    sys.exit("error: failed to load model")
if words["-m"].endswith("odd.gguf"):
    print("| model | t/s |")
    sys.exit()
assert words["-o"] == "json" and words["-r"] == "1" and words["-t"] == "2" and words["-ub"] == "512", words
seconds = (n_prompt + 10 * n_gen + depth) * (2 if words["-fa"] == "1" else 1) / 1000
print(json.dumps([{{"build_commit": "abc", "build_number": 7, "cpu_info": "CPU", "backends": "CPU", "n_prompt": n_prompt, "n_gen": n_gen,
                   "n_depth": depth, "avg_ns": seconds * 1e9, "avg_ts": max(n_prompt, n_gen) / seconds}}]))
"""


@pytest.fixture
def llama_bench(tmp_path) -> str:
    """A program that answers as llama-bench does: 1 ms a token of a prompt, 10 ms a token decoded, twice that with flash attention."""
    path = tmp_path / "llama-bench"
    path.write_text(FAKE_LLAMA_BENCH.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_a_llama_bench_is_asked_test_by_test(llama_bench) -> None:
    peer = script("llama_bench").LlamaBench([llama_bench], "m.gguf", 2, False, 2048, 512)
    assert peer.ask(what="pp", n=512, depth=0) == pytest.approx(0.512)
    assert peer.ask(what="tg", n=16, depth=100) == pytest.approx(0.260)
    assert peer.facts == {"version": "llama-bench abc (7)", "system_info": "CPU, CPU"}


def test_a_llama_bench_that_fails_says_so(llama_bench, tmp_path) -> None:
    made = script("llama_bench").LlamaBench
    missing = str(tmp_path / "none")
    for program, model, words in ((llama_bench, "absent.gguf", "status 1: error: failed to load"),
                                  (llama_bench, "odd.gguf", "no list of one row"), (missing, "m.gguf", "cannot be run: No such file")):
        with pytest.raises(RuntimeError, match=words):
            made([program], model, 2, False, 2048, 512).ask(what="pp", n=1, depth=0)


@pytest.mark.slow
def test_a_comparison_with_a_llama_bench(llama_bench, tiny, tmp_path) -> None:
    result = tmp_path / "result.json"
    words = f"{tiny} --llama-bench {llama_bench} -t 2 -p 16,32 -n 4 -d 0,8 -r 2 -o {result}".split()
    command = [sys.executable, str(ROOT / "bench" / "compare_llama_cpp.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(result.read_text())["files"]
    assert [t["test"] for t in file["tests"]] == ["pp16", "pp32", "tg4", "tg4 @ d8"]
    assert [round(t["llama.cpp"]) for t in file["tests"]] == [1000, 1000, 100, 83]
    assert {t["flash_attention"] for t in file["tests"]} == {"off"}
    assert all(len(s) == 2 for t in file["tests"] for s in t["seconds"].values())
    assert "llama-bench abc (7): CPU, CPU" in done.stdout


def test_prompts_and_depths_by_default() -> None:
    args = script("compare_llama_cpp").options().parse_args([])
    assert args.n_prompt == [128, 512, 2048, 4096] and args.n_depth == [0, 1024, 4096] and args.llama_bench is None


@pytest.mark.parametrize("name", ["mul_mat", "soft_max", "rms_norm", "flash_attn_ext", "swiglu", "get_rows", "add"])
def test_the_same_ops_in_pytorch(name) -> None:
    """Where it is installed: results are the reference's, as far as the type holds them."""
    pytest.importorskip("torch")
    call = script("torch_ops").TorchCall
    shapes = {"mul_mat": "m=40,k=64,n=3", "flash_attn_ext": "t=3,h=6,kv=2,d=64,m=64", "get_rows": "m=50,n=64,r=5",
              "soft_max": "h=2,r=3,n=32"}
    types = ["f16", "f32"] if name in ("mul_mat", "flash_attn_ext") else ["f32"]
    for case in cases(OPS[name], types, [shapes.get(name, "c=5,n=64")]):
        data = make_data(case)
        made = call(case, data, 0)
        made.run()
        assert nmse(case, data, made.get()) < 1e-5, case
    with pytest.raises(LookupError, match="not compared"):
        call(cases(OPS["set_rows"])[0], {}, 0)


def test_the_table_of_a_comparison() -> None:
    compare = script("compare_llama_cpp")
    row = compare._row("tg", 10, 1024, {"lanewise": [1.0, 2.0, 4.0], "off": [4.0, 4.0, 4.0], "on": [5.0, 5.0, 5.0]}, 10**9, 10.0)
    assert (row["test"], row["ratio"], row["flash_attention"], row["lanewise"]) == ("tg10 @ d1024", 2.0, "off", 5.0)
    machine = {"cpu_info": "CPU", "n_threads": 2, "build_commit": "abc", "versions": "v"}
    facts = {"machine": machine, "peer": {"version": "p", "system_info": "s"}}
    file = {"label": "M", "content": {"Q4_1": 66_000_000, "F32": 10}, "read_gb_s": 10.0, "tests": [row], **facts}
    text = compare.as_table({"files": [file], "rounds": 3, "busy": ["other (1): 90 %"], "date": "today"})
    assert "| M (66 MB Q4_1) | tg10 @ d1024 | 5.0 | 2.5 | off | **2.00** (1.00 .. 4.00) | 50% / 25% |" in text
    assert "prove nothing: other (1): 90 %" in text
