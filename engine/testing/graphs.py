"""Whole graphs: random ones, which any set of devices must compute like one device alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from engine.backend import HOST, Backend, BufferType, place
from engine.dtypes import F16, F32, I32, Q4_0, Q8_0, DType
from engine.errors import Unplaceable
from engine.graph import Graph
from engine.op import Call, Op
from engine.sched.execute import Executable
from engine.tensor import Tensor, input_tensor, leaf
from engine.testing.limits import Disagreement
from engine.testing.values import Array, byte_rows, elements
from engine.testing_backends import Refuse, VirtualBackend

ROWS, COLUMNS = 5, 64  # of every tensor of a random graph, unless it is a view
GRAPH_NMSE = 1e-6  # between devices with different kernels: as for whole models
Ops = Mapping[str, Op]


@dataclass
class RandomGraph:
    """A recipe: run on anything, any number of times. `text` has a line for each node; `seed` decides the values."""

    steps: tuple[tuple[str, tuple[int, ...]], ...]
    weight_type: DType
    seed: int

    def build(self, ops: Ops, where: BufferType = HOST) -> tuple[Graph, dict[Tensor, Array]]:
        """The graph, with weights in memory of type `where`, and values for its inputs."""
        rng = np.random.default_rng(self.seed)
        feeds: dict[Tensor, Array] = {}
        pool: list[Tensor] = []
        for i in range(2):
            t = input_tensor(F32, (ROWS, COLUMNS), f"input{i}")
            feeds[t] = rng.standard_normal(t.shape).astype(np.float32)
            pool.append(t)
        context = _Context(ops, rng, feeds, self.weight_type, where)
        for name, at in self.steps:
            pool.append(NODES[name](context, *(pool[i % len(pool)] for i in at)))
        used = {s for t in pool for s in t.srcs if s is not None}
        return Graph([t for t in pool if t.op is not None and t not in used and not t.is_view_op] or [pool[-1]]), feeds

    def __repr__(self) -> str:
        nodes = "; ".join(f"{2 + i} = {name}({', '.join(str(a % (2 + i)) for a in at)})" for i, (name, at) in enumerate(self.steps))
        return f"graph({nodes}; weights {self.weight_type}, seed {self.seed})"


@dataclass
class _Context:
    """What nodes are made with."""

    ops: Ops
    rng: np.random.Generator
    feeds: dict[Tensor, Array]
    weight_type: DType
    where: BufferType

    def weight(self, rows: int, columns: int, dtype: DType | None = None) -> Tensor:
        dtype = dtype or self.weight_type
        t = leaf(dtype, (rows, columns), f"weight{len(self.feeds)}")
        data = elements(self.rng.standard_normal((rows, columns)) / np.sqrt(columns), dtype)
        buffer = self.where.allocate(max(1, self.where.nbytes_of(t)), "weights")
        buffer.set(place(t, buffer), byte_rows(data) if dtype.is_block else data)
        return t

    def ids(self, rows: int) -> Tensor:
        t = input_tensor(I32, (ROWS,), f"ids{len(self.feeds)}")
        self.feeds[t] = self.rng.permutation(rows)[:ROWS].astype(np.int32)
        return t


def _added(c: _Context, x: Tensor, y: Tensor) -> Tensor:
    return c.ops["add"](x, y)


def _row_added(c: _Context, x: Tensor) -> Tensor:
    return c.ops["add"](x, c.weight(1, COLUMNS, F32))


def _multiplied(c: _Context, x: Tensor, y: Tensor) -> Tensor:
    return c.ops["rms_norm"](c.ops["mul"](x, y))


def _gated(c: _Context, x: Tensor, y: Tensor) -> Tensor:
    return c.ops["swiglu"](x, y)


def _product(c: _Context, x: Tensor) -> Tensor:
    return c.ops["mul_mat"](c.weight(COLUMNS, COLUMNS), x)


def _attended(c: _Context, x: Tensor, y: Tensor) -> Tensor:
    scores = c.ops["soft_max"](c.ops["mul_mat"](x, y), None, factor=0.125)
    return c.ops["mul_mat"](c.weight(COLUMNS, ROWS, F32), scores)


def _looked_up(c: _Context, x: Tensor) -> Tensor:
    return c.ops["get_rows"](x, c.ids(ROWS))


def _written(c: _Context, x: Tensor, y: Tensor) -> Tensor:
    """Rows of x over those of a copy of y."""
    return c.ops["set_rows"](x, c.ids(ROWS), c.ops["scale"](y, factor=0.5))


def _turned(c: _Context, x: Tensor) -> Tensor:
    """Through two views and a copy: what is transposed twice is what it was, but in other memory."""
    return c.ops["cpy"](c.ops["cpy"](x.transpose()).transpose())


def _scaled(c: _Context, x: Tensor) -> Tensor:
    return c.ops["scale"](x, factor=0.75)


def _normed(c: _Context, x: Tensor) -> Tensor:
    return c.ops["rms_norm"](x)


NODES: dict[str, Callable[..., Tensor]] = {
    "add": _added, "add row": _row_added, "mul": _multiplied, "swiglu": _gated, "mul_mat": _product, "attend": _attended,
    "get_rows": _looked_up, "set_rows": _written, "transpose": _turned, "scale": _scaled, "rms_norm": _normed}
NODE_OPS = frozenset({"add", "mul", "rms_norm", "swiglu", "mul_mat", "soft_max", "get_rows", "set_rows", "scale", "cpy"})
_SOURCES = {"add": 2, "mul": 2, "swiglu": 2, "attend": 2, "set_rows": 2}


@st.composite
def random_graphs(draw: Callable[..., Any], longest: int = 12) -> RandomGraph:
    """Up to `longest` nodes, each of any op on results so far."""
    steps = []
    for i in range(draw(st.integers(1, longest), label="nodes")):
        name = draw(st.sampled_from(list(NODES)), label=f"node {i}")
        steps.append((name, tuple(draw(st.integers(0, 1 + i)) for _ in range(_SOURCES.get(name, 1)))))
    return RandomGraph(tuple(steps), draw(st.sampled_from([F32, F16, Q8_0, Q4_0]), label="weights"), draw(st.integers(0, 2**16)))


@st.composite
def refusals(draw: Callable[..., Any]) -> Refuse:
    """A rule for what a partial backend refuses: some ops, or all small or large calls."""
    ops = frozenset(draw(st.sets(st.sampled_from(sorted(NODE_OPS)), max_size=6), label="ops refused"))
    by_size = draw(st.sampled_from(["", "", "fewer rows than columns"]), label="sizes refused")

    def refuse(call: Call) -> str | None:
        if call.op.name in ops:
            return f"{call.op.name} is refused here"
        first = next(t for t in call.tensors.values() if t is not None)
        return by_size if by_size and len(first.shape) > 1 and first.shape[-2] < first.shape[-1] else None

    return refuse


@st.composite
def device_sets(draw: Callable[..., Any], inner: Backend, floor: Backend) -> list[Backend]:
    """One to three partial devices made of `inner`, some with memory of their own, before the floor, which takes everything."""
    made: list[Backend] = []
    for i in range(draw(st.integers(1, 3), label="devices")):
        private = inner.buffer_type.is_host and draw(st.booleans(), label=f"device {i} has memory of its own")
        made.append(VirtualBackend(inner, f"virtual{i}", draw(refusals(), label=f"device {i}"), private=private))
    return [*made, floor]


def run_graph(recipe: RandomGraph, ops: Ops, backends: Sequence[Backend], weights: int | None = None) -> list[Array]:
    """The outputs of a graph on these backends, as float64. `weights` is the backend in whose memory they lie, None for the host's.

    Raises:
        Unplaceable: nobody takes some node.
    """
    graph, feeds = recipe.build(ops, HOST if weights is None else backends[weights].buffer_type)
    with Executable(backends, graph) as run:
        for t in graph.inputs:
            run.set(t, feeds[t])
        run.run()
        return [run.get(t).astype(np.float64) for t in graph.outputs]


def check_graphs(backend: Backend, floor: Backend, ops: Ops, examples: int = 20, seed: int = 0) -> int:
    """Random graphs on `backend` and partial devices made of it, over the floor, against the floor alone; how many were run.

    Bit for bit where the kernels are the same, else within the limits of whole models.

    Raises:
        Disagreement: other results.
    """
    exact, n_run = backend is floor, 0

    @seeded(seed)
    @settings(max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.shrink), print_blob=False,
              suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=Verbosity.quiet)
    @given(recipe=random_graphs(), machine=device_sets(backend, floor), at=st.integers(0, 2))
    def check(recipe: RandomGraph, machine: list[Backend], at: int) -> None:
        nonlocal n_run
        want = run_graph(recipe, ops, [floor])
        weights = at if at < len(machine) - 1 else None
        try:
            got = run_graph(recipe, ops, machine, weights)
        except Unplaceable:  # a write into another device's memory, by a backend that refuses it
            return
        n_run += 1
        for one, other in zip(got, want, strict=True):
            if not _same(one, other, exact):
                names = ", ".join(b.name for b in machine)
                raise Disagreement(f"{recipe}\non {names} (made of {backend.name}) the result is not that of {floor.name} alone: NMSE "
                                   f"{nmse(one, other):.2e}; seed {seed}")

    check()
    return n_run


def _same(got: Array, want: Array, exact: bool) -> bool:
    return bool(np.array_equal(got, want, equal_nan=True)) if exact else nmse(got, want) <= GRAPH_NMSE


def nmse(got: Array, want: Array) -> float:
    """Squared error relative to the squared reference; infinite where one is not a number and the other is."""
    if not (np.isfinite(got) == np.isfinite(want)).all():
        return float("inf")
    finite = np.isfinite(want)
    return float(((got - want)[finite] ** 2).sum() / max(float((want[finite] ** 2).sum()), 1e-30))
