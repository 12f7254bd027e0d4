"""OpenCL devices: every platform's own, parts of them and repeats of them, and why there is none.

A *context* is shared by a device's parts and repeats, so that they can wait for each other's events and copy between their buffers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.backend import Capabilities, Device, DeviceType
from engine.backends.opencl.pocl import name_cpu
from engine.errors import AllocationError, DeviceError
from engine.settings import opencl_drivers, settings

log = logging.getLogger(__name__)

REMEDY = "install the GPU's driver, or `pip install 'lanewise[pocl]'` for one that runs on the CPU"
SIMULATORS = ("oclgrind",)
ON_CPUS = ("pocl", *SIMULATORS)  # drivers that never have a GPU
NO_MEMORY = {"MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_RESOURCES", "OUT_OF_HOST_MEMORY", "INVALID_BUFFER_SIZE"}
_ORDER = (DeviceType.GPU, DeviceType.IGPU, DeviceType.ACCEL, DeviceType.CPU, DeviceType.TEST)


def may_hold_gpus() -> bool:
    """Whether a driver is registered that is not known to run on CPUs alone: told by the names of the files drivers register with, without
    loading any, since that takes half a second."""
    spec = find_spec("pyopencl")
    own = [Path(folder) / ".libs" for folder in (spec.submodule_search_locations or ())] if spec else []
    for place in (*opencl_drivers(), *own):
        for icd in place.glob("*.icd") if place.is_dir() else (place,) if place.exists() else ():
            if not any(name in icd.name.lower() for name in ON_CPUS):
                return True
    return False


def library() -> ModuleType:
    """pyopencl, imported at the first use.

    Raises:
        DeviceError: it cannot be.
    """
    try:
        import pyopencl
    except (ImportError, OSError) as why:
        raise DeviceError(f"pyopencl cannot be imported ({why}): `pip install pyopencl`") from None
    return pyopencl


@contextmanager
def typed(name: str, doing: str, advice: str = "use another device, or 'none' for the CPU alone") -> Iterator[None]:
    """Inside, what the driver of device `name` reports becomes an error of ours.

    Raises:
        AllocationError: the device is out of memory. DeviceError: everything else.
    """
    cl = library()
    try:
        yield
    except cl.Error as why:
        code = getattr(why, "code", None)
        status = str(cl.status_code.to_string(code, "status %d")) if isinstance(code, int) else str(why).partition("\n")[0]
        if isinstance(why, cl.MemoryError) or status in NO_MEMORY:
            raise AllocationError(f"{doing}: {name} has no memory for it ({status}); use a shorter context (-c), a smaller batch (-ub) "
                                  "or another device") from None
        routine = getattr(why, "routine", "") or "the driver"
        raise DeviceError(f"{doing}: {routine} failed on {name} with {status}; {advice}") from None


@dataclass
class Shared:
    """A context, made when it is first needed, for a device or for its parts together."""

    members: list[Any] = field(default_factory=list)
    root: Any = None

    @cached_property
    def context(self) -> Any:
        name_cpu(self.root)
        return library().Context(self.members)


@dataclass(frozen=True)
class Found:
    """An OpenCL device and how we describe it."""

    cl: Any
    shared: Shared
    device: Device

    @property
    def rounds_divisions(self) -> bool:
        """Whether / and sqrt can be had correctly rounded."""
        return bool(self.cl.single_fp_config & library().device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT)

    @property
    def driver(self) -> str:
        """Everything about platform, device and driver that machine code depends on."""
        d, p = self.cl, self.cl.platform
        return "\n".join((p.name, p.version, d.name, d.version, d.driver_version, d.vendor))


def find_devices() -> list[Found]:
    """GPUs first, then CPUs, then simulators, each kind as the platforms list them.

    Raises:
        DeviceError: there is none; the reason says what to install.
    """
    roots = sorted(_roots(), key=lambda pair: _ORDER.index(pair[0]))
    if not roots:
        raise DeviceError(f"no OpenCL platform has a device{_broken()}: {REMEDY}")
    seen: Counter[str] = Counter()
    found: list[Found] = []
    for number, (type, root) in enumerate(roots):
        id = _stable_id(root)
        seen[id] += 1
        found += _units(root, type, f"opencl:{number}", id if seen[id] == 1 else f"{id} #{seen[id]}")
    return found


def _roots() -> Iterator[tuple[DeviceType, Any]]:
    cl = library()
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # the loader's way to say that it found none
        return
    for platform in platforms:
        try:
            devices = platform.get_devices()
        except cl.Error as why:
            log.info("the OpenCL platform %s has no device: %s", platform.name, why)
            continue
        for device in devices:
            if not (device.available and device.compiler_available):
                log.info("the OpenCL device %s is not available, or has no compiler", device.name)
                continue
            if (type := device_type(device)) is not None:
                yield type, device


def device_type(device: Any) -> DeviceType | None:
    """Our type of an OpenCL device; None for one that runs no kernels."""
    kinds = library().device_type
    if any(name in device.platform.name.lower() for name in SIMULATORS):
        return DeviceType.TEST
    if device.type & kinds.GPU:
        return DeviceType.IGPU if device.host_unified_memory else DeviceType.GPU
    if device.type & kinds.ACCELERATOR:
        return DeviceType.ACCEL
    return DeviceType.CPU if device.type & kinds.CPU else None


def _broken() -> str:
    """The drivers that are registered and did not load."""
    folders = (Path("/etc/OpenCL/vendors"), Path(library().__file__ or "").parent / ".libs")
    files = [str(f) for folder in folders if folder.is_dir() for f in sorted(folder.glob("*.icd"))]
    return f" ({', '.join(files)} {'names a driver' if len(files) == 1 else 'name drivers'} that did not load)" if files else ""


# -- parts and repeats ------------------------------------------------------------------------------------------


def _units(root: Any, type: DeviceType, name: str, id: str) -> list[Found]:
    """The device whole, or its parts and repeats where the settings ask for them."""
    shared = Shared(root=root)
    parts = _parts(root, name, settings().opencl_subdevices)
    members = [part for part in parts for _ in range(max(1, settings().opencl_repeats))]
    shared.members += parts
    if len(members) == 1:
        return [Found(root, shared, _describe(root, type, name, id, root.name.strip()))]
    kind = "part" if len(parts) > 1 else "repeat"
    return [Found(part, shared, _describe(part, type, f"{name}.{k}", f"{id}.{k}", f"{root.name.strip()}, {kind} {k + 1} of {len(members)}"))
            for k, part in enumerate(members)]


def _parts(root: Any, name: str, n: int) -> list[Any]:
    """`n` equal parts of a device; itself where it cannot be parted so."""
    if n < 2:
        return [root]
    cl = library()
    try:
        each = root.max_compute_units // n
        if each == 0:
            raise ValueError(f"it has {root.max_compute_units} compute units")
        return list(root.create_sub_devices([cl.device_partition_property.EQUALLY, each]))[:n]
    except (cl.Error, ValueError) as why:
        log.warning("%s (%s) cannot be parted into %d sub-devices (%s): it is used whole", name, root.name.strip(), n, why)
        return [root]


# -- description ------------------------------------------------------------------------------------------------


def _describe(d: Any, type: DeviceType, name: str, id: str, what: str) -> Device:
    cores = f"{d.max_compute_units} compute unit{'s' * (d.max_compute_units != 1)}"
    driver = d.platform.version.partition("  ")[0].split(maxsplit=2)[2:]  # behind "OpenCL 3.0"
    text = f"{what}, {cores}, {driver[0].strip('() ') if driver else d.platform.name.strip()}"
    return Device(name, text, type, id, Capabilities(asynchronous=True, events=True), lambda: _memory(d))


def _memory(d: Any) -> tuple[int | None, int | None]:
    """Total bytes, and those free where the driver tells (AMD's extension, in KiB)."""
    free = _ask(d, "amd", "global_free_memory_amd")
    return d.global_mem_size, int(free[0]) * 1024 if free else None


def _ask(d: Any, vendor: str, attribute: str) -> Any:
    """A fact that only drivers with this vendor's extension know, else None."""
    if f"cl_{vendor}_device_attribute_query" not in d.extensions.split():
        return None
    try:
        return getattr(d, attribute, None)
    except library().Error:
        return None


def _stable_id(d: Any) -> str:
    """The PCI address where the driver tells it, as other backends name the same hardware; else platform and device."""
    return pci_address(d) or f"{d.platform.name.strip()}/{d.name.strip()}"


def pci_address(d: Any) -> str:
    """"0000:01:00.0", or "" where it is not known."""
    bus, slot = _ask(d, "nv", "pci_bus_id_nv"), _ask(d, "nv", "pci_slot_id_nv")
    if isinstance(bus, int) and isinstance(slot, int):
        domain = _ask(d, "nv", "pci_domain_id_nv") or 0
        return f"{domain:04x}:{bus:02x}:{slot >> 3:02x}.{slot & 7}"
    topology = _ask(d, "amd", "topology_amd")
    if topology is not None:
        return f"0000:{topology.bus & 255:02x}:{topology.device & 255:02x}.{topology.function & 7}"
    return ""

