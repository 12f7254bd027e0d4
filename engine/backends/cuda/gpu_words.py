"""The words of the printed text on a GPU: intrinsics of fixed types, written in LLVM for NVVM.

Note [exact]. numba.cuda has no switch for contraction, and libnvvm contracts by default: f32 operators are the `.rn` intrinsics, which
neither libnvvm nor ptxas contracts. Note [old IR]: NVVM reads LLVM 7, which has no `fneg`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba.cuda.extending import intrinsic

from engine.lang.tree import Table

types: Any = import_module("numba.cuda.types")
cgutils: Any = import_module("numba.cuda.cgutils")
F32, I1, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
KINDS = {"f32": (types.float32, F32), "i32": (types.int32, I32), "u32": (types.uint32, I32), "index": (types.int64, I64),
         "truth": (types.boolean, I1)}
ALL_LANES, WARP = -1, 32
Emit = Callable[..., Any]


def word(result: str, operands: Sequence[str], emit: Emit) -> Any:
    """An intrinsic: Numba casts its operands to these kinds, `emit(builder, *values)` writes LLVM."""
    names = ", ".join(f"a{k}" for k in range(len(operands)))
    give = KINDS[result][0] if result else types.void
    take = tuple(KINDS[o][0] for o in operands)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out = emit(builder, *args)
        return out if result else context.get_dummy_value()

    scope: dict[str, Any] = {"signature": give(*take), "code": code}
    exec(f"def typed(context{', ' if names else ''}{names}):\n    return signature, code", scope)
    made: Any = intrinsic(scope["typed"])
    made.result, made.operands, made.emit = result, tuple(operands), emit
    return made


def constant(value: int, type: Any = I32) -> Any:
    return ir.Constant(type, value)


def call(name: str, result: Any, *operands: Any) -> Emit:
    return lambda b, *vs: b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(result, operands), name), vs)


def asm(text: str, constraints: str, result: Any, *operands: Any) -> Emit:
    return lambda b, *vs: b.call(ir.InlineAsm(ir.FunctionType(result, operands), text, constraints), vs)


# -- memory -----------------------------------------------------------------------------------------------------


def pointer(b: Any, base: Any, offset: Any, type: Any) -> Any:
    """In the global address space, so that loads are `ld.global`; the constant goes into the instruction."""
    start = b.inttoptr(base, ir.PointerType(I8, 1))
    return b.bitcast(b.gep(start, [offset], inbounds=True), ir.PointerType(type, 1))


def pieces(b: Any, base: Any, offset: Any, size: int, by: int) -> Any:
    """An integer of `size` bytes, read `by` bytes at a time."""
    whole, part = ir.IntType(8 * size), ir.IntType(8 * by)
    first, out = pointer(b, base, offset, part), None
    for k in range(size // by):
        v = b.load(b.gep(first, [constant(k)]), align=by)
        v = b.shl(b.zext(v, whole), constant(8 * by * k, whole)) if by < size else v
        out = v if out is None else b.or_(out, v)
    return out


def put_pieces(b: Any, base: Any, offset: Any, size: int, by: int, v: Any) -> None:
    part = ir.IntType(8 * by)
    first = pointer(b, base, offset, part)
    for k in range(size // by):
        one = b.trunc(b.lshr(v, constant(8 * by * k, v.type)), part) if by < size else v
        b.store(one, b.gep(first, [constant(k)]), align=by)


HALF_TO_FLOAT, FLOAT_TO_HALF = asm("cvt.f32.f16 $0, $1;", "=f,h", F32, I16), asm("cvt.rn.f16.f32 $0, $1;", "=h,f", I16, F32)


def _bf16_to_float(b: Any, v: Any) -> Any:
    return b.bitcast(b.shl(b.zext(v, I32), constant(16)), F32)


def _float_to_bf16(b: Any, v: Any) -> Any:
    """To nearest even; a NaN keeps its upper bits and stays one."""
    bits = b.bitcast(v, I32)
    odd = b.and_(b.lshr(bits, constant(16)), constant(1))
    near = b.add(bits, b.add(odd, constant(0x7FFF)))
    kept = b.select(b.fcmp_unordered("uno", v, v), b.or_(bits, constant(0x400000)), near)
    return b.trunc(b.lshr(kept, constant(16)), I16)


def _same(b: Any, v: Any) -> Any:
    return v


# unit -> kind of its value, bytes, bits to value, value to bits
UNITS: dict[str, tuple[str, int, Emit, Emit]] = {
    "f32": ("f32", 4, lambda b, v: b.bitcast(v, F32), lambda b, v: b.bitcast(v, I32)), "i32": ("i32", 4, _same, _same),
    "u32": ("u32", 4, _same, _same), "i64": ("index", 8, _same, _same), "f16": ("f32", 2, HALF_TO_FLOAT, FLOAT_TO_HALF),
    "bf16": ("f32", 2, _bf16_to_float, _float_to_bf16),
    **{f"{s}{8 * n}": ("i32", n, (lambda b, v: b.sext(v, I32)) if s == "i" else (lambda b, v: b.zext(v, I32)),
                       (lambda b, v, n=n: b.trunc(v, ir.IntType(8 * n)))) for s in "iu" for n in (1, 2)}}


def _memory() -> dict[str, Any]:
    out = {}
    for unit, (kind, size, grow, shrink) in UNITS.items():
        for by in (1, 2, 4, 8):
            if by > size:
                continue
            name = unit if by == size else f"{unit}_by{by}"

            def load(b: Any, base: Any, offset: Any, size: int = size, by: int = by, grow: Emit = grow) -> Any:
                return grow(b, pieces(b, base, offset, size, by))

            def store(b: Any, base: Any, offset: Any, v: Any, size: int = size, by: int = by, shrink: Emit = shrink) -> None:
                put_pieces(b, base, offset, size, by, shrink(b, v))

            out[f"load_{name}"] = word(kind, ("index", "index"), load)
            out[f"store_{name}"] = word("", ("index", "index", kind), store)
    return out


# -- operators and conversions ----------------------------------------------------------------------------------


def _plain(name: str) -> Emit:
    return lambda b, x, y: getattr(b, name)(x, y)


_INTEGER = {n: _plain(f) for n, f in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("and", "and_"), ("or", "or_"), ("xor", "xor"),
                                      ("shl", "shl"))}
_SIGNED = {**_INTEGER, "floordiv": _plain("sdiv"), "mod": _plain("srem"), "shr": _plain("ashr")}
_UNSIGNED = {**_INTEGER, "floordiv": _plain("udiv"), "mod": _plain("urem"), "shr": _plain("lshr")}
# Operands of // and % are never negative: an index divides like an unsigned number.
_INDEX = {**_SIGNED, "floordiv": _UNSIGNED["floordiv"], "mod": _UNSIGNED["mod"]}
DIVIDE, ROOT = call("llvm.nvvm.div.rn.f", F32, F32, F32), call("llvm.nvvm.sqrt.rn.f", F32, F32)
PLUS = call("llvm.nvvm.add.rn.f", F32, F32, F32)
_FLOAT: dict[str, Emit] = {"add": PLUS, "mul": call("llvm.nvvm.mul.rn.f", F32, F32, F32), "div": DIVIDE,
                           "sub": lambda b, x, y: PLUS(b, x, _minus(b, y))}


def _minus(b: Any, x: Any) -> Any:
    """Note [old IR]: the sign bit is turned."""
    return b.bitcast(b.xor(b.bitcast(x, I32), constant(-(1 << 31))), F32)


def _absolute(b: Any, x: Any) -> Any:
    return b.bitcast(b.and_(b.bitcast(x, I32), constant(0x7FFFFFFF)), F32)


def _operators() -> dict[str, Any]:
    families = {"f32": _FLOAT, "i32": _SIGNED, "u32": _UNSIGNED, "index": _INDEX}
    out = {f"{op}_{kind}": word(kind, (kind, kind), emit) for kind, family in families.items() for op, emit in family.items()}
    out |= {f"{op}_truth": word("truth", ("truth", "truth"), _INTEGER[op]) for op in ("and", "or", "xor")}
    out["neg_f32"] = word("f32", ("f32",), _minus)
    out["neg_i32"] = word("i32", ("i32",), lambda b, x: b.sub(constant(0), x))
    out |= {f"where_{k}": word(k, ("truth", k, k), lambda b, c, x, y: b.select(c, x, y)) for k in KINDS}
    return out


def _conversions() -> dict[str, Any]:
    saturate = {k: asm(f"cvt.rzi.{t}.f32 $0, $1;", "=r,f", I32, F32) for k, t in (("i32", "s32"), ("u32", "u32"))}  # NaN gives 0
    emit: dict[tuple[str, str], Emit] = {
        ("f32", "i32"): lambda b, v: b.sitofp(v, F32), ("f32", "u32"): lambda b, v: b.uitofp(v, F32),
        ("f32", "index"): lambda b, v: b.sitofp(v, F32), ("i32", "f32"): saturate["i32"], ("u32", "f32"): saturate["u32"],
        ("i32", "u32"): _same, ("u32", "i32"): _same, ("i32", "index"): lambda b, v: b.trunc(v, I32),
        ("u32", "index"): lambda b, v: b.trunc(v, I32), ("index", "i32"): lambda b, v: b.sext(v, I64),
        ("index", "u32"): lambda b, v: b.zext(v, I64)}
    out = {f"{want}_from_{have}": word(want, (have,), e) for (want, have), e in emit.items()}
    for want in ("f32", "i32", "u32"):
        for have in ("f32", "i32", "u32"):
            if want != have:
                out[f"{want}_bits_of_{have}"] = word(want, (have,), lambda b, v, t=KINDS[want][1]: b.bitcast(v, t))
    return out


# -- words of the language --------------------------------------------------------------------------------------

LARGER, SMALLER = call("__nv_fmaxf", F32, F32, F32), call("__nv_fminf", F32, F32, F32)


def _extreme(symbol: str, signed: bool) -> Emit:
    return lambda b, x, y: b.select((b.icmp_signed if signed else b.icmp_unsigned)(symbol, x, y), x, y)


def _byte(signed: bool) -> Emit:
    def emit(b: Any, q: Any, e: Any) -> Any:
        up = b.shl(q, b.sub(constant(24), b.shl(e, constant(3))))
        return (b.ashr if signed else b.lshr)(up, constant(24))

    return emit


def _pack(b: Any, *parts: Any) -> Any:
    out = None
    for k, v in enumerate(parts):
        v = b.shl(b.and_(v, constant(255)), constant(8 * k))
        out = v if out is None else b.or_(out, v)
    return out


def _language() -> dict[str, Any]:
    one, three = ("f32",), ("f32", "f32", "f32")
    dp4a = {"dot4_i32": "s32.s32", "dot4_u32": "u32.s32"}  # signed codes, or unsigned ones, times signed bytes
    out = {
        "fma": word("f32", three, call("llvm.fma.f32", F32, F32, F32, F32)), "abs_f32": word("f32", one, _absolute),
        "rint": word("f32", one, asm("cvt.rni.f32.f32 $0, $1;", "=f,f", F32, F32)), "sqrt": word("f32", one, ROOT),
        "round_away": word("f32", one, call("__nv_roundf", F32, F32)),
        "rsqrt": word("f32", one, lambda b, x: DIVIDE(b, ir.Constant(F32, 1.0), ROOT(b, x))),
        "maximum_f32": word("f32", ("f32", "f32"), LARGER), "minimum_f32": word("f32", ("f32", "f32"), SMALLER),
        "byte": word("i32", ("u32", "i32"), _byte(True)), "ubyte": word("i32", ("u32", "i32"), _byte(False)),
        "pack": word("u32", ("i32",) * 4, _pack),
        "lane_number": word("i32", (), call("llvm.nvvm.read.ptx.sreg.tid.x", I32))}
    for kind in ("i32", "u32", "index"):
        out[f"maximum_{kind}"] = word(kind, (kind, kind), _extreme(">", kind != "u32"))
        out[f"minimum_{kind}"] = word(kind, (kind, kind), _extreme("<", kind != "u32"))
    for name, form in dp4a.items():
        out[name] = word("i32", ("u32", "u32", "i32"), asm(f"dp4a.{form} $0, $1, $2, $3;", "=r,r,r,r", I32, I32, I32, I32))
    return out


def _group_number(b: Any) -> Any:
    """Blocks lie along x; a block holds blockDim.y groups."""
    block, size, own = (call(f"llvm.nvvm.read.ptx.sreg.{n}", I32)(b) for n in ("ctaid.x", "ntid.y", "tid.y"))
    return b.add(b.mul(b.zext(block, I64), b.zext(size, I64)), b.zext(own, I64))


# -- across lanes -----------------------------------------------------------------------------------------------

SYNC_BLOCK, SYNC_WARP = call("llvm.nvvm.barrier0", ir.VoidType()), call("llvm.nvvm.bar.warp.sync", ir.VoidType(), I32)
THREAD = call("llvm.nvvm.read.ptx.sreg.tid.x", I32)


def _shuffle(mode: str) -> Emit:
    """The intrinsic, not asm: LLVM knows that it is convergent."""
    inner = call(f"llvm.nvvm.shfl.sync.{mode}.i32", I32, I32, I32, I32, I32)
    return lambda b, bits, j: inner(b, constant(ALL_LANES), bits, j, constant(WARP - 1))


def _exchange(b: Any, lanes: int, bits: Any, at: Any) -> Any:
    """The bits of lane `at`, through the block's shared memory."""
    shared = b.module.globals.get("lanewise_exchange")
    if shared is None:
        shared = cgutils.add_global_variable(b.module, ir.ArrayType(I32, lanes), "lanewise_exchange", addrspace=3)
        shared.initializer, shared.linkage, shared.align = ir.Constant(shared.type.pointee, ir.Undefined), "internal", 4
    b.store(bits, b.gep(shared, [constant(0), THREAD(b)]))
    SYNC_BLOCK(b)
    out = b.load(b.gep(shared, [constant(0), at]))
    SYNC_BLOCK(b)
    return out


