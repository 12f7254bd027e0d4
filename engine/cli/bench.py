"""`lanewise bench model` and `lanewise bench op`: tokens per second of a model, and the speed of single ops beside this machine's limits.

Options, columns and JSON names of `bench model` are llama-bench's. Every test option takes several values, and all combinations are run.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backend import Backend
from engine.benchmark import (
    ModelRow,
    ModelTest,
    OpCase,
    OpRow,
    WrongResult,
    bench_model,
    bench_op,
    cases,
    draw_roofline,
    machine,
    measure_roofline,
    pyplot,
)
from engine.cli.options import GPU_FLAGS, KV_TYPES
from engine.cli.progress import Progress
from engine.cli.session import note, running
from engine.cli.text import UsageError
from engine.errors import DeviceError, ShapeError
from engine.model import Model
from engine.op import Op
from engine.runtime import demo_model, load, ops, registry

FORMATS = ("md", "json", "jsonl", "csv")
FLASH = {"on": True, "off": False, "auto": True, "1": True, "0": False, "-1": True}
PICTURES = (".png", ".svg")
Cell = Callable[[Any], str]


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True, title="what to measure")
    parts = (("model", "tokens per second of models", _add_model), ("op", "time of single ops, beside the roofline", _add_op))
    for name, about, add in parts:
        sub = kinds.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
        sub.add_argument("-v", "--verbose", action="count", dest="verbose_too", default=argparse.SUPPRESS, help="log more on stderr")
        sub.add_argument("-o", "--output", choices=FORMATS, default="md", help="how results are written (default: md)")
        add(sub)


def run(args: argparse.Namespace) -> int:
    return _run_model(args) if args.what == "model" else _run_op(args)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """llama-bench's options. Those that make a grid hold lists of values."""
    more = "; several with commas"
    add = parser.add_argument
    add("-m", "--model", action="append", metavar="FILE", help="the GGUF file, may be repeated (default: the demo model)")
    add("-p", "--n-prompt", type=numbers, default=[512], metavar="N", help=f"tokens of a prompt, 0 for none (default: 512){more}")
    add("-n", "--n-gen", type=numbers, default=[128], metavar="N", help=f"tokens generated one by one (default: 128){more}")
    add("-pg", type=_pair, action="append", default=[], metavar="PP,TG", help="a prompt and tokens behind it in one test, may be repeated")
    add("-d", "--n-depth", type=numbers, default=[0], metavar="N", help=f"tokens the context holds before (default: 0){more}")
    add("-b", "--batch-size", type=numbers, default=[2048], metavar="N", help=f"most tokens given at once (default: 2048){more}")
    add("-ub", "--ubatch-size", type=numbers, default=[512], metavar="N", help=f"most tokens computed at once (default: 512){more}")
    add("-t", "--threads", type=numbers, default=[0], metavar="N", help=f"threads of the CPU, 0 for all allowed cores (default: 0){more}")
    add("-ctk", "--cache-type-k", type=_words(KV_TYPES), default=["f16"], metavar="T", help=f"type of K in the cache (default: f16){more}")
    add("-ctv", "--cache-type-v", type=_words(KV_TYPES), default=["f16"], metavar="T", help=f"type of V in the cache (default: f16){more}")
    add("-fa", "--flash-attn", type=_words(tuple(FLASH)), default=["auto"], metavar="T", help=f"on, off or auto (default: auto){more}")
    add("-dev", "--device", type=lambda text: text.split(","), default=["auto"], metavar="NAMES",
        help=f"devices, best first, with / between them (default: auto, all this machine has){more}")
    add("-r", "--repetitions", type=_positive, default=5, metavar="N", help="repetitions of each test (default: 5)")
    add("--no-warmup", action="store_true", help="no run before the first repetition")
    add("--progress", action="store_true", help="say on stderr which test runs")
    gpu = parser.add_argument_group("for machines with a GPU")
    for flags, name in ((("-ngl", "--n-gpu-layers"), "gpu_layers"), (("-sm", "--split-mode"), "split_mode"),
                        (("-ts", "--tensor-split"), "tensor_split"), (("-mg", "--main-gpu"), "main_gpu"),
                        (("-nkvo", "--no-kv-offload"), "no_kv_offload"), (("-nopo", "--no-op-offload"), "no_op_offload"),
                        (("-ot", "--override-tensor"), "override_tensor")):
        gpu.add_argument(*flags, dest=name, metavar="X", help="as for `lanewise generate`")


