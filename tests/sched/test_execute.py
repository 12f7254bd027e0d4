"""Running: the same results on any machine, lazy or not, with and without reuse; and what `set`, `get` and `explain` say."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from sched_toys import COLUMNS, OPS, ROWS, Case, ToyBackend, add, cases, cpu, get_rows, product, scale, set_rows, values, weight

from engine.backend import HOST
from engine.backends.null import NullBackend
from engine.dtypes import BF16, F32, I32, Q8_0
from engine.errors import AllocationError, ClosedError, ShapeError, Unplaceable
from engine.graph import Graph
from engine.sched.alloc import Pool
from engine.sched.execute import Executable
from engine.sched.explain import explain
from engine.sched.passes import schedule
from engine.tensor import Tensor, input_tensor

FEW = settings(max_examples=80, deadline=None)


def x_input(name: str = "x") -> Tensor:
    return input_tensor(F32, (ROWS, COLUMNS), name)


def ids_input(name: str = "ids") -> Tensor:
    return input_tensor(I32, (ROWS,), name)


def outputs_of(case: Case, **options) -> list[np.ndarray] | None:
    case.restore()
    try:
        made = Executable(case.backends, case.graph, pins=case.pins, **options)
    except Unplaceable:
        return None
    with made:
        for t in case.graph.inputs:
            made.set(t, case.feeds[t])
        made.run()
        return [made.get(t) for t in case.graph.outputs]


def same(got: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(g, e) for g, e in zip(got, expected, strict=True))


# -- properties -------------------------------------------------------------------------------------------------


@FEW
@given(case=cases())
def test_results_are_those_of_one_node_after_the_other(case: Case) -> None:
    if (got := outputs_of(case)) is not None:
        assert same(got, case.expected())
        without = outputs_of(case, reuse=False)
        assert without is not None and same(without, got)


@FEW
@given(case=cases(lazy=True))
def test_lazy_backends_give_the_same(case: Case) -> None:
    if (got := outputs_of(case)) is not None:
        assert same(got, case.expected())


@FEW
@given(case=cases())
def test_explanation_adds_up(case: Case) -> None:
    try:
        plan = schedule(case.graph, case.backends, pins=case.pins)
    except Unplaceable:
        return
    told = explain(plan)
    assert [n.name for n in told.nodes] == [n.name for n in case.graph.nodes]
    assert sum(told.counts.values()) + told.n_views == len(case.graph)
    data = json.loads(json.dumps(told.to_json()))
    assert sum(b["n_nodes"] for b in data["backends"]) + data["n_views"] == data["n_nodes"] == len(case.graph)
    assert data["n_splits"] == len(plan.splits)
    for node, line in zip(case.graph.nodes, told.nodes, strict=True):
        assert (line.split is None) == node.is_view_op
        assert line.cause and line.variant
    assert len(told.lines) == 1 + len(plan.splits) + len(case.graph) + bool(told.n_views)


# -- lazy devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("queues", [False, True])
def test_a_copy_waits_for_queued_work(events: bool, queues: bool) -> None:
    """Without asynchronous copies, both sides finish first; with them, the destination's stream waits."""
    a, b = ToyBackend("a", lazy=True, events=events), ToyBackend("b", lazy=True, events=events)
    if not queues:
        a.copy_async = b.copy_async = lambda src, dst: False  # type: ignore[method-assign]
    h = x_input()
    x = h
    for i in range(4):
        h = product(weight(f"w{i}", type=(a, b)[i % 2].buffer_type, seed=i), h)
    with Executable([a, b, cpu()], Graph([h])) as made:
        for seed in range(3):
            made.set(x, values(x.shape, seed))
            made.run()
            expected = values(x.shape, seed)
            for i in range(4):
                expected = expected @ values((COLUMNS, COLUMNS), i).T
            assert np.array_equal(made.get(h), expected)
    assert any(line.startswith("queue" if queues else "copy") for line in a.log + b.log)


