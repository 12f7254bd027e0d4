"""The vocabulary: one Word per name. Kernels import their words from here; a target is a dictionary from word to meaning.

U is uniform (one value for the group), V varying (one value per lane); T is f32, i32 or u32. A word *must* be there on every target.
Words whose meaning may use a special instruction have a portable form too, and every form gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from engine.errors import KernelError
from engine.lang.function import Function
from engine.lang.tree import Table

INF = float("inf")


@dataclass(frozen=True)
class Word:
    """A name of the language.

    Attributes:
        form: how it is written, with the types of its operands.
        meaning: what it gives, on every target.
        rule: the typing rule of the walk that checks it.
    """

    name: str
    form: str
    meaning: str
    rule: str

    def __call__(self, *_: Any) -> Any:
        raise KernelError(f"{self.name} is a word of the lane language: it has a meaning inside a kernel only")

    def __iter__(self) -> Any:
        return self()

    def __enter__(self) -> Any:
        return self()

    def __exit__(self, *_: object) -> None: ...

    def __mul__(self, other: Any = None) -> Any:
        return self()

    __add__ = __radd__ = __sub__ = __rsub__ = __rmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __neg__ = __mul__


WORDS: dict[str, Word] = {}


def _word(name: str, form: str, meaning: str, rule: str) -> Word:
    WORDS[name] = Word(name, form, meaning, rule)
    return WORDS[name]


# Lane spaces and control: lanes that take no part read zero, write nothing, and leave names from outside unchanged.
lanes = _word("lanes", "for i in lanes(n) / for a, b, c in lanes(A, B, C)",
              "tiles of LANES consecutive indices, the last may be partial / the row-major grid, flattened; lanes past its end repeat the "
              "last place", "space")
span = _word("span", "with span(start, n) as i", "one tile of indices start + lane, those below n take part", "space")
only = _word("only", "with only(c)", "a varying `if`: lanes without c take no part", "space")
inside = _word("inside", "inside(i)", "does this lane take part in i's space -> V truth", "inside")
first = _word("first", "first(i)", "start of i's tile -> index", "first")
static = _word("static", "for k in static(n)", "unrolled when the kernel is bound; k is a constant", "expand")
private = _word("private", "t = private(n, init)", "n registers t[0] .. t[n - 1], indexed by constants", "expand")

# Numbers: U or V in, V if any is V.
f32 = _word("f32", "f32(x)", "x as f32: integers round to nearest even", "convert")
i32 = _word("i32", "i32(x)", "x as i32: f32 truncates and saturates, NaN gives 0; u32 keeps its bits", "convert")
u32 = _word("u32", "u32(x)", "x as u32: f32 truncates and saturates, NaN gives 0; i32 keeps its bits", "convert")
as_f32 = _word("as_f32", "as_f32(i32 | u32)", "the same bits as f32", "bits")
as_i32 = _word("as_i32", "as_i32(f32 | u32)", "the same bits as i32", "bits")
as_u32 = _word("as_u32", "as_u32(f32 | i32)", "the same bits as u32", "bits")
index = _word("index", "index(U i32 | U u32)", "a uniform integer as an index, sign extended", "index")
where = _word("where", "where(c, T, T)", "lane by lane the first where c holds, else the second; both are computed", "where")
fma = _word("fma", "fma(f32 a, b, c)", "a * b + c with one rounding", "float")
maximum = _word("maximum", "maximum(T, T)", "the larger; a number wins over NaN", "same")
minimum = _word("minimum", "minimum(T, T)", "the smaller; a number wins over NaN", "same")
abs = _word("abs", "abs(f32)", "the absolute value", "float")
rint = _word("rint", "rint(f32)", "to the nearest integer, halves to even", "float")
round_away = _word("round_away", "round_away(f32)", "to the nearest integer, halves away from zero", "float")
sqrt = _word("sqrt", "sqrt(f32)", "correctly rounded square root", "float")
rsqrt = _word("rsqrt", "rsqrt(f32)", "1 / sqrt(x), both correctly rounded", "float")
exp = _word("exp", "exp(f32)", "within 2 ulp; exp(-inf) = 0, NaN stays NaN", "float")
exp2 = _word("exp2", "exp2(f32)", "2 to the x, within 3 ulp up to |x| = 16", "float")
log = _word("log", "log(f32)", "within 3 ulp; log(0) = -inf, NaN below", "float")
log1p = _word("log1p", "log1p(f32)", "log(1 + x) without cancellation, within 4 ulp", "float")
tanh = _word("tanh", "tanh(f32)", "within 3 ulp", "float")
sin = _word("sin", "sin(f32)", "absolute error below 2e-7 for |x| <= 3.2", "float")
cos = _word("cos", "cos(f32)", "absolute error below 2e-7 for |x| <= 3.2", "float")

# Bytes in words: four to a u32, the lowest first.
byte = _word("byte", "byte(u32, e)", "signed byte e (a constant) -> i32", "byte")
ubyte = _word("ubyte", "ubyte(u32, e)", "unsigned byte e (a constant) -> i32", "byte")
pack = _word("pack", "pack(i32, i32, i32, i32)", "four numbers -128 .. 127 -> u32", "pack")
dot4 = _word("dot4", "dot4(u32 x, u32 y, i32 acc, low, high)",
             "acc + the sum of four products; x holds codes low .. high (constants; low < 0: signed bytes, else unsigned), y signed bytes "
             "-127 .. 127", "dot4")
dot = _word("dot", "dot((u32 ..) x, (u32 ..) y, i32 total, low, high)",
            "the sum of the products of all bytes -> i32; operands as for dot4; total must be the sum of y's bytes", "dot")

# Constant tables: objects of a module, made by table(). TABLE[i] -> u32, for any integer i, U or V; i is below the number of entries.
nibbles = _word("nibbles", "nibbles(TABLE, u32)",
                "the four bytes 0 .. 15 of a word, each replaced by that byte of a table of 16 bytes (4 entries) -> u32", "table")

# Blocks: the three functions of a quantised type. value = scale * (code - ZERO) - offset.
codes = _word("codes", "codes(block, s, t)", "quad t (0 .. 7) of run s: four codes -> u32", "decoder")
scale = _word("scale", "scale(block, s, t)", "the scale of that quad -> f32", "decoder")
offset = _word("offset", "offset(block, s, t)", "what is taken off there -> f32", "decoder")

# Across lanes, in uniform flow only; the result is uniform. Lanes that take no part count with what they hold.
group_sum = _word("group_sum", "group_sum(V f32 | V i32)", "the sum over the lanes, in an order fixed for a given LANES", "group")
group_max = _word("group_max", "group_max(V f32 | V i32)", "the largest over the lanes; a number wins over NaN", "group")
group_min = _word("group_min", "group_min(V f32 | V i32)", "the smallest over the lanes; a number wins over NaN", "group")
lane = _word("lane", "lane(V, j)", "what lane j holds", "lane")
barrier = _word("barrier", "barrier()", "orders the group's memory: what lanes wrote before is read after", "barrier")

# Decided when a kernel is bound.
LANES = Word("LANES", "LANES", "the number of lanes of a group: a constant", "constant")

TABLES: dict[str, Table] = {}
FUNCTIONS: list[Function] = []
DECODERS: dict[str, dict[str, Function]] = {}


def table(name: str, values: ArrayLike) -> Table:
    """Constants that kernels read by subscript, in the memory a target keeps for constants.

    Args:
        name: an identifier in Python and C, one of a kind in the process.
        values: integers of 32 bits or less, 2^n of them; bytes are joined, four to a word, the lowest first.

    Raises:
        KernelError: the name or the number of values is not allowed.
    """
    given = np.array(values, order="C")
    if given.dtype.itemsize == 1 and given.size % 4 == 0:
        made = Table(name, given.reshape(-1).view("<u4"))
    else:
        made = Table(name, given.astype(np.int64).astype(np.uint32).reshape(-1))
    made.values.flags.writeable = False
    n = made.values.size
    if not (name.isidentifier() and name.isascii() and name.isupper()):
        raise KernelError(f"table {name!r}: a name of capital letters, digits and _ is expected")
    if not n or n & (n - 1):
        raise KernelError(f"table {name}: {n} entries, but a power of two is expected: pad it")
    if not np.array_equal(TABLES.get(name, made).values, made.values):
        raise KernelError(f"table {name}: there is another table of this name")
    return TABLES.setdefault(name, made)


def function(fn: FunctionType) -> Function:
    """Text that kernels may call by name: statements, then one return."""
    FUNCTIONS.append(Function(fn))
    return FUNCTIONS[-1]


def decoder(*formats: str) -> Any:
    """Mark the `codes`, `scale` or `offset` of block formats; the function's name ends in the word it is the meaning of."""

    def add(fn: FunctionType) -> Function:
        made = function(fn)
        word = fn.__name__.rsplit("_", 1)[1]
        for name in formats:
            DECODERS.setdefault(name, {})[word] = made
        return made

    return add
