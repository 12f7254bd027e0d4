"""Searches for the scale (and minimum) of a run of values, and for the nearest of a few levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.gguf.quants.fields import Bytes, Doubles


def reciprocal(steps: NDArray[Any]) -> NDArray[Any]:
    """1 / step, and 0 where the step is 0 or too small to have one."""
    usable = np.abs(steps) >= np.finfo(steps.dtype).tiny
    out: NDArray[Any] = np.divide(1, steps, out=np.zeros_like(steps), where=usable)
    return out


def signed_extreme(values: NDArray[Any]) -> NDArray[Any]:
    """The value of largest magnitude in each run, the first of equals: [..., 1]."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)


def round_away(values: NDArray[Any]) -> Doubles:
    """To the nearest integer, halves away from zero."""
    wide = values.astype(np.float64)
    out: Doubles = np.trunc(wide + np.copysign(0.5, wide))
    return out


def nearest(x: NDArray[Any], levels: Sequence[float] | NDArray[Any]) -> Bytes:
    """The index of the nearest of ascending levels; halfway it is the upper one."""
    ends = np.asarray(levels, x.dtype)
    return np.searchsorted((ends[1:] + ends[:-1]) / 2, x, side="right").astype(np.uint8)


def search_with_min(x: Doubles, weights: Doubles, top: int, first: float, n_steps: int, power: int = 2) -> tuple[Doubles, Doubles]:
    """Step and minimum (<= 0) of each run with the least weighted error: x [n, runs, length] -> two [n, runs].

    Candidates round the run with an inverse step of (top + shift) / span, shift = first, first + 0.1, ... (span: from the best minimum so
    far), and then fit step and minimum to the codes by least squares. The error of an element counts with this power.
    """
    high, low = x.max(axis=-1), np.minimum(x.min(axis=-1), 0.0)
    step = (high - low) / top
    least = _error(x, weights, _codes_between(x, low, high, top, top), step, low, power)
    for i in range(n_steps + 1):
        codes = _codes_between(x, low, high, top + first + 0.1 * i, top)
        new_step, new_low = _fit_line(x, weights, codes)
        error = _error(x, weights, codes, new_step, new_low, power)
        better = error < least
        step, low = np.where(better, new_step, step), np.where(better, new_low, low)
        least = np.where(better, error, least)
    return step, low


def _codes_between(x: Doubles, low: Doubles, high: Doubles, n_codes: float, top: int) -> Doubles:
    """Codes 0 .. top of x when `n_codes` steps lead from low to high."""
    per_step = n_codes * reciprocal(high - low)
    return np.clip(np.rint((x - low[..., None]) * per_step[..., None]), 0, top)


def _fit_line(x: Doubles, weights: Doubles, codes: Doubles) -> tuple[Doubles, Doubles]:
    """Step and minimum (<= 0) that bring step * codes + minimum nearest to x; 0 where all codes are equal."""
    w, wl, wx = weights.sum(-1), (weights * codes).sum(-1), (weights * x).sum(-1)
    wll, wlx = (weights * codes * codes).sum(-1), (weights * codes * x).sum(-1)
    by = reciprocal(np.maximum(w * wll - wl * wl, 0.0))
    step, low = (w * wlx - wx * wl) * by, (wll * wx - wl * wlx) * by
    return np.where(low > 0, wlx * reciprocal(wll), step), np.minimum(low, 0.0)


def _error(x: Doubles, weights: Doubles, codes: Doubles, step: Doubles, low: Doubles, power: int) -> Doubles:
    error: Doubles = (weights * np.abs(step[..., None] * codes + low[..., None] - x) ** power).sum(-1)
    return error


def search_step(x: Doubles, weights: Doubles, inverses: Sequence[Doubles], round_to: Callable[[Doubles], Doubles]) -> Doubles:
    """The step of each run with the least weighted squared error: x [n, runs, length] -> [n, runs].

    Args:
        inverses: candidates for 1 / step, each [n, runs, 1].
        round_to: values in steps -> the nearest ones that there are codes for. The step is then fitted to them by least squares.
    """
    best_step, best_gain = np.zeros(x.shape[:-1]), np.zeros(x.shape[:-1])
    for per_step in inverses:
        levels = round_to(x * per_step)
        wlx, wll = (weights * levels * x).sum(-1), (weights * levels * levels).sum(-1)
        step = wlx * reciprocal(wll)
        better = step * wlx > best_gain
        best_step, best_gain = np.where(better, step, best_step), np.where(better, step * wlx, best_gain)
    return best_step


def search_symmetric(x: Doubles, half: int) -> Doubles:
    """Step of each run for codes -half .. half - 1; errors weigh x squared.

    Candidates round with an inverse step of -(half + shift) / extreme, shift = 0, then -0.9 .. 0.9.
    """
    by = reciprocal(signed_extreme(x))
    inverses = [by * -(half + 0.1 * shift) for shift in (0, *range(-9, 0), *range(1, 10))]
    return search_step(x, x * x, inverses, lambda u: np.clip(np.rint(u), -half, half - 1))
