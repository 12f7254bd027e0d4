"""What llama.cpp computes: tiny models of each architecture, and the two real ones. The limits are those of the golden data's README."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from float64_models import nmse

from engine.model import Model
from engine.runtime import load

FIGURES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden_figures" / "real-models.json").read_text())


@pytest.mark.golden
@pytest.mark.parametrize("sizes", [[24], [5, 1, 11, 3, 4]], ids=["at once", "in pieces"])
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "composed"])
@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense"])
def test_small_models(name: str, flash: bool, sizes: list[int], golden: Path) -> None:
    want = np.load(golden / "archs" / f"{name}.npz")
    with load(golden / "archs" / f"{name}.gguf", flash=flash) as model, model.context(kv_type="f32") as context:
        ends = np.cumsum(sizes)
        prompt = np.concatenate([context.decode(part, logits="all") for part in np.split(want["prompt"], ends[:-1])])
        generated = np.stack([context.decode([int(token)]) for token in want["generated"]])
    assert nmse(prompt, want["prompt_logits"]) < 1e-6
    assert nmse(generated, want["generated_logits"]) < 1e-6
    chosen = np.concatenate([prompt[-1:], generated[:-1]]).argmax(axis=1)
    assert chosen.tolist() == want["generated"].tolist()


# -- real models ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What we compute for one case: logits of the prompt, then after each of the given greedy tokens."""

    key: str
    figures: dict[str, Any]
    ids: list[int]
    prompt: np.ndarray
    after: np.ndarray

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood of the prompt's tokens."""
        logits = self.prompt[:-1].astype(np.float64)
        top = logits.max(axis=1)
        whole = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
        return float(np.mean(whole - logits[np.arange(len(logits)), self.ids[1:]]))


@pytest.fixture(scope="module", params=FIGURES)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    key: str = request.param
    model: Model = request.getfixturevalue("smollm2" if key.startswith("smollm2") else "gemma3")
    figures = FIGURES[key]
    ids = model.tokenize(figures["text"])
    with model.context(512) as context:
        prompt = context.decode(ids, logits="all")
        after = [prompt[-1], *(context.decode([token]) for token in figures["greedy_tokens"][:-1])]
    yield Run(key, figures, ids, prompt, np.stack(after))


def test_token_ids(run: Run) -> None:
    assert run.ids == run.figures["tokens"]


def test_likelihood(run: Run) -> None:
    exact, theirs = np.mean(run.figures["exact_prompt_nll"]), np.mean(run.figures["prompt_nll"])
    assert abs(run.nll - exact) <= max(0.02 * exact, 2 * abs(theirs - exact))


def test_greedy_choices(run: Run) -> None:
    same = run.after.argmax(axis=1) == np.array(run.figures["exact_argmax_after_each"])
    assert len(same) == 32 and same.sum() >= 30


@pytest.mark.golden
def test_logits(run: Run, golden: Path) -> None:
    """As near to exact arithmetic as twice llama.cpp's own distance, and a little."""
    model, case = run.key.split("/")
    want = np.load(golden / "real" / f"{model}.{case}.npz")
    assert want["tokens"].tolist() == run.ids
    for where, ours in (("last", run.prompt[-1]), ("mid", run.prompt[len(run.ids) // 2])):
        assert nmse(ours, want[f"exact_{where}_logits"]) <= 2 * run.figures[f"nmse_{where}_to_exact"] + 2e-4, where
