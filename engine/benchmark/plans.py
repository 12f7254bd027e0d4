"""Calls of an op as a plan that is timed: operands in memory, one result for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.backend import HOST, Backend, Buffer, BufferType, Plan, place
from engine.op import Step
from engine.tensor import Tensor


def memory_of(backend: Backend) -> BufferType:
    return HOST if backend.reads(HOST) else backend.buffer_type


def buffer_of(t: Tensor) -> Buffer:
    found = t.root.buffer
    assert found is not None, f"{t} has no memory"
    return found


@dataclass(frozen=True)
class Prepared:
    """A plan of `n_calls` calls of one op, which all write `result`; `variant` is the kernel, behind the conversion it needs."""

    backend: Backend
    plan: Plan
    result: Tensor
    n_calls: int
    variant: str

    def run(self) -> None:
        """Run every call and wait for the last."""
        self.plan.run()
        self.backend.synchronize()

    def get(self) -> np.ndarray:
        """The stored elements of the result."""
        t = self.result
        return buffer_of(t).get(t).view(t.dtype.numpy).reshape(*t.shape[:-1], t.shape[-1] // t.dtype.block_size)


def plan_of(backend: Backend, nodes: Sequence[Tensor]) -> Prepared:
    """Nodes of one op as a plan in which all write the same result (Note [cold] in ops.py)."""
    memory, shared = memory_of(backend), {}
    steps: list[Step] = []
    for node in nodes:
        backend.require(node)
        for j, step in enumerate(backend.optimize([node])):
            if step.out.view_of is None:
                if j not in shared:
                    shared[j] = memory.allocate(max(1, memory.nbytes_of(step.out)))
                place(step.out, shared[j])
            steps.append(step)
    return Prepared(backend, backend.prepare(steps), nodes[-1], len(nodes), backend.require(nodes[-1]).variant)
