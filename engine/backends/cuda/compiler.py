"""Kernels of one GPU by binding: from memory, from a disk cache of our own, or compiled now.

An entry is a cubin, or PTX where no assembler is installed. Its key hashes everything it depends on: the printed text with its tables, the
words' meaning, the compute capability, the versions of what compiles.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from engine.backends.cuda import compile as toolchain
from engine.backends.cuda.device import Gpu, versions
from engine.backends.cuda.printer import Program, print_program
from engine.errors import DeviceError
from engine.lang.binding import Binding
from engine.object_cache import ObjectCache

log = logging.getLogger(__name__)
ENTRY = "lanewise_kernel"


def program_of(b: Binding) -> Program:
    """The printed text of a launch."""
    return print_program(b.kernel())


@dataclass(frozen=True)
class Kernel:
    """A program, and on a GPU its loaded code."""

    program: Program
    code: Any = None


@dataclass
class Compiler:
    """Kernels of one GPU, or of the simulator, which runs the text itself.

    Attributes:
        on_compile: called with the number of kernels still to compile and the name of the next one, before each.
        seconds: time spent compiling, hits not counted.
        compiled, loaded: kernels compiled, and kernels found in the disk cache.
    """

    gpu: Gpu
    cache: ObjectCache
    on_compile: Callable[[int, str], None] | None = None
    seconds: float = 0.0
    compiled: int = 0
    loaded: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _kernels: dict[Any, Kernel] = field(default_factory=dict)

    def kernels(self, bindings: Sequence[Binding]) -> list[Kernel]:
        """The kernel of each binding; what is missing is compiled, in order."""
        with self._lock:
            asked = [b.identity for b in bindings]
            missing = {w: program_of(b) for w, b in zip(asked, bindings, strict=True) if w not in self._kernels}
            todo = {w: p for w, p in missing.items() if not self._ready(w, p)}
            for left, (w, program) in enumerate(todo.items()):
                if self.on_compile:
                    self.on_compile(len(todo) - left, program.name)
                self._compile(w, program)
            return [self._kernels[w] for w in asked]

    def _ready(self, asked: Any, program: Program) -> bool:
        """Without compiling: in the simulator, or from the disk cache."""
        if self.gpu.simulated:
            self._kernels[asked] = Kernel(program)
            return True
        key = self.key(program)
        code = self.cache.get(key)
        if code is None:
            return False
        try:
            self._kernels[asked] = Kernel(program, self.gpu.load(code, ENTRY))
        except DeviceError as why:
            log.warning("the cached kernel %s cannot be used (%s); it is compiled again", key[:12], why)
            self.cache.remove(key)
            return False
        self.loaded += 1
        return True

    def _compile(self, asked: Any, program: Program) -> None:
        started = time.perf_counter()
        code = machine_code(program, self.gpu.capability)
        self.cache.put(self.key(program), code)
        self._kernels[asked] = Kernel(program, self.gpu.load(code, ENTRY))
        self.compiled += 1
        self.seconds += time.perf_counter() - started
        log.info("compiled %s in %.2f s", program.name, time.perf_counter() - started)

    def key(self, program: Program) -> str:
        h = hashlib.sha256(_words_hash().encode())
        h.update(f"{self.gpu.capability} {toolchain.assembler()} {program.lanes} {program.text}".encode())
        for table in program.tables.values():
            h.update(table.values.tobytes())
        return h.hexdigest()


def machine_code(program: Program, capability: toolchain.Capability) -> bytes:
    """A cubin where there is an assembler, else PTX, which the driver assembles."""
    (text,) = toolchain.ptx(program, (capability,))
    text = text.replace(toolchain.entry_of(text), ENTRY)
    return toolchain.cubin(text, capability) if toolchain.assembler() else text.encode()


@cache
def _words_hash() -> str:
    """A hash of the words' meaning and of what compiles."""
    h = hashlib.sha256(" ".join(versions()).encode())
    for name in ("gpu_words.py", "compile.py"):
        h.update((Path(__file__).parent / name).read_bytes())
    return h.hexdigest()