def _reduce(kind: str, lanes: int, combine: Emit) -> Any:
    """The upper half folded onto the lower half, until one is left; every lane ends with the same bits."""
    type = KINDS[kind][1]

    def emit(b: Any, v: Any) -> Any:
        step = lanes // 2
        while step:
            bits = b.bitcast(v, I32)
            inside = step < WARP
            other = _shuffle("bfly")(b, bits, constant(step)) if inside else _exchange(b, lanes, bits, b.xor(THREAD(b), constant(step)))
            v = combine(b, v, b.bitcast(other, type))
            step //= 2
        return v

    return word(kind, (kind,), emit)


def _lane_value(kind: str, lanes: int) -> Any:
    type = KINDS[kind][1]

    def emit(b: Any, v: Any, j: Any) -> Any:
        bits = b.bitcast(v, I32)
        return b.bitcast(_shuffle("idx")(b, bits, j) if lanes <= WARP else _exchange(b, lanes, bits, j), type)

    return word(kind, (kind, "i32"), emit)


def _across(lanes: int) -> dict[str, Any]:
    folds = {"f32": {"sum": _FLOAT["add"], "max": LARGER, "min": SMALLER},
             "i32": {"sum": _SIGNED["add"], "max": _extreme(">", True), "min": _extreme("<", True)}}
    out = {f"group_{n}_{kind}": _reduce(kind, lanes, f) for kind, family in folds.items() for n, f in family.items()}
    out |= {f"lane_value_{kind}": _lane_value(kind, lanes) for kind in ("f32", "i32", "u32")}
    out["barrier"] = word("", (), SYNC_BLOCK if lanes > WARP else (lambda b: SYNC_WARP(b, constant(ALL_LANES))))
    return out


