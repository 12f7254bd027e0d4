"""From a checked kernel to an address: Numba compiles the entry, and the object code is kept in a disk cache of our own.

A hit needs neither Numba nor typing: the object file is handed to LLVM's linker, which gives the address. The key of an entry hashes the
kernel's text and that of every function and word it may use, its types and constants, the versions, and the CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from engine.backends.cpu.features import host_features
from engine.backends.cpu.words import Features
from engine.lang.function import Function
from engine.lang.tree import Table, ViewType
from engine.lang.words import DECODERS
from engine.object_cache import ObjectCache

log = logging.getLogger(__name__)
SYMBOL = "lanewise_kernel"


@dataclass(frozen=True)
class Request:
    """A kernel and everything its machine code depends on."""

    function: Function
    views: Mapping[str, ViewType]
    groups: tuple[str, ...]
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    constants: Mapping[str, int]
    features: Features

    def describe(self) -> str:
        views = ", ".join(f"{n} {t.dtype}{'' if t.unit else '~'}[{t.ndim}]{'' if t.layout == 'plain' else '@' + t.layout}"
                          for n, t in self.views.items())
        constants = ", ".join(f"{k}={v}" for k, v in sorted(self.constants.items()))
        return f"{self.function.label}({views}; {', '.join((*self.groups, '|', *self.ints, '|', *self.floats))}; {constants})"

    def key(self) -> str:
        target = f"{','.join(sorted(self.features.names))}\n{self.features.lanes}"
        return hashlib.sha256("\n".join((_language_hash(), *self._texts(), self.describe(), target)).encode()).hexdigest()

    def _texts(self) -> Iterator[str]:
        """The kernel's text, that of every function and decoder it may call, and the module constants and tables they read."""
        decoders = [f for t in self.views.values() for _, f in sorted(DECODERS.get(t.dtype.name, {}).items())]
        pending, seen = [self.function, *decoders], set()
        while pending:
            f = pending.pop()
            if f in seen:
                continue
            seen.add(f)
            yield f.source
            for name in f.names:
                found = f.globals.get(name)
                if isinstance(found, Function):
                    pending.append(found)
                elif isinstance(found, (int, float)):
                    yield f"{name} = {found!r}"
                elif isinstance(found, Table):
                    yield f"{name} = {found.name} {hashlib.sha256(found.values.tobytes()).hexdigest()}"


@cache
def _language_hash() -> str:
    """A hash of everything but the kernel: words, walk, lowering, versions, CPU."""
    h = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *(here.parent.parent / "lang").glob("*.py"), here.parent.parent / "dtypes.py"]):
        if path.name not in ("sim.py", "cache.py", "team.py", "plan.py", "layouts.py", "__init__.py"):
            h.update(path.read_bytes())
    versions = f"{version('numba')} {llvmlite.__version__} {llvm.llvm_version_info}"
    h.update(f"{versions} {llvm.get_host_cpu_name()} {sorted(host_features())}".encode())
    return h.hexdigest()


_addresses: dict[str, int] = {}  # of every kernel in this process, by key


@dataclass
class Compiler:
    """Addresses of kernels by request: from memory, from the disk cache, or compiled now.

    Attributes:
        on_compile: called with the number of kernels still to compile and the name of the next one, before each.
        seconds: time spent compiling, hits not counted.
    """

    cache: ObjectCache
    on_compile: Callable[[int, str], None] | None = None
    seconds: float = 0.0
    compiled: int = 0
    loaded: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def addresses(self, requests: Sequence[Request]) -> list[int]:
        """The entry of each request; what is missing is compiled, in order."""
        with self._lock:
            keys = [r.key() for r in requests]
            missing = {k: r for k, r in zip(keys, requests, strict=True) if k not in _addresses and not self._load(k)}
            for left, (key, request) in enumerate(missing.items()):
                if self.on_compile:
                    self.on_compile(len(missing) - left, request.function.label)
                self._compile(key, request)
            return [_addresses[k] for k in keys]

    def _load(self, key: str) -> bool:
        code = self.cache.get(key)
        if code is None:
            return False
        try:
            self._link(key, code)
        except (RuntimeError, OSError) as why:
            log.warning("the cached kernel %s cannot be used (%s); it is compiled again", key[:12], why)
            self.cache.remove(key)
            return False
        self.loaded += 1
        return True

    def _compile(self, key: str, request: Request) -> None:
        started = time.perf_counter()
        code = compile_object(request)
        self.cache.put(key, code)
        self._link(key, code)
        self.compiled += 1
        self.seconds += time.perf_counter() - started
        log.info("compiled %s in %.2f s", request.describe(), time.perf_counter() - started)

    def _link(self, key: str, code: bytes) -> None:
        _addresses[key] = link(code, SYMBOL)


def compile_object(request: Request) -> bytes:
    """The object code of the C-callable entry `void f(int64 params, int64 begin, int64 end)`."""
    from engine.backends.cpu.entry import object_code
    from engine.lang.walk import check

    kernel = check(request.function, request.views, request.groups, request.ints, request.floats, request.constants)
    return object_code(kernel, request.features, SYMBOL)


@cache
def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="default", codemodel="jitdefault",
        jit=True)


def link(code: bytes, symbol: str) -> int:
    """Bring object code into the process for good, and give the address of `symbol`. Raises RuntimeError if it is not usable."""
    if len(code) < 64 or not code.startswith(b"\x7fELF"):
        raise RuntimeError("not an object file")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if not address:
        raise RuntimeError(f"no symbol {symbol}")
    engine.detach()  # the code stays: plans of any backend may hold its address, and LLVM cannot give single objects back safely
    return address


ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
