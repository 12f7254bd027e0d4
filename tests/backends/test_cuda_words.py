"""The GPU's meaning of the words beside the simulator's: what is plain LLVM is compiled for the CPU and run on the same numbers.

Left out: words that are single PTX instructions (f16, dp4a, prmt, conversions that saturate) and those across lanes.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

import llvmlite.binding as llvm  # noqa: E402
import llvmlite.ir as ir  # noqa: E402

from engine.backends.cuda import gpu_words, sim_words  # noqa: E402

PURE = {"llvm.nvvm.add.rn.f": "fadd", "llvm.nvvm.mul.rn.f": "fmul", "llvm.nvvm.div.rn.f": "fdiv"}
C: dict[str, Any] = {"f32": ctypes.c_float, "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "index": ctypes.c_int64,
                     "truth": ctypes.c_bool, "": None}
KEPT: list[Any] = []  # compiled code, as long as it may be called
MEMORY = np.random.default_rng(3).integers(0, 256, 64, np.uint8)
FLOATS = [0.0, -0.0, 1.5, -2.75, 3.4e38, 1e-42, float("inf"), float("-inf"), float("nan"), 255.5, 16777217.0]
INTEGERS = [0, 1, -1, 7, 123456789, -2147483648, 2147483647, 31]


def ir_of(word: Any) -> str:
    """The word as a function of a module for the CPU; NVVM's rounding operators become LLVM's own."""
    module = ir.Module()
    kinds = [gpu_words.KINDS[o][1] for o in word.operands]
    result = gpu_words.KINDS[word.result][1] if word.result else ir.VoidType()
    builder = ir.IRBuilder(ir.Function(module, ir.FunctionType(result, kinds), "word").append_basic_block())
    out = word.emit(builder, *builder.function.args)
    builder.ret(out) if word.result else builder.ret_void()
    text = re.sub(r"\w+ addrspace\(1\)\*", "ptr addrspace(1)", str(module))
    for name, op in PURE.items():
        body = f"define float @{op}_(float %x, float %y) {{\n  %r = {op} float %x, %y\n  ret float %r\n}}\n"
        text = text.replace(f'declare float @"{name}"(float %".1", float %".2")', body).replace(f'@"{name}"', f"@{op}_")
    return text


def on_cpu(word: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(ir_of(word))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    KEPT.append(engine)
    return ctypes.CFUNCTYPE(C[word.result], *(C[o] for o in word.operands))(engine.get_function_address("word"))


def is_plain(word: Any) -> bool:
    text = ir_of(word)
    return " asm " not in text and "llvm.nvvm." not in text and "__nv_" not in text


GPU = {n: w for n, w in gpu_words.words(32).items() if hasattr(w, "emit")}
PLAIN = sorted(n for n, w in GPU.items() if is_plain(w))
ARITHMETIC = [n for n in PLAIN if not n.startswith(("load_", "store_"))]


def numbers(kind: str, rng: np.random.Generator) -> list[Any]:
    if kind == "f32":
        return [*map(np.float32, FLOATS), *rng.standard_normal(20).astype(np.float32)]
    if kind == "truth":
        return [False, True]
    given = [*INTEGERS, *rng.integers(-(1 << 31), 1 << 31, 20).tolist()]
    if kind == "index":
        return [int(v) for v in given]
    return [np.uint32(v & 0xFFFFFFFF) if kind == "u32" else np.int32(v) for v in given]


def legal(name: str, args: list[Any]) -> list[Any] | None:
    """Operands as the language allows them."""
    if name.startswith(("floordiv", "mod")):
        args = [abs(int(a)) & 0x7FFFFFFF for a in args]
        return args if args[1] else None
    if name.startswith(("shl", "shr")):
        return [args[0], int(args[1]) & 31]
    return [args[0], int(args[1]) & 3] if name in ("byte", "ubyte") else args


def same(kind: str, a: Any, b: Any) -> bool:
    if kind == "f32":
        x, y = np.float32(a), np.float32(b)
        return bool(np.isnan(x) and np.isnan(y)) or x.view(np.uint32) == y.view(np.uint32)
    bits = 64 if kind == "index" else 32
    return (int(a) - int(b)) % (1 << bits) == 0


def test_most_words_are_plain() -> None:
    assert len(ARITHMETIC) >= 60 and {"fma", "pack", "byte", "where_f32", "add_f32", "div_f32", "floordiv_index"} <= set(ARITHMETIC)
    assert {"load_u32_by2", "store_bf16", "load_i16_by1"} <= set(PLAIN)


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_word_means_the_same_on_both(name: str) -> None:
    word, sim = GPU[name], sim_words.words(sim_words.Memory([]), sim_words.Crowd(32))[name]
    rng, call, tried = np.random.default_rng(1), on_cpu(word), 0
    pools = [numbers(kind, rng) for kind in word.operands]
    for _ in range(300):
        args = legal(name, [pool[rng.integers(len(pool))] for pool in pools])
        if args is None:
            continue
        tried += 1
        plain = [float(a) if kind == "f32" else int(a) for a, kind in zip(args, word.operands, strict=True)]
        assert same(word.result, call(*plain), sim(*args)), f"{name}{tuple(args)}: {call(*plain)} on a GPU, {sim(*args)} in the simulator"
    assert tried > 100


@pytest.mark.parametrize("name", [n for n in PLAIN if n.startswith("load_")])
def test_a_load_means_the_same_on_both(name: str) -> None:
    memory = MEMORY.copy()
    place = memory.ctypes.data
    sim = sim_words.words(sim_words.Memory([(place, memory)]), sim_words.Crowd(32))[name]
    call = on_cpu(GPU[name])
    for offset in (0, 8, 24):
        assert same(GPU[name].result, call(place + 8, offset), sim(place + 8, offset))


@pytest.mark.parametrize("name", [n for n in PLAIN if n.startswith("store_")])
def test_a_store_means_the_same_on_both(name: str) -> None:
    word, rng = GPU[name], np.random.default_rng(2)
    ours, theirs = MEMORY.copy(), MEMORY.copy()
    sim = sim_words.words(sim_words.Memory([(theirs.ctypes.data, theirs)]), sim_words.Crowd(32))[name]
    call = on_cpu(word)
    for value in numbers(word.operands[2], rng):
        call(ours.ctypes.data, 16, float(value) if word.operands[2] == "f32" else int(value))
        sim(theirs.ctypes.data, 16, value)
        assert np.array_equal(ours, theirs), value


def test_tables_are_the_same_on_both() -> None:
    from engine.lang.tree import Table

    table = Table("SOME_WORDS", np.random.default_rng(4).integers(0, 1 << 32, 8, np.uint64).astype(np.uint32))
    call = on_cpu(gpu_words.table_words(table)["SOME_WORDS"])
    assert [call(k) for k in range(8)] == [int(sim_words.table_words(table)["SOME_WORDS"](k)) for k in range(8)] == table.values.tolist()
