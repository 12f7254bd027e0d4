"""Toy ops, a backend that computes them with NumPy, and random graphs: what the scheduler's tests are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from engine.backend import HOST, Backend, Buffer, BufferType, Capabilities, Device, Event, HostBuffer, KernelTable, Plan, place
from engine.backends.null import NullBackend
from engine.dtypes import F32, I32
from engine.graph import Graph
from engine.op import Op, Step, op
from engine.rewrite import fuse
from engine.tensor import Tensor, input_tensor, leaf

ROWS, COLUMNS = 4, 8


@op("x[r, n], y[r, n] -> z[r, n]", groups="r", inplace="x")
def add(row, x, y, z, n):
    pass


@op("x[r, n] -> y[r, n]", groups="r", inplace="x", factor=1.0)
def scale(row, x, y, n, factor):
    pass


@op("x[r, n], s?[n] -> y[r, n]", groups="r")
def shift(row, x, s, y, n):
    pass


@op("w[m, k], x[n, k] -> y[n, m]", groups="n m")
def product(column, row, w, x, y, k):
    pass


@op("x[m, n], ids[r] -> y[r, n]", groups="r", types={"ids": [I32]})
def get_rows(row, x, ids, y, n):
    pass


@op("x[r, n], ids[r], y[m, n] -> y", groups="r", types={"ids": [I32]})
def set_rows(row, x, ids, y, n):
    pass


@op("x[r, n], y[r, n] -> z[r, n]", groups="r", factor=1.0, inplace="x", fuses=add.pattern(scale.pattern("x", factor="factor"), "y"))
def scale_add(row, x, y, z, n, factor):
    pass


@op("x[r, n] -> y[r, n]", groups="r")
def prepare_x(row, x, y, n):
    pass


def _set_rows(x, ids, y):
    y[ids] = x
    return y


MEANING: dict[Op, Callable[..., np.ndarray]] = {
    add: lambda x, y: x + y,
    scale: lambda x, factor: x * np.float32(factor),
    shift: lambda x, s: x - np.float32(1) if s is None else x - s,
    product: lambda w, x: np.stack([(w * row).sum(1) for row in x]),  # columns apart, so that their number changes no bit
    get_rows: lambda x, ids: x[ids],
    set_rows: _set_rows,
    scale_add: lambda x, y, factor: x * np.float32(factor) + y,
    prepare_x: lambda x: x.copy(),
}
OPS = (add, scale, shift, product, get_rows, set_rows)
ALL_OPS = tuple(MEANING)


def array_of(t: Tensor) -> np.ndarray:
    buffer = t.root.buffer
    assert isinstance(buffer, HostBuffer), f"{t} has no memory"
    return buffer.array(t)


def compute(step: Step) -> None:
    """Run a step on its tensors' memory."""
    operands = [array_of(s) if s is not None else None for s in step.srcs]
    result = MEANING[step.op](*operands, **step.params)
    array_of(step.out)[...] = result


class ToyEvent(Event):
    def wait(self) -> None:
        self.backend.synchronize()


class ToyPlan(Plan):
    def __init__(self, backend: ToyBackend, steps: Sequence[Step]) -> None:
        self.backend, self.steps = backend, steps

    def run(self) -> None:
        for s in self.steps:
            self.backend.give(lambda s=s: compute(s))


