"""What runs in Numba's CUDA simulator, which a process has to be started with: see test_cuda_simulator.py."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backend import HOST, DeviceType, place
from engine.backends.cpu import CpuBackend
from engine.backends.cuda import CudaBackend
from engine.backends.cuda import compile as toolchain
from engine.backends.cuda.device import ALIGNMENT, Gpu
from engine.backends.cuda.plan import CudaPlan, groups_together
from engine.backends.cuda.sim_words import Crowd, Group, Memory
from engine.backends.sim import SimBackend
from engine.dtypes import DTYPES, F16, F32, I8, Q4_0, Q8_0
from engine.errors import AllocationError, ClosedError, InterruptedRun, KernelError
from engine.gguf.quants import quantize
from engine.graph import Graph
from engine.runtime import load
from engine.sched.execute import Executable
from engine.settings import cuda_simulator
from engine.tensor import Tensor, leaf
from engine.testing import Example, InterleavedBufferType, check_call, run_guarded
from engine.testing.conformance import Case, cases, check_case, in_rotation
from kernels import OPS

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny_model import write_tiny_model  # noqa: E402

SEED, SHARE = int(os.environ.get("SIMULATED_SEED", "0")), int(os.environ.get("SIMULATED_SHARE", "1"))
pytestmark = pytest.mark.skipif(not cuda_simulator(), reason="needs NUMBA_ENABLE_CUDASIM=1")
rng = np.random.default_rng(SEED)
Array = np.ndarray[Any, Any]


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    made = CudaBackend(list(OPS.values()), Gpu(0, simulated=True))
    yield made
    made.close()


def held(backend: Any, dtype: Any, data: Array, shape: tuple[int, ...] | None = None) -> Tensor:
    t = leaf(dtype, shape or data.shape, "t")
    place(t, backend.buffer_type.allocate(max(1, t.nbytes))).buffer.set(t, data)  # type: ignore[union-attr]
    return t


def computed(backend: Any, make: Callable[[Any], Tensor]) -> Array:
    with Executable([backend], Graph([make(backend)])) as run:
        run.run()
        return run.get(run.graph.outputs[0])


# -- kernels ----------------------------------------------------------------------------------------------------


def rotating() -> list[Case]:
    """One key of each (op, block size), as the seed decides; of these one in SHARE."""
    table = CudaBackend(list(OPS.values()), Gpu(0, simulated=True)).table
    return in_rotation(cases(table, OPS.values()), SEED)[SEED % SHARE :: SHARE]


@pytest.mark.parametrize("case", rotating() if cuda_simulator() else [], ids=str)
def test_a_row_of_the_table_agrees_with_the_reference(backend: CudaBackend, case: Case) -> None:
    outcome = check_case(backend, case, examples=2, seed=SEED, budget=200)
    if outcome.status == "refused":  # it takes larger calls only
        outcome = check_case(backend, case, examples=4, seed=SEED, budget=1500)
    assert outcome.status == "ok", outcome.reason


PRODUCTS = {"q4_0": (7, 96, 3), "q8_0": (3, 64, 1), "q4_k": (5, 512, 2), "q6_k": (4, 256, 2)}


@pytest.mark.parametrize("name", PRODUCTS)
def test_bits_equal_the_cpus_where_lanes_are_equal(name: str) -> None:
    """Quantised activations, integer dot products, and the order of sums over the lanes."""
    m, k, n = PRODUCTS[name]
    w = quantize(rng.standard_normal((m, k)).astype(np.float32), DTYPES[name])
    x = rng.standard_normal((n, k)).astype(np.float32)

    def product(backend: Any) -> Tensor:
        return OPS["mul_mat"](held(backend, DTYPES[name], w, (m, k)), held(backend, F32, x))

    ours = CudaBackend(list(OPS.values()), Gpu(0, simulated=True), lanes=8)
    assert np.array_equal(computed(ours, product), computed(CpuBackend(list(OPS.values()), threads=1, lanes=8), product))


def test_interleaved_weights_give_what_the_file_layout_gives(backend: CudaBackend) -> None:
    w, x = quantize(rng.standard_normal((33, 64)).astype(np.float32), Q4_0), rng.standard_normal((2, 64)).astype(np.float32)
    packed = leaf(Q4_0, (33, 64), "w")
    place(packed, backend.packed.allocate(backend.packed.nbytes_of(packed))).buffer.set(packed, w)  # type: ignore[union-attr]
    plain = computed(backend, lambda b: OPS["mul_mat"](held(b, Q4_0, w, (33, 64)), held(b, F32, x)))
    rows = OPS["mul_mat"](packed, held(backend, F32, x))
    assert "mul_mat_rows" in backend.supports(rows).variant
    np.testing.assert_allclose(computed(backend, lambda b: rows), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "f16"])
def test_slices_of_k_have_the_bits_of_the_language_itself(backend: CudaBackend, name: str) -> None:
    """Two launches over scratch memory; for blocks, all slices by one group too."""
    m, k = 3, 512
    e = Example.parse(f"mul_mat[{name},f32,f32] w={m},{k} x=2,{k} seed={SEED}", OPS)
    blocks = DTYPES[name].is_block
    names = ("mul_mat_rows_split", "mul_mat_rows_in_turn") if blocks else ("mul_mat_split",)
    got = [check_call(backend, e, variant, backend.packed if blocks else None) for variant in names]
    sim = SimBackend([OPS["mul_mat"], OPS["quantize_rows"]], lanes=32)
    got.append(check_call(sim, e, names[0], InterleavedBufferType(32) if blocks else None))
    assert len({one.tobytes() for one in got}) == 1


def test_weights_lie_interleaved_where_they_can(backend: CudaBackend) -> None:
    assert list(backend.weight_types) == [backend.packed, backend.buffer_type]
    assert all(backend.reads(t) for t in backend.weight_types)
    x = Tensor(F32, (1, 4096), name="x")
    for rows, variant in ((4096, "mul_mat_rows_split"), (1 << 17, "mul_mat_rows")):
        w = leaf(Q4_0, (rows, 4096), "w")
        assert backend.supports(OPS["mul_mat"](w, x), {w: backend.packed}).variant == f"quantize_rows + {variant}"


def test_blocks_of_several_groups_and_folded_launches_change_no_bit() -> None:
    x = rng.standard_normal((11, 40)).astype(np.float32)
    results, launches = [], []
    for max_blocks in (1, 2, 1 << 20):
        backend = CudaBackend(list(OPS.values()), Gpu(0, simulated=True), max_blocks=max_blocks)
        node = OPS["soft_max"](held(backend, F32, x))
        results.append(computed(backend, lambda b: node))  # noqa: B023
        plan = backend.prepare(backend.optimize([place(OPS["soft_max"](held(backend, F32, x)), backend.buffer_type.allocate(440 * 4))]))
        launches.append([(p.blocks, p.together, int(p.values[0])) for p in plan.parts])
    assert launches == [[(1, 4, 0), (1, 4, 4), (1, 4, 8)], [(2, 4, 0), (1, 4, 8)], [(3, 4, 0)]]
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def test_groups_share_a_block_only_where_there_are_enough_for_every_multiprocessor() -> None:
    assert [groups_together(n, 32, 100) for n in (1, 199, 200, 399, 400, 1 << 40)] == [1, 1, 2, 2, 4, 4]
    assert groups_together(1 << 20, 256, 100) == 1


# -- what the simulator must notice -----------------------------------------------------------------------------


def launched(text: str, *integers: int, pieces: list[tuple[int, Array]] | None = None, lanes: int = 4) -> None:
    from numba import cuda

    from engine.backends.cuda import sim_words

    crowd = Crowd(lanes)
    scope: dict[str, Any] = sim_words.words(Memory(pieces or []), crowd)
    exec(text, scope)
    try:
        cuda.jit(crowd.guarded(scope["kernel"]))[1, (lanes, 1)](*integers)
    except Exception as why:
        raise (crowd.error or why) from None


@pytest.mark.parametrize("body, said", [
    ("store_f32(x, 16, f32(1.0))", "leaves every tensor"), ("load_f32(x, -4)", "leaves every tensor"), ("load_f32(x, 2)", "not aligned"),
    ("load_u32_by2(x, 1)", "not aligned"), ("if lane_number() < 3: group_sum_f32(f32(1.0))", "not reached by every lane"),
    ("group_sum_f32(f32(1.0)) if lane_number() else group_max_f32(f32(1.0))", "different words")])
def test_a_wrong_access_or_a_divergent_word_is_an_error(body: str, said: str) -> None:
    memory = Gpu(0, simulated=True).allocate(16)
    with pytest.raises(KernelError, match=said):
        launched(f"def kernel(x):\n    {body}\n", memory.address, pieces=[(memory.address, memory.host)])


def test_words_across_lanes_fold_the_upper_half_onto_the_lower() -> None:
    memory = Gpu(0, simulated=True).allocate(64)
    x = memory.host.view(np.float32)
    x[:4] = [1e8, 1.0, -1e8, 3.0]
    launched("def kernel(x):\n    v = load_f32(x + index_from_i32(lane_number()) * 4, 0)\n    s = group_sum_f32(v)\n"
             "    store_f32(x + index_from_i32(lane_number()) * 4, 16, add_f32(s, lane_value_f32(v, 1)))\n",
             memory.address, pieces=[(memory.address, memory.host)])
    assert x[4:8].tolist() == [np.float32(1e8 - 1e8) + np.float32(1.0 + 3.0) + 1.0] * 4


def test_a_lane_that_left_breaks_the_meeting() -> None:
    group = Group(2)
    group.leave()
    with pytest.raises(KernelError, match="not reached"):
        group.exchange(0, "barrier", None)


# -- memory, copies, order --------------------------------------------------------------------------------------


def test_memory_is_zero_aligned_and_typed(backend: CudaBackend) -> None:
    buffer = backend.buffer_type.allocate(1000)
    assert buffer.address % ALIGNMENT == 0 and buffer.nbytes == 1000  # type: ignore[attr-defined]
    assert not buffer.get(place(leaf(I8, (1000,), "all"), buffer)).any()
    assert backend.buffer_type.allocate(0).nbytes == 0
    with pytest.raises(AllocationError, match="size >= 0"):
        backend.buffer_type.allocate(-1)
    assert backend.device.type is DeviceType.TEST and backend.device.capabilities.host_buffer


def test_scratch_of_no_elements(backend: CudaBackend) -> None:
    """The sum of nothing has no partial sums."""
    empty = Example.of(OPS["sum"], ("sum", ("f32", "f32")), {"x": np.zeros((0, 1, 1, 1), np.float32)})
    got, guards = run_guarded(backend, empty)
    assert got == 0 and guards.intact


def test_set_and_get_of_strided_tensors_touch_only_their_own_bytes(backend: CudaBackend) -> None:
    data = np.arange(6 * 10, dtype=np.float32).reshape(6, 10)
    root = held(backend, F32, data)
    assert root.buffer is not None
    for view, own in ((root[1::2, 3:8:2], data[1::2, 3:8:2]), (root.transpose(), data.T), (root[2:2], data[2:2])):
        assert np.array_equal(root.buffer.get(view).view(np.float32).reshape(own.shape), own)
    root.buffer.set(root[1::2, 3:8:2], np.full((3, 3), -1, np.float32))
    data[1::2, 3:8:2] = -1
    assert np.array_equal(root.buffer.get(root).view(np.float32).reshape(6, 10), data)


@pytest.mark.parametrize("shape", [(33, 64), (1, 32), (2, 5, 96)])
def test_interleaved_memory_gives_back_what_was_set(backend: CudaBackend, shape: tuple[int, ...]) -> None:
    data = rng.integers(0, 256, (*shape[:-1], Q8_0.row_nbytes(shape[-1])), np.uint8)
    t = leaf(Q8_0, shape, "w")
    buffer = backend.packed.allocate(backend.packed.nbytes_of(t) + ALIGNMENT, "weights")
    place(t, buffer, ALIGNMENT)
    buffer.set(t, data)
    assert np.array_equal(buffer.get(t), data.reshape(-1)) and backend.packed.layout_of(Q8_0) == "lanes32"


def test_copies_go_both_ways_and_between_buffers(backend: CudaBackend) -> None:
    data = rng.standard_normal((4, 6)).astype(np.float32)
    for host in (HOST, backend.pinned):
        source, there, back = leaf(F32, (4, 6), "source"), leaf(F32, (4, 6), "there"), leaf(F32, (4, 6), "back")
        place(source, host.allocate(96)).buffer.set(source, data)  # type: ignore[union-attr]
        place(back, host.allocate(96))
        other = place(leaf(F32, (4, 6), "other"), backend.buffer_type.allocate(200), 64)
        place(there, backend.buffer_type.allocate(96))
        assert backend.copy_async(source, there) and backend.copy_async(there, other) and backend.copy_async(other, back)
        backend.synchronize()
        assert np.array_equal(back.buffer.get(back).view(np.float32).reshape(4, 6), data)  # type: ignore[union-attr]


def test_only_tensors_that_lie_alike_are_copied_as_bytes(backend: CudaBackend) -> None:
    root = place(leaf(F32, (4, 6), "root"), HOST.allocate(96))
    target = place(leaf(F32, (6, 4), "target"), backend.buffer_type.allocate(96))
    assert not backend.copy_async(root.transpose(), target)
    assert not backend.copy_async(place(leaf(F16, (6, 4), "half"), HOST.allocate(48)), target)
    data = rng.standard_normal((4, 6)).astype(np.float32)
    root.buffer.set(root, data)  # type: ignore[union-attr]
    backend.copy(root.transpose(), target)
    assert np.array_equal(target.buffer.get(target).view(np.float32).reshape(6, 4), data.T)  # type: ignore[union-attr]


def test_a_graph_runs_over_the_gpu_and_the_cpu(backend: CudaBackend) -> None:
    cpu = CpuBackend(list(OPS.values()), threads=1)
    x = rng.standard_normal((3, 40)).astype(np.float32)

    def graph(b: Any) -> tuple[Tensor, Tensor, Tensor]:
        first = OPS["rms_norm"](held(b, F32, x), name="first")
        second = OPS["silu"](first, name="second")
        return first, second, OPS["soft_max"](second, name="third")

    first, second, third = graph(backend)
    with Executable([backend, cpu], Graph([third]), pins={first: backend, second: cpu, third: backend}) as run:
        assert [s.backend for s in run.schedule.splits] == [backend, cpu, backend]
        run.run()
        mixed = run.get(third)
    np.testing.assert_allclose(mixed, computed(cpu, lambda b: graph(b)[-1]), rtol=1e-5)


def test_a_whole_model_agrees_with_the_cpu(backend: CudaBackend, tmp_path: Path) -> None:
    """A tiny Llama, one token: every node but the look-up in the mapped embedding runs here."""
    path = write_tiny_model(tmp_path / "tiny.gguf")
    logits = {}
    for backends in ([backend, CpuBackend(list(OPS.values()), threads=1)], [CpuBackend(list(OPS.values()), threads=1)]):
        with load(path, backends=backends) as model, model.context(n_ctx=32) as context:
            where = Counter(line.backend for line in context.explain(1).nodes)
            logits[backends[0].name] = context.decode([7])
            assert where["cpu"] == (1 if backends[0] is backend else where.total()), where
    assert logits["cuda"].argmax() == logits["cpu"].argmax()
    np.testing.assert_allclose(logits["cuda"], logits["cpu"], rtol=1e-3, atol=1e-4)


def test_events_and_streams_keep_the_order(backend: CudaBackend) -> None:
    other = CudaBackend(list(OPS.values()), Gpu(0, simulated=True))
    event = backend.record()
    other.wait(event)
    event.wait()
    other.synchronize()


def test_a_closed_backend_gives_its_memory_back_and_says_so(backend: CudaBackend) -> None:
    t = held(backend, F32, np.ones(4, np.float32))
    backend.close()
    backend.close()
    for act in (lambda: t.buffer.get(t), lambda: backend.buffer_type.allocate(4), backend.record):  # type: ignore[union-attr]
        with pytest.raises(ClosedError, match="closed"):
            act()


def test_an_interrupt_stops_a_run_between_two_launches(backend: CudaBackend) -> None:
    x = held(backend, F32, np.ones((2, 8), np.float32))
    steps = [backend.optimize([place(OPS["silu"](x), backend.buffer_type.allocate(64))])[0] for _ in range(2)]
    plan = backend.prepare(steps)
    assert isinstance(plan, CudaPlan)
    queue, asked = plan._simulate, []

    def once(part: Any) -> None:
        queue(part)
        asked.append(part)
        backend.interrupt()

    plan._simulate = once  # type: ignore[method-assign]
    with pytest.raises(InterruptedRun, match="silu"):
        plan.run()
    assert len(asked) == 1


def test_elementary_functions_are_plain_functions_here() -> None:
    from engine.backends.cuda import sim_words
    from engine.backends.cuda.compiler import program_of
    from engine.calls import a_call
    from engine.lang.binding import bind

    op = OPS["soft_max"]
    call = a_call(op, op.keys()[0], op.variants[-1], 32)
    assert call is not None
    program = program_of(bind(call, op.variants[-1])[0])
    scope = toolchain.namespace(program, sim_words.words(Memory([]), Crowd(32)), {})
    assert scope["exp_of"](np.float32(-np.inf)) == 0 and scope["exp_of"](np.float32(0)) == 1
