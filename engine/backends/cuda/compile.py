"""From printed text to machine code: numba.cuda makes PTX, nvJitLink (where it is installed) a cubin; both without a GPU.

A cubin runs on every driver of its CUDA major version; PTX needs a driver as new as the toolkit that made it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from engine.backends.cuda.printer import Program

Capability = tuple[int, int]
SIZED, FRAME_SIZE, REGISTER_COUNT = 0x04, 0x11, 0x2F  # of records in .nv.info: a format, and two attributes
_functions: dict[str, Any] = {}  # elementary functions are typed once, for all kernels that call them


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor: registers a thread, bytes of local memory a thread (spills, arrays), of shared memory."""

    registers: int
    local_nbytes: int
    shared_nbytes: int


def namespace(program: Program, words: Mapping[str, Any], tables: Mapping[str, Any], device: Any = None) -> dict[str, Any]:
    """What the kernel's text is executed in; `device` makes a function callable from a kernel."""
    scope: dict[str, Any] = {**words, **tables}
    so_far = f"{program.lanes}\n"
    for name, text in program.functions.items():
        so_far += text
        if so_far not in _functions:
            own = dict(scope)
            exec(compile(text, f"<{name}>", "exec"), own)
            if device is None:
                scope[name] = own[name]
                continue
            _functions[so_far] = device(own[name])
        scope[name] = _functions[so_far]
    return scope


def function(program: Program, scope: dict[str, Any]) -> Any:
    """The kernel as a Python function."""
    exec(compile(program.kernel, f"<{program.name}>", "exec"), scope)
    return scope[program.name]


def ptx(program: Program, capabilities: tuple[Capability, ...]) -> list[str]:
    """PTX for each compute capability. The text is typed once; only NVVM runs for each."""
    from engine.backends.cuda import gpu_words

    tables = {n: w for t in program.tables.values() for n, w in gpu_words.table_words(t).items()}
    kernel = function(program, namespace(program, gpu_words.words(program.lanes), tables, _device_function))
    types, compiler = gpu_words.types, _numba("compiler")
    signature = types.void(*[types.int64] * program.n_integers, *[types.float32] * program.n_floats)
    library, _ = compiler._compile_pyfunc_with_fixup(kernel, signature, device=False, abi="numba", cc=capabilities[0])
    return [library.get_asm_str(cc=cc) for cc in capabilities]


def _numba(name: str) -> Any:
    """A module of numba.cuda, whose interface is not typed."""
    return import_module(f"numba.cuda.{name}")


def _device_function(fn: Any) -> Any:
    """A function of float32 that kernels call. It is compiled here, since Numba's own way asks the driver for the GPU of this machine."""
    types = _numba("types")
    dispatcher = _numba("decorators").jit(device=True, forceinline=True)(fn)
    operands = (types.float32,) * fn.__code__.co_argcount
    options = {"opt": 3, "fastmath": False}
    made = _numba("compiler").compile_cuda(fn, types.float32, operands, cc=(8, 0), forceinline=True, nvvm_options=options)
    dispatcher.overloads[operands] = made
    made.target_context.insert_user_function(made.entry_point, made.fndesc, [made.library])
    dispatcher.disable_compile()
    return dispatcher


def entry_of(text: str) -> str:
    """The name of the one kernel in PTX."""
    found = re.search(r"\.visible\s+\.entry\s+([\w$]+)", text)
    assert found is not None, "PTX without an entry"
    return found[1]


# -- the assembler ----------------------------------------------------------------------------------------------


@cache
def assembler() -> tuple[int, int] | None:
    """The version of nvJitLink, or None where it is not installed."""
    try:
        from cuda.bindings import nvjitlink

        major, minor = nvjitlink.version()
        return int(major), int(minor)
    except Exception:  # whatever the loader of a missing library raises
        return None


def cubin(text: str, capability: Capability) -> bytes:
    """PTX assembled for one GPU architecture; nothing is contracted there either."""
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(3, [f"-arch=sm_{capability[0]}{capability[1]}", "-fma=0", "-O3"])
    try:
        code = text.encode()
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), "kernel.ptx")
        nvjitlink.complete(handle)
        out = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, out)
        return bytes(out)
    finally:
        nvjitlink.destroy(handle)


def resources(code: bytes, entry: str) -> Resources:
    """Read from the cubin, an ELF file: its .nv.info holds records of (format, attribute, bytes, symbol, value)."""
    sections = _sections(code)
    shared = sections.get(f".nv.shared.{entry}")
    facts = _attributes(code, sections, _symbol(code, sections, entry))
    return Resources(facts.get(REGISTER_COUNT, 0), facts.get(FRAME_SIZE, 0), shared.size if shared else 0)


@dataclass(frozen=True)
class _Section:
    offset: int
    size: int


def _sections(code: bytes) -> dict[str, _Section]:
    """Sections of a 64-bit little-endian ELF file by name."""
    start, = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    rows = [struct.unpack_from("<IIQQQQII", code, start + size * k) for k in range(count)]
    table = rows[names][4]
    out = {}
    for row in rows:
        at = table + row[0]
        out[code[at : code.index(b"\0", at)].decode()] = _Section(row[4], row[5])
    return out


def _attributes(code: bytes, sections: Mapping[str, _Section], symbol: int) -> dict[int, int]:
    """What .nv.info says of one function."""
    info = sections.get(".nv.info")
    at, end = (info.offset, info.offset + info.size) if info else (0, 0)
    out: dict[int, int] = {}
    while at + 4 <= end:
        form, attribute, size = struct.unpack_from("<BBH", code, at)
        at += 4
        if form != SIZED:
            continue
        if size == 8:
            found, value = struct.unpack_from("<II", code, at)
            if found == symbol:
                out[attribute] = value
        at += size
    return out


def _symbol(code: bytes, sections: Mapping[str, _Section], entry: str) -> int:
    table, names = sections[".symtab"], sections[".strtab"]
    for k in range(table.size // 24):
        at = names.offset + struct.unpack_from("<I", code, table.offset + 24 * k)[0]
        if code[at : code.index(b"\0", at)].decode() == entry:
            return k
    return -1
