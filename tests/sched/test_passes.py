"""The five passes: where nodes go, why, what is copied, and what is said when nothing works."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from sched_toys import COLUMNS, OPS, ROWS, Case, ToyBackend, add, cases, cpu, get_rows, product, scale, set_rows, shift, weight

from engine.backend import HOST
from engine.backends.null import NullBackend
from engine.dtypes import F32, I32
from engine.errors import DeviceError, Unplaceable
from engine.graph import Graph
from engine.sched.passes import Schedule, schedule
from engine.tensor import Tensor, input_tensor, leaf
from engine.testing_backends import FilteredBackend

FEW = settings(max_examples=60, deadline=None)


def x_input(name: str = "x") -> Tensor:
    return input_tensor(F32, (ROWS, COLUMNS), name)


def homes(plan: Schedule, *nodes: Tensor) -> list[str]:
    return [plan.placement.at[t].name for t in nodes]


def causes(plan: Schedule, *nodes: Tensor) -> list[str]:
    return [plan.placement.cause[t] for t in nodes]


def placed(case: Case, backends: list | None = None) -> Schedule | None:
    """The schedule, or None where pins or memory make the case impossible."""
    try:
        return schedule(case.graph, backends or case.backends, pins=case.pins)
    except Unplaceable:
        return None


# -- properties -------------------------------------------------------------------------------------------------


@FEW
@given(case=cases())
def test_every_node_in_one_split_in_order(case: Case) -> None:
    if (plan := placed(case)) is None:
        return
    run = [n for s in plan.splits for n in s.nodes]
    assert run == [n for n in case.graph.nodes if not n.is_view_op]
    for s in plan.splits:
        assert s.nodes
        assert all(plan.placement.at[n] is s.backend for n in s.nodes)
    position = {n: i for i, n in enumerate(run)}
    for n in run:
        assert all(position[s] < position[n] for s in n.srcs if s in position)


@FEW
@given(case=cases(pinned=False))
def test_graphs_without_pins_can_always_be_placed(case: Case) -> None:
    """The CPU runs everything and copies what it cannot read; only memory that is written in place, elsewhere, can make it impossible."""
    if placed(case) is None:
        assert any(t.view_of is not None and t.root.buffer is not None and t.root.buffer.type is not HOST
                   for t in case.graph.nodes if not t.is_view_op)


@FEW
@given(case=cases())
def test_nobody_runs_what_it_refuses(case: Case) -> None:
    if (plan := placed(case)) is None:
        return
    p = plan.placement
    for t in case.graph.tensors:
        assert p.cause[t].split(".")[0] in ("user", "1", "2", "3", "4")
        if t.op is not None:
            assert p.at[t].supports(t)
    for t in case.graph.nodes:
        if t.view_of is not None and not t.is_view_op:
            memory = p.memory_of(t)
            assert memory is not None and p.at[t].reads(memory), "a write happens where the memory is"
    for t, b in p.pins.items():
        assert p.at[t] is b and p.cause[t] == "user"


@FEW
@given(case=cases())
def test_one_copy_for_each_edge_between_memories(case: Case) -> None:
    """Every operand a split cannot read has been copied to its backend: once, unless the memory was written in between."""
    if (plan := placed(case)) is None:
        return
    fresh: dict = {}
    for s in plan.splits:
        assert len(set(s.copies)) == len(s.copies)
        for t in s.copies:
            assert not plan.placement.readable(t, s.backend)
            assert (t, s.backend) not in fresh
            fresh[t, s.backend] = True
        for n in s.nodes:
            for src in n.srcs:
                if src is not None:
                    assert plan.placement.readable(src, s.backend) != ((src, s.backend) in fresh)
            if n.view_of is not None:
                fresh = {k: v for k, v in fresh.items() if k[0].root is not n.root}
    needed = {t for s in plan.splits for n in s.nodes for t in n.srcs if t is not None and not plan.placement.readable(t, s.backend)}
    assert {t for s in plan.splits for t in s.copies} == needed


@FEW
@given(case=cases())
def test_a_backend_that_supports_nothing_changes_nothing(case: Case) -> None:
    before = placed(case)
    for useless in (NullBackend((), "useless"), NullBackend((), "useless", buffer_type=HOST)):
        for at in range(len(case.backends)):
            after = placed(case, [*case.backends[:at], useless, *case.backends[at:]])
            assert (before is None) == (after is None)
            if before is not None and after is not None:
                assert before.placement.at == after.placement.at
                assert before.placement.cause == after.placement.cause
                assert [(s.backend, s.nodes, s.copies) for s in before.splits] == [(s.backend, s.nodes, s.copies) for s in after.splits]


@FEW
@given(case=cases())
def test_needed_nodes_are_those_read_outside(case: Case) -> None:
    if (plan := placed(case)) is None:
        return
    for i, s in enumerate(plan.splits):
        assert s.needed <= set(s.nodes)
        for j, other in enumerate(plan.splits):
            for n in other.nodes:
                for src in n.srcs:
                    assert j == i or src not in s.nodes or src in s.needed
        assert all(t in s.needed for t in case.graph.outputs if t in s.nodes)


# -- rules, one by one ------------------------------------------------------------------------------------------


def test_pin_by_data_input_and_weight() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    x, w = x_input(), weight("w", type=gpu.buffer_type)
    y = product(w, x)
    plan = schedule(Graph([y]), [gpu, host])
    assert homes(plan, x, w, y) == ["cpu", "gpu", "gpu"]
    assert causes(plan, x, w, y) == ["1.input", "1.data", "1.weight"]
    assert [(s.backend.name, s.copies) for s in plan.splits] == [("gpu", [x])]


def test_spread_keeps_a_region_together() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    w = weight("w", type=gpu.buffer_type)
    a = scale(x_input(), factor=2.0)
    b = product(w, a)
    c = scale(b, factor=2.0)
    plan = schedule(Graph([c]), [gpu, host])
    assert homes(plan, a, b, c) == ["gpu"] * 3
    assert causes(plan, a, b, c) == ["2.spread", "1.weight", "2.spread"]
    assert len(plan.splits) == 1


def test_orphans_go_nearest_their_inputs() -> None:
    gpu, other, host = ToyBackend("gpu", [add]), ToyBackend("other", [add, scale, product]), cpu([product])
    w = weight("w", type=other.buffer_type)
    y = product(w, x_input())
    odd = FilteredBackend(gpu, lambda call: None, name="gpu")
    z = add(scale(y), y)
    plan = schedule(Graph([z]), [odd, other, host])
    assert homes(plan, y, z) == ["other", "other"]
    lonely = NullBackend([shift], "lonely")
    s = shift(x_input("y"), None)
    plan = schedule(Graph([s]), [lonely, cpu([add])])
    assert causes(plan, s) == ["3.nearest"] and homes(plan, s) == ["lonely"]


def test_upgrade_moves_up_within_one_memory() -> None:
    accel, host = ToyBackend("accel", [product], buffer_type=HOST), cpu()
    a = get_rows(weight("table"), input_tensor(I32, (ROWS,), "ids"))
    y = product(scale(a), a)
    plan = schedule(Graph([add(y, y)]), [accel, host])
    assert homes(plan, y) == ["accel"] and causes(plan, y) == ["3.upgrade"]
    assert [s.backend.name for s in plan.splits] == ["cpu", "accel", "cpu"]
    assert not any(s.copies for s in plan.splits)


def test_upgrade_needs_readable_inputs() -> None:
    """A better backend in the same memory does not take a node one of whose inputs lies elsewhere."""
    gpu, accel, host = ToyBackend("gpu", [product]), ToyBackend("accel", [add], buffer_type=HOST), cpu()
    far = product(weight("w", type=gpu.buffer_type), x_input())
    near = get_rows(weight("table"), input_tensor(I32, (ROWS,), "ids"))
    mixed, local = add(near, far), add(near, near)
    plan = schedule(Graph([mixed, local]), [gpu, accel, host])
    assert homes(plan, far, near, mixed, local) == ["gpu", "cpu", "cpu", "accel"]
    assert causes(plan, mixed, local) == ["2.spread", "3.upgrade"]


def test_a_cpu_node_ends_a_region() -> None:
    gpu, host = ToyBackend("gpu", [product, scale]), cpu()
    far = product(weight("w", type=gpu.buffer_type), x_input())
    near = get_rows(weight("table"), input_tensor(I32, (ROWS,), "ids"))
    after = scale(near)
    plan = schedule(Graph([far, after]), [gpu, host])
    assert homes(plan, far, near, after) == ["gpu", "cpu", "cpu"] and causes(plan, after) == ["2.spread"]


def test_views_follow_their_root() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    y = product(weight("w", type=gpu.buffer_type), x_input())
    view = y[1:3]
    plan = schedule(Graph([scale(view)]), [gpu, host])
    assert homes(plan, view) == ["gpu"] and causes(plan, view) == ["4.view"]


def test_leaf_without_memory_follows_its_reader() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    w, later = weight("w", type=gpu.buffer_type), leaf(F32, (ROWS, COLUMNS), "later")
    y = add(product(w, x_input()), later)
    plan = schedule(Graph([y]), [gpu, host])
    assert homes(plan, later) == ["gpu"] and causes(plan, later) == ["4.follow"]


@pytest.mark.parametrize("n, name", [(31, "cpu"), (32, "gpu"), (33, "gpu")])
def test_offload_by_batch(n: int, name: str) -> None:
    gpu, host = ToyBackend("gpu", offloads=lambda node: node.op is product and node.shape[0] >= 32), cpu()
    x = input_tensor(F32, (n, COLUMNS), "x")
    y = product(weight("w"), x)
    plan = schedule(Graph([y]), [gpu, host])
    assert homes(plan, y) == [name]
    assert causes(plan, y) == ["1.offload" if name == "gpu" else "1.weight"]
    assert homes(schedule(Graph([y]), [gpu, host], offload=False), y) == ["cpu"]


def test_optional_weights_do_not_decide() -> None:
    """Host-resident attention sinks neither pin nor offload a node whose data lies on the device."""
    gpu, host = ToyBackend("gpu", offloads=lambda node: True), cpu()
    cache = weight("k", (ROWS, COLUMNS), gpu.buffer_type, "cache")
    sinks = weight("sinks", (COLUMNS,))
    y = shift(scale(product(weight("w", type=gpu.buffer_type), cache[0:ROWS])), sinks)
    plan = schedule(Graph([y]), [gpu, host])
    assert homes(plan, y) == ["gpu"] and causes(plan, y) == ["2.spread"]
    assert [s.copies for s in plan.splits] == [[sinks]]
    alone = shift(x_input(), sinks)
    assert "offload" not in causes(schedule(Graph([alone]), [gpu, host]), alone)[0]


def test_streamed_weights_cut_a_split() -> None:
    gpu, host = ToyBackend("gpu", offloads=lambda node: node.op is product), cpu()
    a = product(weight("w1"), x_input())
    b = product(weight("w2"), a)
    c = product(weight("w3"), b)
    plan = schedule(Graph([c]), [gpu, host])
    assert [[t.name for t in s.copies] for s in plan.splits] == [["w1", "x"], ["w2"], ["w3"]]
    tied = weight("w")
    plan = schedule(Graph([product(tied, product(tied, x_input()))]), [gpu, host])
    assert [[t.name for t in s.copies] for s in plan.splits] == [["w", "x"]]


def test_many_inputs_of_one_split() -> None:
    gpu, host = ToyBackend("gpu", [add, product]), cpu()
    total = product(weight("w", type=gpu.buffer_type), x_input())
    for i in range(64):
        total = add(total, x_input(f"x{i}"))
    plan = schedule(Graph([total]), [gpu, host])
    assert len(plan.splits) == 1 and len(plan.splits[0].copies) == 65


def test_two_layer_model_has_three_splits() -> None:
    gpu, host = ToyBackend("gpu", [product, add, scale]), cpu()
    table, ids = weight("embeddings"), input_tensor(I32, (ROWS,), "ids")
    h = get_rows(table, ids)
    for i in range(2):
        h = add(h, scale(product(weight(f"w{i}", type=gpu.buffer_type), h), factor=0.5))
    out = product(weight("out"), shift(h, None))
    plan = schedule(Graph([out]), [gpu, host])
    assert [s.backend.name for s in plan.splits] == ["cpu", "gpu", "cpu"]


# -- writes into views ------------------------------------------------------------------------------------------


def test_write_goes_where_the_memory_is() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    ids = input_tensor(I32, (ROWS,), "ids")
    cache = weight("cache", (16, COLUMNS), HOST, "cache")
    k = product(weight("w", type=gpu.buffer_type), x_input())
    w = set_rows(k, ids, cache[0:8])
    plan = schedule(Graph([w]), [gpu, host])
    assert homes(plan, k, w) == ["gpu", "cpu"] and causes(plan, w) == ["1.data"]


def test_a_weight_does_not_pull_a_write_away_from_its_memory() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    y = product(weight("w", type=gpu.buffer_type), x_input())
    w = set_rows(weight("rows", (ROWS, COLUMNS)), input_tensor(I32, (ROWS,), "ids"), y)
    plan = schedule(Graph([w]), [gpu, host], offload=False)
    assert homes(plan, y, w) == ["gpu", "gpu"]


def test_computed_memory_goes_where_its_writer_can_be() -> None:
    """The GPU could compute `y`, but nobody could then write into it there."""
    gpu, host = ToyBackend("gpu", [product, scale, add]), cpu()
    y = scale(product(weight("w", type=gpu.buffer_type), x_input()))
    w = set_rows(x_input("new"), input_tensor(I32, (ROWS,), "ids"), y)
    plan = schedule(Graph([add(w, y)]), [gpu, host])
    assert homes(plan, y, w) == ["cpu", "cpu"]
    assert "cannot run in gpu memory" in plan.placement.answer(y, gpu).reason


def test_copies_are_taken_again_after_a_write() -> None:
    gpu, host = ToyBackend("gpu", [scale]), cpu()
    cache = weight("cache", (ROWS, COLUMNS), HOST, "cache")
    a = scale(cache)
    w = set_rows(x_input(), input_tensor(I32, (ROWS,), "ids"), cache)
    b = scale(cache)
    g = Graph([add(a, b), w])
    plan = schedule(g, [gpu, host], pins={a: gpu, b: gpu})
    assert [[t.name for t in s.copies if t is cache] for s in plan.splits if s.backend is gpu] == [["cache"], ["cache"]]


# -- refusals ---------------------------------------------------------------------------------------------------


def test_unplaceable_names_tensor_op_types_and_everyone() -> None:
    gpu = FilteredBackend(ToyBackend("gpu"), lambda call: "no sums today" if call.op is add else None)
    y = add(x_input(), x_input("b"), name="total")
    with pytest.raises(Unplaceable) as e:
        schedule(Graph([y]), [gpu, cpu([scale])])
    assert (e.value.tensor, e.value.op, e.value.types) == ("total", "add", ("f32", "f32", "f32"))
    assert e.value.reasons == {"gpu": "no sums today", "cpu": "no kernel for add"}
    assert all(part in str(e.value) for part in ("total", "add", "f32", "gpu", "cpu", "no sums today"))


def test_memory_of_a_backend_that_is_not_there() -> None:
    absent, gpu, host = ToyBackend("absent"), ToyBackend("gpu"), cpu()
    state = weight("state", (ROWS, COLUMNS), absent.buffer_type, "cache")
    with pytest.raises(Unplaceable, match="'state'.*absent memory.*gpu.*cpu"):
        schedule(Graph([scale(state)]), [gpu, host])


def test_cache_type_nobody_can_write() -> None:
    gpu, host = ToyBackend("gpu", [scale, add]), cpu()
    cache = weight("cache", (ROWS, COLUMNS), gpu.buffer_type, "cache")
    w = set_rows(x_input(), input_tensor(I32, (ROWS,), "ids"), cache)
    with pytest.raises(Unplaceable) as e:
        schedule(Graph([w]), [gpu, host])
    assert e.value.reasons["gpu"] == "no kernel for set_rows" and "gpu memory" in e.value.reasons["cpu"]


def test_pins_hold_and_are_checked() -> None:
    gpu, host = ToyBackend("gpu", [scale]), cpu()
    y = scale(x_input())
    assert homes(schedule(Graph([y]), [gpu, host], pins={y: gpu}), y) == ["gpu"]
    z = add(y, y)
    with pytest.raises(Unplaceable) as e:
        schedule(Graph([z]), [gpu, host], pins={z: gpu})
    assert e.value.reasons["gpu"] == "no kernel for add"
    with pytest.raises(DeviceError, match="elsewhere.*gpu, cpu"):
        schedule(Graph([z]), [gpu, host], pins={z: ToyBackend("elsewhere")})
    with pytest.raises(DeviceError):
        schedule(Graph([z]), [])


def test_pinned_memory_that_the_backend_cannot_read() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    w = weight("w")
    with pytest.raises(Unplaceable, match="host memory"):
        schedule(Graph([product(w, x_input())]), [gpu, host], pins={w: gpu})


def test_strict_refuses_what_would_leave() -> None:
    gpu, host = ToyBackend("gpu", [product, scale]), cpu()
    a = product(weight("w", type=gpu.buffer_type), x_input())
    b = add(a, a, name="sum")
    g = Graph([scale(b)])
    with pytest.raises(Unplaceable) as e:
        schedule(g, [gpu, host], strict=True)
    assert e.value.tensor == "sum" and "1 nodes would leave gpu: sum" in e.value.reasons["strict"]
    assert e.value.reasons["gpu"] == "no kernel for add"
    schedule(g, [gpu, host], strict=True, allowed=[gpu, host])
    schedule(Graph([b]), [gpu, host], strict=True, pins={b: host})
    schedule(Graph([add(x_input(), x_input("b"))]), [host], strict=True)


def test_strict_says_that_data_decided() -> None:
    gpu, host = ToyBackend("gpu"), cpu()
    y = product(weight("w"), x_input())
    with pytest.raises(Unplaceable, match="could run it, but it went to cpu"):
        schedule(Graph([y]), [gpu, host], strict=True)


def test_packed_weights_are_judged_as_they_would_be_copied() -> None:
    class Packed(type(HOST)):  # type: ignore[misc]
        def layout_of(self, dtype):
            return "lanes8"

    packed = Packed()
    gpu, host = ToyBackend("gpu", offloads=lambda n: True), NullBackend(OPS, "cpu", buffer_type=HOST, reads=[packed], lanes=8)
    w = leaf(F32, (COLUMNS, COLUMNS), "w")
    w.buffer = packed.allocate(w.nbytes, "weights")
    y = product(w, x_input())
    plan = schedule(Graph([y]), [gpu, host])
    assert causes(plan, y) == ["1.offload"]
    with pytest.raises(Unplaceable, match="lies lanes8"):
        schedule(Graph([y]), [host])
