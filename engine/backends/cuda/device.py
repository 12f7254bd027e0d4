"""One GPU through numba.cuda, or Numba's simulator in its place: memory, a stream, events, copies, kernels.

Everything but loading and launching goes through numba.cuda's own interface, which the simulator has too. Nothing is made on a GPU before
it is first used.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np

from engine.backend import Backend, Capabilities, Device, DeviceType, Event
from engine.backends.cuda.compile import assembler
from engine.errors import AllocationError, ClosedError, DeviceError
from engine.settings import cuda_simulator

log = logging.getLogger(__name__)
ALIGNMENT = 256
LIBRARY = "libcuda.so.1"
REMEDY = "`pip install 'lanewise[cuda]'`"
OLDEST = (7, 5)  # the compute capability toolkits 13 still compile for
Version = tuple[int, int]


def library() -> ModuleType:
    """numba.cuda, imported at the first use. Raises DeviceError where it cannot be."""
    try:
        from numba import cuda
    except Exception as why:  # its loader raises what its parts raise
        raise DeviceError(f"numba.cuda cannot be imported ({why}): {REMEDY}") from None
    return cuda


# -- finding ----------------------------------------------------------------------------------------------------


def find_gpus() -> list[Gpu]:
    """Every GPU that can be used here. Raises DeviceError with the reason where there is none."""
    if cuda_simulator():
        return [Gpu(0, simulated=True)]
    if find_spec("numba_cuda") is None:
        raise DeviceError(f"numba-cuda is not installed: {REMEDY}")
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise DeviceError(f"there is no NVIDIA driver ({LIBRARY} is not on this machine): install the driver of the GPU") from None
    return _real_gpus()


def _real_gpus() -> list[Gpu]:
    cuda = library()
    from numba.cuda.cudadrv.driver import driver

    try:
        driver_version, count = driver.get_version(), driver.get_device_count()
    except Exception as why:
        raise DeviceError(f"the NVIDIA driver does not start: {_first_line(why)}") from None
    if why_not := too_old(driver_version, toolkit_version(), assembler()):
        raise DeviceError(why_not)
    if not count:
        raise DeviceError("the NVIDIA driver finds no GPU: see `nvidia-smi`, and CUDA_VISIBLE_DEVICES")
    made, refused = [], []
    for number in range(count):
        capability = tuple(cuda.gpus[number].compute_capability)
        if capability < OLDEST:
            refused.append(f"GPU {number} has compute capability {capability[0]}.{capability[1]}")
        else:
            made.append(Gpu(number))
    if not made:
        raise DeviceError(f"{'; '.join(refused)}: {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    for line in refused:
        log.warning("%s and is not used: %d.%d or newer is needed", line, *OLDEST)
    return made


def toolkit_version() -> Version | None:
    """The CUDA version of what makes PTX, or None where it is missing."""
    try:
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
        major, minor = library().runtime.get_version()
        return int(major), int(minor)
    except Exception as why:  # a library that is not found, or not usable: its loaders raise many things
        log.debug("no CUDA toolkit: %s", why)
        return None


def too_old(driver: Version, toolkit: Version | None, assembler: Version | None) -> str | None:
    """Why code of this toolkit does not run on this driver, with both versions and the remedy; None where it does.

    Cubins (which need an assembler, nvJitLink) run on every driver of their major version, PTX on a driver as new as itself.
    """
    if toolkit is None:
        return f"there is no CUDA toolkit (libNVVM and NVRTC are not found): {REMEDY}"
    have, made = _dotted(driver), _dotted(toolkit)
    if driver[0] < toolkit[0]:
        return (f"the NVIDIA driver supports CUDA {have}, the installed toolkit makes code for CUDA {made}: update the driver, or install "
                f"`numba-cuda[cu{driver[0]}]` in place of `numba-cuda[cu{toolkit[0]}]`")
    if driver < toolkit and assembler is None:
        return (f"the NVIDIA driver supports CUDA {have}, the installed toolkit makes PTX for CUDA {made}, and no assembler is there: "
                f"update the driver, or `pip install 'nvidia-nvjitlink=={toolkit[0]}.*'`")
    return None


def _dotted(v: Version) -> str:
    return f"{v[0]}.{v[1]}"


def _first_line(why: BaseException) -> str:
    return next((line.strip() for line in str(why).splitlines() if line.strip()), type(why).__name__)


@contextmanager
def typed(name: str, doing: str) -> Iterator[None]:
    """Inside, what the driver reports becomes an error of ours: AllocationError without memory, else DeviceError."""
    try:
        yield
    except Exception as why:
        if not type(why).__module__.startswith(("numba.", "cuda.")):  # not theirs
            raise
        if "OUT_OF_MEMORY" in str(why):
            raise AllocationError(f"{doing}: {name} has no memory for it; use a shorter context (-c), a smaller batch (-ub), fewer layers "
                                  "(-ngl) or another device") from None
        raise DeviceError(f"{doing}: {name} reports {_first_line(why)}; use another device, or 'none' for the CPU alone") from None


# -- memory -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Memory:
    """A piece of a GPU's memory: uint8 [n] of numba.cuda, None after it was given back."""

    gpu: Gpu
    array: Any
    address: int
    nbytes: int

    def part(self, at: int, nbytes: int) -> Any:
        if self.array is None:
            raise ClosedError(f"memory of {self.gpu.name} was given back when its backend was closed")
        return self.array[at : at + nbytes]

    @property
    def host(self) -> np.ndarray:
        """The simulator's memory is the host's."""
        return np.asarray(self.array)


