"""The contract between the engine and what runs kernels: devices, buffers, kernel tables, plans.

A backend *must* have a name, a device, a kernel table, `prepare` and `synchronize`; it *should* say how much memory there is; it *may*
rewrite its splits in `optimize`, record events and copy asynchronously.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import final

import numpy as np

from engine.dtypes import DType
from engine.errors import AllocationError, UnsupportedOp
from engine.op import Call, Key, Op, Step, Variant
from engine.tensor import Tensor

AsIf = Mapping[Tensor, "BufferType"]
_NOTHING: AsIf = MappingProxyType({})


class DeviceType(StrEnum):
    CPU = "CPU"
    GPU = "GPU"
    IGPU = "IGPU"
    ACCEL = "ACCEL"
    META = "META"
    TEST = "TEST"


@dataclass(frozen=True)
class Capabilities:
    """What a device can do beside computing. Each is a promise: false is always safe."""

    asynchronous: bool = False
    events: bool = False
    host_buffer: bool = False
    buffer_from_host_memory: bool = False
    mmap: bool = False


@dataclass(frozen=True)
class Device:
    """One device of a backend. `total` and `free` are bytes, None where unknown; `id` is stable over runs and names the hardware."""

    name: str
    description: str
    type: DeviceType
    id: str
    capabilities: Capabilities = Capabilities()
    memory: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)

    @property
    def total(self) -> int | None:
        return self.memory()[0]

    @property
    def free(self) -> int | None:
        return self.memory()[1]


# -- memory -----------------------------------------------------------------------------------------------------


class BufferType(ABC):
    """Where memory comes from, and how weights lie in it.

    Attributes:
        name: as `-ot` and messages show it.
        alignment: bytes, a power of two.
        max_nbytes: the largest single buffer.
        is_host: whether its memory is readable by the host at an address.
    """

    name: str
    alignment: int = 64
    max_nbytes: int = 1 << 62
    is_host: bool = False

    @abstractmethod
    def allocate(self, nbytes: int, usage: str = "compute") -> Buffer:
        """Memory of `nbytes`, or AllocationError. Its content is zero."""

    def holds(self, dtype: DType) -> bool:
        """Whether weights of this type can lie here."""
        return True

    def nbytes_of(self, tensor: Tensor) -> int:
        """Bytes `tensor` takes here, padding included."""
        return tensor.nbytes

    def layout_of(self, dtype: DType) -> str:
        """"plain" (the file's order) or "lanesN" (N rows side by side) for weights of `dtype` in this memory."""
        return "plain"


class Buffer(ABC):
    """A piece of memory of one buffer type. `usage` is "weights", "cache" or "compute"."""

    def __init__(self, type: BufferType, nbytes: int, usage: str) -> None:
        self.type, self.nbytes, self.usage = type, nbytes, usage

    @abstractmethod
    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        """Copy the tensor's bytes, in the file's layout, into this buffer."""

    @abstractmethod
    def get(self, tensor: Tensor) -> np.ndarray:
        """The tensor's bytes in the file's layout, as uint8: `get` undoes `set` byte for byte."""


class HostBuffer(Buffer):
    """Memory of this process."""

    def __init__(self, type: BufferType, memory: np.ndarray, usage: str) -> None:
        super().__init__(type, memory.nbytes, usage)
        self.memory = memory  # uint8
        self.address = memory.ctypes.data

    def array(self, tensor: Tensor) -> np.ndarray:
        """The tensor as a NumPy view of this memory: elements (bf16 as uint16) or block records."""
        n = tensor.shape[-1] // tensor.dtype.block_size
        return np.ndarray((*tensor.shape[:-1], n), tensor.dtype.numpy, self.memory.data,
                          tensor.root.buffer_offset + tensor.root_offset, tensor.strides)

    def set(self, tensor: Tensor, data: np.ndarray) -> None:
        target = self.array(tensor)
        target[...] = np.ascontiguousarray(data).view(np.uint8).reshape(-1).view(tensor.dtype.numpy).reshape(target.shape)

    def get(self, tensor: Tensor) -> np.ndarray:
        return np.ascontiguousarray(self.array(tensor)).reshape(-1).view(np.uint8)


def aligned_zeros(nbytes: int, alignment: int = 64) -> np.ndarray:
    """uint8 memory at an aligned address, zeroed lazily by the system.

    Raises:
        AllocationError: a negative size, an alignment that is no power of two, or no memory.
    """
    if nbytes < 0 or alignment < 1 or alignment & (alignment - 1):
        raise AllocationError(f"cannot allocate {nbytes} bytes aligned to {alignment}: a size >= 0 and a power of two are expected")
    try:
        raw = np.zeros(nbytes + alignment, np.uint8)
    except (MemoryError, ValueError, OverflowError):
        raise AllocationError(f"no memory for {nbytes} bytes on the host; use a shorter context (-c) or a smaller batch (-ub)") from None
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


class HostBufferType(BufferType):
    """Ordinary memory, the file's layout: shared by every backend that runs on the host."""

    name, is_host = "host", True

    def allocate(self, nbytes: int, usage: str = "compute") -> HostBuffer:
        return HostBuffer(self, aligned_zeros(nbytes, self.alignment), usage)

    def wrap(self, memory: np.ndarray, usage: str = "weights") -> HostBuffer:
        """Memory that exists already, such as a mapped file."""
        return HostBuffer(self, memory, usage)


HOST = HostBufferType()


def place(tensor: Tensor, buffer: Buffer, offset: int = 0) -> Tensor:
    """Give a root tensor its memory."""
    assert tensor.view_of is None, f"{tensor} is a view"
    tensor.buffer, tensor.buffer_offset = buffer, offset
    return tensor


# -- what can run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Support:
    """An answer with its reason: truthy and naming the variant that runs, or falsy and naming the requirement not met."""

    ok: bool
    variant: str = ""
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def yes(variant: str) -> Support:
    return Support(True, variant=variant)


def no(reason: str) -> Support:
    return Support(False, reason=reason)


class Row(ABC):
    """One line of a kernel table: a way to run a key."""

    name: str

    @abstractmethod
    def refusal(self, call: Call) -> str | None:
        """Why this row does not fit the call, or None."""

    def fitting(self, call: Call, variant: str | None = None) -> tuple[str, str]:
        """The variant's name where this row fits, else "" and why not; `variant` asks for one by name."""
        if variant and variant != self.name:
            return "", f"{self.name} was not asked for"
        why = self.refusal(call)
        return (self.name, "") if why is None else ("", why)


@dataclass(frozen=True)
class KernelRow(Row):
    """A kernel of the lane language."""

    op: Op
    variant: Variant

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.variant.name

    def refusal(self, call: Call) -> str | None:
        for operand in call.tensors:
            want, have = self.variant.layouts.get(operand, "plain"), call.layouts.get(operand, "plain")
            if (f"{want}{call.lanes}" if want == "lanes" else want) != have:
                return f"{self.name}: operand {operand} lies {have}, this kernel reads {want}"
        why = self.variant.when(call) if self.variant.when else None
        return f"{self.name}: {why}" if why else None


@dataclass(frozen=True)
class ThroughRow(Row):
    """The key is run by converting one operand first: MUL_MAT of quantised weights through QUANTIZE_ROWS."""

    operand: str
    convert: Op
    dtype: DType
    inner: tuple[Row, ...]

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.convert.name} + {self.inner[0].name}"

    def refusal(self, call: Call) -> str | None:
        name, why = self.fitting(call)
        return None if name else why

    def fitting(self, call: Call, variant: str | None = None) -> tuple[str, str]:
        why = f"no kernel for converted {self.operand}"
        for row in self.inner:
            name, said = row.fitting(call, None if variant == self.name else variant)
            if name:
                return f"{self.convert.name} + {name}", ""
            why = said if variant in (None, self.name, row.name) else why
        return "", why