def _add_op(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", type=lambda text: text.lower().split(","), default=None, metavar="NAMES", help="ops, with commas (default: all)")
    add("--types", type=lambda text: text.lower().split(","), default=None, metavar="TYPES",
        help="types with commas, such as q4_0,f16; x=f32+y=f16 for named operands")
    add("--shapes", action="append", default=None, metavar="SHAPE",
        help="extents such as m=4096,k=4096/14336,n=1 (/ between alternatives); several with spaces, or the option repeated")
    add("-dev", "--device", default="cpu", metavar="NAMES", help="devices, with commas (default: cpu)")
    add("-t", "--threads", type=numbers, default=[0], metavar="N", help="threads of the CPU, with commas (default: all cores)")
    add("-r", "--repetitions", type=_positive, default=3, metavar="N", help="timed runs of each call at least (default: 3)")
    add("--seconds", type=float, default=0.2, metavar="S", help="time to spend on each call at least (default: 0.2)")
    add("--hot", action="store_true", help="use the same operands again and again, instead of operands that come from memory")
    add("--plot", type=Path, metavar="FILE", help="draw the roofline, as PNG or SVG")


# -- values of options ------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """llama-bench's lists: "1,2", "1-4", "0-512+128", "1-8*2"."""
    found: list[int] = []
    for part in text.split(","):
        m = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part)
        if m is None:
            raise argparse.ArgumentTypeError(f"{part!r}: a number, FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR is expected")
        first, last, step = int(m[1]), int(m[2] or m[1]), int(m[4] or 1)
        multiplies = m[3] == "*"
        if last < first or (multiplies and (step < 2 or first < 1)) or step < 1:
            raise argparse.ArgumentTypeError(f"{part!r} never ends: the last number must be reached from the first")
        while first <= last:
            found.append(first)
            first = first * step if multiplies else first + step
    return found