# -- the GPU ----------------------------------------------------------------------------------------------------


class Gpu:
    """A GPU with one stream of work.

    Attributes:
        capability: compute capability.
        n_processors: multiprocessors.
    """

    def __init__(self, number: int, *, simulated: bool = False) -> None:
        self.number, self.simulated = number, simulated
        self.name = f"cuda:{number}"
        self.is_closed = False
        self._memories: WeakSet[Memory] = WeakSet()
        self._peers: set[int] = set()

    # -- what it is ---------------------------------------------------------------------------------------------

    @cached_property
    def handle(self) -> Any:
        """numba.cuda's device: `with` makes its context current."""
        return library().gpus[self.number]

    @cached_property
    def capability(self) -> Version:
        major, minor = (9, 0) if self.simulated else self.handle.compute_capability
        return int(major), int(minor)

    @cached_property
    def n_processors(self) -> int:
        return 1 if self.simulated else int(self.handle.MULTIPROCESSOR_COUNT)

    @cached_property
    def device(self) -> Device:
        if self.simulated:
            return Device(self.name, f"Numba {version('numba')}'s CUDA simulator", DeviceType.TEST, "cuda:simulator",
                          Capabilities(asynchronous=True, events=True, host_buffer=True))
        gpu, (major, minor) = self.handle, self.capability
        name = gpu.name.decode() if isinstance(gpu.name, bytes) else str(gpu.name)
        description = f"{name}, compute capability {major}.{minor}, {self.n_processors} multiprocessors"
        return Device(self.name, description, DeviceType.IGPU if gpu.INTEGRATED else DeviceType.GPU, self._pci(),
                      Capabilities(asynchronous=True, events=True, host_buffer=True), self.memory_info)

    def _pci(self) -> str:
        """The place on the bus, as other backends of the same GPU name it."""
        place = self.handle.get_device_identity()
        return f"{place['pci_domain_id']:04x}:{place['pci_bus_id']:02x}:{place['pci_device_id']:02x}.0"

    def memory_info(self) -> tuple[int | None, int | None]:
        """Total and free bytes."""
        try:
            with self.current("asking for memory"):
                info = library().current_context().get_memory_info()
            return int(info.total), int(info.free)
        except (DeviceError, AllocationError):
            return None, None

    # -- use ----------------------------------------------------------------------------------------------------

    @contextmanager
    def current(self, doing: str) -> Iterator[None]:
        """Inside, the GPU is the calling thread's, and its errors are ours."""
        if self.is_closed:
            raise ClosedError(f"the backend {self.name} is closed")
        with typed(self.name, doing), self.handle:
            yield

    @cached_property
    def stream(self) -> Any:
        with self.current("making a stream"):
            return library().stream()

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed memory at an aligned address.

        Raises:
            AllocationError: there is not enough, or the size is negative.
        """
        if nbytes < 0:
            raise AllocationError(f"cannot allocate {nbytes} bytes on {self.name}: a size >= 0 is expected")
        room = max(1, nbytes)
        pad = ALIGNMENT if self.simulated else 0  # CUDA's own are aligned to 256
        with self.current(f"allocating {nbytes} bytes"):
            try:
                array = library().device_array(room + pad, np.uint8, stream=self.stream)
            except MemoryError:
                raise AllocationError(f"no memory for {nbytes} bytes on {self.name}") from None
            skip = -_address(array, self.simulated) % ALIGNMENT if pad else 0
            array = array[skip : skip + room]
            _driver().device_memset(array, 0, room, self.stream)
        made = Memory(self, array, _address(array, self.simulated), nbytes)
        self._memories.add(made)
        return made

    def pinned(self, nbytes: int) -> np.ndarray:
        """Zeroed host memory that the GPU reads and writes while the host goes on."""
        with self.current(f"allocating {nbytes} bytes of pinned host memory"):
            made: np.ndarray = library().pinned_array(max(1, nbytes), np.uint8)[:nbytes]
        made[...] = 0
        return made

    # -- copies: uint8 arrays of the host, in the order of the stream -------------------------------------------

    def write(self, memory: Memory, at: int, data: np.ndarray, *, wait: bool = True) -> None:
        """Bring data to byte `at`. Without `wait`, pinned data must stay as it is until this point of the stream is reached."""
        if data.nbytes:
            with self.current(f"copying {data.nbytes} bytes to the GPU"):
                _driver().host_to_device(memory.part(at, data.nbytes), data, data.nbytes, self.stream)
                self._finish(wait)

    def read(self, memory: Memory, at: int, out: np.ndarray, *, wait: bool = True) -> None:
        """Fill `out` from byte `at`. Without `wait` it has its content when this point of the stream is reached."""
        if out.nbytes:
            with self.current(f"copying {out.nbytes} bytes from the GPU"):
                _driver().device_to_host(out, memory.part(at, out.nbytes), out.nbytes, self.stream)
                self._finish(wait)

    def move(self, source: Memory, at: int, target: Memory, to: int, nbytes: int) -> None:
        """Queue a copy from this or another GPU's memory: directly where they are peers, else the driver goes through the host."""
        if nbytes:
            with self.current(f"copying {nbytes} bytes from {source.gpu.name}"):
                self._befriend(source.gpu)
                _driver().device_to_device(target.part(to, nbytes), source.part(at, nbytes), nbytes, self.stream)

    def _befriend(self, other: Gpu) -> None:
        """Open the direct way to another GPU, once, where there is one."""
        if self.simulated or other.number in self._peers or other is self:
            return
        self._peers.add(other.number)
        own = library().current_context()
        if own.can_access_peer(other.number):
            own.enable_peer_access(other.handle.get_primary_context().handle)

    def _finish(self, wait: bool) -> None:
        if wait:
            self.stream.synchronize()

    # -- order --------------------------------------------------------------------------------------------------

    def mark(self) -> Any:
        """An event behind the work so far."""
        with self.current("recording an event"):
            made = library().event()
            made.record(self.stream)
            return made

    def wait_for(self, event: Any) -> None:
        """Work given from now on starts after an event of any GPU."""
        with self.current("waiting for an event"):
            event.wait(self.stream)

    def finish(self) -> None:
        """Wait until everything is done."""
        if "stream" in self.__dict__ and not self.is_closed:
            with self.current("running"):
                self.stream.synchronize()

    def close(self) -> None:
        """Wait, and give the memory back."""
        if self.is_closed:
            return
        try:
            self.finish()
        finally:
            self.is_closed = True
            for memory in list(self._memories):
                memory.array = None
            self.__dict__.pop("stream", None)

    # -- kernels ------------------------------------------------------------------------------------------------

    def load(self, code: bytes, entry: str) -> Any:
        """The kernel in a cubin or in PTX, on this GPU for as long as the process runs."""
        image = np.frombuffer(code + b"\0", np.uint8)
        with self.current(f"loading {entry}"):
            module = _driver().driver.cuModuleLoadData(image.ctypes.data)
            return _driver().driver.cuModuleGetFunction(module, entry.encode())

    def launch(self, kernel: Any, blocks: int, threads: tuple[int, int], arguments: int) -> None:
        """Queue a kernel inside `current`; `arguments` is the address of an array of pointers to its parameters."""
        x, y = threads
        _driver().driver.cuLaunchKernel(kernel, blocks, 1, 1, x, y, 1, 0, int(self.stream), arguments, 0)


def _driver() -> Any:
    from numba.cuda.cudadrv import driver

    return driver


def _address(array: Any, simulated: bool) -> int:
    return int(np.asarray(array).ctypes.data if simulated else array.device_ctypes_pointer.value)


class CudaEvent(Event):
    """A point in a GPU's stream."""

    def __init__(self, backend: Backend, gpu: Gpu) -> None:
        super().__init__(backend)
        self.gpu, self.cuda = gpu, gpu.mark()

    def wait(self) -> None:
        with self.gpu.current("waiting for an event"):
            self.cuda.synchronize()


def versions() -> Sequence[str]:
    """The installed packages that compile, with their versions."""
    out = []
    for name in ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink"):
        try:
            out.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return out
