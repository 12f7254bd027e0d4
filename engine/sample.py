"""Choosing the next token: penalties, top-k, top-p, min-p, temperature, in llama.cpp's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.errors import SamplingError

MAX_SEED = 2**64 - 1
N_BLOCKS = 1024

Range = tuple[Callable[[float], bool], str]

FINITE: Range = (lambda _: True, "a finite number")
FRACTION: Range = (lambda x: 0 <= x <= 1, "0 to 1")
POSITIVE: Range = (lambda x: x > 0, "more than 0")
# What each number may be. Integers are listed with their lower and upper limit.
RANGES: dict[str, Range] = {
    "temperature": (lambda _: True, "a finite number; 0 or less is greedy"),
    "top_p": FRACTION,
    "min_p": FRACTION,
    "repeat_penalty": POSITIVE,
    "presence_penalty": FINITE,
    "frequency_penalty": FINITE,
}
LIMITS: dict[str, tuple[int, int, str]] = {
    "top_k": (-(2**31), 2**31 - 1, "an integer; 0 or less keeps all tokens"),
    "repeat_last_n": (-1, 2**31 - 1, "an integer of -1 (all tokens) or more; 0 is off"),
    "seed": (-1, MAX_SEED, f"an integer from 0 to {MAX_SEED}, or -1 or none for a random one"),
}


@dataclass(frozen=True)
class SamplerSettings:
    """How to choose a token. The defaults are llama.cpp's; an impossible value raises `SamplingError`."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in RANGES:
                check_number(field.name, value)
            elif not (field.name == "seed" and value is None):
                check_integer(field.name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature <= 0

    @property
    def has_penalties(self) -> bool:
        """Whether past tokens change the logits."""
        changes = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return changes and self.repeat_last_n != 0


def check_number(name: str, value: object) -> None:
    """Refuse what is not a finite number in the option's range."""
    is_allowed, allowed = RANGES[name]
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not is_allowed(value):  # type: ignore[arg-type]
        raise SamplingError(f"{name} = {value!r} is not allowed: expected {allowed}")


def check_integer(name: str, value: object) -> None:
    """Refuse what is not an integer in the option's range."""
    low, high, allowed = LIMITS[name]
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingError(f"{name} = {value!r} is not allowed: expected {allowed}")


class Sampler:
    """Draws tokens; with the same seed, logits and history, the same ones.

    `seed` is the seed in use, also where the settings ask for a random one, so that a run can be repeated.
    """

    def __init__(self, settings: SamplerSettings | None = None) -> None:
        self.settings = settings or SamplerSettings()
        wanted = self.settings.seed
        is_random = wanted is None or wanted == -1
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if is_random else int(wanted or 0)
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: NDArray[np.float32], history: Sequence[int] = ()) -> int:
        """The next token after `history` (prompt and answer so far), given float32 `logits[n_vocab]`."""
        s = self.settings
        logits = checked_logits(logits)
        if s.has_penalties:
            logits = checked_logits(penalized(logits, history, s))
        if s.is_greedy:
            return int(np.argmax(logits))
        ids, kept = candidates(logits, s)
        with np.errstate(over="ignore"):  # a tiny temperature makes all but the best impossible
            weights = np.exp((kept - kept[0]) / s.temperature)
        total = np.cumsum(weights)
        drawn = np.searchsorted(total, self._random.random() * total[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])


