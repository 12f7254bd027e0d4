"""The null backend supports what it was given and computes nothing; the filtering wrapper refuses what a test says."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend import HOST, DeviceType
from engine.backends.null import NullBackend, PrivateBufferType
from engine.dtypes import F32
from engine.errors import AllocationError, UnsupportedOp
from engine.graph import Graph
from engine.op import op
from engine.sched.execute import Executable
from engine.tensor import input_tensor
from engine.testing_backends import FilteredBackend


@op("x[r, n] -> y[r, n]", groups="r")
def twice(row, x, y, n):
    pass


@op("x[r, n] -> y[r, n]", groups="r")
def thrice(row, x, y, n):
    pass


def x_input(*shape: int):
    return input_tensor(F32, shape or (2, 3), "x")


def test_it_supports_its_ops_and_nothing_else() -> None:
    backend = NullBackend([twice])
    assert backend.supports(twice(x_input())).variant == "general"
    assert backend.supports(x_input()[0:1]).variant == "view"
    refused = backend.supports(thrice(x_input()))
    assert not refused and refused.reason == "no kernel for thrice"
    with pytest.raises(UnsupportedOp, match="thrice.*null: no kernel"):
        backend.require(thrice(x_input()))


def test_it_is_a_hidden_device_with_memory_of_its_own() -> None:
    (found,) = NullBackend.discover([twice])
    a, b = NullBackend([twice], "a"), NullBackend([twice], "b")
    assert found.name == "null" and found.device.type is DeviceType.TEST
    assert a.reads(a.buffer_type) and not a.reads(b.buffer_type) and not a.reads(HOST) and not a.buffer_type.is_host
    assert a.device.id != b.device.id
    twin = NullBackend([twice], "twin", buffer_type=a.buffer_type, reads=[HOST])
    assert twin.reads(a.buffer_type) and twin.reads(HOST)


def test_plans_compute_nothing() -> None:
    backend, x = NullBackend([twice]), x_input()
    y = twice(x)
    with Executable([backend], Graph([y])) as made:
        made.set(x, np.ones((2, 3), np.float32))
        made.run()
        made.run()
        assert not made.get(y).any()
        assert made._stages[0].plan.n_runs == 2  # type: ignore[union-attr]


def test_private_memory_has_limits() -> None:
    small = PrivateBufferType("small", 256, 1024)
    assert small.allocate(1024).address % 256 == 0
    assert small.allocate(0).nbytes == 0
    for nbytes in (1025, 2**64 - 8, -1):
        with pytest.raises(AllocationError):
            small.allocate(nbytes)
    with pytest.raises(AllocationError, match="power of two"):
        PrivateBufferType("odd", 3).allocate(8)


def test_a_filtered_backend_refuses_with_the_reason() -> None:
    inner = NullBackend([twice, thrice], "inner")
    backend = FilteredBackend(inner, lambda call: f"{call['n']} columns are too many" if call["n"] > 4 else None, name="picky")
    assert backend.supports(twice(x_input(2, 4)))
    assert backend.supports(twice(x_input(2, 5))).reason == "5 columns are too many"
    assert backend.table.keys_of(twice) == inner.table.keys_of(twice)
    assert backend.name == "picky" and backend.device is inner.device and backend.reads(inner.buffer_type)
    assert FilteredBackend.score() == 0 and FilteredBackend.discover([]) == []
