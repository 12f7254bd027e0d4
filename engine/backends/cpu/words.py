"""The CPU meaning of the words: LLVM on vectors of LANES elements (varying) or on scalars (uniform).

`WORDS` maps a word to a function of a `Target` and LLVM values. Words that gain from a special instruction ask `target.has(feature)`; every
form gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from engine.lang.tree import Table

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, PTR = ir.HalfType(), ir.FloatType(), ir.PointerType()
SCALAR = {"f32": F32, "i32": I32, "u32": I32, "truth": I1, "index": I64}
STORED = {"f32": F32, "f16": F16, "bf16": I16, "i32": I32, "u32": I32, "i8": I8, "u8": I8, "i16": I16, "u16": I16, "i64": I64}


@dataclass(frozen=True)
class Features:
    """The width of the target and the instructions it may use."""

    lanes: int
    names: frozenset[str]


class Target:
    """An IR builder that knows its lanes and features."""

    def __init__(self, builder: Any, features: Features) -> None:
        self.b, self.lanes, self.features = builder, features.lanes, features.names

    def has(self, *names: str) -> bool:
        return all(n in self.features for n in names)

    # -- values -------------------------------------------------------------------------------------------------

    def vector(self, t: Any) -> Any:
        return ir.VectorType(t, self.lanes)

    def like(self, t: Any, v: Any) -> Any:
        """`t`, wide where `v` is."""
        return ir.VectorType(t, v.type.count) if wide(v) else t

    def const(self, t: Any, value: Any) -> Any:
        return ir.Constant(t, [value] * t.count if isinstance(t, ir.VectorType) else value)

    def iota(self, t: Any = I32) -> Any:
        return ir.Constant(self.vector(t), list(range(self.lanes)))

    def splat(self, v: Any) -> Any:
        if wide(v):
            return v
        if isinstance(v, ir.Constant) and not isinstance(v.constant, str):
            return ir.Constant(self.vector(v.type), [v.constant] * self.lanes)
        undefined = ir.Constant(self.vector(v.type), ir.Undefined)
        one = self.b.insert_element(undefined, v, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(self.vector(I32), [0] * self.lanes))

    def level(self, *values: Any) -> list[Any]:
        """The values all wide if one is."""
        return [self.splat(v) for v in values] if any(wide(v) for v in values) else list(values)

    def call(self, name: str, result: Any, args: Sequence[Any], **kw: Any) -> Any:
        kind = ir.FunctionType(result, [a.type for a in args])
        module = self.b.module
        fn = module.globals.get(name) or ir.Function(module, kind, name)
        return self.b.call(fn, args, **kw)

    def llvm(self, name: str, *args: Any, **kw: Any) -> Any:
        """An intrinsic overloaded on its first operand's type."""
        return self.call(f"llvm.{name}.{mangle(args[0].type)}", args[0].type, args, **kw)


def wide(v: Any) -> bool:
    return isinstance(v.type, ir.VectorType)


def mangle(t: Any) -> str:
    if isinstance(t, ir.VectorType):
        return f"v{t.count}{mangle(t.element)}"
    return {F32: "f32", F16: "f16"}.get(t) or f"i{t.width}"


# -- operators --------------------------------------------------------------------------------------------------


def _float_compare(symbol: str) -> Callable[[Any, Any, Any], Any]:
    return lambda b, x, y: (b.fcmp_unordered if symbol == "!=" else b.fcmp_ordered)(symbol, x, y)


_SYMBOLS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
FLOAT = {"add": lambda b, x, y: b.fadd(x, y), "sub": lambda b, x, y: b.fsub(x, y), "mul": lambda b, x, y: b.fmul(x, y),
         "div": lambda b, x, y: b.fdiv(x, y), **{k: _float_compare(s) for k, s in _SYMBOLS.items()}}
_INTEGER: dict[str, Callable[..., Any]] = {
    "add": lambda b, x, y: b.add(x, y), "sub": lambda b, x, y: b.sub(x, y), "mul": lambda b, x, y: b.mul(x, y),
    "and": lambda b, x, y: b.and_(x, y), "or": lambda b, x, y: b.or_(x, y), "xor": lambda b, x, y: b.xor(x, y),
    "shl": lambda b, x, y: b.shl(x, y)}


def _signed_compare(symbol: str) -> Callable[..., Any]:
    return lambda b, x, y: b.icmp_signed(symbol, x, y)


def _unsigned_compare(symbol: str) -> Callable[..., Any]:
    return lambda b, x, y: b.icmp_unsigned(symbol, x, y)


SIGNED = {**_INTEGER, "floordiv": lambda b, x, y: b.sdiv(x, y), "mod": lambda b, x, y: b.srem(x, y), "shr": lambda b, x, y: b.ashr(x, y),
          **{k: _signed_compare(s) for k, s in _SYMBOLS.items()}}