def _positive(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{n}: 1 or more is expected")
    return n


def _pair(text: str) -> tuple[int, int]:
    m = re.fullmatch(r"(\d+)[,/](\d+)", text)
    if m is None:
        raise argparse.ArgumentTypeError(f"{text!r}: two numbers are expected, such as 512,128")
    return int(m[1]), int(m[2])


def _words(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        for word in text.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r}: {', '.join(known)} are possible")
        return text.split(",")

    return parse


# -- output -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the Markdown table: its title, what a row shows there, whether that is a number, and the least width."""

    title: str
    cell: Cell
    is_number: bool = True
    width: int = 6


@dataclass
class Printer:
    """Writes rows to stdout as they come, in one of the formats."""

    format: str
    columns: Sequence[Column]
    n_rows: int = 0
    _widths: list[int] = field(default_factory=list)

    def __enter__(self) -> Printer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.n_rows:
            self._end()

    def row(self, row: ModelRow | OpRow) -> None:
        """Write one row, and what has to stand before it."""
        getattr(self, f"_{self.format}")(row)
        self.n_rows += 1
        sys.stdout.flush()

    def _end(self) -> None:
        """Write what stands behind the rows."""
        if self.format == "json":
            sys.stdout.write("\n]\n" if self.n_rows else "[]\n")
        elif self.format == "md" and self.n_rows:
            sys.stdout.write(f"\nbuild: {machine().build_commit} ({machine().build_number})\n")

    def _json(self, row: ModelRow | OpRow) -> None:
        text = json.dumps(row.as_dict(), indent=2, ensure_ascii=False)
        sys.stdout.write(("," if self.n_rows else "[") + "\n" + text)

    def _jsonl(self, row: ModelRow | OpRow) -> None:
        sys.stdout.write(json.dumps(row.as_dict(), ensure_ascii=False) + "\n")

    def _csv(self, row: ModelRow | OpRow) -> None:
        flat = {k: v for k, v in row.as_dict().items() if not isinstance(v, (list, dict))}
        out = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
        if not self.n_rows:
            out.writerow(flat)
        out.writerow(flat.values())

    def _md(self, row: ModelRow | OpRow) -> None:
        cells = [c.cell(row) for c in self.columns]
        if not self.n_rows:
            self._widths = [max(len(c.title), len(cell), c.width) for c, cell in zip(self.columns, cells, strict=True)]
            self._line([c.title for c in self.columns])
            sys.stdout.write("| " + " | ".join("-" * (w - 1) + (":" if c.is_number else "-")
                                               for c, w in zip(self.columns, self._widths, strict=True)) + " |\n")
        self._line(cells)

    def _line(self, cells: Sequence[str]) -> None:
        parts = [cell.rjust(w) if c.is_number else cell.ljust(w) for c, cell, w in zip(self.columns, cells, self._widths, strict=True)]
        sys.stdout.write(f"| {' | '.join(parts)} |\n")


# -- bench model ------------------------------------------------------------------------------------------------

# Columns that are shown where an option has several values or another one than its default: option, title, what a row shows.
VARIED: tuple[tuple[str, str, Cell], ...] = (
    ("batch_size", "n_batch", lambda r: str(r.n_batch)), ("ubatch_size", "n_ubatch", lambda r: str(r.n_ubatch)),
    ("cache_type_k", "type_k", lambda r: r.type_k), ("cache_type_v", "type_v", lambda r: r.type_v),
    ("flash_attn", "fa", lambda r: str(r.flash_attn)), ("device", "dev", lambda r: r.devices),
)
DEFAULTS = {"batch_size": [2048], "ubatch_size": [512], "cache_type_k": ["f16"], "cache_type_v": ["f16"], "flash_attn": ["auto"],
            "device": ["auto"]}


def _run_model(args: argparse.Namespace) -> int:
    tests = _tests(args)
    with Printer(args.output, _model_columns(args)) as printer:
        for path, device, flash in itertools.product(_models(args), args.device, args.flash_attn):
            names = None if device == "auto" else device.split("/")
            with load(path, devices=names, threads=args.threads[0], flash=FLASH[flash]) as model:
                if ignored := [flag for name, flag in GPU_FLAGS.items() if getattr(args, name) not in (None, "0", "auto")]:
                    note(f"no usable GPU found, {', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} ignored")
                for row in _model_rows(model, args, tests):
                    printer.row(row)
    return 0


def _tests(args: argparse.Namespace) -> list[ModelTest]:
    """Prompts, then generations, then both together, at each depth."""
    sizes = [(p, 0) for p in args.n_prompt if p] + [(0, n) for n in args.n_gen if n] + [pair for pair in args.pg if sum(pair)]
    if not sizes:
        raise UsageError("there is nothing to measure: give a number of tokens other than 0 with -p, -n or -pg")
    return [ModelTest(p, n, d) for p, n in sizes for d in args.n_depth]


def _models(args: argparse.Namespace) -> list[str]:
    """The files; commas separate several unless a file has them in its name."""
    given = args.model or [str(demo_model())]
    return [name for text in given for name in ([text] if Path(text).is_file() else text.split(","))]


def _model_rows(model: Model, args: argparse.Namespace, tests: Sequence[ModelTest]) -> Iterator[ModelRow]:
    grid = itertools.product(args.cache_type_k, args.cache_type_v, args.batch_size, args.ubatch_size, args.threads)
    for type_k, type_v, n_batch, n_ubatch, threads in grid:
        for test in tests:
            options = {"kv_type_k": type_k, "kv_type_v": type_v, "threads": threads, "n_ubatch": min(n_batch, n_ubatch)}
            with model.context(n_ctx=test.n_ctx, **options) as context, running(context) as now:
                if args.progress:
                    now.say(f"{model.path.name}, {test}, {args.repetitions} repetitions")
                row = bench_model(context, test, repetitions=args.repetitions, warmup=not args.no_warmup, n_batch=n_batch)
            if row.compile_s >= 0.05:
                note(f"{test}: {row.compile_s:.1f} s of compiling kernels are not part of the figures")
            yield row


def _model_columns(args: argparse.Namespace) -> list[Column]:
    shown = [Column(title, cell) for name, title, cell in VARIED if getattr(args, name) != DEFAULTS[name]]
    return [
        Column("model", lambda r: r.model_type, False, 22), Column("size", lambda r: f"{r.model_size / (1 << 20):.2f} MiB"),
        Column("params", lambda r: f"{r.model_n_params / 1e6:.2f} M"), Column("backend", lambda r: r.backends, False),
        Column("threads", lambda r: str(r.n_threads)), *shown, Column("test", lambda r: r.test, width=15),
        Column("t/s", lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}", width=18),
    ]


# -- bench op ---------------------------------------------------------------------------------------------------


def _run_op(args: argparse.Namespace) -> int:
    _check_plot(args.plot)
    wanted, rows, wrong = _cases(args), [], 0
    found = registry()
    try:
        with Printer(args.output, _op_columns()) as printer:
            for name, threads in itertools.product(args.device.split(","), args.threads):
                for result in _op_rows(found.get(name), threads, wanted, args):
                    if isinstance(result, WrongResult):
                        note(str(result))
                        wrong += 1
                    else:
                        printer.row(result)
                        rows.append(result)
    finally:
        found.close()
    if args.output == "md":
        sys.stdout.write("".join(f"{line}\n" for line in _peaks(rows)))
    if args.plot and rows:
        draw_roofline(rows, args.plot)
    return 1 if wrong else 0


def _op_rows(backend: Backend, threads: int, wanted: Sequence[OpCase], args: argparse.Namespace) -> Iterator[OpRow | WrongResult]:
    """A row of each call this device runs; ops that it does not run are passed over, unless they are named."""
    backend.set_threads(threads)
    able = [case for case in wanted if args.op or backend.supports(case.node(case.leaves()))]
    if not able:
        raise DeviceError(f"{backend.name} runs none of these ops; `lanewise ops` shows what each device runs")
    if len(able) < len(wanted):
        note(f"{backend.name} does not run {len(wanted) - len(able)} of {len(wanted)} calls")
    with Progress([backend]):
        roofline = measure_roofline(backend)
        for case in able:
            try:
                yield bench_op(backend, case, roofline, seconds=args.seconds, least=args.repetitions, cold=not args.hot)
            except WrongResult as error:
                yield error


def _check_plot(path: Path | None) -> None:
    """Say before anything is measured what drawing would fail of."""
    if path is not None:
        if path.suffix.lower() not in PICTURES:
            raise UsageError(f"--plot {path}: a file that ends in {' or '.join(PICTURES)} is expected")
        pyplot()


def _cases(args: argparse.Namespace) -> list[OpCase]:
    """The calls that are asked for, all of them legal."""
    shapes = [s for text in args.shapes for s in text.split()] if args.shapes else None
    made: list[OpCase] = []
    try:
        for op in _ops(args):
            try:
                made += cases(op, args.types, shapes)
            except ShapeError as error:
                if args.op:
                    raise
                if not args.types and not shapes:
                    note(f"{op.name} is left out: {error}; name it with --op and give --shapes")
    except ShapeError as error:
        raise UsageError(str(error)) from None
    if not made:
        raise UsageError("no op has these types and shapes; name one with --op to see why")
    return made


def _ops(args: argparse.Namespace) -> list[Op]:
    if unknown := [name for name in args.op or () if name not in ops()]:
        raise UsageError(f"there is no op {unknown[0]!r}: {', '.join(sorted(ops()))} are known")
    return [ops()[name] for name in (args.op or ops())]


def _op_columns() -> list[Column]:
    return [
        Column("op", lambda r: r.op, False, 14), Column("types", lambda r: r.types, False, 14),
        Column("shape", lambda r: r.shape, False, 26),
        Column("backend", lambda r: r.backend.upper(), False), Column("threads", lambda r: str(r.n_threads)),
        Column("median us", lambda r: f"{r.median_us:.1f}"), Column("p10", lambda r: f"{r.p10_us:.1f}"),
        Column("p90", lambda r: f"{r.p90_us:.1f}"), Column("GB/s", lambda r: f"{r.gb_s:.2f}"),
        Column("GFLOP/s", lambda r: f"{r.gflop_s:.1f}" if r.flop else "-"), Column("of roofline", lambda r: f"{100 * r.share:.0f}%"),
        Column("bound", lambda r: r.bound, False), Column("kernel", lambda r: r.variant, False),
    ]


def _peaks(rows: Sequence[OpRow]) -> Iterator[str]:
    """The rooflines that shares refer to."""
    if not rows:
        return
    for roofline in {id(r.roofline): r.roofline for r in rows}.values():
        reads = ", ".join(f"{value:.1f} with {n}" for n, value in roofline.reads.items())
        yield (f"roofline with {roofline.n_threads} threads: FMA {roofline.fma:.0f} GFLOP/s, 8-bit dot {roofline.dot8:.0f} GFLOP/s, memory "
               f"reads in GB/s by threads: {reads}")
    yield f"cpu: {rows[0].machine.cpu_info} ({rows[0].machine.features}), {rows[0].machine.versions}"
