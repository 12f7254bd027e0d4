"""Kernels and device logic of the CUDA backend in Numba's simulator: another process, told so by its environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_the_simulated_suite_passes(run_seed: int, request: pytest.FixtureRequest) -> None:
    """Half of the keys in rotation, all of them with --all-keys."""
    pytest.importorskip("numba_cuda")
    seed, here = str(run_seed % 1000), Path(__file__).parent
    told = {"NUMBA_ENABLE_CUDASIM": "1", "SIMULATED_SEED": seed, "SIMULATED_SHARE": "1" if request.config.option.all_keys else "2"}
    quietly = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([sys.executable, "-m", "pytest", *quietly, str(here / "cuda_simulated.py")],
                          env={**os.environ, **told}, capture_output=True, text=True,
                          timeout=880, cwd=here.parent.parent)
    assert done.returncode == 0, f"SIMULATED_SEED={seed}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 80 and "skipped" not in done.stdout, done.stdout[-500:]