class KernelTable:
    """Everything one backend can run. Its keys are the backend's capabilities; nothing else is consulted.

    Attributes:
        rows: key -> the ways to run it, fastest first.
        fused: its ops that stand for several others, the largest pattern first.
    """

    def __init__(self, ops: Iterable[Op], lanes: int, native: Mapping[Key, tuple[Row, ...]] = MappingProxyType({})) -> None:
        self.lanes = lanes
        self.rows: dict[Key, tuple[Row, ...]] = dict(native)
        self.forced: dict[Tensor, str] = {}  # nodes whose variant the user decides
        ops = tuple(ops)
        for op in ops:
            self._declare(op)
        self._names = {name for name, _ in self.rows}
        self.fused = tuple(sorted((op for op in ops if op.fuses is not None), key=lambda op: -op.fuses.n_ops if op.fuses else 0))

    def _declare(self, op: Op) -> None:
        names = [o.name for o in op.contract.views]
        for key in op.keys():
            rows = tuple(KernelRow(op, v) for v in op.variants if v.least_lanes <= self.lanes and all(
                t in {d.name for d in v.types.get(n, op.types[n])} for n, t in zip(names, key[1], strict=True)))
            self.rows[key] = (*self.rows.get(key, ()), *rows)
            for operand, (convert, dtype) in op.through.items():
                at = names.index(operand)
                if key[1][at] == dtype.name:
                    plain = (key[0], (*key[1][:at], "f32", *key[1][at + 1 :]))
                    self.rows[plain] = (*self.rows.get(plain, ()), ThroughRow(operand, convert, dtype, rows))

    def keys_of(self, op: Op | str) -> list[Key]:
        name = op if isinstance(op, str) else op.name
        return [k for k in self.rows if k[0] == name]

    def lookup(self, call: Call, variant: str | None = None) -> tuple[Row | None, str]:
        """The first row that fits, or None and the first requirement not met. `variant` asks for one row by name."""
        row, _, why = self.first(call, variant)
        return row, why

    def first(self, call: Call, variant: str | None) -> tuple[Row | None, str, str]:
        """The first row that fits, its variant's name, or why none does."""
        rows = self.rows.get(_without_optional(call), ())
        refusals = []
        for row in rows:
            name, why = row.fitting(call, variant)
            if name:
                return row, name, ""
            refusals.append(why)
        if refusals:
            asked = [w for w in refusals if not w.endswith("was not asked for")]
            names = ", ".join(r.name for r in rows)
            return None, "", asked[0] if asked else f"{call.op.name} has no variant {variant!r}: {names}"
        return None, "", f"no kernel for {call.op.name}({', '.join(call.types)}){self._first_wrong_type(call)}"

    def _first_wrong_type(self, call: Call) -> str:
        """The first operand that no key has, behind the types before it."""
        keys = [key[1] for key in self.keys_of(call.op)]
        for i, (o, name) in enumerate(zip(call.op.contract.views, _without_optional(call)[1], strict=True)):
            known = dict.fromkeys(key[i] for key in keys)
            if known and name not in known:
                return f": {o.name} is {name}, {' or '.join(known)} is expected"
            keys = [key for key in keys if key[i] == name]
        return ""

    def supports(self, node: Tensor | Step, as_if: AsIf = _NOTHING, variant: str | None = None) -> Support:
        """Can this table run `node`? `as_if` supposes weights to lie in other memory than they do."""
        op = node.op
        if op is not None and op.name not in self._names:  # the usual refusal of a table of few ops, without building the call
            return no(f"no kernel for {op.name}")
        _, name, why = self.first(self.call(node, as_if), variant)
        return yes(name) if name else no(why)

    def call(self, node: Tensor | Step, as_if: AsIf = _NOTHING) -> Call:
        step = Step.of(node) if isinstance(node, Tensor) else node
        layouts = {}
        for operand, t in zip(step.op.contract.operands, step.srcs, strict=True):
            where = as_if.get(t.root) or (t.root.buffer.type if t.root.buffer else None) if t is not None else None
            if where is not None and t is not None and (layout := where.layout_of(t.dtype)) != "plain":
                layouts[operand.name] = layout
        return Call.of(step, layouts, self.lanes)


