"""Single ops side by side with NumPy, PyTorch and ggml's own: alternating rounds on one machine, medians, errors beside the times.

    python bench/compare_ops.py -t 2                                         measures, and writes bench/results/ops-...json
    python bench/compare_ops.py --op mul_mat --types q4_k --shapes m=4096,k=14336,n=1
    python bench/compare_ops.py --table bench/results/FILE.json              a Markdown table from it

ggml comes from the wheel `libggml-python` (`pip install libggml-python`; or --ggml FOLDER names its `lib64`), with weights as files hold
them and in its own repacked layout; the better of both counts. PyTorch takes part where it is installed, with the ops it has for float
types. NumPy multiplies float32 weights that were dequantised before. Operands come from memory in every engine (Note [cold] in
engine/benchmark/ops.py). The wheel is built for AVX2; on a CPU with more, LANEWISE_LANES=8 keeps our vectors to the same width.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from peers import Answer, Engine, Watch, serve, table, warn_if_busy, write_results

from engine.benchmark import OpCase, cache_nbytes, cases, machine, make_data, measure, measure_roofline, nmse, prepare, sets_of, values
from engine.dtypes import DTYPES
from engine.runtime import registry
from kernels import OPS

OURS = "lanewise"
SHAPES = "m=4096,k=4096/14336,n=1/512"
# What is compared by default: op, types, shapes.
DEFAULT = (("mul_mat", "q4_0,q8_0,q4_k,q5_k,q6_k", SHAPES), ("mul_mat", "f32,f16,bf16", "m=4096,k=4096,n=1/512"),
           ("get_rows", "q8_0", "m=49152,n=576,r=512"), ("rms_norm", "f32", "c=512,n=576"), ("soft_max", "f32", "h=9,r=512,n=512"),
           ("flash_attn_ext", "f16", "t=1,h=9,kv=3,d=64,m=1024/4096 t=512,h=9,kv=3,d=64,m=512"))
Maker = Callable[[OpCase, Mapping[str, np.ndarray], int], Any]

# -- the engines, each in its own process -----------------------------------------------------------------------


def answers(make: Maker) -> Answer:
    """Requests name a case and what to do: "time" gives seconds a call, "check" the error of the last result."""
    held: dict[str, Any] = {}

    def answer(request: dict[str, Any]) -> Any:
        key = json.dumps(request["case"])
        if held.get("key") != key:
            if held and hasattr(held["made"], "close"):
                held["made"].close()
            held.clear()
            case = parsed(request["case"])
            data = make_data(case)
            try:
                made = make(case, data, 2 * cache_nbytes())
            except LookupError:
                made = None
            held.update(key=key, case=case, data=data, made=made)
        made = held["made"]
        if made is None:
            return None
        if request["what"] == "check":
            return nmse(held["case"], held["data"], made.get())
        return measure(made.run, seconds=request["seconds"], least=1, calls=made.n_calls).median

    return answer


def parsed(case: list[str]) -> OpCase:
    """[op, types, shape], as requests carry them."""
    name, kind, shape = case
    return cases(OPS[name], [kind], [shape])[0]


def lanewise(threads: int) -> tuple[dict[str, Any], Answer]:
    """Our own side."""
    backend = registry().get("cpu")
    backend.set_threads(threads)
    measured, roofline = answers(lambda case, data, cold: prepare(backend, case, data, cold)), measure_roofline(backend)

    def answer(request: dict[str, Any]) -> Any:
        if request["what"] != "bound":
            return measured(request)
        case = parsed(request["case"])
        call = backend.table.call(case.node(case.leaves()))
        return {"nbytes": call.nbytes, "flop": call.flop, "least_s": roofline.bound(call.nbytes, call.flop, bool(call.weight_format))[0]}

    return {**asdict(machine()), "n_threads": threads, "roofline": asdict(roofline)}, answer


class NumpyCall:
    """The same call in NumPy: a product of float32 matrices, or what the op's reference does, in float32."""

    def __init__(self, case: OpCase, data: Mapping[str, np.ndarray], cold: int) -> None:
        self.case = case
        one = {name: self._plain(values(array, DTYPES[case.types[name]])) for name, array in data.items()}
        self.n_calls = sets_of(sum(a.nbytes for a in one.values()), cold)
        self.sets = [{name: a.copy() for name, a in one.items()} for _ in range(self.n_calls)]

    @staticmethod
    def _plain(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32) if x.dtype == np.float64 else x

    def run(self) -> None:
        for operands in self.sets:
            if self.case.op.name == "mul_mat":
                self.result = operands["x"] @ operands["w"].swapaxes(-1, -2)
            else:
                self.result = self.case.op.reference_of([operands.get(o.name) for o in self.case.op.contract.operands], self.case.params)

    def get(self) -> np.ndarray:
        return self.result.astype(np.float32)