def test_a_copy_waits_for_readers_of_the_memory_it_overwrites() -> None:
    """Streamed weights take turns in the same memory, while the products that read them are still queued."""
    gpu = ToyBackend("gpu", lazy=True, offloads=lambda n: n.op is product)
    gpu.copy_async = lambda src, dst: False  # type: ignore[method-assign]
    x = h = x_input()
    for i in range(4):
        h = product(weight(f"w{i}", seed=i), h)
    with Executable([gpu, cpu()], Graph([h])) as made:
        twins = [made.memory.places[c.dst] for stage in made._stages for c in stage.copies if c.src.is_weight]
        assert len({t.offset for t in twins}) < len(twins) == 4
        made.set(x, values(x.shape, 9))
        made.run()
        expected = values(x.shape, 9)
        for i in range(4):
            expected = expected @ values((COLUMNS, COLUMNS), i).T
        assert np.array_equal(made.get(h), expected)


def test_setting_an_input_waits_for_its_readers() -> None:
    gpu = ToyBackend("gpu", lazy=True)
    x = x_input()
    y = product(weight("w", type=gpu.buffer_type), x)
    with Executable([gpu, cpu()], Graph([y])) as made:
        made.set(x, values(x.shape, 1))
        made.run()
        assert gpu.queue, "the device has not run yet"
        made.set(x, values(x.shape, 2))
        assert not gpu.queue
        assert np.array_equal(made.get(y), values(x.shape, 1) @ values((COLUMNS, COLUMNS), 1).T)


def test_closing_waits() -> None:
    gpu = ToyBackend("gpu", lazy=True)
    x = x_input()
    made = Executable([gpu, cpu()], Graph([product(weight("w", type=gpu.buffer_type), x)]))
    made.set(x, values(x.shape, 1))
    made.run()
    made.close()
    assert not gpu.queue


# -- rewriting --------------------------------------------------------------------------------------------------


def test_fused_nodes_and_added_tensors() -> None:
    x, y = x_input("x"), x_input("y")
    out = product(weight("w"), add(scale(x, factor=3.0), y, name="sum"), name="out")
    with Executable([cpu(fuses=True)], Graph([out])) as made:
        made.set(x, values(x.shape, 1))
        made.set(y, values(y.shape, 2))
        made.run()
        assert np.array_equal(made.get(out), (values(x.shape, 1) * 3 + values(y.shape, 2)) @ values((COLUMNS, COLUMNS), 1).T)
        told = made.explain()
    assert [n.fused_into for n in told.nodes] == ["scale_add", "scale_add", ""]
    assert told.splits[0].added == ("prepare_x",) and told.splits[0].n_nodes == 3 and told.splits[0].n_steps == 3
    assert told.summary == "cpu: 3 nodes, 1 split"
    assert told.lines[2] == "  fused: 1 x scale_add = add(scale(x, factor), y)"
    (fused,) = told.to_json()["splits"][0]["fused"]
    assert fused["op"] == "scale_add" and fused["writes"] == "sum" and fused["nodes"][1:] == ["sum"]


def test_what_is_fused_away_takes_no_memory() -> None:
    x, y = x_input("x"), x_input("y")
    s = scale(x, factor=3.0)
    with Executable([cpu(fuses=True)], Graph([add(s, y)])) as made:
        assert s not in made.memory.places
    with Executable([cpu(fuses=True)], Graph([add(s, y)]), reuse=False) as made:
        assert s in made.memory.places and made.explain().splits[0].fused == ()


def test_a_fusion_keeps_what_is_read_elsewhere() -> None:
    gpu, host = ToyBackend("gpu", fuses=True), cpu()
    x, y = x_input("x"), x_input("y")
    s = scale(x, factor=3.0)
    out = add(add(s, y), s)
    pins = {out: host, out.srcs[0]: gpu, s: gpu}
    with Executable([gpu, host], Graph([out]), pins=pins) as made:
        made.set(x, values(x.shape, 1))
        made.set(y, values(y.shape, 2))
        made.run()
        assert np.array_equal(made.get(out), values(x.shape, 1) * 6 + values(y.shape, 2))


# -- set, get, run ----------------------------------------------------------------------------------------------


