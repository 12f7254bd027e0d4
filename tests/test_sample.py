"""Sampling: settings, order, distribution, determinism."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import SamplingError
from engine.sample import Sampler, SamplerSettings, candidates, largest

PLAIN = SamplerSettings(temperature=1, top_k=0, top_p=1, min_p=0, seed=1)
NEG_INF = float("-inf")

logit_arrays = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-20, 20, width=32))


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def support(logits: np.ndarray, settings: SamplerSettings) -> set[int]:
    return {int(i) for i in candidates(logits, settings)[0]}


def naive_support(logits: np.ndarray, s: SamplerSettings) -> set[int]:
    """llama.cpp's chain, step by step, over the whole sorted vocabulary."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.top_k > 0:
        order = order[: s.top_k]
    p = np.exp(logits[order].astype(np.float64) - float(logits[order[0]]))
    sums = np.cumsum(p)
    if s.top_p < 1:
        order = order[: int(np.count_nonzero(sums[:-1] < s.top_p * sums[-1])) + 1]
    if s.min_p > 0:
        least = float(logits[order[0]]) + math.log(s.min_p)
        order = [i for i in order if float(logits[i]) >= least]
    return set(order)


@given(
    logit_arrays,
    st.integers(-1, 50),
    st.one_of(st.floats(0, 1), st.just(1.0)),
    st.one_of(st.floats(0, 1), st.just(0.0)),
)
def test_candidates_are_those_of_the_chain(logits, top_k, top_p, min_p):
    settings = replace(PLAIN, top_k=top_k, top_p=top_p, min_p=min_p)
    assert support(logits, settings) == naive_support(logits, settings)


@given(logit_arrays, st.integers(1, 250))
def test_largest_is_the_head_of_a_full_sort(logits, k):
    expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]
    assert largest(logits, min(k, len(logits))).tolist() == expected


@pytest.mark.parametrize("k", [1, 40, 1000, 1024, 5000])
@pytest.mark.parametrize("n", [2048, 50_001, 262_144])
def test_largest_of_large_vocabularies(n, k):
    logits = np.random.default_rng(n).integers(-500, 500, n).astype(np.float32)  # many equal ones
    k = min(k, n)
    assert largest(logits, k).tolist() == np.lexsort((np.arange(n), -logits))[:k].tolist()


def test_largest_with_masked_logits():
    logits = np.full(5000, NEG_INF, dtype=np.float32)
    logits[[7, 4000]] = 1, 2
    assert largest(logits, 3).tolist() == [4000, 7, 0]
    assert support(logits, replace(PLAIN, top_k=40, min_p=0.05)) == {7, 4000}


@pytest.mark.parametrize("top_k", [0, 40])
def test_nucleus_of_a_flat_large_vocabulary(top_k):
    logits = np.zeros(10_000, dtype=np.float32)
    n = len(support(logits, replace(PLAIN, top_k=top_k, top_p=0.5)))
    assert n == (5000 if top_k == 0 else 20)


def test_frequencies_follow_the_softmax():
    logits, n = array(0, 1, 2, -1), 20_000
    sampler = Sampler(PLAIN)
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=4)
    expected = np.exp(logits) / np.exp(logits).sum() * n
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-squared, 3 degrees: 4e-6 beyond


def test_temperature_sharpens():
    logits, n = array(0, 1), 20_000
    for temperature in (0.5, 1.0, 2.0):
        sampler = Sampler(replace(PLAIN, temperature=temperature))
        share = np.mean([sampler.sample(logits) for _ in range(n)])
        expected = 1 / (1 + math.exp(-1 / temperature))
        assert abs(share - expected) < 4.6 * math.sqrt(expected * (1 - expected) / n)


def test_temperature_comes_last():
    """A high temperature does not let in what min-p at temperature 1 keeps out."""
    sampler = Sampler(replace(PLAIN, temperature=1000, min_p=0.5))
    assert {sampler.sample(array(3, 0, 2.5)) for _ in range(200)} == {0, 2}


def test_penalties_come_first():
    """The penalised token falls out of the top-k it would have been in."""
    settings = replace(PLAIN, top_k=1, presence_penalty=5)
    assert Sampler(settings).sample(array(3, 2, 1), history=[0]) == 1


@given(logit_arrays, st.lists(st.integers(0, 5), max_size=5))
def test_greedy_is_argmax(logits, history):
    for temperature in (0, -1, -0.5):
        settings = SamplerSettings(temperature=temperature, top_k=3)
        assert Sampler(settings).sample(logits, history) == int(np.argmax(logits))


def test_greedy_takes_the_first_of_equal_logits():
    assert Sampler(SamplerSettings(temperature=0)).sample(array(1, 3, 3)) == 1


@given(logit_arrays)
def test_tiny_temperature_is_greedy_but_for_ties(logits):
    drawn = Sampler(replace(PLAIN, temperature=1e-40)).sample(logits)
    assert logits[drawn] == logits.max()


@given(st.integers(0, 2**64 - 1), logit_arrays)
def test_same_seed_same_tokens(seed, logits):
    a, b = (Sampler(SamplerSettings(temperature=1.5, seed=seed)) for _ in range(2))
    assert [a.sample(logits) for _ in range(10)] == [b.sample(logits) for _ in range(10)]


@pytest.mark.parametrize("seed", [None, -1])
def test_random_seeds_differ_and_can_be_repeated(seed):
    logits = np.zeros(1000, dtype=np.float32)
    runs = [Sampler(replace(PLAIN, seed=seed)) for _ in range(3)]
    drawn = [[r.sample(logits) for _ in range(10)] for r in runs]
    assert drawn[0] != drawn[1] != drawn[2]
    again = Sampler(replace(PLAIN, seed=runs[0].seed))
    assert [again.sample(logits) for _ in range(10)] == drawn[0]