# -- tables -----------------------------------------------------------------------------------------------------


def table_words(table: Table) -> dict[str, Any]:
    """A table as a gather from global memory (lanes read different entries, which constant memory would serve one by one), and, where it
    has 16 bytes, as a permutation of registers."""
    values = table.values.view("i4").tolist()

    def gather(b: Any, i: Any) -> Any:
        name = f"lanewise_table_{table.name}"
        found = b.module.globals.get(name)
        if found is None:
            found = cgutils.add_global_variable(b.module, ir.ArrayType(I32, len(values)), name, addrspace=1)
            found.initializer, found.linkage = ir.Constant(found.type.pointee, values), "internal"
            found.global_constant, found.align = True, 4
        return b.load(b.gep(found, [constant(0, I64), i]), align=4)

    out = {table.name: word("u32", ("index",), gather)}
    if len(values) == 4:
        out[f"{table.name}_nibbles"] = word("u32", ("u32",), lambda b, q: _nibbles(b, q, values))
    return out


PERMUTE = asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", I32, I32, I32, I32)


def _nibbles(b: Any, quad: Any, values: Sequence[int]) -> Any:
    """Four lookups at once: a byte permutation takes three bits of each index, bit 3 chooses between two of them."""
    three = b.and_(quad, constant(0x07070707))
    three = b.and_(b.or_(three, b.lshr(three, constant(4))), constant(0x00FF00FF))
    selector = b.and_(b.or_(three, b.lshr(three, constant(8))), constant(0xFFFF))
    low, high = (PERMUTE(b, constant(values[k]), constant(values[k + 1]), selector) for k in (0, 2))
    upper = b.mul(b.and_(b.lshr(quad, constant(3)), constant(0x01010101)), constant(255))
    return b.or_(b.and_(low, b.not_(upper)), b.and_(high, upper))


# -- all of them ------------------------------------------------------------------------------------------------


@cache
def _common() -> dict[str, Any]:
    return {**_memory(), **_operators(), **_conversions(), **_language(), "group_number": word("index", (), _group_number),
            "f32": types.float32, "i32": types.int32, "u32": types.uint32, "INF": np.float32(np.inf), "NINF": np.float32(-np.inf),
            "NAN": np.float32(np.nan)}


@cache
def words(lanes: int) -> dict[str, Any]:
    """Every word, for groups of `lanes` threads: 32, or a larger power of two up to 1,024."""
    return {**_common(), **_across(lanes)}