def test_set_checks_and_changes_nothing() -> None:
    x, ids, table = x_input(), ids_input(), weight("table")
    y = add(get_rows(table, ids), x)
    with Executable([cpu()], Graph([y]), id_limits={ids: COLUMNS}) as made:
        made.set(x, values(x.shape, 1))
        made.set(ids, np.arange(ROWS, dtype=np.int32))
        with pytest.raises(ShapeError, match=r"\[4, 7\].*\[4, 8\]"):
            made.set(x, np.zeros((ROWS, COLUMNS - 1), np.float32))
        with pytest.raises(ShapeError, match="float64.*float32"):
            made.set(x, np.zeros((ROWS, COLUMNS)))
        with pytest.raises(ShapeError, match="list"):
            made.set(x, [1.0])  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match="'table' is no input.*x"):
            made.set(table, np.zeros((COLUMNS, COLUMNS), np.float32))
        for wrong in (-1, COLUMNS):
            with pytest.raises(ShapeError, match=f"id {wrong}: 0 to 7"):
                made.set(ids, np.full(ROWS, wrong, np.int32))
        made.run()
        assert np.array_equal(made.get(y), values((COLUMNS, COLUMNS), 1)[:ROWS] + values(x.shape, 1))


def test_inputs_must_have_a_value() -> None:
    x, y = x_input("x"), x_input("y")
    with Executable([cpu()], Graph([add(x, y)])) as made:
        made.set(x, values(x.shape, 1))
        with pytest.raises(ShapeError, match="input y has no value"):
            made.run()


def test_only_what_lasts_can_be_read() -> None:
    x, w = x_input(), weight("w")
    hidden = product(w, x, name="hidden")
    y = scale(hidden)
    with Executable([cpu()], Graph([y])) as made:
        made.set(x, values(x.shape, 1))
        made.run()
        assert np.array_equal(made.get(x), values(x.shape, 1)) and np.array_equal(made.get(w), values(w.shape, 1))
        with pytest.raises(AllocationError, match="'hidden'.*output"):
            made.get(hidden)
    with Executable([cpu()], Graph([y]), reuse=False) as made:
        made.set(x, values(x.shape, 1))
        made.run()
        assert np.array_equal(made.get(hidden), made.get(y))
    with Executable([cpu()], Graph([y, hidden])) as made:
        made.set(x, values(x.shape, 1))
        made.run()
        assert np.array_equal(made.get(hidden), made.get(y))


def test_views_as_outputs() -> None:
    x = x_input()
    y = scale(x, factor=2.0)
    part, turned = y[1:3, 2:5], y.transpose()
    with Executable([cpu()], Graph([part, turned])) as made:
        made.set(x, values(x.shape, 1))
        made.run()
        assert np.array_equal(made.get(part), 2 * values(x.shape, 1)[1:3, 2:5])
        assert np.array_equal(made.get(turned), 2 * values(x.shape, 1).T)


def test_formats_of_inputs() -> None:
    half, block = input_tensor(BF16, (2, 8), "half"), input_tensor(Q8_0, (2, 64), "block")
    with Executable([cpu()], Graph([half, block])) as made:
        made.set(half, np.arange(16, dtype=np.uint16).reshape(2, 8))
        data = np.frombuffer(np.random.default_rng(0).bytes(4 * 34), Q8_0.numpy).reshape(2, 2)
        made.set(block, data)
        made.run()
        assert np.array_equal(made.get(half), np.arange(16, dtype=np.uint16).reshape(2, 8))
        assert made.get(block).tobytes() == data.tobytes()


def test_empty_tensors_run() -> None:
    x = input_tensor(F32, (0, COLUMNS), "x")
    y = scale(x)
    with Executable([cpu()], Graph([y])) as made:
        made.set(x, np.zeros((0, COLUMNS), np.float32))
        made.run()
        assert made.get(y).shape == (0, COLUMNS)


def test_lasting_memory_keeps_between_graphs() -> None:
    cache, x, ids = weight("cache", usage="cache"), x_input(), ids_input()
    with Executable([cpu()], Graph([set_rows(x, ids, cache)])) as made:
        made.set(x, values(x.shape, 5))
        made.set(ids, np.array([3, 1, 0, 7], np.int32))
        made.run()
    ids2 = ids_input()
    read = get_rows(cache, ids2)
    with Executable([cpu()], Graph([read])) as made:
        made.set(ids2, np.array([3, 1, 0, 7], np.int32))
        made.run()
        assert np.array_equal(made.get(read), values(x.shape, 5))


def test_same_shapes_other_leaves() -> None:
    """Two graphs that look alike but read each other's weights do not share results."""
    pool, x = Pool(), x_input()
    w1, w2 = weight("w1", seed=1), weight("w2", seed=2)
    got = []
    for w in (w1, w2):
        y = product(w, x)
        with Executable([cpu()], Graph([y]), pool=pool) as made:
            made.set(x, values(x.shape, 1))
            made.run()
            got.append(made.get(y))
    assert np.array_equal(got[1], values(x.shape, 1) @ values(w2.shape, 2).T) and not np.array_equal(*got)


