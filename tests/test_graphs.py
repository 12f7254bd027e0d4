"""Whole graphs: on any set of devices, and with any of them refusing ops, a graph gives what one device alone gives."""

from __future__ import annotations

import pytest

from engine.backend import HOST, place
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import F32
from engine.graph import Graph
from engine.sched.execute import Executable
from engine.tensor import input_tensor, leaf
from engine.testing import RandomGraph, VirtualBackend, check_graphs, run_graph
from kernels import OPS


def test_random_graphs_over_random_devices_give_the_same_bits(cpu: CpuBackend, run_seed: int) -> None:
    assert check_graphs(cpu, cpu, OPS, 25, run_seed) >= 20


@pytest.mark.parametrize("lanes", [4, 32])
def test_random_graphs_over_other_kernels_agree(lanes: int, cpu: CpuBackend, run_seed: int) -> None:
    assert check_graphs(SimBackend(OPS.values(), lanes=lanes), cpu, OPS, 10, run_seed) >= 8


def test_every_kind_of_node_runs_everywhere(cpu: CpuBackend) -> None:
    from engine.testing.graphs import NODES

    recipe = RandomGraph(tuple((name, (i, i + 1)[: 1 + (name in ("add", "mul", "swiglu", "attend", "set_rows"))])
                               for i, name in enumerate(NODES)), F32, 3)
    graph, _ = recipe.build(OPS)
    assert {n.op.name for n in graph.nodes if not n.is_view_op} >= {"mul_mat", "soft_max", "set_rows", "get_rows", "cpy", "swiglu"}
    alone, other = run_graph(recipe, OPS, [cpu]), run_graph(recipe, OPS, [VirtualBackend(cpu, "own", private=True), cpu], 0)
    assert all((a == b).all() for a, b in zip(alone, other, strict=True))


def test_a_virtual_device_has_memory_of_its_own(cpu: CpuBackend) -> None:
    own = VirtualBackend(cpu, "own", private=True)
    assert not own.reads(HOST) and own.reads(own.buffer_type) and not cpu.reads(own.buffer_type)
    x, w = input_tensor(F32, (2, 8), "x"), leaf(F32, (1, 8), "w")
    part = VirtualBackend(cpu, "part", lambda call: "no" if call.op.name == "silu" else None, private=True)
    place(w, part.buffer_type.allocate(w.nbytes, "weights"))
    graph = Graph([OPS["silu"](OPS["add"](x, w))])
    with Executable([part, cpu], graph) as run:
        assert {split.backend.name for split in run.schedule.splits} == {"part", "cpu"}
