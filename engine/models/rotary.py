"""Angles of ROPE, made on the host in float64: turns per position, YaRN's mixture of them, axes of positions.

YaRN (Peng et al., arXiv:2309.00071) stretches slow pairs of dimensions by the factor the context grew by, leaves fast ones as they are, and
makes what is rotated a little larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Yarn:
    """What a model's metadata says of YaRN.

    Attributes:
        n_ctx_orig: the context length before it was stretched.
        beta_fast, beta_slow: turns within `n_ctx_orig` from which a pair keeps its frequency, and below which it is stretched as a whole.
        ext_factor: the share of the mixture, 0 to 1; 0 stretches all pairs alike.
        attn_factor: an extra magnitude.
    """

    n_ctx_orig: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ext_factor: float = 1.0
    attn_factor: float = 1.0

    def kept(self, half: int, base: float) -> Array:
        """How much each pair keeps of its own frequency, 0 to 1."""
        low = max(0, floor(self._pair(half, base, self.beta_fast)))
        high = min(2 * half - 1, ceil(self._pair(half, base, self.beta_slow)))
        ramp = (np.arange(half) - low) / max(0.001, high - low)
        return self.ext_factor * (1 - np.clip(ramp, 0, 1))

    def _pair(self, half: int, base: float, n_turns: float) -> float:
        """The pair that turns `n_turns` times within the original context."""
        return half * log(self.n_ctx_orig / (n_turns * 2 * pi)) / log(base)

    def magnitude(self, scale: float) -> float:
        """What sine and cosine are multiplied by where positions are divided by `scale`."""
        return self.attn_factor * (1 + 0.1 * log(scale)) if self.ext_factor else self.attn_factor


def turns(half: int, base: float, scale: float = 1.0, factors: Array | None = None, yarn: Yarn | None = None) -> Array:
    """float64 [half]: turns per position of each pair.

    Args:
        scale: what positions are divided by.
        factors: what the frequency of each pair is divided by, from the model's file.
    """
    own = base ** (-np.arange(half) / half) / (2 * pi)
    if factors is not None:
        own = own / factors
    stretched: Array = own / scale
    if yarn is None:
        return stretched
    kept = yarn.kept(half, base)
    return stretched * (1 - kept) + own * kept


def table(turns: Array) -> Array:
    """float32 [2, half]: the operand `freqs` of ROPE, what a float32 holds of each number and what it does not."""
    high = turns.astype(np.float32)
    return np.stack([high, (turns - high).astype(np.float32)])


def axes(half: int, sections: Sequence[int], interleaved: bool = False) -> Array:
    """int32 [half]: which axis of the positions (time, height, width, extra) turns each pair: M-RoPE.

    Args:
        sections: pairs of each of the four axes, repeated along the head.
        interleaved: time, height and width by turns, as long as their sections last; what is left goes to the fourth axis.
    """
    t, h, w, _ = (int(n) for n in sections)
    at = np.arange(half) % max(sum(sections), 1)
    if not interleaved:
        return np.searchsorted(np.cumsum((t, h, w)), at, "right").astype(np.int32)
    turn = at % 3
    return np.where(at < 3 * np.array((t, h, w))[turn], turn, 3).astype(np.int32)


def section_turns(half: int, base: float, sections: Sequence[int]) -> Array:
    """float64 [half]: as `turns`, each section's pairs beginning with the fastest again: two-dimensional ROPE of vision encoders."""
    starts = np.concatenate([[0], np.cumsum(sections)])
    at = np.arange(half) % max(sum(sections), 1)
    return base ** (-(at - starts[np.searchsorted(starts, at, "right") - 1]) / (half / 2)) / (2 * pi)
