"""`lanewise show OP`: what a kernel becomes: its own text, LLVM IR, assembly, OpenCL C, the Python text for CUDA, PTX."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from engine.backend import KernelRow, KernelTable, ThroughRow
from engine.calls import a_call
from engine.cli.text import UsageError
from engine.lang.binding import Binding, bind
from engine.op import Key, Op
from engine.runtime import ops

GPU_LANES = 32
SYMBOL = "kernel"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", metavar="OP", help="the op's name, in either case")
    add("--key", metavar="TYPES", help="types in contract order, with commas; the first ones are enough (default: the op's first key)")
    add("--variant", metavar="NAME", help="the kernel (default: the general one)")
    add("--lanes", type=int, default=0, metavar="N", help="lanes of a group (default: this CPU's SIMD width, 32 for OpenCL and CUDA)")
    form = parser.add_mutually_exclusive_group()
    for name, what in FORMS.items():
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=what[1])


def run(args: argparse.Namespace) -> int:
    op = ops().get(args.op.lower())
    if op is None:
        raise UsageError(f"there is no op {args.op!r}: {', '.join(ops())} are known")
    write = FORMS[args.form or "text"][0]
    on_cpu = args.form in ("llvm", "asm")
    lanes = args.lanes or (_cpu_lanes() if on_cpu else GPU_LANES)
    key = _key(op, args.key)
    for binding in _launches(op, key, args.variant, lanes):
        sys.stdout.write(write(binding, lanes))
    return 0


def _key(op: Op, asked: str | None) -> Key:
    keys = op.keys()
    wanted = [t.strip().lower() for t in (asked or "").split(",") if t.strip()]
    fitting = [k for k in keys if list(k[1][: len(wanted)]) == wanted]
    if not fitting:
        raise UsageError(f"{op.name} has no key {asked}: {'; '.join(','.join(k[1]) for k in keys)}")
    return fitting[0]


def _launches(op: Op, key: Key, variant: str | None, lanes: int) -> Sequence[Binding]:
    rows = [r for r in KernelTable([op], lanes).rows[key] if isinstance(r, KernelRow) and not isinstance(r, ThroughRow)]
    row = next((r for r in reversed(rows) if variant in (None, r.name, r.variant.kernel.name)), None)
    if row is None:
        raise UsageError(f"{op.name}({', '.join(key[1])}) has no variant {variant!r}: {', '.join(r.name for r in rows)}")
    call = a_call(op, key, row.variant, lanes)
    if call is None:
        raise UsageError(f"{op.name}({', '.join(key[1])}), {row.name}: no call with {lanes} lanes was found that this kernel takes")
    return bind(call, row.variant)


def _cpu_lanes() -> int:
    from engine.backends.cpu.features import features

    return features(0).lanes


def _text(b: Binding, lanes: int) -> str:
    views = ", ".join(f"{n} {v.dtype}[{v.ndim}]{'' if v.layout == 'plain' else f' {v.layout}'}" for n, v in b.views.items())
    constants = ", ".join(f"{k} = {v}" for k, v in b.constants.items())
    return f"# groups {', '.join(b.groups)}; {views}\n# {constants}\n{b.function.source}\n"


def _llvm(b: Binding, lanes: int) -> str:
    from engine.backends.cpu.entry import texts
    from engine.backends.cpu.features import features

    return texts(b.kernel(), features(lanes), SYMBOL)[0]


def _asm(b: Binding, lanes: int) -> str:
    from engine.backends.cpu.entry import texts
    from engine.backends.cpu.features import features

    return texts(b.kernel(), features(lanes), SYMBOL)[1]


def _cl(b: Binding, lanes: int) -> str:
    from engine.backends.opencl.printer import print_program

    return print_program(b.kernel(), f"{b.function.name}_kernel")


def _cuda(b: Binding, lanes: int) -> str:
    from engine.backends.cuda.compiler import program_of

    program = program_of(b)
    return "\n".join([*program.functions.values(), program.kernel])


def _ptx(b: Binding, lanes: int) -> str:
    from engine.backends.cuda.compile import ptx
    from engine.backends.cuda.compiler import program_of

    return ptx(program_of(b), ((8, 0),))[0]


FORMS: dict[str, tuple[Callable[[Binding, int], str], str]] = {
    "text": (_text, "the kernel's own text and what it is bound to (the default)"),
    "llvm": (_llvm, "LLVM IR after optimisation, for this CPU"), "asm": (_asm, "assembly for this CPU"),
    "cl": (_cl, "OpenCL C"), "cuda": (_cuda, "the Python text for numba.cuda"), "ptx": (_ptx, "PTX for compute capability 8.0")}