UNSIGNED = {**_INTEGER, "floordiv": lambda b, x, y: b.udiv(x, y), "mod": lambda b, x, y: b.urem(x, y), "shr": lambda b, x, y: b.lshr(x, y),
            **{k: _unsigned_compare(s) for k, s in _SYMBOLS.items()}}
# Operands of // and % are never negative, so an index divides like an unsigned number; its comparisons are signed.
INDEXES = {**SIGNED, "floordiv": UNSIGNED["floordiv"], "mod": UNSIGNED["mod"]}
OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {"f32": FLOAT, "i32": SIGNED, "u32": UNSIGNED, "index": INDEXES, "truth": UNSIGNED}


# -- conversions ------------------------------------------------------------------------------------------------


def convert(t: Target, v: Any, have: str, want: str) -> Any:
    """A number of one kind as another."""
    if want == "index":
        return t.b.sext(v, I64) if have == "i32" else t.b.zext(v, I64)
    if want == "f32":
        return (t.b.uitofp if have == "u32" else t.b.sitofp)(v, t.like(F32, v))
    if have == "f32":
        return _saturate(t, v, want)
    return t.b.trunc(v, t.like(I32, v)) if have == "index" else v


def _saturate(t: Target, v: Any, want: str) -> Any:
    """f32 to an integer: truncates, saturates, NaN gives 0. LLVM's own saturating conversion falls apart into scalars on x86."""
    low, high = (-2147483648.0, 2147483648.0) if want == "i32" else (0.0, 4294967296.0)
    least, most = (-(1 << 31), (1 << 31) - 1) if want == "i32" else (0, -1)
    i = t.like(I32, v)
    above = t.b.fcmp_ordered(">=", v, t.const(v.type, high))
    fits = t.b.and_(t.b.fcmp_ordered(">=", v, t.const(v.type, low)), t.b.not_(above))
    inside = t.b.select(fits, v, t.const(v.type, 0.0))
    n = (t.b.fptosi if want == "i32" else t.b.fptoui)(inside, i)
    below = t.b.fcmp_ordered("<", v, t.const(v.type, low))
    return t.b.select(above, t.const(i, most), t.b.select(below, t.const(i, least), n))


def grow(t: Target, v: Any, unit: str) -> Any:
    """A stored element as a value."""
    if unit == "f16":
        return t.b.fpext(v, t.like(F32, v))
    if unit == "bf16":
        i = t.like(I32, v)
        return t.b.bitcast(t.b.shl(t.b.zext(v, i), t.const(i, 16)), t.like(F32, v))
    if unit in ("i8", "i16"):
        return t.b.sext(v, t.like(I32, v))
    if unit in ("u8", "u16"):
        return t.b.zext(v, t.like(I32, v))
    return v


def shrink(t: Target, v: Any, unit: str) -> Any:
    """A value as a stored element: floats round to nearest even, integers keep their low bits."""
    if unit == "f16":
        return t.b.fptrunc(v, t.like(F16, v))
    if unit == "bf16":
        i = t.like(I32, v)
        bits = t.b.bitcast(v, i)
        odd = t.b.and_(t.b.lshr(bits, t.const(i, 16)), t.const(i, 1))
        near = t.b.add(bits, t.b.add(odd, t.const(i, 0x7FFF)))
        quiet = t.b.or_(bits, t.const(i, 0x400000))  # a NaN keeps its upper bits and stays one
        kept = t.b.select(t.b.fcmp_unordered("uno", v, v), quiet, near)
        return t.b.trunc(t.b.lshr(kept, t.const(i, 16)), t.like(I16, v))
    if unit in ("i8", "u8", "i16", "u16"):
        return t.b.trunc(v, t.like(STORED[unit], v))
    return v


# -- words ------------------------------------------------------------------------------------------------------


def _extreme(name: str, symbol: str) -> Callable[[Target, str, Any, Any], Any]:
    def word(t: Target, kind: str, x: Any, y: Any) -> Any:
        if kind == "f32":
            return t.llvm(name, x, y, fastmath=("nsz",))
        compare = t.b.icmp_unsigned if kind == "u32" else t.b.icmp_signed
        return t.b.select(compare(symbol, x, y), x, y)

    return word


def _plain(name: str) -> Callable[..., Any]:
    return lambda t, kind, *args: t.llvm(name, *args)


def _byte(e: int, signed: bool) -> Callable[[Target, str, Any], Any]:
    def word(t: Target, kind: str, q: Any) -> Any:
        up, down = t.const(q.type, 24 - 8 * e), t.const(q.type, 24)
        return (t.b.ashr if signed else t.b.lshr)(t.b.shl(q, up), down)

    return word