def _without_optional(call: Call) -> Key:
    """The key in the table: an operand left out counts as its first declared type."""
    types = tuple(t if t != "-" else call.op.types[o.name][0].name for o, t in zip(call.op.contract.views, call.types, strict=True))
    return call.op.name, types


# -- who runs it ------------------------------------------------------------------------------------------------


class Plan(ABC):
    """A split made ready: addresses are final, nothing is looked up again."""

    @abstractmethod
    def run(self) -> None:
        """Run every step in order. May return before the work is done if the device is asynchronous."""


class Event(ABC):
    """A point in a backend's stream."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the point is reached."""


class Backend(ABC):
    """A stream of work on one device. The class is an entry point of the group `engine.backends`.

    Attributes:
        name: as `--device` takes it.
        score: 0 means "not on this machine"; the highest wins where several variants offer one name.
    """

    name: str
    device: Device
    table: KernelTable
    buffer_type: BufferType

    @classmethod
    @abstractmethod
    def discover(cls, ops: Sequence[Op]) -> list[Backend]:
        """One backend per device of this machine. Raises DeviceError with a reason where there is none."""

    @classmethod
    def score(cls) -> int:
        return 1

    @classmethod
    def may_be_default(cls) -> bool:
        """Whether this machine may have a device that is used without being named. A cheap no spares the others its discovery."""
        return True

    @final
    def supports(self, node: Tensor | Step, as_if: AsIf = _NOTHING) -> Support:
        """supports_op: a look-up in the kernel table. VIEW, RESHAPE, PERMUTE and TRANSPOSE need no kernel."""
        if isinstance(node, Tensor) and node.is_view_op:
            return yes("view")
        return self.table.supports(node, as_if)

    def reads(self, type: BufferType) -> bool:
        """supports_buft: can kernels of this backend read memory of `type` where it lies?"""
        return type is self.buffer_type

    @property
    def weight_types(self) -> Sequence[BufferType]:
        """Buffer types for weights, the fastest first."""
        return (self.buffer_type,)

    def wants_offload(self, node: Tensor) -> bool:
        """offload_op: is it worth copying host weights over for this node?"""
        return False

    def optimize(self, nodes: Sequence[Tensor], needed: Collection[Tensor] = ()) -> list[Step]:
        """The split's nodes (views left out) as steps, after this backend's own rewriting.

        Every node is replaced by exactly one step, which may stand for several: the last of them is what it writes, the others get no
        memory. `needed` are the nodes that something outside the split reads, outputs included: they must still be written, so a
        fusion never swallows them. Placement and `supports` see nodes, never what is made of them.
        """
        return [Step.of(n) for n in nodes if not n.is_view_op]

    @abstractmethod
    def prepare(self, steps: Sequence[Step]) -> Plan:
        """Compile and bind the steps; every tensor has its memory."""

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Bring `src`, in another backend's memory, into `dst` in ours."""
        assert src.root.buffer is not None and dst.root.buffer is not None
        dst.root.buffer.set(dst, src.root.buffer.get(src))

    def copy_async(self, src: Tensor, dst: Tensor) -> bool:
        """May queue the copy behind this backend's work so far, and say so; False where it cannot: both sides then synchronise first."""
        return False

    def record(self) -> Event | None:
        """An event behind the work so far, or None where the device has none: then `synchronize` is used."""
        return None

    def wait(self, event: Event) -> None:
        """Work given to this backend from now on starts after `event`. By default the host waits; a device that can, queues it."""
        event.wait()

    def synchronize(self) -> None:
        """Wait until everything this backend was given is done, events it was told to wait for included."""

    @contextmanager
    def forced(self, node: Tensor, variant: str | None) -> Iterator[None]:
        """Inside, `node` runs with this variant of its key instead of the first that fits."""
        if variant is None:
            yield
            return
        self.table.forced[node] = variant
        try:
            yield
        finally:
            del self.table.forced[node]

    def set_threads(self, n: int) -> None:
        """Run with `n` threads from now on (0: all allowed cores), where the device is the host."""

    def interrupt(self) -> None:
        """Make a run in progress end early with InterruptedRun, where the device can. Called from any thread."""

    def close(self) -> None:
        """Give back threads and device memory."""

    def require(self, node: Tensor) -> Support:
        """`supports`, or UnsupportedOp."""
        if not (answer := self.supports(node)):
            raise UnsupportedOp(node.name, node.op.name if node.op else "none", node.types, {self.name: answer.reason})
        return answer

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