def with_numpy(threads: int) -> tuple[dict[str, Any], Answer]:
    from threadpoolctl import threadpool_info, threadpool_limits

    threadpool_limits(threads)
    blas = [i for i in threadpool_info() if i["user_api"] == "blas"]
    used = ", ".join(f"{i['internal_api']} {i['version']} {i.get('architecture', '')}" for i in blas)
    return {"version": f"numpy {np.__version__}", "system_info": used}, answers(NumpyCall)


def with_ggml(threads: int, folder: Path, repack: bool) -> tuple[dict[str, Any], Answer]:
    from ggml_ops import OPERANDS, Library, Prepared

    lib = Library(folder, threads)

    def make(case: OpCase, data: Mapping[str, np.ndarray], cold: int) -> Prepared:
        if case.op.name not in OPERANDS:
            raise LookupError(f"{case.op.name} is not compared with ggml")
        one = sum(a.nbytes for a in data.values())
        return Prepared(lib, case, data, sets_of(one, cold), repack)

    return {"version": f"ggml {lib.version().decode()}", "system_info": lib.features}, answers(make)


def with_pytorch(threads: int) -> tuple[dict[str, Any], Answer]:
    import torch
    from torch_ops import TorchCall

    torch.set_num_threads(threads)
    used = [line.strip(" -") for line in torch.__config__.show().splitlines() if "CPU capability" in line]
    return {"version": f"pytorch {torch.__version__}", "system_info": ", ".join(used)}, answers(TorchCall)


def ggml_folder(given: Path | None) -> Path | None:
    """Where ggml's libraries are, or None."""
    if given is not None:
        if not (given / "libggml-cpu.so").is_file():
            raise SystemExit(f"--ggml {given}: there is no libggml-cpu.so; the folder `lib64` of the wheel libggml-python is expected")
        return given
    spec = importlib.util.find_spec("libggml")
    places = [Path(p) / "lib64" for p in (spec.submodule_search_locations or ())] if spec else []
    return next((p for p in places if (p / "libggml-cpu.so").is_file()), None)


# -- measuring --------------------------------------------------------------------------------------------------


def wanted(args: argparse.Namespace) -> list[list[str]]:
    """Op, types and shape of each case."""
    parts = DEFAULT
    if args.op:
        mine = [d for d in DEFAULT if d[0] == args.op] or [(args.op, "", "")]
        parts = tuple((args.op, args.types or types, args.shapes or shapes) for _, types, shapes in mine)
    found = []
    for name, types, shapes in parts:
        if name not in OPS:
            raise SystemExit(f"there is no op {name!r}: {', '.join(sorted(OPS))} are known")
        for kind in types.split(",") if types else [None]:
            made = cases(OPS[name], [kind] if kind is not None else None, shapes.split() or None)
            found += [[name, kind or _kind_of(c), c.shape] for c in made]
    return [list(case) for case in dict.fromkeys(map(tuple, found))]


def _kind_of(case: OpCase) -> str:
    return "+".join(f"{operand}={kind}" for operand, kind in case.types.items())


