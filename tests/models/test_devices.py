"""The tiny models of each architecture on each device alone, and on mixtures of devices that refuse some of the ops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from float64_models import nmse

from engine.backend import Backend
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.errors import ModelError
from engine.runtime import load, registry
from engine.testing import VirtualBackend
from kernels import OPS

N_PROMPT = 9


def names(golden: Path, backend: Backend) -> list[str]:
    """Golden models that the loader knows."""
    out = []
    for path in sorted((golden / "archs").glob("*.gguf")):
        try:
            with load(path, backends=[backend]):
                out.append(path.stem)
        except ModelError:
            continue
    return out


def logits(golden: Path, name: str, backends: Sequence[Backend]) -> np.ndarray:
    """Logits after each token of a short prompt, in two batches, and of two more tokens one by one."""
    want = np.load(golden / "archs" / f"{name}.npz")
    with load(golden / "archs" / f"{name}.gguf", backends=backends) as model, model.context(64, kv_type="f32") as context:
        prompt = want["prompt"][:N_PROMPT]
        parts = [context.decode(prompt[:4], logits="all"), context.decode(prompt[4:], logits="all")]
        return np.concatenate([*parts, *(context.decode([int(t)], logits="all") for t in want["prompt"][N_PROMPT : N_PROMPT + 2])])


def refusing(inner: Backend, name: str, rng: random.Random) -> VirtualBackend:
    """A device with memory of its own that refuses about a third of the ops."""
    refused = {op for op in OPS if rng.random() < 0.35}
    return VirtualBackend(inner, name, lambda call: f"{call.op.name} is refused here" if call.op.name in refused else None, private=True)


@pytest.mark.golden
def test_each_device_alone_and_mixtures(golden: Path, cpu: CpuBackend, run_seed: int) -> None:
    rng = random.Random(run_seed)
    known = names(golden, cpu)
    assert len(known) >= 2
    for name in known:
        want = np.load(golden / "archs" / f"{name}.npz")["prompt_logits"][: N_PROMPT + 2]
        alone = logits(golden, name, [cpu])
        assert nmse(alone, want) < 1e-6, name
        for _ in range(2):
            machine = [*(refusing(cpu, f"virtual{i}", rng) for i in range(rng.randrange(1, 3))), cpu]
            assert np.array_equal(logits(golden, name, machine), alone), f"{name} on {machine}, seed {run_seed}"


@pytest.mark.golden
@pytest.mark.slow
def test_the_language_itself_runs_the_models(golden: Path, cpu: CpuBackend) -> None:
    sim = SimBackend(OPS.values(), lanes=32)
    for name in names(golden, cpu):
        assert nmse(logits(golden, name, [sim, cpu]), logits(golden, name, [cpu])) < 1e-6, name


@pytest.mark.golden
def test_an_opencl_device_alone_and_in_mixtures(golden: Path, cpu: CpuBackend, run_seed: int) -> None:
    found = registry()
    try:
        devices = [b for b in found.all if b.name.startswith("opencl")]
        if not devices:
            pytest.skip("no OpenCL device: pip install 'lanewise[pocl]'")
        rng = random.Random(run_seed)
        refused = {op for op in OPS if rng.random() < 0.35}
        part = VirtualBackend(devices[0], "part", lambda call: "refused here" if call.op.name in refused else None)
        for name in names(golden, cpu):
            alone = logits(golden, name, [cpu])
            for machine in ([devices[0], cpu], [part, cpu]):
                assert nmse(logits(golden, name, machine), alone) < 1e-6, f"{name} on {machine}, seed {run_seed}"
    finally:
        found.close()
