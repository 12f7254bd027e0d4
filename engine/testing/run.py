"""One call between guard bytes, on any backend: tensors are placed, filled and read through `Buffer.set` and `get` alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.backend import HOST, Backend, Buffer, BufferType, HostBuffer, KernelTable, Row, place
from engine.dtypes import I8, DType
from engine.errors import ShapeError
from engine.layouts import PackedBuffer, PackedBufferType
from engine.op import Call, Op
from engine.tensor import Tensor, leaf, row_major
from engine.testing.example import Example
from engine.testing.limits import Disagreement, assert_close
from engine.testing.values import Array, byte_rows

GUARD = 192  # bytes before and behind every tensor, at least
POISONS = (0xFF, 0x5A)  # of what is to be written: NaN, or a number (1.5e16 in f32), so that neither can pass for a result


class _InterleavedBuffer(HostBuffer):
    def __init__(self, type: BufferType, memory: Array, usage: str, packed: PackedBufferType) -> None:
        super().__init__(type, memory, usage)
        self._packed = PackedBuffer(packed, memory, usage)

    def set(self, tensor: Tensor, data: Array) -> None:
        self._packed.set(tensor, data)

    def get(self, tensor: Tensor) -> Array:
        return self._packed.get(tensor)


class InterleavedBufferType(PackedBufferType):
    """Host memory with `lanes` rows of quantised weights side by side, for backends that read the host's memory as it lies."""

    def allocate(self, nbytes: int, usage: str = "weights") -> Any:
        return _InterleavedBuffer(self, HOST.allocate(nbytes, usage).memory, usage, self)


@dataclass
class Guards:
    """What a run changed that it must not: names of tensors whose inputs, gaps or surroundings differ."""

    changed: list[str] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        return not self.changed


@dataclass
class _Held:
    """A tensor, the memory around it, and what that memory held before the run."""

    tensor: Tensor
    buffer: Buffer
    before: Array
    start: int
    is_result: bool = False

    def now(self) -> Array:
        return self.buffer.get(place(leaf(I8, (len(self.before),), "memory"), self.buffer)).copy()

    def array(self, image: Array) -> Array:
        t = self.tensor
        return np.ndarray(units_of(t), t.dtype.numpy, image.data, self.start + t.root_offset, t.strides)

    def is_intact(self) -> bool:
        now = self.now()
        if self.is_result:
            self.array(now)[...] = self.array(self.before)
        return bool(np.array_equal(now, self.before))


@dataclass
class _HeldWeights:
    """Weights in memory with a layout of its own, between two more matrices: only whole matrices can be set and read there."""

    tensor: Tensor
    buffer: Buffer
    contents: dict[Tensor, Array]

    def is_intact(self) -> bool:
        return all(np.array_equal(self.buffer.get(t).reshape(-1), data) for t, data in self.contents.items())


