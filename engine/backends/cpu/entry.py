"""The entry of a kernel as a Numba function: one intrinsic whose code is the lowered kernel. Needed only when something is compiled."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from numba import cfunc, types
from numba.extending import intrinsic

from engine.backends.cpu.lower import lower
from engine.backends.cpu.words import Features
from engine.lang.tree import Kernel


def object_code(kernel: Kernel, features: Features, symbol: str) -> bytes:
    """Numba compiles `void f(int64 params, int64 begin, int64 end)`; its object code, with the entry under `symbol`."""
    module, machine = c_module(*_entry(kernel, features), symbol)
    return machine.emit_object(module)


def texts(kernel: Kernel, features: Features, symbol: str) -> tuple[str, str]:
    """What a kernel became: its LLVM IR after optimisation, and its assembly."""
    module, machine = c_module(*_entry(kernel, features), symbol)
    return str(module), machine.emit_assembly(module)


def _entry(kernel: Kernel, features: Features) -> tuple[Any, Any]:
    """The entry as a Python function, and its signature."""

    @intrinsic
    def body(typing: Any, params: Any, begin: Any, end: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lower(builder, kernel, features, args)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), code

    def entry(params, begin, end):  # type: ignore[no-untyped-def]
        body(params, begin, end)  # type: ignore[call-arg]

    return entry, types.void(types.int64, types.int64, types.int64)


def c_object(function: Any, signature: Any, symbol: str) -> bytes:
    """Object code of a Python function compiled by Numba, callable from C under `symbol`; it holds no reference to this process."""
    module, machine = c_module(function, signature, symbol)
    return machine.emit_object(module)


def c_module(function: Any, signature: Any, symbol: str) -> tuple[Any, Any]:
    """The optimised module of a Python function compiled by Numba, and the target machine that makes code of it."""
    compiled: Any = cfunc(signature, nopython=True, error_model="numpy", nogil=True)(function)  # type: ignore[call-arg]
    library = compiled._library
    module = llvm.parse_assembly(str(library._final_module))
    for f in module.functions:
        if f.name == compiled.native_name:
            f.name = symbol
        elif not f.is_declaration:
            f.linkage = "internal"
    machine = library.codegen._tm
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes.getModulePassManager().run(module, passes)
    return module, machine
