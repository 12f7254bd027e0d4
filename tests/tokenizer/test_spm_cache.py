"""The merge table of SentencePiece vocabularies: derivation and its cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer.merges import derive_merges, merges_from_scores, split_merges

TOKENS = ["a", "b", "c", "ab", "bc", "abc", "é", "aé"]
SCORES = np.array([0, 0, 0, -1, -3, -2, 0, -4], dtype=np.float32)
IDS = np.arange(len(TOKENS))
MERGES = [("a", "b"), ("a", "bc"), ("ab", "c"), ("b", "c"), ("a", "é")]


def best_pair_first(text: str) -> list[str]:
    """SentencePiece's rule, as it is stated: join the neighbours whose union scores best, leftmost first."""
    scores = dict(zip(TOKENS, SCORES.tolist(), strict=True))
    parts = list(text)
    while True:
        unions = [a + b for a, b in zip(parts, parts[1:], strict=False)]
        joins = [(scores[union], -i) for i, union in enumerate(unions) if union in scores]
        if not joins:
            return parts
        i = -max(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(st.text("abcé", max_size=12))
def test_merge_rules_do_what_scores_say(text):
    from tokenizers import Tokenizer, models

    words = {t: i for i, t in enumerate(TOKENS)}
    model = Tokenizer(models.BPE(words, derive_merges(TOKENS, IDS, SCORES)))
    assert model.encode(text).tokens == best_pair_first(text)


def test_derived_table():
    assert derive_merges(TOKENS, IDS, SCORES) == MERGES


def test_only_the_given_ids_take_part():
    assert derive_merges(TOKENS, np.array([0, 1, 3, 2]), SCORES) == [("a", "b")]


def test_cache_gives_the_same_table(tmp_path):
    place = tmp_path / "new" / "folder"
    assert merges_from_scores(TOKENS, IDS, SCORES, place) == MERGES
    (stored,) = place.iterdir()
    before = stored.read_bytes()
    assert merges_from_scores(TOKENS, IDS, SCORES, place) == MERGES
    assert stored.read_bytes() == before
    assert list(place.iterdir()) == [stored]  # no temporary file is left


def test_cache_is_read(tmp_path, monkeypatch):
    merges_from_scores(TOKENS, IDS, SCORES, tmp_path)
    monkeypatch.setattr("engine.tokenizer.merges.derive_merges", lambda *_: pytest.fail("derived again"))
    assert merges_from_scores(TOKENS, IDS, SCORES, tmp_path) == MERGES


def test_other_vocabularies_have_other_files(tmp_path):
    merges_from_scores(TOKENS, IDS, SCORES, tmp_path)
    assert merges_from_scores(TOKENS, IDS, -SCORES, tmp_path) != MERGES
    assert merges_from_scores([*TOKENS[:-1], "bé"], IDS, SCORES, tmp_path)[-1] == ("b", "é")
    assert merges_from_scores(TOKENS, IDS[:4], SCORES, tmp_path) == MERGES[:1]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "longer"])
def test_damaged_cache_is_made_again(tmp_path, damage):
    merges_from_scores(TOKENS, IDS, SCORES, tmp_path)
    (stored,) = tmp_path.iterdir()
    good = stored.read_bytes()
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    bad = {"empty": b"", "cut": good[:-3], "flipped": flipped, "longer": good + b"x" * 8}
    stored.write_bytes(bad[damage])
    assert merges_from_scores(TOKENS, IDS, SCORES, tmp_path) == MERGES
    assert stored.read_bytes() == good


def test_cache_that_cannot_be_used_is_ignored(tmp_path, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with caplog.at_level("DEBUG"):
        assert merges_from_scores(TOKENS, IDS, SCORES, in_the_way) == MERGES
    assert {r.levelname for r in caplog.records} == {"DEBUG"}
    assert in_the_way.read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_read_only_cache_is_ignored(tmp_path):
    tmp_path.chmod(0o500)
    assert merges_from_scores(TOKENS, IDS, SCORES, tmp_path) == MERGES


def test_split_merges_at_the_first_space_that_is_not_first():
    assert split_merges(["a b", "  b", "a b c", "ab"]) == [("a", "b"), (" ", "b"), ("a", "b c"), ("ab", "")]


def test_import_is_light():
    code = "import sys, engine.tokenizer, engine.sample; print({'tokenizers', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
