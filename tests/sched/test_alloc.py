"""Memory: nothing overlaps while it lives, dead memory is used again, limits are kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_toys import COLUMNS, ROWS, Case, ToyBackend, add, cases, cpu, product, scale, set_rows, weight

from engine.backend import HOST, BufferType
from engine.backends.null import PrivateBufferType
from engine.dtypes import F32, I32
from engine.errors import AllocationError, Unplaceable
from engine.graph import Graph
from engine.sched.alloc import Heap, MemoryPlan, Place, Pool, Use, plan_memory
from engine.sched.execute import Executable
from engine.tensor import Tensor, input_tensor, leaf

FEW = settings(max_examples=80, deadline=None)
MIB = 1 << 20


def tensor(name: str, n: int = 16) -> Tensor:
    return leaf(F32, (n,), name)


def chain(sizes: list[int], inplace: bool = False) -> list[Use]:
    """Each tensor is made from the one before."""
    made = [tensor(f"t{i}", n) for i, n in enumerate(sizes)]
    return [Use(t, (made[i - 1],) if i else (), HOST, made[i - 1] if inplace and i else None) for i, t in enumerate(made)]


def alive_overlaps(plan: MemoryPlan, uses: list[Use], forever: set[Tensor]) -> list[tuple[str, str]]:
    """Play the run: pairs of tensors that share bytes while both are needed. (A result may lie on an operand it replaces.)"""
    last = {t.root: i for i, u in enumerate(uses) for t in (*u.reads, u.writes)}
    clashes, living = [], {t for t in plan.places if t in forever and t.is_input}
    for i, use in enumerate(uses):
        new = use.writes.root
        if new in plan.places and new not in living:
            for other in living:
                dies_here = last.get(other) == i and use.inplace is not None and use.inplace.root is other and other not in forever
                if not dies_here and _overlap(plan.places[new], plan.places[other]):
                    clashes.append((new.name, other.name))
            living.add(new)
        living -= {t for t in living if last.get(t, -1) <= i and t not in forever}
    return clashes


def _overlap(a: Place, b: Place) -> bool:
    return a.type is b.type and a.chunk == b.chunk and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def fits(plan: MemoryPlan) -> bool:
    """Places are aligned, inside their chunk, and large enough."""
    return all(p.offset % p.type.alignment == 0 and p.offset + p.nbytes <= plan.chunks[p.type][p.chunk] and p.nbytes >= p.type.nbytes_of(t)
               for t, p in plan.places.items())


# -- properties -------------------------------------------------------------------------------------------------


@FEW
@given(case=cases())
def test_living_tensors_never_overlap(case: Case) -> None:
    try:
        made = Executable(case.backends, case.graph, pins=case.pins)
    except Unplaceable:
        return
    with made:
        uses = made._uses()
        forever = {t.root for t in case.graph.outputs} | set(case.graph.inputs)
        assert fits(made.memory)
        assert alive_overlaps(made.memory, uses, forever) == []
        for t in made.memory.places:
            assert t.buffer is not None and t.buffer.nbytes >= t.buffer_offset + t.nbytes
    assert all(t.buffer is None for t in case.graph.tensors if t not in case.lasting)


@FEW
@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=30), reads=st.data(), limit=st.sampled_from([256, 1024, 1 << 40]))
def test_heaps_keep_apart_what_lives(sizes: list[int], reads: st.DataObject, limit: int) -> None:
    type, uses = PrivateBufferType("p", 32, limit), []
    for i, n in enumerate(sizes):
        sources = reads.draw(st.lists(st.sampled_from(uses), max_size=2)) if uses else []
        uses.append(Use(tensor(f"t{i}", n), tuple(u.writes for u in sources), type, sources[0].writes if sources else None))
    plan = plan_memory(uses, outputs=[uses[-1].writes])
    assert fits(plan) and alive_overlaps(plan, uses, {uses[-1].writes}) == []
    alone = max(-(-max(4 * n, 1) // 32) * 32 for n in sizes)
    assert all(size <= max(limit, alone) for size in plan.chunks[type])
    again = plan_memory(uses, outputs=[uses[-1].writes])
    assert again.places == plan.places


@FEW
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=60))
def test_a_heap_that_is_emptied_is_whole_again(moves: list[tuple[bool, int]]) -> None:
    heap, taken = Heap(HOST), []
    for give, n in moves:
        if give and taken:
            heap.give(taken.pop(n % len(taken)))
        else:
            taken.append(heap.take(n))
    for place in taken:
        heap.give(place)
    assert heap._gaps == [] and heap._ends in ([], [0])


# -- rules, one by one ------------------------------------------------------------------------------------------


def test_a_chain_needs_two_tensors() -> None:
    plan = plan_memory(uses := chain([64] * 20), outputs=[])
    assert plan.nbytes == {"host": 2 * 256}
    assert plan_memory(uses, reuse=False).nbytes == {"host": 20 * 256}


def test_in_place_needs_one() -> None:
    assert plan_memory(chain([64] * 20, inplace=True)).nbytes == {"host": 256}


def in_place(last: Tensor, source: Tensor, *others: Tensor, outputs: tuple[Tensor, ...] = (), type: BufferType = HOST,
             later: tuple[Tensor, ...] = ()) -> bool:
    """Whether `last`, made from `source` and `others`, takes over the memory of `source`'s root."""
    uses = [Use(source.root, (), HOST), *[Use(o, (), HOST) for o in others if o.view_of is None and o is not source.root],
            Use(last, (source, *others), type, source), *[Use(tensor("later"), (t,), HOST) for t in later]]
    plan = plan_memory(uses, outputs=outputs)
    return plan.places[last] == plan.places[source.root]


