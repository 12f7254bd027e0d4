"""Python for numba.cuda from the typed tree: a group is a warp (or a block, above 32 lanes), a lane a thread.

The text is made of assignments, `if`, `while` and calls of words that name their types, so that Numba's promotions never show. The words
exist twice, for the GPU (`gpu_words`) and for Numba's CUDA simulator (`sim_words`): the very text that is compiled is the one that is run
there. Parameters of a kernel: the first group of this launch, the number of groups, for each view its address and byte strides, the extents
of the group indices, sizes, float32 scalars.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.dtypes import UNIT_NBYTES
from engine.lang.spmd import SpmdPrinter
from engine.lang.tree import Kernel, Table

INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
         "ne": "!="}
FIRST = ("first_group", "n_groups")  # the parameters in front of every kernel's own
RESERVED = frozenset({*keyword.kwlist, *FIRST, "lane", "lane_at", "group", "fma", "rint", "round_away", "sqrt", "rsqrt", "pack", "byte",
                      "ubyte", "barrier", "lane_number", "group_number", "f32", "i32", "u32", "i64", "INF", "NINF", "NAN", "True", "False",
                      "abs_f32"})
_TYPED = re.compile(r".+_(f32|i32|u32|truth|index|f16|bf16|[iu]8|[iu]16|i64|by1|by2)")
_LITERAL = re.compile(r"(?:f32|i32|u32)\((-?[\d.]+(?:e[+-]?\d+)?)\)")


class Address(str):
    """An address as text. Its constant part stays apart: it goes into the load instruction, added up it would take a register each."""

    base: str
    constant: int

    def __new__(cls, base: str, constant: int) -> Address:
        made = super().__new__(cls, f"{base} + {constant}" if constant else base)
        made.base, made.constant = base, constant
        return made


@dataclass(frozen=True)
class Program:
    """A printed kernel: the elementary functions it calls (name -> text, callees first), its tables, and its own text."""

    name: str
    functions: dict[str, str]
    tables: dict[str, Table]
    kernel: str
    n_floats: int
    n_integers: int
    lanes: int

    @property
    def text(self) -> str:
        """All of it, as a person reads it."""
        tables = [f"# {n}: a table of {t.values.size} words" for n, t in self.tables.items()]
        return "\n\n".join([*tables, *self.functions.values(), self.kernel])


class CudaPrinter(SpmdPrinter):
    names = {"f32": "f32", "i32": "i32", "u32": "u32", "index": "i64", "truth": "bool", "block": "i64"}
    reserved = RESERVED

    def __init__(self, kernel: Kernel, options: Any = None) -> None:
        super().__init__(kernel, options)
        self.depth = 1
        self._open: list[tuple[str, int]] = []  # what ends each open block, and where it began

    def fresh(self, name: str) -> str:
        """Words end in a type, so names must not; views and tables keep theirs."""
        return super().fresh(f"{name}_" if _TYPED.fullmatch(name) else name)

    # -- expressions --------------------------------------------------------------------------------------------

    def literal(self, kind: str, value: Any) -> str:
        if kind == "f32":
            return _float(float(value))
        if kind == "truth":
            return str(bool(value))
        if kind == "u32":
            return f"u32({int(value) & 0xFFFFFFFF})"
        if kind == "i32":
            return f"i32({((int(value) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)})"
        return str(int(value)) if value >= 0 else f"({int(value)})"

    def infix(self, op: str, kind: str, x: str, y: str) -> str:
        if kind == "index" and (short := _short(op, x, y)):
            return short
        is_comparison = op in ("lt", "le", "gt", "ge", "eq", "ne")
        if op in INFIX and (kind == "index" or is_comparison):
            x, y = (x, y) if kind == "index" else loose(x, y)
            return f"({x} {INFIX[op]} {y})"
        return f"{op}_{kind}({', '.join(loose(x, y))})"

    def minus(self, kind: str, x: str) -> str:
        return f"(-{x})" if kind == "index" else f"neg_{kind}({x})"

    def convert(self, have: str, want: str, x: str) -> str:
        if have == "index" and x.isdigit():
            return self.literal(want, int(x))
        if want == "index" and (found := _LITERAL.fullmatch(x)):
            return found[1]
        return "lane_at" if (want, x) == ("index", "lane") else f"{want}_from_{have}({bare(x)})"

    def bits(self, have: str, want: str, x: str) -> str:
        return f"{want}_bits_of_{have}({bare(x)})"

    def choose(self, kind: str, condition: str, x: str, y: str) -> str:
        if condition in ("True", "False"):
            return x if condition == "True" else y
        return f"where_{kind}({', '.join((bare(condition), *loose(x, y)))})"

    def both(self, x: str, y: str) -> str:
        return x if y == "True" else y if x == "True" else f"and_truth({bare(x)}, {bare(y)})"

    def word(self, name: str, kind: str, args: Sequence[str]) -> str:
        inner = loose(*args)
        if name.startswith(("byte", "ubyte")):
            return f"{name[:-1]}({inner[0]}, {name[-1]})"
        typed = name in ("maximum", "minimum", "abs")
        return f"{name}_{kind}({', '.join(inner)})" if typed else f"{name}({', '.join(inner)})"

    def dot4(self, x: str, y: str, acc: str, low: int, high: int) -> str:
        return f"{'dot4_i32' if low < 0 else 'dot4_u32'}({', '.join(loose(x, y, acc))})"

    def table(self, table: Table, index: str) -> str:
        return f"{table.name}({bare(index)})"

    def nibbles(self, table: Table, quad: str) -> str:
        return f"{table.name}_nibbles({bare(quad)})"

    def call(self, name: str, args: Sequence[str]) -> str:
        return f"{name}_of({', '.join(bare(a) for a in args)})"

    # -- memory -------------------------------------------------------------------------------------------------

    def offset(self, base: str, terms: Sequence[tuple[str, int | str]], constant: int = 0) -> str:
        parts = [base]
        if isinstance(base, Address):
            parts, constant = [base.base], base.constant + constant
        for index, stride in terms:
            if index == "0" or stride == 0:
                continue
            if index.isdigit() and isinstance(stride, int):
                constant += int(index) * stride
            else:
                parts.append(index if stride == 1 else f"{index} * {stride}")
        return Address(" + ".join(parts), constant)

    def load(self, unit: str, address: str, alignment: int) -> str:
        return f"load_{_cut(unit, alignment)}({_pair(address)})"

    def store(self, unit: str, address: str, alignment: int, value: str) -> str:
        return f"store_{_cut(unit, alignment)}({_pair(address)}, {bare(value)})"

    # -- across lanes: by shuffles, so that no array is shared ---------------------------------------------------

    def write_shared(self, array: str, value: str) -> None: ...

    def read_shared(self, array: str) -> None: ...

    def op_reduce(self, e: Any) -> str:
        kind = e.type.kind
        return self.named(kind, e.data, f"{e.data}_{kind}({bare(self.value(e.args[0]))})")

    def op_lane(self, e: Any) -> str:
        x, j = (self.value(a) for a in e.args)
        at = self.convert("index", "i32", j)
        return self.named(e.type.kind, "of_lane", f"lane_value_{e.type.kind}({bare(x)}, {', '.join(loose(at, 'lane')[:1])})")

    def fence(self, everything: bool) -> None:
        self.statement("barrier()")

    def share(self, array: str, value: str) -> None:
        raise AssertionError("no array is shared")

    def slot(self, array: str, lane: str) -> str:
        raise AssertionError("no array is shared")

    def fold(self, word: str, kind: str, array: str) -> str:
        raise AssertionError("no array is shared")

    # -- statements ---------------------------------------------------------------------------------------------

    def statement(self, text: str) -> None:
        self.out.append("    " * self.depth + text)

    def comment(self, text: str) -> None:
        self.statement(f"# {text}")

    def declare(self, kind: str, name: str, value: str, constant: bool) -> None:
        self.assign(name, value)

    def assign(self, name: str, value: str) -> None:
        self.statement(f"{name} = {bare(value)}")

    def open_if(self, condition: str) -> None:
        self._begin(f"if {bare(condition)}:", "")

    def open_else(self) -> None:
        self.close()
        self._begin("else:", "")

    def open_loop(self, name: str, start: str, stop: str, step: int) -> None:
        """No `range`: its iterator counts down a second number."""
        self.assign(name, start)
        self._begin(f"while {name} < {bare(stop)}:", f"{name} = {name} + {step}")

    def _begin(self, head: str, end: str) -> None:
        self.statement(head)
        self.depth += 1
        self._open.append((end, len(self.out)))

    def close(self) -> None:
        end, start = self._open.pop()
        if end or all(line.lstrip().startswith("#") for line in self.out[start:]):
            self.statement(end or "pass")
        self.depth -= 1

    def function_text(self, name: str, params: Sequence[tuple[str, str]], kind: str, body: Sequence[str], result: str) -> list[str]:
        return [f"def {name}_of({', '.join(n for _, n in params)}):", *body, f"    return {bare(result)}"]

    # -- the program --------------------------------------------------------------------------------------------

    def program(self) -> Program:
        k = self.kernel
        head = self.parameters()
        self.block(k.body)
        functions = {f"{n}_of": "\n".join(lines) for n, lines in self.functions.items()}
        n_integers = len(FIRST) + sum(1 + t.ndim for t in k.views.values()) + len(k.groups) + len(k.ints)
        return Program(k.name, functions, dict(self.tables), "\n".join([head, *self.out]) + "\n", len(k.floats), n_integers, self.lanes)

    def parameters(self) -> str:
        k = self.kernel
        strides = {f"{v}_stride_{d}" for v, t in k.views.items() for d in range(t.ndim)}
        self.taken |= {*FIRST, "lane", "lane_at", "group", *k.views, *strides}
        views = [", ".join([v, *(f"{v}_stride_{d}" for d in range(t.ndim))]) for v, t in k.views.items()]
        extents = [self.fresh(f"{g}_extent") for g in k.groups]
        numbers = []
        for n in (*k.ints, *k.floats):
            made = self.env[f"parameter {n}"] = self.fresh(n)
            numbers.append(made)
        self.statement("lane = lane_number()")
        self.statement("lane_at = index_from_i32(lane)")
        self.statement("group = first_group + group_number()")
        self.open_if("group >= n_groups")
        self.statement("return")
        self.close()
        for g, extent in zip(k.groups[:0:-1], extents[:0:-1], strict=True):
            made = self.env[f"parameter {g}"] = self.fresh(g)
            self.statement(f"{made} = mod_index(group, {extent})")
            self.statement(f"group = floordiv_index(group, {extent})")
        made = self.env[f"parameter {k.groups[0]}"] = self.fresh(k.groups[0])
        self.statement(f"{made} = group")
        lines = [", ".join(FIRST), *views, ", ".join(extents), *([", ".join(numbers)] if numbers else [])]
        return f"def {k.name}(" + (",\n" + " " * (len(k.name) + 5)).join(lines) + "):"


def print_program(kernel: Kernel) -> Program:
    """A checked kernel as Python for numba.cuda."""
    return CudaPrinter(kernel).program()


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


def loose(*args: str) -> list[str]:
    """Operands of a word: a literal beside a typed partner needs no cast, and each cast is a call that Numba types."""
    found = [_LITERAL.fullmatch(a) for a in args]
    if all(found):
        return [bare(a) for a in args]
    return [f[1] if f else bare(a) for f, a in zip(found, args, strict=True)]


def _short(op: str, x: str, y: str) -> str:
    """Index arithmetic with 0 and 1, and on literals, is done here."""
    if x.isdigit() and y.isdigit() and op in ("add", "sub", "mul"):
        result = {"add": int(x) + int(y), "sub": int(x) - int(y), "mul": int(x) * int(y)}[op]
        return str(result) if result >= 0 else f"({result})"
    if y == "0" and op in ("add", "sub", "shl", "shr") or y == "1" and op in ("mul", "floordiv"):
        return x
    if x == "0" and op == "add" or x == "1" and op == "mul":
        return y
    return "0" if op == "mul" and "0" in (x, y) else ""


def _float(value: float) -> str:
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INF" if value > 0 else "NINF"
    return f"f32({float(np.float32(value))!r})"


def _pair(address: str) -> str:
    return f"{address.base}, {address.constant}" if isinstance(address, Address) else f"{address}, 0"


def _cut(unit: str, alignment: int) -> str:
    """Units that may lie at an odd place are read and written in pieces."""
    return f"{unit}_by{alignment}" if alignment < UNIT_NBYTES[unit] else unit
