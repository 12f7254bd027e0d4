"""From a bound kernel to a program of the device: the printed text, built once per text, its machine code kept in a disk cache of our own.

An entry's key hashes everything its machine code depends on: text, build options, and the versions of platform, device and driver.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.backends.opencl.devices import Found, library, typed
from engine.backends.opencl.printer import print_program
from engine.errors import BuildError
from engine.lang.binding import Binding
from engine.object_cache import ObjectCache

log = logging.getLogger(__name__)

FORMAT = "opencl 1"  # of an entry; another number where the meaning of a key changes


@dataclass(frozen=True)
class Source:
    """A program with one kernel. `what` says for messages what it is."""

    text: str
    kernel: str
    what: str


@dataclass
class Compiler:
    """Kernels of one device: from memory, from the disk cache, or built now.

    Attributes:
        on_compile: called with the number of programs still to build and the name of the next one, before each.
        seconds: time spent building, hits not counted.
        compiled, loaded: programs built, and programs found in the disk cache.
    """

    found: Found
    cache: ObjectCache
    on_compile: Callable[[int, str], None] | None = None
    seconds: float = 0.0
    compiled: int = 0
    loaded: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _programs: dict[str, Any] = field(default_factory=dict)
    _sources: dict[Any, Source] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.found.device.name

    # -- text ---------------------------------------------------------------------------------------------------

    def source(self, b: Binding) -> Source:
        """The text of a launch, printed once."""
        asked = b.identity
        with self._lock:
            if asked not in self._sources:
                name = f"{b.function.name}_kernel"  # a name of its own: OpenCL C has many functions
                text = print_program(b.kernel(), name, divide_exact=not self.found.rounds_divisions)
                self._sources[asked] = Source(text, name, _describe(b))
            return self._sources[asked]

    @property
    def options(self) -> tuple[str, ...]:
        """Never -cl-fast-relaxed-math: numbers mean the same on every device."""
        rounding = ("-cl-fp32-correctly-rounded-divide-sqrt",) if self.found.rounds_divisions else ()
        return ("-cl-std=CL1.2", *rounding)

    # -- programs -----------------------------------------------------------------------------------------------

    def kernels(self, sources: Sequence[Source]) -> list[Any]:
        """A kernel object of its own for each source. Programs that are missing are built, in order.

        Raises:
            BuildError: the device's compiler refuses a text.
        """
        with self._lock:
            missing = {s.text: s for s in sources if s.text not in self._programs and not self._load(s)}
            for left, s in enumerate(missing.values()):
                if self.on_compile:
                    self.on_compile(len(missing) - left, s.kernel.removesuffix("_kernel"))
                self._build(s)
            with typed(self.name, "making a kernel"):
                return [library().Kernel(self._programs[s.text], s.kernel) for s in sources]

    def key(self, s: Source) -> str:
        return hashlib.sha256("\n".join((FORMAT, self.found.driver, *self.options, s.text)).encode()).hexdigest()

    def _load(self, s: Source) -> bool:
        """Take a program from the disk cache; an entry the driver does not want is made again."""
        key = self.key(s)
        code = self.cache.get(key)
        if code is None:
            return False
        cl = library()
        try:
            program = self._made([self.found.cl], [code])
            program.build(self._option_bytes, [self.found.cl])
            cl.Kernel(program, s.kernel)
        except (cl.Error, ValueError) as why:
            log.warning("%s: the cached program %s cannot be used (%s); it is built again", self.name, key[:12], _first_line(why))
            self.cache.remove(key)
            return False
        self._programs[s.text] = program
        self.loaded += 1
        return True

    def _build(self, s: Source) -> None:
        cl, started = library(), time.perf_counter()
        with typed(self.name, f"building {s.what}"):
            program = self._made(s.text)
        try:
            program.build(self._option_bytes, [self.found.cl])
        except cl.Error as why:
            raise BuildError(f"{self.name}: the driver's compiler refuses the text printed for {s.what}: report it with this log, or use "
                             "another device", _log_of(program, self.found.cl) or str(why), s.text) from None
        self._programs[s.text] = program
        self._keep(s, program)
        self.compiled += 1
        self.seconds += time.perf_counter() - started
        log.info("%s: built %s in %.2f s", self.name, s.what, time.perf_counter() - started)

    def _made(self, *args: Any) -> Any:
        """The plain program under pyopencl's own class, which has a disk cache too, without a limit."""
        return library()._cl._Program(self.found.shared.context, *args)

    @property
    def _option_bytes(self) -> bytes:
        return " ".join(self.options).encode()

    def _keep(self, s: Source, program: Any) -> None:
        """The machine code into the disk cache; drivers that do not give it away are asked again in the next process."""
        cl = library()
        try:
            devices, codes = program.get_info(cl.program_info.DEVICES), program.get_info(cl.program_info.BINARIES)
        except cl.Error as why:
            log.info("%s gives no machine code (%s): %s is built again in the next process", self.name, _first_line(why), s.what)
            return
        code = next((c for d, c in zip(devices, codes, strict=True) if d == self.found.cl), b"")
        if code:
            self.cache.put(self.key(s), code)


def _describe(b: Binding) -> str:
    views = ", ".join(f"{n} {t.dtype}{'' if t.unit else '~'}[{t.ndim}]{'' if t.layout == 'plain' else '@' + t.layout}"
                      for n, t in b.views.items())
    return f"{b.function.name}({views}; {', '.join(f'{k}={v}' for k, v in sorted(b.constants.items()))})"


def _log_of(program: Any, device: Any) -> str:
    cl = library()
    try:
        return str(program.get_build_info(device, cl.program_build_info.LOG)).strip("\0 \n")
    except cl.Error:
        return ""


def _first_line(why: Exception) -> str:
    return str(why).partition("\n")[0]