def test_when_in_place_is_allowed() -> None:
    x, y, other = tensor("x"), tensor("y"), tensor("other")
    assert in_place(y, x) and in_place(y, x, other)
    assert in_place(tensor("z"), x.reshape(4, 4).reshape(16)), "a view of the whole"
    assert not in_place(y, x, later=(x,)), "read again"
    assert not in_place(y, x, later=(x.reshape(4, 4),)), "read again through a view"
    assert not in_place(y, x, outputs=(x,)), "an output"
    assert not in_place(y, x, x[0:16]), "read at other places by the same step"
    assert not in_place(tensor("z", 8), x), "another shape"
    assert not in_place(tensor("z", 8), x[8:16]) and not in_place(tensor("z", 8), x[0:8]), "a part"
    assert not in_place(y, x, type=PrivateBufferType("p")), "other memory"
    transposed = leaf(F32, (4, 4), "m").transpose()
    assert not in_place(leaf(F32, (4, 4), "z"), transposed), "other strides"


def test_inputs_and_outputs_are_never_used_again() -> None:
    x = input_tensor(F32, (16,), "x")
    a, b, c = tensor("a"), tensor("b"), tensor("c")
    uses = [Use(a, (x,), HOST, x), Use(b, (a,), HOST, a), Use(c, (b,), HOST, b)]
    plan = plan_memory(uses, [(x, HOST)], outputs=[a.reshape(4, 4)])
    assert len({plan.places[t].offset for t in (x, a, b)}) == 3
    assert plan.places[c] == plan.places[b]


def test_best_fit_takes_the_smallest_gap() -> None:
    heap = Heap(HOST)
    large, _, small, _ = heap.take(512), heap.take(64), heap.take(128), heap.take(64)
    heap.give(large)
    heap.give(small)
    assert heap.take(128).offset == small.offset
    assert heap.take(64).offset == large.offset


def test_alignment_and_empty_tensors() -> None:
    type = PrivateBufferType("p", 256)
    uses = [Use(tensor(f"t{i}", i), (), type) for i in (0, 1, 65, 0, 3)]
    plan = plan_memory(uses, outputs=[u.writes for u in uses])
    assert fits(plan) and alive_overlaps(plan, uses, {u.writes for u in uses}) == []