def test_seeds_differ():
    logits = np.zeros(1000, dtype=np.float32)
    drawn = {tuple(Sampler(replace(PLAIN, seed=s)).sample(logits) for _ in range(5)) for s in range(20)}
    assert len(drawn) == 20


@given(logit_arrays, st.integers(0, 40), st.floats(0, 1), st.floats(0, 1))
def test_drawn_token_is_a_candidate(logits, top_k, top_p, min_p):
    settings = replace(PLAIN, top_k=top_k, top_p=top_p, min_p=min_p)
    assert Sampler(settings).sample(logits) in naive_support(logits, settings)


def test_masked_tokens_are_never_drawn():
    sampler = Sampler(PLAIN)
    assert {sampler.sample(array(NEG_INF, 0, NEG_INF, 0)) for _ in range(200)} == {1, 3}


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits():
    settings = SamplerSettings(temperature=0, repeat_penalty=2)
    assert Sampler(settings).sample(array(3, 2), [0]) == 1  # 1.5 < 2
    assert Sampler(settings).sample(array(-1, -1.5), [0]) == 1  # -2 < -1.5
    assert Sampler(settings).sample(array(5, 2), [0]) == 0  # 2.5 > 2


def test_frequency_penalty_counts_and_presence_penalty_does_not():
    logits, history = array(3, 2), [0, 0, 0]
    assert Sampler(SamplerSettings(temperature=0, frequency_penalty=0.5)).sample(logits, history) == 1
    assert Sampler(SamplerSettings(temperature=0, presence_penalty=0.5)).sample(logits, history) == 0


@pytest.mark.parametrize("last_n, expected", [(0, 0), (1, 0), (2, 1), (64, 1), (-1, 1)])
def test_repeat_last_n(last_n, expected):
    settings = SamplerSettings(temperature=0, presence_penalty=9, repeat_last_n=last_n)
    assert Sampler(settings).sample(array(3, 2, 1), [0, 2]) == expected


def test_whole_history_counts_with_minus_one():
    settings = SamplerSettings(temperature=0, presence_penalty=9, repeat_last_n=-1)
    assert Sampler(settings).sample(array(3, 2, 1), [0] + [2] * 1000) == 1


def test_logits_are_not_changed():
    logits = array(3, 2, 1)
    logits.flags.writeable = False
    Sampler(SamplerSettings(repeat_penalty=1.5, seed=1)).sample(logits, [0, 1])
    assert logits.tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    "logits, message",
    [
        (array(1, math.nan, math.nan), "2 of 3 logits are NaN"),
        (array(1, math.inf), "1 of 2 logits are infinite"),
        (array(NEG_INF, NEG_INF), "all 2 logits are -inf"),
        (array(), r"float32\[0\]"),
        (np.zeros((2, 2), dtype=np.float32), r"float32\[2, 2\]; expected float32\[n_vocab\]"),
        (np.zeros(3, dtype=np.int32), r"int32\[3\]"),
    ],
)
def test_logits_nothing_can_be_drawn_from(logits, message):
    for settings in (SamplerSettings(), SamplerSettings(temperature=0), SamplerSettings(top_k=0)):
        with pytest.raises(SamplingError, match=message):
            Sampler(settings).sample(logits)


@pytest.mark.parametrize("history", [[-1], [3]])
def test_history_outside_the_vocabulary(history):
    with pytest.raises(SamplingError, match="expected 0 to 2"):
        Sampler(SamplerSettings(repeat_penalty=1.1)).sample(array(1, 2, 3), history)


BAD = [
    ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"), ("temperature", True),
    ("top_k", 1.5), ("top_k", math.nan), ("top_k", None), ("top_k", 2**31),
    ("top_p", math.nan), ("top_p", -0.1), ("top_p", 1.1), ("min_p", math.nan), ("min_p", -1), ("min_p", 2),
    ("repeat_penalty", 0), ("repeat_penalty", -1), ("repeat_penalty", math.nan), ("repeat_penalty", math.inf),
    ("repeat_last_n", -2), ("repeat_last_n", 0.5), ("presence_penalty", math.nan),
    ("frequency_penalty", math.inf), ("seed", -2), ("seed", 2**64), ("seed", 0.5), ("seed", math.nan),
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD)
def test_impossible_settings(name, value):
    with pytest.raises(SamplingError) as caught:
        SamplerSettings(**{name: value})
    assert str(caught.value).startswith(f"{name} = {value!r} is not allowed: expected ")


def test_numpy_numbers_are_numbers():
    settings = SamplerSettings(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(7))
    assert Sampler(settings).sample(array(1, 2, 3)) in (0, 1, 2)


def test_defaults_and_frozen():
    s = SamplerSettings()
    assert (s.temperature, s.top_k, s.top_p, s.min_p) == (0.8, 40, 0.95, 0.05)
    assert (s.repeat_penalty, s.repeat_last_n, s.seed) == (1, 64, None)
    assert (s.presence_penalty, s.frequency_penalty) == (0, 0)
    with pytest.raises(FrozenInstanceError):
        s.top_k = 1  # type: ignore[misc]


def test_large_penalties_do_not_break():
    settings = SamplerSettings(temperature=0, presence_penalty=1e308)
    assert Sampler(settings).sample(array(5, 1), [0]) == 1
    with pytest.raises(SamplingError, match="no token is left"):
        Sampler(settings).sample(array(5, 1), [0, 1])
