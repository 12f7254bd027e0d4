"""Ops over whole rows: norms, sums, sorting, out_prod; and those that move elements about."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from engine.testing.example import Example
from engine.testing.facts.base import Bound, Draw, Facts, Sizes, bound_of_copies, bound_of_one_number, exact, shorter
from engine.testing.values import TINY, Array


def _bound_of_row(e: Example) -> Bound:
    return Bound(np.abs(e.want), e.sizes["n"])


def _bound_of_sums(e: Example) -> Bound:
    """The same op on magnitudes."""
    x = e.decoded["x"]
    assert x is not None
    return Bound(e.op.reference_of([np.abs(x)], e.params), x.size if e.op.name == "sum" else e.sizes["n"])


def _centred(x: Array, y: Array, axes: tuple[int, ...], eps: float) -> Array:
    """(x - mean) / deviation, as x is large beside what is left: an error of the mean, and of x - mean, in units of the deviation."""
    n = max(math.prod(x.shape[k] for k in axes), 1)
    d = x - np.sum(x, axis=axes, keepdims=True) / n
    deviation = np.sqrt(np.sum(d * d, axis=axes, keepdims=True) / n + eps)
    return (np.abs(x) + np.sum(np.abs(x), axis=axes, keepdims=True) / n) / deviation + np.abs(y)


def _bound_of_norm(e: Example) -> Bound:
    x = e.decoded["x"]
    assert x is not None
    return Bound(_centred(x, e.want, (-1,), e.params["eps"]), e.sizes["n"])


def _bound_of_group_norm(e: Example) -> Bound:
    x = e.decoded["x"]
    assert x is not None
    per = max(-(-x.shape[1] // e.params["n_groups"]), 1)
    parts = [_centred(x[:, k : k + per], e.want[:, k : k + per], (1, 2, 3), e.params["eps"]) for k in range(0, x.shape[1], per)]
    return Bound(np.concatenate(parts, 1) if parts else np.zeros_like(x), per * x.shape[2] * x.shape[3])


def _bound_of_out_prod(e: Example) -> Bound:
    """Products may fall below the normal range, where they keep an absolute precision."""
    x, w = e.decoded["x"], e.decoded["w"]
    assert x is not None and w is not None
    k = e.sizes["k"]
    return Bound(e.op.reference_of([np.abs(x), np.abs(w)], e.params), k, TINY + k * 2.0**-149)


def _joined(draw: Draw, sizes: Sizes) -> None:
    """All extents but one are the same."""
    free = draw(st.sampled_from("abcn"), label="joined along")
    for d in "abcn":
        if d != free:
            sizes[f"w{d}"] = sizes[d]


def _joined_along(sizes: Sizes) -> st.SearchStrategy[int]:
    differ = [k for k, d in enumerate("ncba") if sizes[d] != sizes[f"w{d}"]]
    return st.sampled_from(differ or range(4))


_EPS = st.sampled_from([1e-5, 1e-6])
_FEW = (0, 1, 2, 3)
_TIMES = st.sampled_from([1, 1, 2, 3, 0])


def _widths(d: str) -> Callable[[Sizes], st.SearchStrategy[int]]:
    """Places to add at an end of dimension d: what goes round needs no more than there is."""
    return lambda sizes: st.integers(0, min(3, sizes[f"x{d}"]))


FACTS: dict[str, Facts] = {
    "norm": Facts(params={"eps": _EPS}, decades={"x": (-30, 16)}, bound=_bound_of_norm),
    "l2_norm": Facts(params={"eps": st.sampled_from([1e-12, 1e-6])}, decades={"x": (-30, 16)}, bound=_bound_of_row),
    "group_norm": Facts(params={"eps": _EPS, "n_groups": lambda sizes: st.integers(1, max(sizes["c"], 1))}, decades={"x": (-30, 16)},
                        bound=_bound_of_group_norm),
    **dict.fromkeys(("sum_rows", "mean", "sum", "cumsum"), Facts(bound=_bound_of_sums)),
    "out_prod": Facts(shorter(("xa", "a"), ("xb", "b")), decades={"x": (-15, 15), "w": (-15, 15)}, bound=_bound_of_out_prod),
    "argmax": Facts(bound=bound_of_copies),
    "argsort": Facts(params={"descending": st.sampled_from([0, 1])}, bound=bound_of_copies),
    "top_k": Facts(params={"k": lambda sizes: st.integers(0, sizes["n"])}, bound=bound_of_copies),
    "repeat": Facts(extents={"xa": _FEW, "xb": _FEW, "xc": _FEW}, params={f"times{k}": _TIMES for k in range(4)}, bound=bound_of_copies),
    "concat": Facts(_joined, params={"dim": _joined_along}, bound=bound_of_copies),
    "pad": Facts(extents={"xa": _FEW, "xb": _FEW, "xc": _FEW}, bound=bound_of_copies,
                 params={"circular": st.sampled_from([0, 1]), **{f"{end}p{k}": _widths(d) for k, d in enumerate("ncba") for end in "lr"}}),
    "roll": Facts(params={f"shift{k}": st.integers(-100, 100) for k in range(4)}, bound=bound_of_copies),
    "diag_mask_inf": Facts(params={"n_past": st.integers(0, 5)}, bound=bound_of_copies),
    "fill": Facts(params={"value": exact(0, 0.1, -3e4)}, bound=bound_of_one_number),
}