def test_chunks_at_the_largest_buffer() -> None:
    type = PrivateBufferType("small", 64, MIB)
    parts = [tensor(f"t{i}", MIB // 8) for i in range(6)]  # half a MiB each
    uses = [Use(t, (), type) for t in parts]
    plan = plan_memory(uses, outputs=parts)
    assert plan.chunks == {type: [MIB, MIB, MIB]}
    plan.apply(Pool())
    assert all(t.buffer is not None and t.buffer.nbytes <= MIB for t in parts)
    plan.release()
    lone = plan_memory([Use(tensor("lone", MIB // 2), (), type)])
    with pytest.raises(AllocationError, match=f"small.*{MIB}.*{2 * MIB}"):
        lone.apply(Pool())


def test_no_memory_for_the_graph_leaves_its_tensors_alone() -> None:
    gpu = ToyBackend("gpu", buffer_type=PrivateBufferType("small", 64, 64))
    y = scale(input_tensor(F32, (ROWS, COLUMNS), "x"))
    with pytest.raises(AllocationError, match="small"):
        Executable([gpu, cpu()], Graph([y]), pins={y: gpu})
    assert y.buffer is None


def test_a_leaf_without_memory_is_an_error() -> None:
    y = add(input_tensor(F32, (ROWS, COLUMNS), "x"), leaf(F32, (ROWS, COLUMNS), "forgotten"))
    with pytest.raises(AllocationError, match="'forgotten'.*place it in a buffer or mark it as an input"):
        Executable([cpu()], Graph([y]))
    target = leaf(F32, (ROWS, COLUMNS), "cache")
    written = set_rows(input_tensor(F32, (ROWS, COLUMNS), "x"), input_tensor(I32, (ROWS,), "ids"), target)
    with pytest.raises(AllocationError, match="'cache'"):
        Executable([cpu()], Graph([written]))
    with pytest.raises(AllocationError, match="output 'alone'"):
        Executable([cpu()], Graph([leaf(F32, (4,), "alone")]))


def test_copies_lie_in_the_destination() -> None:
    gpu = ToyBackend("gpu")
    x, w = input_tensor(F32, (ROWS, COLUMNS), "x"), weight("w", type=gpu.buffer_type)
    with Executable([gpu, cpu()], Graph([product(w, x)])) as made:
        (copy,) = made._stages[0].copies
        assert copy.src is x and copy.dst.name == "gpu#x"
        assert made.memory.places[copy.dst].type is gpu.buffer_type and made.memory.places[x].type is HOST


def test_copies_keep_the_strides_that_were_judged() -> None:
    gpu = ToyBackend("gpu")
    turned = input_tensor(F32, (COLUMNS, ROWS), "x").transpose()
    with Executable([gpu, cpu()], Graph([product(weight("w", type=gpu.buffer_type), turned)])) as made:
        (copy,) = made._stages[0].copies
        assert copy.dst.strides == turned.strides and not copy.dst.is_contiguous


def test_streamed_weights_use_the_same_memory() -> None:
    gpu = ToyBackend("gpu", offloads=lambda n: n.op is product)
    h = input_tensor(F32, (ROWS, COLUMNS), "x")
    for i in range(8):
        h = product(weight(f"w{i}"), h)
    with Executable([gpu, cpu()], Graph([h])) as made:
        assert made.memory.nbytes["gpu"] <= 2 * COLUMNS * COLUMNS * 4 + 3 * ROWS * COLUMNS * 4


def test_pool_grows_to_the_largest_and_is_kept() -> None:
    pool = Pool()
    first = pool.take(HOST, [100, 200])
    assert pool.take(HOST, [50]) == first[:1]
    larger = pool.take(HOST, [50, 300])
    assert larger[0] is first[0] and larger[1] is not first[1] and larger[1].nbytes >= 300
    pool.clear()
    assert pool.take(HOST, [50])[0] is not first[0]