# -- life cycle -------------------------------------------------------------------------------------------------


def test_executables_of_a_pool_take_turns() -> None:
    pool, x1, x2 = Pool(), x_input("x1"), x_input("x2")
    y1, y2 = scale(x1, factor=2.0), scale(x2, factor=3.0)
    with Executable([cpu()], Graph([y1]), pool=pool) as first, Executable([cpu()], Graph([y2]), pool=pool) as second:
        assert y1.buffer is y2.buffer
        first.set(x1, values(x1.shape, 1))
        first.run()
        second.set(x2, values(x2.shape, 2))
        with pytest.raises(AllocationError, match="or no longer"):
            first.get(y1)
        second.run()
        with pytest.raises(ShapeError, match="x1 has no value"):
            first.run()
        first.set(x1, values(x1.shape, 1))
        first.run()
        assert np.array_equal(first.get(y1), 2 * values(x1.shape, 1))


def test_a_graph_belongs_to_one_executable() -> None:
    x = x_input()
    g = Graph([scale(x)])
    first = Executable([cpu()], g)
    with pytest.raises(AllocationError, match="close"):
        Executable([cpu()], g)
    first.close()
    first.close()
    for act in (first.run, lambda: first.get(x), lambda: first.set(x, values(x.shape, 1)), first.reserve):
        with pytest.raises(ClosedError):
            act()
    second = Executable([cpu()], g)
    del second
    Executable([cpu()], g).close()


def test_pins_survive_reserve() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    x = x_input()
    y = scale(product(weight("w"), x), factor=2.0)
    with Executable([gpu, host], Graph([y]), pins={y: gpu}) as made:
        for _ in range(2):
            assert made.schedule.placement.at[y] is gpu and made.schedule.placement.cause[y] == "user"
            made.set(x, values(x.shape, 1))
            made.run()
            assert np.array_equal(made.get(y), 2 * (values(x.shape, 1) @ values((COLUMNS, COLUMNS), 1).T))
            made.reserve()


def test_a_failing_step_leaves_nothing_running() -> None:
    gpu, host = ToyBackend("gpu", lazy=True), cpu()
    x, ids, table = x_input(), ids_input(), weight("table")
    bad = get_rows(table, ids)
    y = add(product(weight("w", type=gpu.buffer_type), x), x)
    with Executable([gpu, host], Graph([y, bad]), pins={bad: host}) as made:
        made.set(x, values(x.shape, 1))
        made.set(ids, np.full(ROWS, 99, np.int32))
        with pytest.raises(IndexError):
            made.run()
        assert not gpu.queue
        made.set(ids, np.zeros(ROWS, np.int32))
        made.run()
        assert np.array_equal(made.get(bad), values((COLUMNS, COLUMNS), 1)[[0] * ROWS])


# -- explain ----------------------------------------------------------------------------------------------------


def test_explanation_of_a_small_graph() -> None:
    gpu, host = NullBackend(OPS, "gpu"), NullBackend(OPS, "cpu", buffer_type=HOST)
    table, ids = weight("table"), ids_input()
    h = get_rows(table, ids, name="embedded")
    y = product(weight("w", type=gpu.buffer_type), h[0:ROWS], name="logits")
    with Executable([gpu, host], Graph([y])) as made:
        told = made.explain()
    assert told.summary == "gpu: 1 node, cpu: 1 node, 1 view, 2 splits"
    assert told.lines[1:] == [
        "split 0: cpu, 1 node in 1 step",
        "  embedded: get_rows(f32, i32, f32) [4, 8] on cpu [1.weight] general",
        "split 1: gpu, 1 node in 1 step, copies in 0.1 KiB: embedded (view) from cpu (0.1 KiB)",
        "  logits: product(f32, f32, f32) [4, 8] on gpu [1.weight] general",
        "views: 1",
        "  embedded (view): view(f32, f32) [4, 8] on cpu [4.view] view"]
    assert told.to_json()["splits"][1]["copies"] == [{"tensor": "embedded (view)", "from": "cpu", "nbytes": 128}]
