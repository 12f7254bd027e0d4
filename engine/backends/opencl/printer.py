"""OpenCL C 1.2 from the typed tree: a group is a work-group, a lane a work-item.

A program is the parts of `prelude` that are used, the elementary functions that are used, and one kernel. Its arguments: for each view its
buffer, byte offset and byte strides; the extents of the group indices; the first group of this launch; sizes; float32 scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backends.opencl.prelude import prelude
from engine.lang.spmd import SpmdPrinter
from engine.lang.tree import Kernel

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "/", "mod": "%", "shl": "<<", "shr": ">>", "and": "&", "or": "|",
         "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
WRAPS = ("add", "sub", "mul")
RESERVED = frozenset("""auto bool break case char const constant continue default do double else enum event_t extern float for global goto
    half if image1d_t image2d_t inline int kernel local long private quad read_only register restrict return sampler_t short signed sizeof
    size_t static struct switch typedef uchar uint ulong union unsigned ushort vector void volatile while write_only lane group
    acos acosh all any asin atan barrier bitselect cbrt ceil clamp cos cross degrees distance dot erf exp exp2 expm1 fabs fdim floor fma
    fmax fmin fmod fract hypot ilogb isnan ldexp length log log1p log2 logb mad max min mix modf nan normalize pow radians remainder rint
    rootn round rsqrt select sign sin sinh smoothstep sqrt step tan tanh tgamma trunc vload_half""".split())


@dataclass(frozen=True)
class Options:
    """What a device leaves to the text.

    Attributes:
        divide_exact: its own / and sqrt are not correctly rounded, so ours are used.
    """

    divide_exact: bool = False


class OpenCLPrinter(SpmdPrinter):
    names = {"f32": "float", "i32": "int", "u32": "uint", "index": "long", "truth": "bool", "block": "__global uchar *"}
    reserved = RESERVED

    def __init__(self, kernel: Kernel, options: Any = None) -> None:
        super().__init__(kernel, options or Options())
        self.depth = 1

    # -- expressions --------------------------------------------------------------------------------------------

    def literal(self, kind: str, value: Any) -> str:
        if kind == "f32":
            return _float(float(value))
        if kind == "truth":
            return "true" if value else "false"
        if kind == "u32":
            return f"{int(value) & 0xFFFFFFFF:#x}u" if not 0 <= value < 256 else f"{int(value)}u"
        if kind == "i32":
            value = ((int(value) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
        return f"{int(value)}" if value >= 0 else f"({int(value)})" if value > -(1 << 31) else "(-2147483647 - 1)"

    def infix(self, op: str, kind: str, x: str, y: str) -> str:
        if kind == "i32" and op in WRAPS:
            return self._wrapping(op, x, y)
        if kind in ("index", "u32") and (short := _short(op, x, y)):
            return short
        if op == "div" and self.options.divide_exact:
            return f"divide({bare(x)}, {bare(y)})"
        if kind == "index" and op == "mul":
            x = f"(long){x}" if x.isdigit() and y.isdigit() else x
        return f"({x} {INFIX[op]} {y})"

    def _wrapping(self, op: str, x: str, y: str) -> str:
        """int arithmetic that wraps; C leaves an overflow undefined."""
        return _short(op, x, y) or f"{op}_i32({bare(x)}, {bare(y)})"

    def minus(self, kind: str, x: str) -> str:
        return f"sub_i32(0, {bare(x)})" if kind == "i32" else f"(-{x})"

    def convert(self, have: str, want: str, x: str) -> str:
        if have == "f32" and want in ("i32", "u32"):
            return f"{want}_of({bare(x)})"
        if want == "index" and (have == "i32" or x.isdigit()):
            return x if x.isdigit() or x == "lane" else f"(long){x}"
        return f"({self.names[want]}){x}"

    def bits(self, have: str, want: str, x: str) -> str:
        return f"as_{self.names[want]}({bare(x)})"

    def choose(self, kind: str, condition: str, x: str, y: str) -> str:
        if condition in ("true", "false"):
            return x if condition == "true" else y
        return f"({condition} ? {x} : {y})"

    def both(self, x: str, y: str) -> str:
        return f"({x} & {y})"

    def word(self, name: str, kind: str, args: Sequence[str]) -> str:
        inner = [bare(a) for a in args]
        if name in ("maximum", "minimum"):
            if kind == "f32":
                return f"{'fmax' if name == 'maximum' else 'fmin'}({inner[0]}, {inner[1]})"
            word, cast = "max" if name == "maximum" else "min", f"({self.names[kind]})"
            return f"{word}({', '.join(cast + a for a in args)})"
        if name.startswith(("byte", "ubyte")):
            return f"{name[:-1]}_of({inner[0]}, {name[-1]})"
        known = {"abs": "fabs", "round_away": "round", "rsqrt": "inverse_root", "sqrt": "root" if self.options.divide_exact else "sqrt"}
        return f"{known.get(name, name)}({', '.join(inner)})"

    def dot4(self, x: str, y: str, acc: str, low: int, high: int) -> str:
        return f"{'dot4_signed' if low < 0 else 'dot4_unsigned'}({bare(x)}, {bare(y)}, {bare(acc)})"

    def dot(self, xs: Sequence[str], ys: Sequence[str], low: int, high: int) -> str:
        """One line a quad: the sum as it grows."""
        made = self.fresh("sum")
        self.declare("i32", made, self.dot4(xs[0], ys[0], "0", low, high), constant=False)
        for x, y in zip(xs[1:], ys[1:], strict=True):
            self.assign(made, self.dot4(x, y, made, low, high))
        return made

    def table(self, table: Any, index: str) -> str:
        return f"{table.name}[{bare(index)}]"

    def nibbles(self, table: Any, quad: str) -> str:
        return f"bytes_of({table.name}, {bare(quad)})"

    def call(self, name: str, args: Sequence[str]) -> str:
        return f"{name}_of({', '.join(bare(a) for a in args)})"

    # -- memory -------------------------------------------------------------------------------------------------

    def offset(self, base: str, terms: Sequence[tuple[str, int | str]], constant: int = 0) -> str:
        parts = [base]
        for index, stride in terms:
            if index == "0" or stride == 0:
                continue
            if index.isdigit() and isinstance(stride, int):
                constant += int(index) * stride
            else:
                parts.append(index if stride == 1 else f"{index} * {stride}")
        if constant:
            parts.append(str(constant))
        return " + ".join(parts)

    def load(self, unit: str, address: str, alignment: int) -> str:
        return f"load_{unit}{_cut(unit, alignment)}({address})"

    def store(self, unit: str, address: str, alignment: int, value: str) -> str:
        return f"store_{unit}{_cut(unit, alignment)}({address}, {bare(value)});"

    def share(self, array: str, value: str) -> None:
        self.statement(f"{array}[lane] = {bare(value)};")

    def slot(self, array: str, lane: str) -> str:
        return f"{array}[{bare(lane)}]"

    def fold(self, word: str, kind: str, array: str) -> str:
        return f"{word}_{kind}({array})"

    def fence(self, everything: bool) -> None:
        self.statement("barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);" if everything else "barrier(CLK_LOCAL_MEM_FENCE);")

    # -- statements ---------------------------------------------------------------------------------------------

    def statement(self, text: str) -> None:
        self.out.append("    " * self.depth + text)

    def comment(self, text: str) -> None:
        self.statement(f"// {text}".rstrip("\\ "))

    def declare(self, kind: str, name: str, value: str, constant: bool) -> None:
        type = self.names[kind]
        star = "" if type.endswith("*") else " "
        const = "const " if constant and kind != "block" else ""
        self.statement(f"{const}{type}{star}{name} = {bare(value)};")

    def assign(self, name: str, value: str) -> None:
        self.statement(f"{name} = {bare(value)};")

    def open_if(self, condition: str) -> None:
        self.statement(f"if ({bare(condition)}) {{")
        self.depth += 1

    def open_else(self) -> None:
        self.depth -= 1
        self.statement("} else {")
        self.depth += 1

    def open_loop(self, name: str, start: str, stop: str, step: int) -> None:
        forward = f"{name}++" if step == 1 else f"{name} += {step}"
        self.statement(f"for (long {name} = {bare(start)}; {name} < {bare(stop)}; {forward}) {{")
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.statement("}")

    def function_text(self, name: str, params: Sequence[tuple[str, str]], kind: str, body: Sequence[str], result: str) -> list[str]:
        listed = ", ".join(f"{self.names[k]} {n}" for k, n in params)
        return [f"{self.names[kind]} {name}_of({listed})", "{", *body, f"    return {bare(result)};", "}"]

    # -- the program --------------------------------------------------------------------------------------------

    def program(self, name: str) -> str:
        head = self.parameters(name)
        before = list(self.out)
        self.out.clear()
        self.block(self.kernel.body)
        shared = [f"    __local {self.names[kind]} {array}[LANES];" for array, kind in self.shared.items()]
        text = [*head, "{", *shared, *before, *self.out, "}"]
        functions = [line for f in self.functions.values() for line in (*f, "")]
        tables = [line for t in self.tables.values() for line in (*_table_text(t), "")]
        own = "\n".join([*tables, *functions, *text]) + "\n"
        return prelude(own, self.lanes, divide_exact=self.options.divide_exact) + "\n" + own

    def parameters(self, name: str) -> list[str]:
        lines, k = [], self.kernel
        self.taken |= {"lane", "group", "first_group", *k.views}
        for view, t in k.views.items():
            strides = [f"long {view}_stride_{d}" for d in range(t.ndim)]
            lines.append(", ".join([f"__global uchar *{view}_buffer", f"long {view}_offset", *strides]))
            self.statement(f"__global uchar *{view} = {view}_buffer + {view}_offset;")
        lines.append(", ".join([*(f"long {g}_extent" for g in k.groups), "long first_group"]))
        numbers = []
        for kind, listed in (("int", k.ints), ("float", k.floats)):
            for n in listed:
                made = self.env[f"parameter {n}"] = self.fresh(n)
                numbers.append(f"{'long' if kind == 'int' else 'float'} {made}")
        if numbers:
            lines.append(", ".join(numbers))
        self.statement("const int lane = get_local_id(0);")
        self.statement("long group = first_group + get_group_id(0);")
        for g in k.groups[:0:-1]:
            made = self.env[f"parameter {g}"] = self.fresh(g)
            self.statement(f"const long {made} = group % {g}_extent;")
            self.statement(f"group /= {g}_extent;")
        made = self.env[f"parameter {k.groups[0]}"] = self.fresh(k.groups[0])
        self.statement(f"const long {made} = group;")
        head = f"__kernel __attribute__((reqd_work_group_size({self.lanes}, 1, 1)))\nvoid {name}("
        return [head + (",\n" + " " * (len(name) + 6)).join(lines) + ")"]


def print_program(kernel: Kernel, name: str, *, divide_exact: bool = False) -> str:
    """A whole OpenCL C 1.2 program with one kernel of this name."""
    return OpenCLPrinter(kernel, Options(divide_exact)).program(name)


def bare(text: str) -> str:
    """The text without parentheses around the whole of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]


