"""Real models with the whole graph on an OpenCL device: the same greedy tokens as on the CPU, and nothing but the embedding elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.backend import DeviceType
from engine.backends.opencl import OpenCLBackend
from engine.backends.opencl.devices import find_devices
from engine.errors import DeviceError
from engine.model import Model
from engine.runtime import load
from kernels import OPS

PROMPT, N = "The capital of France is", 8


@pytest.fixture(scope="module")
def device(cpu) -> Iterator[list]:
    try:
        found = next(f for f in find_devices() if f.device.type is not DeviceType.TEST)
    except (DeviceError, StopIteration) as why:
        pytest.skip(f"no OpenCL device: {why}")
    backend = OpenCLBackend(list(OPS.values()), found)
    yield [backend, cpu]
    backend.close()


def greedy(model: Model, n_ctx: int = 256) -> list[int]:
    context, out = model.context(n_ctx), []
    tokens = model.tokenize(PROMPT)
    for _ in range(N):
        tokens = [int(context.decode(tokens).argmax())]
        out += tokens
    return out


def check(on_cpu: Model, on_device: Model) -> None:
    assert greedy(on_device) == greedy(on_cpu)
    context = on_device.context(256)
    plan = context.explain()
    assert [n.name for n in plan.nodes if n.backend == "cpu"] == ["embd"] and len(plan.splits) == 2
    assert all(t.buffer.type.name.startswith("opencl:") for t in (*context.cache.keys, *context.cache.values))  # type: ignore[union-attr]


def test_smollm2(smollm2: Model, smollm2_path, device: list) -> None:
    with load(smollm2_path, backends=device) as model:
        check(smollm2, model)


@pytest.mark.slow
def test_gemma3(gemma3: Model, gemma3_path, device: list) -> None:
    with load(gemma3_path, backends=device) as model:
        check(gemma3, model)