def _pack(t: Target, kind: str, *parts: Any) -> Any:
    out = None
    for k, v in enumerate(t.level(*parts)):
        v = t.b.shl(t.b.and_(v, t.const(v.type, 255)), t.const(v.type, 8 * k))
        out = v if out is None else t.b.or_(out, v)
    return out


def _rsqrt(t: Target, kind: str, x: Any) -> Any:
    return t.b.fdiv(t.const(x.type, 1.0), t.llvm("sqrt", x))


WORDS: dict[str, Callable[..., Any]] = {
    "fma": _plain("fma"), "maximum": _extreme("maxnum", ">"), "minimum": _extreme("minnum", "<"), "abs": _plain("fabs"),
    "rint": _plain("nearbyint"), "round_away": _plain("round"), "sqrt": _plain("sqrt"), "rsqrt": _rsqrt, "pack": _pack,
    **{f"byte{e}": _byte(e, True) for e in range(4)}, **{f"ubyte{e}": _byte(e, False) for e in range(4)}}

def group(t: Target, word: str, kind: str, v: Any) -> Any:
    """A reduction over the lanes: the upper half is folded onto the lower half, until one is left. LLVM's own reductions of maxima are
    chains of scalars, and the order of a sum has to be ours."""
    fold = {"group_max": WORDS["maximum"], "group_min": WORDS["minimum"]}.get(word) or (
        lambda t, kind, x, y: t.b.fadd(x, y) if kind == "f32" else t.b.add(x, y))
    n = t.lanes
    while n > 1:
        n //= 2
        low, high = (ir.Constant(ir.VectorType(I32, n), list(range(k, k + n))) for k in (0, n))
        undefined = ir.Constant(v.type, ir.Undefined)
        v = fold(t, kind, t.b.shuffle_vector(v, undefined, low), t.b.shuffle_vector(v, undefined, high))
    return t.b.extract_element(v, ir.Constant(I32, 0))


# -- tables -----------------------------------------------------------------------------------------------------


def _constants(t: Target, table: Table) -> Any:
    """The table in the module's memory."""
    name = f"table.{table.name}"
    found = t.b.module.globals.get(name)
    if found is None:
        type = ir.ArrayType(I32, table.values.size)
        found = ir.GlobalVariable(t.b.module, type, name)
        found.linkage, found.global_constant, found.unnamed_addr = "internal", True, True
        found.initializer = ir.Constant(type, table.values.view("i4").tolist())
    return found


def gather(t: Target, table: Table, i: Any) -> Any:
    """Entries of a table: one, or one a lane; `i` has 64 bits."""
    base = t.b.ptrtoint(_constants(t, table), I64)
    places = t.b.add(*t.level(base, t.b.shl(i, t.const(i.type, 2))))
    pointers = t.b.inttoptr(places, t.like(PTR, i))
    if not wide(i):
        return t.b.load(pointers, typ=I32)
    every, result = t.const(t.vector(I1), 1), t.vector(I32)
    return t.call(f"llvm.masked.gather.{mangle(result)}.v{t.lanes}p0", result, [pointers, ir.Constant(I32, 4), every, t.const(result, 0)])