def units_of(t: Tensor) -> tuple[int, ...]:
    """The shape in elements, or in blocks."""
    return (*t.shape[:-1], t.shape[-1] // t.dtype.block_size)


def _guard(memory: BufferType) -> int:
    return -(-GUARD // memory.alignment) * memory.alignment


def _hold(memory: BufferType, root: Tensor, tensor: Tensor, data: Array | None, is_result: bool = False, poison: int = POISONS[0]) -> _Held:
    """Give `root` memory between guards. Gaps and guards hold NaN for operands, so that a stray read shows in the result."""
    guard, fill = _guard(memory), 0xFF if root.dtype.name[0] not in "iu" else 0xA5
    image = np.full(2 * guard + root.nbytes, 0xA5 if is_result else fill, np.uint8)
    image[guard : guard + root.nbytes] = poison if is_result and data is None else fill
    buffer = memory.allocate(len(image))
    place(root, buffer, guard)
    held = _Held(tensor, buffer, image, guard, is_result)
    if data is not None and data.size:
        held.array(image)[...] = data
    buffer.set(place(leaf(I8, (len(image),), "memory"), buffer), image)
    return held


def _hold_weights(memory: BufferType, root: Tensor, data: Array) -> _HeldWeights:
    """Weights in memory with a layout of its own; the matrices around them hold NaN."""
    matrices = [leaf(root.dtype, (1, root.dtype.block_size), "before"), root, leaf(root.dtype, (1, root.dtype.block_size), "behind")]
    around = np.full(root.dtype.nbytes, 0xFF, np.uint8)
    contents = dict(zip(matrices, (around, byte_rows(data).reshape(-1), around), strict=True))
    offsets = [0]
    for t in matrices:
        offsets.append(offsets[-1] + -(-memory.nbytes_of(t) // memory.alignment) * memory.alignment)
    buffer = memory.allocate(offsets[-1], "weights")
    for t, offset in zip(matrices, offsets, strict=False):
        buffer.set(place(t, buffer, offset), contents[t])
    return _HeldWeights(root, buffer, contents)


def _operand(example: Example, name: str, memory: BufferType, weights: BufferType | None) -> _Held | _HeldWeights:
    dtype, shape, layout = example.dtypes[name], example.shapes[name], example.layouts.get(name)
    data = example.operands[name]
    if weights is not None and weights.layout_of(dtype) != "plain":
        return _hold_weights(weights, leaf(dtype, shape, name), data)
    is_result = example.op.contract.writes and name == example.op.contract.result.name
    if layout is None:
        root = leaf(dtype, shape, name)
        return _hold(memory, root, root, data, is_result)
    units = _units(dtype, shape)
    strides = layout.strides(units)
    reach = 1 + sum((n - 1) * s for n, s in zip(units, strides, strict=True)) if 0 not in units else 1
    root = leaf(dtype, ((layout.offset + reach + 3) * dtype.block_size,), f"{name} (memory)")
    view = root.view(shape, [s * dtype.nbytes for s in strides], layout.offset * dtype.nbytes, name)
    return _hold(memory, root, view, data, is_result)


def _units(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // dtype.block_size)


class _ForcedTable(KernelTable):
    """Another table where one op runs one variant only."""

    def __init__(self, table: KernelTable, op: Op, variant: str) -> None:
        super().__init__((), table.lanes, native=table.rows)
        self._table, self._op, self._variant = table, op, variant

    def first(self, call: Call, variant: str | None) -> tuple[Row | None, str, str]:
        return self._table.first(call, self._variant if variant is None and call.op is self._op else variant)


@contextmanager
def forced(backend: Backend, op: Op, variant: str | None) -> Iterator[None]:
    """Inside, `backend` runs `op` by the row named `variant` and by no other; None leaves the choice to the table."""
    if variant is None:
        yield
        return
    own = backend.table
    backend.table = _ForcedTable(own, op, variant)
    try:
        yield
    finally:
        backend.table = own


def run_guarded(backend: Backend, example: Example, variant: str | None = None, weights: BufferType | None = None,
                in_place: bool = False) -> tuple[Array, Guards]:
    """Run one call between guard bytes, in the backend's own memory; the stored result, dense, and what was changed beside it.

    Args:
        variant: the row of the kernel table to run; the first that fits by default.
        weights: memory for operands that it has a layout for.
        in_place: the result overwrites the operand that `op.inplace` names.

    Raises:
        LanewiseError: the backend refuses the call.
    """
    memory, poison = backend.buffer_type, POISONS[example.seed % 2]
    held = {n: _operand(example, n, memory, weights) for n in example.shapes}
    srcs = [held[o.name].tensor if o.name in held else None for o in example.op.contract.operands]
    node = example.op(*srcs, **example.params)
    result = _result(example, node, held, memory, in_place, poison)
    with forced(backend, example.op, variant):
        backend.require(node)
        steps = backend.optimize([node])
        added = [_hold(memory, s.out, s.out, None, True, poison) for s in steps if s.out is not node]
        plan = backend.prepare(steps)
        with np.errstate(all="ignore"):  # of backends that compute with NumPy
            plan.run()
            backend.synchronize()
    got = result.array(result.now()).copy()
    return got, Guards([h.tensor.name for h in (*held.values(), *added, result) if not h.is_intact()])


def _result(example: Example, node: Tensor, held: dict[str, _Held | _HeldWeights], memory: BufferType, in_place: bool,
            poison: int) -> _Held:
    """Where the result goes: memory of its own, the operand that is written, or the operand it may overwrite."""
    op = example.op
    if not op.contract.writes and not in_place:
        return _hold(memory, node, node, None, True, poison)
    under = held[op.contract.result.name if op.contract.writes else op.inplace]
    assert isinstance(under, _Held), f"{under.tensor} cannot be written"
    if op.contract.writes:
        return under
    assert under.tensor.is_contiguous and under.tensor.root is under.tensor, f"{under.tensor} cannot be overwritten"
    place(node, under.buffer, under.start)
    under.is_result = True
    return replace(under, tensor=node)


def check_call(backend: Backend, example: Example, variant: str | None = None, weights: BufferType | None = None) -> Array:
    """Run one call between guards and compare it; the stored result. Raises Disagreement."""
    got, guards = run_guarded(backend, example, variant, weights)
    if not guards.intact:
        raise Disagreement(f"{example}\nmemory that is not the result's was changed: {', '.join(guards.changed)}")
    assert_close(example, got)
    return got


def refusal(backend: Backend, example: Example, variant: str | None = None, weights: BufferType | None = None) -> str:
    """Why the table does not take this call, or an empty string. Nothing is allocated."""
    try:
        node, leaves = node_of(example)
    except ShapeError as why:
        return str(why)
    as_if = {t: weights for t in leaves if weights is not None and weights.layout_of(t.dtype) != "plain"}
    answer = backend.table.supports(node, as_if, variant)
    return "" if answer else answer.reason


def node_of(example: Example) -> tuple[Tensor, list[Tensor]]:
    """The call as a graph node on leaves without memory. Raises ShapeError."""
    leaves = {n: _shaped(example, n) for n in example.shapes}
    return example.op(*[leaves.get(o.name) for o in example.op.contract.operands], **example.params), list(leaves.values())


def _shaped(example: Example, name: str) -> Tensor:
    """An operand without memory."""
    dtype, shape, layout = example.dtypes[name], example.shapes[name], example.layouts.get(name)
    t = leaf(dtype, shape, name)
    if layout is not None:
        t.strides = tuple(s * dtype.nbytes for s in layout.strides(_units(dtype, shape)))
    else:
        t.strides = row_major(shape, dtype)
    return t
