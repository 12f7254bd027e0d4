"""The OpenCL backend on whatever device there is (PoCL in most places): memory, copies, events, plans, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.backend import HOST, Backend, DeviceType, HostBuffer, KernelTable, place
from engine.backends.opencl import OpenCLBackend, buffers, plan, stream
from engine.backends.opencl.devices import Found, find_devices
from engine.dtypes import DTYPES, F16, F32, I32, Q4_1, Q6_K, Q8_0, DType
from engine.errors import AllocationError, ClosedError, DeviceError, InterruptedRun, UnsupportedOp
from engine.graph import Graph
from engine.op import Step
from engine.sched.execute import Executable
from engine.settings import override
from engine.tensor import Tensor, input_tensor, leaf
from engine.testing import Example, check_call
from kernels import OPS

ALL = list(OPS.values())
ADD, MUL, SOFT_MAX, SUM = OPS["add"], OPS["mul"], OPS["soft_max"], OPS["sum"]


@pytest.fixture(scope="module")
def found() -> Found:
    try:
        return next(f for f in find_devices() if f.device.type is not DeviceType.TEST)
    except (DeviceError, StopIteration) as why:
        pytest.skip(f"no OpenCL device: {why}")


@pytest.fixture
def backend(found: Found) -> Iterator[OpenCLBackend]:
    made = OpenCLBackend(ALL, found)
    yield made
    made.close()


@pytest.fixture
def two(found: Found) -> Iterator[list[OpenCLBackend]]:
    """One device twice: two queues in one context."""
    with override(opencl_repeats=2):
        made = [OpenCLBackend(ALL, f) for f in find_devices() if f.device.name.startswith(f"{found.device.name}.")]
    yield made
    for b in made:
        b.close()


def placed(backend: Backend, data: np.ndarray, dtype: DType = F32, name: str = "x") -> Tensor:
    t = leaf(dtype, data.shape, name)
    buffer = backend.buffer_type.allocate(t.nbytes)
    buffer.set(place(t, buffer), data)
    return t


def value(t: Tensor) -> np.ndarray:
    """The content of a tensor, wherever it lies."""
    buffer = t.root.buffer
    assert buffer is not None
    return buffer.get(t).view(t.dtype.numpy).reshape(*t.shape[:-1], t.shape[-1] // t.dtype.block_size)


def run(backend: Backend, node: Tensor) -> np.ndarray:
    """One op, its result in new memory."""
    place(node, backend.buffer_type.allocate(node.nbytes))
    backend.prepare(backend.optimize([node])).run()
    backend.synchronize()
    return value(node)


RNG = np.random.default_rng(3)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def weights(dtype: DType, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (*shape[:-1], dtype.row_nbytes(shape[-1])), np.uint8)


# -- memory -----------------------------------------------------------------------------------------------------


def test_memory_is_zero_and_aligned(backend: OpenCLBackend) -> None:
    for nbytes in (0, 1, 15, 16, 1000, 100_003):
        t = leaf(DTYPES["i8"], (max(1, nbytes),), "bytes")
        buffer = backend.buffer_type.allocate(nbytes)
        assert buffer.nbytes == nbytes and not buffer.get(place(t, buffer)).any()
    alignment = backend.buffer_type.alignment
    assert alignment >= 64 and alignment & (alignment - 1) == 0
    assert not backend.buffer_type.is_host and 0 < backend.buffer_type.max_nbytes <= (backend.device.total or 0)


@pytest.mark.parametrize("nbytes", [-1, 1 << 60])
def test_memory_that_cannot_be_had_is_a_typed_error(backend: OpenCLBackend, nbytes: int) -> None:
    for type in backend.weight_types:
        with pytest.raises(AllocationError, match=f"{backend.name}.* {nbytes} "):
            type.allocate(nbytes)


def test_a_driver_out_of_memory_is_an_allocation_error(backend: OpenCLBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    cl = stream.library()

    class Full:
        def __init__(self, *args: Any) -> None:
            raise cl.MemoryError(cl._cl._ErrorRecord(msg="", code=cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE, routine="clCreateBuffer"))

    monkeypatch.setattr(cl, "Buffer", Full)
    with pytest.raises(AllocationError, match="MEM_OBJECT_ALLOCATION_FAILURE.*shorter context"):
        backend.buffer_type.allocate(64)


@pytest.mark.parametrize("chunk", [stream.COPY_NBYTES, 100])
def test_dense_tensors_go_round(backend: OpenCLBackend, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(stream, "COPY_NBYTES", chunk)
    buffer = backend.buffer_type.allocate(10_000)
    around = leaf(DTYPES["i8"], (10_000,), "all")
    buffer.set(place(around, buffer), np.full(10_000, 7, np.int8))
    data = numbers(5, 7, 11)
    t = place(leaf(F32, data.shape, "x"), buffer, 1024)
    buffer.set(t, data)
    assert (value(t) == data).all()
    now = buffer.get(place(around, buffer))
    assert (now[:1024] == 7).all() and (now[1024 + data.nbytes :] == 7).all()


@pytest.mark.parametrize("piece", [buffers.PIECE_NBYTES, 64])
@pytest.mark.parametrize("view", [
    lambda t: t[:, 1:3], lambda t: t[1:, :, ::2], lambda t: t.permute(2, 0, 1), lambda t: t.transpose(), lambda t: t[2],
    lambda t: t[:, :, 3:4], lambda t: t[0:0]], ids=["rows", "steps", "permuted", "transposed", "one", "column", "empty"])
def test_views_go_round_and_leave_the_rest(backend: OpenCLBackend, monkeypatch: pytest.MonkeyPatch, view: Any, piece: int) -> None:
    monkeypatch.setattr(buffers, "PIECE_NBYTES", piece)
    data = numbers(4, 5, 6)
    device, host = placed(backend, data), leaf(F32, data.shape, "host")
    buffer = HOST.allocate(host.nbytes)
    buffer.set(place(host, buffer), data)
    one, other = view(device), view(host)
    assert (value(one) == value(other)).all()
    new = numbers(*one.shape)
    for t in (one, other):
        t.root.buffer.set(t, new)
    assert (value(one) == new).all()
    assert (value(device) == value(host)).all()


@pytest.mark.slow
def test_offsets_beyond_2_gib(backend: OpenCLBackend) -> None:
    offset = (2 << 30) + 4096
    if backend.buffer_type.max_nbytes < offset + 4096:
        pytest.skip(f"{backend.name} has buffers of {backend.buffer_type.max_nbytes} bytes")
    buffer = backend.buffer_type.allocate(offset + 4096)
    data = numbers(3, 70)
    x, y = place(leaf(F32, data.shape, "x"), buffer, offset), place(leaf(F32, data.shape, "y"), buffer, 64)
    buffer.set(x, data)
    buffer.set(y, -2 * data)
    assert (run(backend, ADD(x, y)) == -data).all()


@pytest.mark.parametrize("shape", [(1, 256), (7, 256), (33, 512), (2, 40, 256), (1030, 256)])
@pytest.mark.parametrize("dtype", [Q4_1, Q6_K, Q8_0], ids=str)
def test_packed_weights_come_back_byte_for_byte(backend: OpenCLBackend, dtype: DType, shape: tuple[int, ...]) -> None:
    type = backend.packed
    assert type.holds(dtype) and type.layout_of(dtype) == f"lanes{backend.lanes}" and not type.holds(F32)
    t, data = leaf(dtype, shape, "w"), weights(dtype, *shape)
    buffer = type.allocate(type.alignment + type.nbytes_of(t))
    buffer.set(place(t, buffer, type.alignment), data)
    assert (buffer.get(t) == data.reshape(-1)).all()


def test_packed_memory_takes_whole_quantised_weights_only(backend: OpenCLBackend) -> None:
    buffer = backend.packed.allocate(4096)
    with pytest.raises(AllocationError, match="cannot lie interleaved"):
        buffer.set(place(leaf(F32, (4, 8), "x"), buffer), numbers(4, 8))


# -- copies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [stream.COPY_NBYTES, 64])
def test_copies_from_and_to_the_host_are_queued(backend: OpenCLBackend, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(stream, "COPY_NBYTES", chunk)
    data = numbers(30, 50)
    source, back = leaf(F32, data.shape, "source"), leaf(F32, data.shape, "back")
    for t in (source, back):
        place(t, HOST.allocate(t.nbytes))
    source.buffer.set(source, data)  # type: ignore[union-attr]
    twin = place(leaf(F32, data.shape, "twin"), backend.buffer_type.allocate(data.nbytes))
    assert backend.copy_async(source, twin) and backend.copy_async(twin, back)
    event = backend.record()
    event.wait()
    assert (value(back) == data).all()


def test_memory_of_the_host_lives_until_a_queued_copy_is_done(backend: OpenCLBackend) -> None:
    data = numbers(1 << 18)
    twin = place(leaf(F32, data.shape, "twin"), backend.buffer_type.allocate(data.nbytes))
    for _ in range(stream.PENDING + 10):  # the sources are given up at once
        source = place(leaf(F32, data.shape, "source"), HOST.allocate(data.nbytes))
        source.buffer.set(source, data)  # type: ignore[union-attr]
        assert backend.copy_async(source, twin)
    backend.synchronize()
    assert (value(twin) == data).all() and not backend.stream._pending


def test_read_only_memory_can_be_copied_from(backend: OpenCLBackend) -> None:
    data = numbers(64)
    memory = data.view(np.uint8)
    memory.flags.writeable = False
    source = place(leaf(F32, data.shape, "mapped"), HostBuffer(HOST, memory, "weights"))
    twin = place(leaf(F32, data.shape, "twin"), backend.buffer_type.allocate(data.nbytes))
    backend.copy(source, twin)
    assert (value(twin) == data).all()


def test_a_view_is_copied_to_a_twin_with_its_gaps_or_not_at_once(backend: OpenCLBackend) -> None:
    data = numbers(6, 8)
    root = place(leaf(F32, data.shape, "root"), HOST.allocate(data.nbytes))
    root.buffer.set(root, data)  # type: ignore[union-attr]
    view = root[1:4, 2:5]
    twin = Tensor(F32, view.shape, name="twin", strides=view.strides)
    place(twin, backend.buffer_type.allocate(twin.nbytes))
    assert backend.copy_async(view, twin)
    backend.synchronize()
    assert (value(twin) == data[1:4, 2:5]).all()
    dense = place(leaf(F32, view.shape, "dense"), backend.buffer_type.allocate(view.n_elements * 4))
    assert not backend.copy_async(view, dense)
    backend.copy(view, dense)
    assert (value(dense) == data[1:4, 2:5]).all()


def test_two_queues_of_a_device_copy_and_wait_for_each_other(two: list[OpenCLBackend]) -> None:
    first, second = two
    assert not first.reads(second.buffer_type) and first.stream.context is second.stream.context
    data = numbers(100, 300)
    x = placed(first, data)
    node = MUL(x, x)
    place(node, first.buffer_type.allocate(node.nbytes))
    work = first.prepare([Step.of(node)])
    twin = place(leaf(F32, data.shape, "twin"), second.buffer_type.allocate(data.nbytes))
    for _ in range(20):
        work.run()
        second.wait(first.record())
        assert second.copy_async(node, twin)
    second.synchronize()
    assert (value(twin) == data * data).all()


def test_an_event_of_another_context_is_waited_for_on_the_host(backend: OpenCLBackend) -> None:
    other = OpenCLBackend(ALL, next(f for f in find_devices() if f.device.name == backend.name))
    try:
        data = numbers(64, 64)
        node = MUL(placed(other, data), placed(other, data))
        place(node, other.buffer_type.allocate(node.nbytes))
        other.prepare([Step.of(node)]).run()
        backend.wait(other.record())
        twin = place(leaf(F32, data.shape, "twin"), backend.buffer_type.allocate(data.nbytes))
        assert not backend.copy_async(node, twin)
        backend.copy(node, twin)
        assert (value(twin) == data * data).all()
    finally:
        other.close()


# -- plans ------------------------------------------------------------------------------------------------------


def test_a_graph_on_two_devices_and_the_cpu_gives_what_the_cpu_gives(two: list[OpenCLBackend], cpu: Backend) -> None:
    data, factor = numbers(40, 60), numbers(60)

    def result(backends: list[Backend], homes: list[Backend]) -> np.ndarray:
        x, w = input_tensor(F32, data.shape, "x"), input_tensor(F32, factor.shape, "w")
        a = ADD(x, w, name="a")
        b = SOFT_MAX(a, name="b")
        c = MUL(b, a, name="c")
        pins = dict(zip((a, b, c), homes, strict=True))
        with Executable(backends, Graph([c]), pins=pins) as run:
            for _ in range(5):
                run.set(x, data)
                run.set(w, factor)
                run.run()
            return run.get(c)

    want = result([cpu], [cpu, cpu, cpu])
    got = result([*two, cpu], [two[0], two[1], cpu])
    assert np.allclose(got, want, rtol=1e-5, atol=1e-7) and not np.isnan(got).any()


def test_many_groups_are_folded_into_several_launches(found: Found) -> None:
    data = numbers(50, 70)
    small = OpenCLBackend(ALL, found, lanes=8, max_items=64)
    try:
        x = placed(small, data)
        node = ADD(x, x)
        place(node, small.buffer_type.allocate(node.nbytes))
        made = small.prepare([Step.of(node)])
        n_groups = made.queued[0].launch.binding.n_groups
        assert len(made.queued) == -(-n_groups // 8) > 1
        made.run()
        small.synchronize()
        assert (value(node) == 2 * data).all()
    finally:
        small.close()


@pytest.mark.parametrize(("n_groups", "folds"), [
    (0, []), (1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 4), (4, 1)]), (9, [(0, 4), (4, 4), (8, 1)])])
def test_folds_cover_every_group_once(n_groups: int, folds: list[tuple[int, int]]) -> None:
    assert list(plan.folded(n_groups, 8, 32)) == folds


def test_nothing_to_do_is_not_launched(backend: OpenCLBackend) -> None:
    x = place(leaf(F32, (0, 5), "x"), backend.buffer_type.allocate(0))
    node = place(ADD(x, x), backend.buffer_type.allocate(0))
    made = backend.prepare([Step.of(node)])
    assert made.queued == ()
    made.run()


def test_a_second_launch_reads_the_scratch_memory_of_the_first(backend: OpenCLBackend) -> None:
    data = RNG.integers(-50, 50, (300, 20)).astype(np.float32)  # exact in any order
    assert run(backend, SUM(placed(backend, data)))[0] == data.sum()
    assert run(backend, SUM(placed(backend, data[:0])))[0] == 0


def test_arguments_outlive_the_graph(backend: OpenCLBackend) -> None:
    data = numbers(200, 30)
    node = ADD(placed(backend, data), placed(backend, data))
    out = place(node, backend.buffer_type.allocate(node.nbytes)).buffer
    made = backend.prepare([Step.of(node)])
    twin = place(leaf(F32, data.shape, "twin"), out)
    del node
    for _ in range(50):
        made.run()
        backend.buffer_type.allocate(data.nbytes)
    backend.synchronize()
    assert (value(twin) == 2 * data).all()


def test_a_run_can_be_interrupted_between_launches(backend: OpenCLBackend) -> None:
    data = numbers(64, 64)
    x = placed(backend, data)
    nodes = [place(MUL(x, x), backend.buffer_type.allocate(data.nbytes)) for _ in range(4)]
    made = backend.prepare([Step.of(n) for n in nodes] * 2000)
    stopped = threading.Event()

    def ask() -> None:
        while not stopped.wait(0.001):
            backend.interrupt()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with pytest.raises(InterruptedRun):
            for _ in range(100):
                made.run()
    finally:
        stopped.set()
        asking.join()
    made.run()  # the next one is whole again
    backend.synchronize()
    assert (value(nodes[-1]) == data * data).all()


def test_a_node_without_a_kernel_is_refused_with_its_reason(found: Found) -> None:
    empty = OpenCLBackend([ADD], found)
    x = placed(empty, numbers(4, 4))
    with pytest.raises(UnsupportedOp, match="soft_max"):
        empty.prepare([Step.of(SOFT_MAX(x))])
    empty.close()


def test_a_launch_the_driver_refuses_names_op_and_tensor(backend: OpenCLBackend) -> None:
    x = placed(backend, numbers(4, 4))
    node = place(ADD(x, x, name="total"), backend.buffer_type.allocate(64))
    made = backend.prepare([Step.of(node)])
    made._local = (backend.lanes + 1,)  # not the size it was built for
    with pytest.raises(DeviceError, match=r"add .*'total'.*INVALID_WORK_GROUP_SIZE"):
        made.run()


# -- life -------------------------------------------------------------------------------------------------------


def test_after_close_everything_is_a_typed_error(found: Found) -> None:
    backend = OpenCLBackend(ALL, found)
    data = numbers(4, 4)
    x = placed(backend, data)
    node = place(ADD(x, x), backend.buffer_type.allocate(64))
    made = backend.prepare([Step.of(node)])
    made.run()
    memory = x.buffer.memory  # type: ignore[union-attr]
    backend.close()
    backend.close()  # does nothing
    assert memory._cl is None, "memory goes back at once"
    attempts = [made.run, lambda: value(x), lambda: backend.buffer_type.allocate(4), lambda: backend.packed.allocate(4),
                lambda: x.buffer.set(x, data), lambda: backend.prepare([Step.of(node)]), backend.record, backend.synchronize]  # type: ignore[union-attr]
    for attempt in attempts:
        with pytest.raises(ClosedError, match=f"{backend.name} is closed"):
            attempt()


def test_closing_one_leaves_its_twin_alone(two: list[OpenCLBackend]) -> None:
    data = numbers(4, 4)
    x = placed(two[1], data)
    two[0].close()
    assert (run(two[1], ADD(x, x)) == 2 * data).all()


def test_a_backend_that_is_never_used_makes_no_context(found: Found) -> None:
    fresh = next(f for f in find_devices() if f.device.name == found.device.name)
    backend = OpenCLBackend(ALL, fresh)
    assert backend.supports(ADD(leaf(F32, (2, 2), "x"), leaf(F32, (2, 2), "w")))
    backend.synchronize()
    backend.close()
    assert "context" not in vars(fresh.shared)


def test_import_engine_loads_no_opencl() -> None:
    code = ("import sys, engine, engine.backends.opencl\n"
            "print([m for m in sys.modules if m.startswith('pyopencl')])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# -- what it claims ---------------------------------------------------------------------------------------------


def test_the_table_is_the_cpu_s(backend: OpenCLBackend) -> None:
    assert set(backend.table.rows) == set(KernelTable(ALL, backend.lanes).rows)
    assert list(backend.weight_types) == [backend.packed, backend.buffer_type]
    assert all(backend.reads(t) for t in backend.weight_types) and not backend.reads(HOST)


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_any_number_of_lanes_gives_the_product(found: Found, lanes: int) -> None:
    backend = OpenCLBackend(ALL, found, lanes=lanes)
    try:
        w, x = RNG.integers(-3, 4, (40, 64)).astype(np.float16), RNG.integers(-3, 4, (5, 64)).astype(np.float32)
        node = OPS["mul_mat"](placed(backend, w, F16, "w"), placed(backend, x))
        assert (run(backend, node) == x @ w.T.astype(np.float32)).all()
    finally:
        backend.close()


@pytest.mark.parametrize(("call", "variants"), [
    ("mul_mat[q4_1,f32,f32] w=33,544:codes x=3,544 seed=1", "mul_mat_rows_split mul_mat_rows_in_turn"),
    ("mul_mat[q5_k,f32,f32] w=5,512:codes x=2,512 seed=2", "mul_mat_rows_split mul_mat_rows_in_turn"),
    ("mul_mat[f16,f32,f32] w=7,520 x=3,520 seed=3", "mul_mat_split"),
    ("mul_mat_id[q8_0,f32,i32,f32] w=3,33,544:codes x=2,1,544 ids=2,2 seed=4", "mul_mat_id_rows_split mul_mat_id_rows_in_turn"),
    ("mul_mat_id[f32,f32,i32,f32] w=3,5,520 x=2,2,520 ids=2,2 seed=5", "mul_mat_id_split")])
def test_slices_of_k_add_up_on_the_lanes_of_a_gpu(found: Found, call: str, variants: str) -> None:
    backend = OpenCLBackend(ALL, found, lanes=32)
    try:
        memory = backend.packed if variants.endswith("in_turn") else None
        got = {check_call(backend, Example.parse(call, OPS), variant, memory).tobytes() for variant in variants.split()}
        assert len(got) == 1
    finally:
        backend.close()


def test_ids_pick_rows(backend: OpenCLBackend) -> None:
    data, ids = numbers(9, 33), np.array([8, 0, 3], np.int32)
    node = OPS["get_rows"](placed(backend, data), placed(backend, ids, I32, "ids"))
    assert (run(backend, node) == data[ids]).all()
