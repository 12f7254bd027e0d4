"""Typing rules of operators and words: from typed operands to a typed expression, or a reason why not."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from engine.lang.tree import DATA, INDEX, NUMBER, Expr, Table, Type

VALUE = {"f32": "f32", "f16": "f32", "bf16": "f32", "i32": "i32", "u32": "u32", "u8": "i32", "i8": "i32", "u16": "i32", "i16": "i32",
         "i64": "index"}  # what reading an element gives
INTEGERS = ("index", "i32", "u32", "span")
OPERATORS: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add), ast.Sub: ("sub", operator.sub), ast.Mult: ("mul", operator.mul), ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("floordiv", operator.floordiv), ast.Mod: ("mod", operator.mod), ast.LShift: ("shl", operator.lshift),
    ast.RShift: ("shr", operator.rshift), ast.BitAnd: ("and", operator.and_), ast.BitOr: ("or", operator.or_),
    ast.BitXor: ("xor", operator.xor), ast.Lt: ("lt", operator.lt), ast.LtE: ("le", operator.le), ast.Gt: ("gt", operator.gt),
    ast.GtE: ("ge", operator.ge), ast.Eq: ("eq", operator.eq), ast.NotEq: ("ne", operator.ne)}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
BITWISE = ("and", "or", "xor")
SYMBOLS = {"div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}


class Refusal(Exception):
    """Why an expression is not in the language; the walk adds the place."""


def const(value: Any, type: Type = NUMBER) -> Expr:
    return Expr("const", type, data=value)


def space_of(args: Sequence[Expr]) -> str | None:
    """The lane space varying operands share."""
    spaces = {a.space for a in args if a.type.varying}
    spaces |= {s for a in args if a.op == "tuple" for s in [space_of(a.args)] if s is not None}
    if len(spaces) > 1:
        names = " and ".join(sorted(str(s) for s in spaces))
        raise Refusal(f"varying values of two lane spaces meet: {names}; lanes mean different things there")
    return spaces.pop() if spaces else None


def make(op: str, kind: str, args: Sequence[Expr], data: Any = None, varying: bool | None = None) -> Expr:
    """An expression of `kind`, varying where an operand is."""
    if varying is None:
        varying = any(a.type.varying for a in args)
    return Expr(op, Type(kind, varying), tuple(args), data, space_of(args) if varying else None)


def is_bare(e: Expr) -> bool:
    return e.type.kind == "number"


def coerce(e: Expr, kind: str) -> Expr:
    """`e` as `kind`: a bare literal takes the type, an index or a span becomes an integer; nothing else mixes."""
    have = e.type.kind
    if have == kind:
        return e
    if is_bare(e):
        if kind != "f32" and not isinstance(e.data, int):
            raise Refusal(f"the literal {e.data!r} meets {kind}: write an integer, or convert")
        if kind == "truth":
            raise Refusal(f"the literal {e.data!r} is no truth value")
        return const(float(e.data) if kind == "f32" else e.data, Type(kind))
    if have in ("index", "span") and kind in ("i32", "u32"):
        return make("convert", kind, (e,))
    raise Refusal(f"{e.type} meets {kind}: convert with {kind if kind in DATA else 'index'}()")


def meet(*args: Expr) -> str:
    """The kind operands share: data types never mix, bare literals and indices adapt."""
    kinds = {a.type.kind for a in args if not is_bare(a)}
    data = kinds & set(DATA)
    if len(data) > 1:
        raise Refusal(f"{' and '.join(sorted(data))} meet: convert with f32(), i32() or u32()")
    if data:
        if data == {"f32"} and kinds & {"index", "span"}:
            raise Refusal("f32 meets an index: write f32(i)")
        return data.pop()
    if "span" in kinds:
        return "i32"
    if "index" in kinds or not kinds:
        return "index" if all(isinstance(a.data, int) for a in args if is_bare(a)) else _bad_index(args)
    if kinds == {"truth"}:
        return "truth"
    raise Refusal(f"operands of kind {', '.join(sorted(kinds))} cannot be combined")


def _bad_index(args: Sequence[Expr]) -> str:
    bare = next(a.data for a in args if is_bare(a) and not isinstance(a.data, int))
    if all(is_bare(a) for a in args):
        return "f32"
    raise Refusal(f"the literal {bare!r} meets an index: write f32(i)")


def binary(label: str, fold: Callable[[Any, Any], Any], x: Expr, y: Expr) -> Expr:
    if is_bare(x) and is_bare(y):
        return _fold(label, fold, x.data, y.data)
    if label in ("shl", "shr"):
        return _shift(label, x, y)
    if label in ("add", "sub") and x.type.kind == "span" and y.type.kind in ("index", "number"):
        return Expr(label, x.type, (x, coerce(y, "index")), space=x.space)
    if label == "add" and y.type.kind == "span" and x.type.kind in ("index", "number"):
        return Expr(label, y.type, (y, coerce(x, "index")), space=y.space)
    kind = meet(x, y)
    if label == "div" and kind != "f32":
        raise Refusal("/ divides f32: use // on integers, or convert with f32()")
    if label in BITWISE and kind == "f32":
        raise Refusal(f"'{label}' works on integers and truth values, not on f32")
    if label in ("floordiv", "mod") and kind == "f32":
        raise Refusal("// and % work on integers")
    if kind == "truth" and label not in BITWISE:
        raise Refusal("truth values take & | ^ only")
    if label in ("floordiv", "mod"):
        _check_division(kind, x, y)
    args = (coerce(x, kind), coerce(y, kind))
    return make(label, "truth" if label in COMPARISONS else kind, args, data=kind if label in COMPARISONS else None)


def _fold(label: str, fold: Callable[[Any, Any], Any], x: Any, y: Any) -> Expr:
    """An operator on two literals."""
    shown = f"{x} {SYMBOLS.get(label, label)} {y}"
    if label in ("floordiv", "mod") and (x < 0 or y <= 0) or label == "div" and y == 0:
        raise Refusal(f"{shown}: operands are never negative, divisors never zero")
    if label in (*BITWISE, "shl", "shr") and not (isinstance(x, int) and isinstance(y, int)):
        raise Refusal(f"{shown}: integers are expected")
    if label in ("shl", "shr") and y < 0:
        raise Refusal(f"{shown}: a shift is never negative")
    return const(fold(x, y))


def _check_division(kind: str, x: Expr, y: Expr) -> None:
    if kind != "u32" and any(a.op == "const" and a.data < 0 for a in (x, y)):
        raise Refusal("operands of // and % are never negative")
    if y.constant == 0:
        raise Refusal("a divisor is never zero")


def _shift(label: str, x: Expr, y: Expr) -> Expr:
    if x.type.kind == "span":
        x = coerce(x, "i32")
    kind = "index" if is_bare(x) else x.type.kind
    if kind not in INTEGERS or (y.type.kind not in INTEGERS and not (is_bare(y) and isinstance(y.data, int))):
        raise Refusal("shifts work on integers")
    if kind == "index" and y.type.varying:
        raise Refusal("an index is shifted by a uniform amount")
    bits = 64 if kind == "index" else 32
    if y.op == "const" and not 0 <= y.data < bits:
        raise Refusal(f"a shift by {y.data} of {bits} bits")
    amount = y if y.type.kind == kind else (coerce(y, kind) if is_bare(y) else make("convert", kind, (y,)))
    return make(label, kind, (coerce(x, kind), amount))


def negate(x: Expr) -> Expr:
    if is_bare(x):
        return const(-x.data)
    if x.type.kind == "span":
        x = coerce(x, "i32")
    if x.type.kind not in ("f32", "i32", "index"):
        raise Refusal(f"{x.type} has no minus")
    return make("neg", x.type.kind, (x,))


# -- words ------------------------------------------------------------------------------------------------------


def _want(args: Sequence[Expr], n: int) -> None:
    if len(args) != n:
        raise Refusal(f"takes {n} operands, {len(args)} given")


def _convert(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 1)
    (x,) = args
    if is_bare(x):
        return const(float(x.data) if word == "f32" else int(x.data), Type(word))
    if x.type.kind == "truth":
        raise Refusal("a truth value is no number: use where(c, 1, 0)")
    if x.type.kind not in (*DATA, "index", "span"):
        raise Refusal(f"{x.type} is no number")
    return x if x.type.kind == word else make("convert", word, (x,))


def _bits(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 1)
    kind = word.removeprefix("as_")
    x = coerce(args[0], "i32") if args[0].type.kind == "span" else args[0]
    if x.type.kind not in DATA:
        raise Refusal(f"{x.type} has no 32 bits")
    return make("bits", kind, (x,))


def _index(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 1)
    (x,) = args
    if x.type.kind == "index" or is_bare(x):
        return coerce(x, "index")
    if x.type.varying or x.type.kind not in ("i32", "u32"):
        raise Refusal(f"index() wants a uniform integer, not a {x.type}")
    return make("convert", "index", (x,))


def _where(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 3)
    c, x, y = args
    if is_bare(c):
        return x if c.data else y
    if c.type.kind != "truth":
        raise Refusal(f"where() wants a truth value first, not a {c.type}")
    kind = meet(x, y)
    if kind == "index" and c.type.varying:
        kind = "i32"
    if is_bare(x) and is_bare(y):
        raise Refusal("two bare literals have no type: write f32(..), i32(..) or u32(..)")
    return make("where", kind, (c, coerce(x, kind), coerce(y, kind)))


FLOAT_WORDS = {"fma": 3}


def _float(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, FLOAT_WORDS.get(word, 1))
    if all(is_bare(a) for a in args):
        args = [coerce(a, "f32") for a in args]
    kinds = {a.type.kind for a in args if not is_bare(a)}
    if kinds != {"f32"}:
        raise Refusal(f"wants f32, not {', '.join(sorted(kinds - {'f32'}))}: convert with f32()")
    return make("word", "f32", [coerce(a, "f32") for a in args], word)


def _same(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 2)
    if all(is_bare(a) for a in args):
        return const(max(a.data for a in args) if word == "maximum" else min(a.data for a in args))
    kind = meet(*args)
    if kind == "truth":
        raise Refusal("wants numbers")
    return make("word", kind, [coerce(a, kind) for a in args], word)


def _byte(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 2)
    if args[0].type.kind != "u32" or not (is_bare(args[1]) and args[1].data in (0, 1, 2, 3)):
        raise Refusal("wants a u32 and a constant 0 .. 3")
    return make("word", "i32", args[:1], f"{word}{args[1].data}")


def _pack(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 4)
    return make("word", "u32", [coerce(a, "i32") for a in args], word)


def _limits(args: Sequence[Expr]) -> tuple[int, int]:
    if not all(is_bare(a) and isinstance(a.data, int) for a in args):
        raise Refusal("low and high are constants")
    low, high = (a.data for a in args)
    if not (-128 <= low <= high <= (127 if low < 0 else 255)):
        raise Refusal(f"codes {low} .. {high} do not fit a byte")
    return low, high


def _dot4(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 5)
    x, y, acc = args[:3]
    if x.type.kind != "u32" or y.type.kind != "u32":
        raise Refusal("wants two u32 words of four bytes")
    return make("dot4", "i32", (x, y, coerce(acc, "i32")), _limits(args[3:]))


def _dot(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 5)
    xs, ys, total = args[:3]
    if xs.op != "tuple" or ys.op != "tuple" or len(xs.args) != len(ys.args):
        raise Refusal("wants two tuples of equally many u32 words")
    if any(a.type.kind != "u32" for a in (*xs.args, *ys.args)):
        raise Refusal("wants u32 words of four bytes")
    return make("dot", "i32", (*xs.args, *ys.args, coerce(total, "i32")), _limits(args[3:]))


def _group(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 1)
    (x,) = args
    if x.type.kind == "span":
        x = coerce(x, "i32")
    if not x.type.varying:
        raise Refusal(f"reduces over the lanes, but its operand is {x.type}")
    if x.type.kind not in ("f32", "i32"):
        raise Refusal(f"wants f32 or i32, not {x.type}")
    return make("reduce", x.type.kind, (x,), word, varying=False)


def _lane(word: str, args: Sequence[Expr]) -> Expr:
    _want(args, 2)
    x, j = args
    if not x.type.varying or x.type.kind not in DATA:
        raise Refusal(f"wants a varying number, not a {x.type}")
    if j.type.varying or j.type.kind not in ("index", "i32", "number"):
        raise Refusal(f"the lane's number is a uniform integer, not a {j.type}")
    if is_bare(j) or j.type.kind != "index":
        j = _index(word, [j])
    if x.op == "name" and j.op != "const":
        x.data.lane_read = True
    return make("lane", x.type.kind, (x, j), varying=False)


def entry(table: Table, i: Expr) -> Expr:
    """`TABLE[i]`. The index is wrapped, so that lanes which take no part may hold any."""
    n = table.values.size
    if is_bare(i) or i.op == "const":
        if not isinstance(i.data, int) or not 0 <= i.data < n:
            raise Refusal(f"{table.name}[{i.data}] of {n} entries")
        return const(int(table.values[i.data]), Type("u32"))
    if i.type.kind not in INTEGERS:
        raise Refusal(f"an index is an integer, not a {i.type}")
    within = binary("and", operator.and_, i, const(n - 1)) if n > 1 else coerce(const(0), "index")
    return make("table", "u32", (within,), table)


def nibbles(table: Table, args: Sequence[Expr]) -> Expr:
    _want(args, 1)
    if table.values.size != 4:
        raise Refusal(f"{table.name} has {4 * table.values.size} bytes, a table of 16 is wanted")
    if args[0].type.kind != "u32":
        raise Refusal("wants a u32 word of four bytes")
    return make("nibbles", "u32", args, table)


RULES: dict[str, Callable[[str, Sequence[Expr]], Expr]] = {
    "convert": _convert, "bits": _bits, "index": _index, "where": _where, "float": _float, "same": _same, "byte": _byte, "pack": _pack,
    "dot4": _dot4, "dot": _dot, "group": _group, "lane": _lane}
__all__ = ["BITWISE", "COMPARISONS", "INDEX", "OPERATORS", "RULES", "VALUE", "Refusal", "binary", "coerce", "const", "entry", "is_bare",
           "make", "negate", "nibbles", "space_of"]