def _short(op: str, x: str, y: str) -> str:
    """Integer arithmetic with 0 and 1, and on literals, is done here."""
    if x.isdigit() and y.isdigit() and op in WRAPS:
        result = {"add": int(x) + int(y), "sub": int(x) - int(y), "mul": int(x) * int(y)}[op]
        if abs(result) < 1 << 31:
            return str(result) if result >= 0 else f"({result})"
    if y in ("0", "0u") and op in ("add", "sub", "shl", "shr", "or") or y == "1" and op in ("mul", "floordiv"):
        return x
    if x == "0" and op == "add" or x == "1" and op == "mul":
        return y
    return "0" if op == "mul" and "0" in (x, y) else ""


def _float(value: float) -> str:
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = repr(float(np.float32(value))) if float(np.float32(value)) == value else str(np.float32(value))
    if "." not in text and "e" not in text:
        text += ".0"
    return f"{text}f" if not text.startswith("-") else f"({text}f)"


def _cut(unit: str, alignment: int) -> str:
    """Units that may lie at an odd place are read in pieces."""
    sizes = {"f32": 4, "i32": 4, "u32": 4, "f16": 2, "bf16": 2, "u16": 2, "i16": 2, "i64": 8}
    return f"_by{alignment}" if alignment < sizes.get(unit, 1) else ""


def _table_text(table: Any) -> list[str]:
    values = [f"{int(v):#010x}u" for v in table.values]
    lines = [", ".join(values[k : k + 10]) for k in range(0, len(values), 10)]
    return [f"__constant uint {table.name}[{len(values)}] = {{", *(f"    {line}," for line in lines), "};"]
