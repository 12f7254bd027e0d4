"""BLAS claims large float products in host memory, says why not otherwise, and leaves the process's thread count alone."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from engine.backend import HOST, DeviceType, place
from engine.backends import blas
from engine.backends.blas import BlasBackend
from engine.backends.null import NullBackend, PrivateBufferType
from engine.dtypes import BF16, F16, F32, Q8_0, DType
from engine.graph import Graph
from engine.op import op
from engine.sched.execute import Executable
from engine.settings import override
from engine.tensor import Tensor, input_tensor, leaf


@op("w[wa, wb, m, k], x[a, b, n, k] -> y[a, b, n, m]", groups="a b n m", types={"w": [F32, F16, BF16, Q8_0], "x": [F32, F16]})
def mul_mat(i, j, column, row, w, x, y, k):
    pass


RNG = np.random.default_rng(7)


def weights(*shape: int, dtype: DType = F32, type=HOST) -> Tensor:
    t = leaf(dtype, shape, "w")
    place(t, type.allocate(t.nbytes, "weights"))
    return t


def x_of(*shape: int, dtype: DType = F32) -> Tensor:
    return input_tensor(dtype, shape, "x")


@pytest.fixture(scope="module")
def backend() -> BlasBackend:
    return BlasBackend(n_threads=2)


def reason(backend: BlasBackend, w: Tensor, x: Tensor) -> str:
    return backend.supports(mul_mat(w, x)).reason


def test_what_it_claims(backend: BlasBackend) -> None:
    assert backend.supports(mul_mat(weights(32, 32), x_of(32, 32))).variant == "sgemm"
    assert backend.supports(mul_mat(weights(32, 32, dtype=F16), x_of(32, 32))).variant == "sgemm of widened slabs"
    assert backend.supports(mul_mat(weights(1, 1, 40, 64), x_of(2, 4, 8, 64)))
    assert backend.device.type is DeviceType.ACCEL and backend.reads(HOST) and backend.buffer_type is HOST


@pytest.mark.parametrize("w, x, why", [
    (lambda: weights(64, 64), lambda: x_of(4, 64), "n = 4 columns; BLAS takes 32 or more"),
    (lambda: weights(64, 64), lambda: x_of(64), "n = 1 columns; BLAS takes 32 or more"),
    (lambda: weights(31, 64), lambda: x_of(32, 64), "m = 31 rows; BLAS takes 32 or more"),
    (lambda: weights(64, 16), lambda: x_of(32, 16), "k = 16 elements a row; BLAS takes 32 or more"),
    (lambda: weights(2, 64, 64), lambda: x_of(2, 32, 64), "w has the shape [2, 64, 64]; BLAS takes one matrix"),
    (lambda: weights(64, 64).transpose(), lambda: x_of(32, 64), "w is not contiguous; BLAS takes dense matrices"),
    (lambda: weights(64, 64), lambda: x_of(32, 128)[:, 0:64], "x is not contiguous; BLAS takes dense matrices"),
    (lambda: weights(64, 64, type=PrivateBufferType("gpu")), lambda: x_of(32, 64), "w lies in gpu memory; BLAS reads the host's"),
])
def test_what_it_refuses(backend: BlasBackend, w, x, why: str) -> None:
    assert reason(backend, w(), x()) == why


@pytest.mark.parametrize("w, x", [(BF16, F32), (Q8_0, F32), (F32, F16)])
def test_types_it_has_no_kernel_for(backend: BlasBackend, w: DType, x: DType) -> None:
    assert f"no kernel for mul_mat({w}, {x}, f32)" in reason(backend, weights(64, 64, dtype=w), x_of(64, 64, dtype=x))


def test_packed_weights_are_refused(backend: BlasBackend) -> None:
    class Packed(type(HOST)):  # type: ignore[misc]
        def layout_of(self, dtype):
            return "lanes8"

    assert reason(backend, weights(64, 64, type=Packed()), x_of(64, 64)) == "w lies lanes8; BLAS reads plain rows"


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("shape", [(32, 33, 32), (129, 65, 100), (200, 32, 256)])
def test_products(backend: BlasBackend, dtype: DType, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, with slabs of a few rows, the last of them partial."""
    m, n, k = shape
    monkeypatch.setattr(blas, "SLAB_NBYTES", 4 * k * 48)
    w, x = weights(m, k, dtype=dtype), x_of(n, k)
    a, b = RNG.standard_normal((m, k)).astype(dtype.numpy), RNG.standard_normal((n, k), np.float32)
    assert w.buffer is not None
    w.buffer.set(w, a)
    y = mul_mat(w, x)
    with Executable([backend], Graph([y])) as made:
        made.set(x, b)
        made.run()
        got = made.get(y)
    truth = b.astype(np.float64) @ a.astype(np.float64).T
    limit = 4 * np.finfo(np.float32).eps * np.sqrt(k) * (np.abs(b).astype(np.float64) @ np.abs(a).astype(np.float64).T)
    assert np.all(np.abs(got - truth) <= limit)


def test_batches_of_activations(backend: BlasBackend) -> None:
    w, x = weights(40, 64), x_of(2, 3, 8, 64)
    a, b = RNG.standard_normal((40, 64), np.float32), RNG.standard_normal((2, 3, 8, 64), np.float32)
    w.buffer.set(w, a)  # type: ignore[union-attr]
    y = mul_mat(w, x)
    with Executable([backend], Graph([y])) as made:
        made.set(x, b)
        made.run()
        assert np.allclose(made.get(y), b @ a.T, rtol=1e-4, atol=1e-4)


def test_threads_are_set_around_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, seen = BlasBackend(n_threads=1), []
    count = lambda: [p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"]  # noqa: E731
    before, matmul = count(), np.matmul
    monkeypatch.setattr(np, "matmul", lambda *args, **more: (seen.append(count()), matmul(*args, **more))[1])
    w, x = weights(64, 64), x_of(64, 64)
    with Executable([backend], Graph([mul_mat(w, x)])) as made:
        made.set(x, np.ones((64, 64), np.float32))
        made.run()
    assert seen and all(set(c) == {1} for c in seen) and count() == before


def test_threads_come_from_the_settings() -> None:
    with override(threads=3):
        assert BlasBackend().n_threads == 3
    assert BlasBackend(n_threads=2).n_threads == 2


def test_discovery_needs_a_product_to_run() -> None:
    assert [b.name for b in BlasBackend.discover([mul_mat])] == ["blas"]
    assert BlasBackend.discover([]) == []


def test_it_takes_products_from_the_cpu_without_copies(backend: BlasBackend) -> None:
    cpu = NullBackend([mul_mat], "cpu", buffer_type=HOST)
    large = mul_mat(weights(64, 64), x_of(64, 64))
    small = mul_mat(weights(8, 64), large)
    with Executable([backend, cpu], Graph([small])) as made:
        told = made.explain()
    assert told.summary == "blas: 1 node, cpu: 1 node, 2 splits" and not any(s.copies for s in told.splits)
    assert [(n.backend, n.variant) for n in told.nodes] == [("blas", "sgemm"), ("cpu", "general")]