def compare(engines: Mapping[str, Engine], case: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One case in alternating rounds; the first one warms up and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for r in range(args.rounds + 1):
        for name in list(engines)[:: -1 if r % 2 else 1]:
            s = engines[name].ask(what="time", case=case, seconds=args.seconds if r else 0)
            if r and s is not None:
                seconds[name].append(s)
    seconds = {name: times for name, times in seconds.items() if times}
    bound = engines[OURS].ask(what="bound", case=case)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    errors = {name: engines[name].ask(what="check", case=case) for name in seconds}
    return {"case": case, "seconds": seconds, "median": median, "nmse": errors, **bound, "roofline_share": bound["least_s"] / median[OURS]}


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every case in every engine."""
    busy: list[str] = []
    folder = ggml_folder(args.ggml)
    names = [OURS, "numpy", *(["ggml", "ggml repack"] if folder else []), *(["pytorch"] if importlib.util.find_spec("torch") else [])]
    if folder is None:
        print("ggml is left out: `pip install libggml-python`, or name the wheel's lib64 with --ggml", file=sys.stderr)
    with ExitStack() as stack:
        first = Watch()
        time.sleep(1)
        warn_if_busy(first, busy)
        common = [sys.executable, __file__, "-t", str(args.threads), *(["--ggml", str(folder)] if folder else [])]
        engines = {name: stack.enter_context(Engine(name, [*common, "--serve", name])) for name in names}
        watch = Watch([e.process.pid for e in engines.values()])
        rows = []
        for case in wanted(args):
            rows.append(compare(engines, case, args))
            warn_if_busy(watch, busy)
            print(f"{' '.join(case)}: {', '.join(f'{n} {1e6 * s:.1f} us' for n, s in rows[-1]['median'].items())}", file=sys.stderr)
        facts = {name: e.facts for name, e in engines.items()}
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "rounds": args.rounds, "threads": args.threads, "busy": busy,
            "engines": facts, "rows": rows}


def as_table(found: Mapping[str, Any]) -> str:
    """The Markdown table of a result, and the lines that say where it is from."""
    torch = ["PyTorch us", "ratio"] if any("pytorch" in row["median"] for row in found["rows"]) else []
    head = ["op", "types", "shape", "Lanewise us", "GB/s", "GFLOP/s", "of roofline", "ggml us", "layout", "ratio", "NumPy us", "ratio",
            *torch, "error (NMSE), ours / ggml's"]
    rows = []
    for row in found["rows"]:
        median = row["median"]
        ggml = min((name for name in median if name.startswith("ggml")), key=lambda n: median[n], default="")
        theirs = ["-"] * 3
        if ggml:
            theirs = [f"{1e6 * median[ggml]:.1f}", ggml.partition(" ")[2] or "plain", f"**{median[ggml] / median[OURS]:.2f}**"]
        pytorch = ["-"] * len(torch)
        if "pytorch" in median:
            pytorch = [f"{1e6 * median['pytorch']:.1f}", f"{median['pytorch'] / median[OURS]:.2f}"]
        errors = " / ".join(f"{row['nmse'][n]:.1e}" for n in (OURS, ggml) if n)
        rows.append([*row["case"], f"{1e6 * median[OURS]:.1f}", f"{row['nbytes'] / median[OURS] / 1e9:.1f}",
                     f"{row['flop'] / median[OURS] / 1e9:.0f}" if row["flop"] else "-", f"{100 * row['roofline_share']:.0f}%", *theirs,
                     f"{1e6 * median['numpy']:.1f}", f"{median['numpy'] / median[OURS]:.2f}", *pytorch, errors])
    m = found["engines"][OURS]
    reads = m["roofline"]["reads"][str(m["n_threads"])]
    lines = [table(head, rows), "",
             f"{m['cpu_info']}, {m['n_threads']} threads, reads {reads:.1f} GB/s; medians of {found['rounds']} rounds; "
             f"commit {m['build_commit']}, {m['versions']}; {found['date']}"]
    lines += [f"{name}: {e['version']} ({e['system_info']})" for name, e in found["engines"].items() if name != OURS]
    if found["busy"]:
        lines.append(f"\nThe machine was not idle, so these figures prove nothing: {'; '.join(found['busy'])}")
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--op", help="one op instead of all")
    p.add_argument("--types", metavar="T,..", help="its types, as for `lanewise bench op`")
    p.add_argument("--shapes", metavar="SHAPES", help="its shapes, with spaces between, as for `lanewise bench op`")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("-r", "--rounds", type=int, default=5, metavar="N", help="rounds after the one that warms up (default: 5)")
    p.add_argument("--seconds", type=float, default=0.1, metavar="S", help="time for a case in a round (default: 0.1)")
    p.add_argument("--ggml", type=Path, metavar="FOLDER", help="where ggml's libraries are, instead of the installed wheel")
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the result goes")
    p.add_argument("--table", type=Path, metavar="FILE", help="print the table of a result instead of measuring")
    p.add_argument("--serve", help=argparse.SUPPRESS)
    return p


def main() -> None:
    args = options().parse_args()
    if args.serve == OURS:
        serve(*lanewise(args.threads))
    elif args.serve == "numpy":
        serve(*with_numpy(args.threads))
    elif args.serve == "pytorch":
        serve(*with_pytorch(args.threads))
    elif args.serve:
        serve(*with_ggml(args.threads, args.ggml, args.serve == "ggml repack"))
    elif args.table:
        print(as_table(json.loads(args.table.read_text())))
    else:
        result = measure_all(args)
        print(as_table(result))
        print(f"written: {write_results('ops', result, result['engines'][OURS], args.output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