def nibbles(t: Target, table: Table, quad: Any) -> Any:
    """A table of 16 bytes, looked up by the bytes of a word."""
    values = table.values.view("<i1").tolist()
    lanes = t.lanes if wide(quad) else 1
    bytes_ = ir.VectorType(I8, 4 * lanes)
    places = t.b.bitcast(quad, bytes_)
    shuffle = {(16, "avx512bw"): "llvm.x86.avx512.pshuf.b.512", (8, "avx2"): "llvm.x86.avx2.pshuf.b",
               (4, "ssse3"): "llvm.x86.ssse3.pshuf.b.128"}
    for (width, feature), name in shuffle.items():
        if lanes == width and t.has(feature):
            return t.b.bitcast(t.call(name, bytes_, [ir.Constant(bytes_, values * (lanes // 4)), places]), quad.type)
    picked = [t.const(bytes_, v) for v in values]
    for bit in range(4):  # the table halves with every bit
        odd = t.b.icmp_unsigned("!=", t.b.and_(places, t.const(bytes_, 1 << bit)), t.const(bytes_, 0))
        picked = [t.b.select(odd, y, x) for x, y in zip(picked[::2], picked[1::2], strict=True)]
    return t.b.bitcast(picked[0], quad.type)


# -- integer dot products ---------------------------------------------------------------------------------------


def dot(t: Target, xs: Sequence[Any], ys: Sequence[Any], total: Any, low: int, high: int) -> Any:
    """The sum of products of bytes: codes low .. high in xs (unsigned if low >= 0), -127 .. 127 in ys, whose sum is `total`."""
    values = t.level(*xs, *ys, total)
    xs, ys, total = values[: len(xs)], values[len(xs) : -1], values[-1]
    if wide(total) and (name := _vnni(t)):
        return _dot_vnni(t, name, xs, ys, total, low)
    if wide(total) and (names := _pmadd(t)) and high < 128:
        return _dot_pmadd(t, names, xs, ys, low, high)
    return _dot_portable(t, xs, ys, low)


def dot4(t: Target, x: Any, y: Any, acc: Any, low: int, high: int) -> Any:
    """acc + the sum of four products of bytes."""
    x, y, acc = t.level(x, y, acc)
    if wide(acc) and (name := _vnni(t)) and low >= 0:
        return t.call(name, acc.type, [acc, *_dot_bytes(t, name, x, y)])
    if wide(acc) and (names := _pmadd(t)) and high < 128:
        return t.b.add(_dot_pmadd(t, names, [x], [y], low, high), acc)
    return t.b.add(_dot_portable(t, [x], [y], low), acc)


def _vnni(t: Target) -> str:
    if t.lanes == 16 and t.has("avx512vnni"):
        return "llvm.x86.avx512.vpdpbusd.512"
    if t.lanes == 8 and (t.has("avx512vnni", "avx512vl") or t.has("avxvnni")):
        return "llvm.x86.avx512.vpdpbusd.256"
    if t.lanes == 4 and (t.has("avx512vnni", "avx512vl") or t.has("avxvnni")):
        return "llvm.x86.avx512.vpdpbusd.128"
    return ""


def _dot_bytes(t: Target, name: str, x: Any, y: Any) -> list[Any]:
    bytes_ = ir.VectorType(I8, 4 * t.lanes)
    return [t.b.bitcast(x, bytes_), t.b.bitcast(y, bytes_)]


def _dot_vnni(t: Target, name: str, xs: Sequence[Any], ys: Sequence[Any], total: Any, low: int) -> Any:
    """Unsigned times signed, exact in 32 bits. Signed codes are moved up by 128, and 128 times the sum of y comes off."""
    v = t.vector(I32)
    acc = t.const(v, 0)
    if low < 0:
        acc = t.b.mul(total, t.const(v, -128))
        xs = [t.b.xor(x, t.const(v, 0x80808080 - (1 << 32))) for x in xs]
    chains = [acc, t.const(v, 0)]  # two, so that one quad need not wait for the one before
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        chains[k % 2] = t.call(name, v, [chains[k % 2], *_dot_bytes(t, name, x, y)])
    return t.b.add(*chains) if len(xs) > 1 else chains[0]


def _pmadd(t: Target) -> tuple[str, str] | None:
    if t.lanes == 16 and t.has("avx512bw"):
        return "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"
    if t.lanes == 8 and t.has("avx2"):
        return "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"
    if t.lanes == 4 and t.has("ssse3"):
        return "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"
    return None


def _dot_pmadd(t: Target, names: tuple[str, str], xs: Sequence[Any], ys: Sequence[Any], low: int, high: int) -> Any:
    """Pairs of products are added in 16 bits, with saturation: as many quads as surely fit are added before they are widened.

    Signed codes go to the unsigned side as |x|, their sign moves to y; |x| <= 128 and |y| <= 127 keep a pair below 32,513.
    """
    v8, v16, v32 = (ir.VectorType(i, n * t.lanes) for i, n in ((I8, 4), (I16, 2), (I32, 1)))
    largest = max(high, -low)
    room = max(1, 32767 // (2 * 127 * largest)) if largest else len(xs)
    ones, total, part = t.const(v16, 1), None, None
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        p, q = t.b.bitcast(x, v8), t.b.bitcast(y, v8)
        if low < 0:
            minus = t.b.icmp_signed("<", p, t.const(v8, 0))
            p, q = t.b.select(minus, t.b.neg(p), p), t.b.select(minus, t.b.neg(q), q)
        s = t.call(names[0], v16, [p, q])
        part = s if part is None else t.b.add(part, s)
        if k % room == room - 1 or k == len(xs) - 1:
            w = t.call(names[1], v32, [part, ones])
            total, part = w if total is None else t.b.add(total, w), None
    return total


def _dot_portable(t: Target, xs: Sequence[Any], ys: Sequence[Any], low: int) -> Any:
    out = t.const(xs[0].type, 0)
    for x, y in zip(xs, ys, strict=True):
        for e in range(4):
            out = t.b.add(out, t.b.mul(_byte(e, low < 0)(t, "i32", x), _byte(e, True)(t, "i32", y)))
    return out