class ToyBackend(NullBackend):
    """Computes with NumPy, in its own memory or the host's.

    Args:
        lazy: does nothing before it must: work and copies are queued until `synchronize`.
        fuses: rewrites scale + add to one op and puts a conversion before each product.
        offloads: whether it wants host weights copied over.
    """

    def __init__(self, name: str = "cpu", ops: Iterable[Op] = OPS, *, buffer_type: BufferType | None = None, lazy: bool = False,
                 events: bool = False, fuses: bool = False, offloads: Callable[[Tensor], bool] = lambda node: False, **more: Any) -> None:
        super().__init__(ops, name, buffer_type=buffer_type, **more)
        old = self.device
        self.device = Device(name, old.description, old.type, old.id, Capabilities(asynchronous=lazy, events=events))
        self.lazy, self.fuses, self.offloads = lazy, fuses, offloads
        self.queue: list[Callable[[], None]] = []
        self.log: list[str] = []

    def give(self, work: Callable[[], None]) -> None:
        if self.lazy:
            self.queue.append(work)
        else:
            work()

    def wants_offload(self, node: Tensor) -> bool:
        return self.offloads(node)

    def prepare(self, steps: Sequence[Step]) -> Plan:
        return ToyPlan(self, steps)

    def optimize(self, nodes: Sequence[Tensor], needed: Collection[Tensor] = ()) -> list[Step]:
        return list(_rewritten(nodes, needed)) if self.fuses else super().optimize(nodes, needed)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        self.log.append(f"copy {src.name}")
        super().copy(src, dst)

    def copy_async(self, src: Tensor, dst: Tensor) -> bool:
        self.log.append(f"queue {src.name}")
        self.give(lambda: Backend.copy(self, src, dst))
        return True

    def record(self) -> Event | None:
        return ToyEvent(self)

    def synchronize(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()


def _rewritten(nodes: Sequence[Tensor], needed: Collection[Tensor]) -> Iterable[Step]:
    yield from fuse(KernelTable([scale_add], 1), list(_converted(nodes)), needed)


def _converted(nodes: Sequence[Tensor]) -> Iterable[Step]:
    for n in nodes:
        if n.op is product:
            x = n.srcs[1]
            ready = Tensor(F32, x.shape, name=f"ready-{x.name}")
            yield Step(prepare_x, (x,), ready, {})
            yield Step(product, (n.srcs[0], ready), n, n.params, (n,))
        else:
            yield Step.of(n)


def cpu(ops: Iterable[Op] = OPS, **more: Any) -> ToyBackend:
    return ToyBackend("cpu", ops, buffer_type=HOST, **more)


def weight(name: str, shape: Sequence[int] = (COLUMNS, COLUMNS), type: BufferType = HOST, usage: str = "weights", seed: int = 1) -> Tensor:
    """A leaf with values in memory of `type`."""
    t = leaf(F32, shape, name)
    buffer = type.allocate(t.nbytes, usage)
    place(t, buffer)
    buffer.set(t, values(shape, seed))
    return t


def values(shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, tuple(shape)).astype(np.float32)


# -- random graphs ----------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A graph, backends to run it, pins, values for the inputs, and what the outputs must be."""

    graph: Graph
    backends: list[ToyBackend]
    pins: dict[Tensor, Backend]
    feeds: dict[Tensor, np.ndarray]
    lasting: dict[Tensor, np.ndarray] = field(default_factory=dict)  # leaves with memory, and their first content

    def restore(self) -> None:
        for t, data in self.lasting.items():
            buffer = t.buffer
            assert isinstance(buffer, Buffer)
            buffer.set(t, data)

    def expected(self) -> list[np.ndarray]:
        """Every node in order, on memory of its own."""
        memory: dict[Tensor, np.ndarray] = {}
        for t in self.graph.tensors:
            if t.view_of is None:
                data = self.feeds.get(t, self.lasting.get(t))
                memory[t] = data.copy() if data is not None else np.zeros(t.shape, np.float32)
        for n in self.graph.nodes:
            if not n.is_view_op:
                operands = [_seen(memory, s) if s is not None else None for s in n.srcs]
                _seen(memory, n)[...] = MEANING[n.op](*operands, **n.params)
        return [_seen(memory, t).copy() for t in self.graph.outputs]


def _seen(memory: dict[Tensor, np.ndarray], t: Tensor) -> np.ndarray:
    return np.ndarray(t.shape, t.dtype.numpy, memory[t.root].data, t.root_offset, t.strides)


@st.composite
def cases(draw: st.DrawFn, lazy: bool = False, pinned: bool = True) -> Case:
    """One to three backends with and without shared memory; weights, caches, inputs, views, writes into views, pins."""
    backends = draw(machines(lazy))
    case = Case(Graph([]), backends, {}, {})
    pool = _leaves(draw, case)
    caches = [t for t in case.lasting if not t.is_weight]
    for i in range(draw(st.integers(1, 14), label="nodes")):
        pool.append(_node(draw, i, pool, caches, case))
    extra = draw(st.lists(st.sampled_from(pool), max_size=3), label="outputs")
    case.graph = Graph(dict.fromkeys([pool[-1], *extra]))
    if pinned:
        for t in draw(st.lists(st.sampled_from(case.graph.nodes or [pool[-1]]), max_size=2), label="pins"):
            case.pins[t] = draw(st.sampled_from(backends))
    return case


@st.composite
def machines(draw: st.DrawFn, lazy: bool) -> list[ToyBackend]:
    backends = []
    for name in draw(st.sampled_from([[], ["gpu"], ["accel"], ["gpu", "accel"], ["gpu", "gpu2"], ["gpu", "twin"]]), label="machine"):
        ops = draw(st.lists(st.sampled_from(OPS), unique=True), label=f"{name} runs")
        shared = HOST if name == "accel" else backends[0].buffer_type if name == "twin" else None
        more = {"lazy": True, "events": draw(st.booleans())} if lazy and draw(st.booleans(), label=f"{name} is lazy") else {}
        if draw(st.booleans(), label=f"{name} fuses"):
            more["fuses"] = True
        offload = draw(st.booleans(), label=f"{name} offloads")
        backends.append(ToyBackend(name, ops, buffer_type=shared, offloads=lambda node, yes=offload: yes, **more))
    return [*backends, cpu(fuses=draw(st.booleans(), label="cpu fuses"))]


def _leaves(draw: st.DrawFn, case: Case) -> list[Tensor]:
    pool = []
    for i in range(draw(st.integers(1, 2), label="inputs")):
        t = input_tensor(F32, (ROWS, COLUMNS), f"input{i}")
        case.feeds[t] = values(t.shape, i)
        pool.append(t)
    for i in range(draw(st.integers(0, 3), label="lasting leaves")):
        usage = draw(st.sampled_from(["weights", "cache"]))
        type = draw(st.sampled_from(case.backends)).buffer_type
        t = weight(f"{usage}{i}", (COLUMNS, COLUMNS), type, usage, seed=10 + i)
        case.lasting[t] = values(t.shape, 10 + i)
        pool.append(t)
    return pool


def _node(draw: st.DrawFn, i: int, pool: list[Tensor], caches: list[Tensor], case: Case) -> Tensor:
    small = [t for t in pool if t.shape == (ROWS, COLUMNS)]
    square = [t for t in pool if t.shape == (COLUMNS, COLUMNS)]
    one = st.sampled_from(small)
    kinds = ["add", "scale", "shift", "view", "again", "write"] + (["product", "slice", "read"] if square else [])
    match draw(st.sampled_from(kinds), label=f"node {i}"):
        case "add":
            return add(draw(one), draw(one))
        case "scale":
            return scale(draw(one), factor=2.0)
        case "shift":
            return shift(draw(one), draw(st.sampled_from(square))[0] if square and draw(st.booleans()) else None)
        case "view":
            return draw(one)[0:ROWS]
        case "again":
            x = draw(one)
            return x.transpose().transpose() if not x.is_contiguous else x.reshape(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
        case "slice":
            start = draw(st.integers(0, COLUMNS - ROWS))
            return draw(st.sampled_from(square))[start : start + ROWS]
        case "product":
            return product(draw(st.sampled_from(square)), draw(one))
        case "read":
            return get_rows(draw(st.sampled_from(square)), _ids(draw, case, COLUMNS))
    computed = [t for t in small if t.root.op is not None]
    targets = [*caches, *computed]
    if not targets:
        return scale(draw(one), factor=0.5)
    target = draw(st.sampled_from(targets))
    x = draw(st.sampled_from([t for t in small if t.root is not target.root] or [scale(draw(one), factor=0.5)]))
    return set_rows(x, _ids(draw, case, target.shape[0]), target)


def _ids(draw: st.DrawFn, case: Case, n: int) -> Tensor:
    ids = input_tensor(I32, (ROWS,), f"ids{len(case.feeds)}")
    case.feeds[ids] = np.array(draw(st.permutations(range(n)))[:ROWS], np.int32)
    return ids