def checked_logits(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logits as they are; `SamplingError` if nothing can be drawn from them."""
    logits = np.asarray(logits)
    if logits.ndim != 1 or logits.size == 0 or logits.dtype.kind != "f":
        raise SamplingError(f"logits are {logits.dtype}{list(logits.shape)}; expected float32[n_vocab]")
    peak = logits.max()  # NaN if there is one
    if np.isfinite(peak):
        return logits
    if n_nan := int(np.isnan(logits).sum()):
        raise SamplingError(f"{n_nan} of {logits.size} logits are NaN; they cannot be sampled")
    if n_inf := int(np.isposinf(logits).sum()):
        raise SamplingError(f"{n_inf} of {logits.size} logits are infinite; they cannot be sampled")
    raise SamplingError(f"all {logits.size} logits are -inf; no token is left to sample")


def penalized(
    logits: NDArray[np.float32], history: Sequence[int], settings: SamplerSettings
) -> NDArray[np.float32]:
    """A copy in which tokens among the last `repeat_last_n` of `history` are less likely."""
    n = settings.repeat_last_n
    recent = np.asarray(history if n < 0 else history[-n:], dtype=np.int64)
    if recent.size == 0:
        return logits
    if recent.min() < 0 or recent.max() >= logits.size:
        raise SamplingError(
            f"a token id in history is outside the vocabulary: expected 0 to {logits.size - 1}"
        )
    ids, counts = np.unique(recent, return_counts=True)
    seen = logits[ids].astype(np.float64)
    changed = logits.copy()
    with np.errstate(over="ignore"):
        seen = np.where(seen <= 0, seen * settings.repeat_penalty, seen / settings.repeat_penalty)
        changed[ids] = seen - (counts * settings.frequency_penalty + settings.presence_penalty)
    return changed


def candidates(
    logits: NDArray[np.float32], settings: SamplerSettings
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids that top-k, top-p and min-p leave, and their logits, likeliest first."""
    if 0 < settings.top_k < logits.size:
        ids = largest(logits, settings.top_k)
        kept = logits[ids].astype(np.float64)
        n = nucleus(np.exp(kept - kept[0]), settings.top_p)
        ids, kept = ids[:n], kept[:n]
    else:
        ids, kept = nucleus_of_all(logits, settings.top_p)
    if settings.min_p > 0:
        n = int(np.count_nonzero(kept >= kept[0] + math.log(settings.min_p)))
        ids, kept = ids[:n], kept[:n]
    return ids, kept


def nucleus(weights: NDArray[np.float64], top_p: float, total: float | None = None) -> int:
    """How many of the descending `weights` are needed for a share of `top_p` of `total`; at least one."""
    if top_p >= 1:
        return len(weights)
    sums = np.cumsum(weights)
    enough = np.searchsorted(sums, top_p * (sums[-1] if total is None else total), side="left")
    return min(int(enough) + 1, len(weights))


def nucleus_of_all(
    logits: NDArray[np.float32], top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Top-p over the whole vocabulary, sorting no more of it than is needed."""
    total = float(np.exp(logits.astype(np.float64) - float(logits.max())).sum())
    k = 256 if top_p < 1 else logits.size
    while True:
        ids = largest(logits, min(k, logits.size))
        kept = logits[ids].astype(np.float64)
        n = nucleus(np.exp(kept - kept[0]), top_p, total)
        if n < len(ids) or len(ids) == logits.size:
            return ids[:n], kept[:n]
        k *= 8


def largest(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the `k` largest logits, largest first; of equal ones the lower id comes first."""
    if k < logits.size:
        pool = np.flatnonzero(logits >= lower_bound(logits, k))
        values = logits[pool]
        least = np.partition(values, len(pool) - k)[len(pool) - k]
        above, equal = pool[values > least], pool[values == least]
        pool = np.concatenate((above, equal[: k - len(above)]))
    else:
        pool = np.arange(logits.size)
    return pool[np.lexsort((pool, -logits[pool]))]


def lower_bound(logits: NDArray[np.float32], k: int) -> float:
    """A number that at least `k` logits reach, found from the maxima of blocks: one quick pass, no sort."""
    size = logits.size // N_BLOCKS
    if size < 2 or k >= N_BLOCKS:
        return -math.inf
    peaks = logits[: size * N_BLOCKS].reshape(N_BLOCKS, size).max(axis=1)
    return float(np.partition(peaks, N_BLOCKS - k)[N_BLOCKS - k])
