"""The vocabulary itself: every word has a rule, a meaning on every target that is here, and no meaning outside a kernel."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backends.cpu import words as cpu
from engine.dtypes import WEIGHT_BLOCKS
from engine.errors import KernelError
from engine.lang import functions, rules, sim, words
from engine.lang.words import DECODERS, FUNCTIONS, LANES, TABLES, WORDS, Word, table
from kernels import OPS

BY_THE_WALK = ("space", "expand", "inside", "first", "decoder", "barrier", "table")  # rules that are no function of typed operands


@pytest.mark.parametrize("word", WORDS.values(), ids=lambda w: w.name)
def test_a_word_is_complete(word: Word) -> None:
    assert getattr(words, word.name) is word
    assert word.name in word.form
    assert word.meaning and "\n" not in word.meaning
    assert word.rule in rules.RULES or word.rule in BY_THE_WALK


@pytest.mark.parametrize("word", [*WORDS.values(), LANES], ids=lambda w: w.name)
def test_a_word_means_nothing_outside_a_kernel(word: Word) -> None:
    with pytest.raises(KernelError, match=f"{word.name} is a word of the lane language"):
        word(1)
    for misuse in (lambda: word + 1, lambda: 1 * word, lambda: word // 2, lambda: -word, lambda: list(word)):
        with pytest.raises(KernelError, match="inside a kernel only"):
            misuse()


def test_every_word_has_a_meaning_in_plain_python() -> None:
    assert set(WORDS) - set(sim.WORDS) == set()


def test_every_number_word_has_a_meaning_on_the_cpu() -> None:
    wanted = {w.name for w in WORDS.values() if w.rule in ("float", "same", "pack")}
    wanted |= {f"{w.name}{e}" for w in WORDS.values() if w.rule == "byte" for e in range(4)}
    assert wanted - set(cpu.WORDS) - set(functions.FUNCTIONS) == set()
    assert set(functions.FUNCTIONS) <= set(WORDS)


def test_a_table_joins_bytes_and_keeps_words() -> None:
    assert table("OF_BYTES", np.array([1, -1, 2, -2, 0, 0, 0, 127], np.int8)).values.tolist() == [0xFE02FF01, 0x7F000000]
    words_ = table("OF_WORDS", [0, 0xFFFFFFFF, -1, 7])
    assert words_.values.dtype == np.uint32 and words_.values.tolist() == [0, 0xFFFFFFFF, 0xFFFFFFFF, 7]
    assert TABLES["OF_WORDS"] is words_ is table("OF_WORDS", [0, 0xFFFFFFFF, -1, 7])
    with pytest.raises(ValueError, match="read-only"):
        words_.values[0] = 1
    mine = np.zeros(4, np.int8)
    kept = table("OF_MINE", mine)
    mine[0] = 1
    assert kept.values.tolist() == [0]


@pytest.mark.parametrize(("name", "values", "why"), [
    ("no name", [1, 2], "a name of capital letters"), ("lower", [1, 2], "a name of capital letters"), ("THREE", [1, 2, 3], "3 entries"),
    ("EMPTY", [], "0 entries"), ("OF_WORDS", [1, 2], "there is another table of this name")])
def test_tables_that_are_refused(name: str, values: list[int], why: str) -> None:
    table("OF_WORDS", [0, 0xFFFFFFFF, -1, 7])
    with pytest.raises(KernelError, match=why):
        table(name, values)
    assert name not in TABLES or name == "OF_WORDS"


def test_every_weight_format_has_its_decoders() -> None:
    assert OPS
    for dtype in WEIGHT_BLOCKS:
        assert set(DECODERS[dtype.name]) == {"codes", "scale"} | ({"offset"} if dtype.has_offset else set()), dtype


def test_a_decoder_is_named_after_its_word() -> None:
    for functions_ in DECODERS.values():
        for word, function in functions_.items():
            assert function.name.endswith(f"_{word}")
            assert function in FUNCTIONS
