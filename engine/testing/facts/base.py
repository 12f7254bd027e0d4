"""What strategies and limits must know of an op: `Facts`, the terms of a limit: `Bound`, and what families of ops share.

Note [limits]. A result agrees if |got - want| <= c * eps * sqrt(reduction length) * sum|products| + floor, element by element. `want` and
`sum|products|` are computed in float64. Products of quantised weights are compared with a reference that takes the *quantised*
activations, made by `quantize_activations`, which shares nothing with the kernels. Where an op has a condition (an exponential of a
large argument), the products are weighted with it: see the `_bound_of_...` functions. Nothing in them was fitted to what a kernel gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from engine.testing.values import TINY, Array

if TYPE_CHECKING:
    from engine.testing.example import Example

Sizes = dict[str, int]
Draw = Callable[..., Any]


@dataclass(frozen=True)
class Bound:
    """sum|products|, the reduction length, and an absolute floor: what float32 cannot represent any better."""

    products: Array
    length: int = 1
    floor: Array | float = TINY


def bound_of_one_number(e: Example) -> Bound:
    return Bound(np.abs(e.want))


def bound_of_copies(e: Example) -> Bound:
    return Bound(np.zeros_like(e.want), floor=0.0)


def nothing(draw: Draw, sizes: Sizes) -> None:
    """Dimensions that are free of each other."""


@dataclass(frozen=True)
class Facts:
    """What strategies and limits must know of an op beyond its contract line. Ops that are not in `FACTS` have these defaults.

    Attributes:
        relate: sets dimensions that depend on others.
        extents: dimension -> the extents it may have, instead of any; 0 among them if it may be empty.
        params: parameter -> a strategy, or what gives one from the extents.
        decades: operand -> the powers of ten of its values.
        values: operand -> its values, from (generator, shape, example).
        specials: "all" (NaN, infinities, -0, subnormals), "nan" or "" (none): what operands may hold.
        bound: the terms of the limit.
        encoded: the operand whose values are stored in the result's type: where that is a block format, the reference takes them as
            `engine.quantize` stores them, and they are finite.
    """

    relate: Callable[[Draw, Sizes], None] = nothing
    extents: Mapping[str, Sequence[int]] = field(default_factory=dict)
    params: Mapping[str, st.SearchStrategy[Any] | Callable[[Sizes], st.SearchStrategy[Any]]] = field(default_factory=dict)
    decades: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    values: Mapping[str, Callable[..., Array]] = field(default_factory=dict)
    specials: str = "all"
    bound: Callable[[Example], Bound] = bound_of_one_number
    encoded: str = ""


def divisor(draw: Draw, n: int, label: str) -> int:
    """1, n, or something that divides n; 0 divides only 0."""
    whole = [d for d in range(2, n) if n % d == 0]
    return int(draw(st.sampled_from([1, n, *(whole[:1])]), label=label))


def shorter(*pairs: tuple[str, str]) -> Callable[[Draw, Sizes], None]:
    def relate(draw: Draw, sizes: Sizes) -> None:
        for short, whole in pairs:
            sizes[short] = divisor(draw, sizes[whole], short)

    return relate


def sometimes_long(draw: Draw, sizes: Sizes) -> None:
    """In one of six calls k is so long that kernels may cut it into slices: the first multiple from 544 on."""
    if draw(st.integers(0, 5), label="5: long") == 5 and sizes["k"]:
        sizes["k"] *= -(-544 // sizes["k"])


def room(extent: str, unit: int) -> Callable[[Draw, Sizes], None]:
    def relate(draw: Draw, sizes: Sizes) -> None:
        sizes["r"] = min(sizes["r"], sizes[extent] * unit)

    return relate


def exact(*numbers: float) -> st.SearchStrategy[float]:
    """Parameters that float32 holds exactly, so that the reference takes the same ones."""
    return st.sampled_from([float(np.float32(n)) for n in numbers])


def cells(extent: str, unit: int) -> Callable[..., Array]:
    """Ids inside the tensor, distinct in each row of them."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
        every = np.tile(np.arange(e.sizes[extent] * unit), (*shape[:-1], 1))
        return rng.permuted(every, axis=-1)[..., : shape[-1]]

    return draw


def mask_values(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Causal-looking, scattered, whole rows and whole stretches of -inf, and finite values as ALiBi has."""
    base = np.where(rng.random(shape) < 0.5, 0.0, rng.standard_normal(shape))
    hidden = rng.random(shape) < rng.choice([0.0, 0.3, 0.95])
    hidden |= np.arange(shape[-1]) >= rng.integers(0, shape[-1] + 2)
    hidden |= rng.random((*shape[:-1], 1)) < 0.1
    return np.where(hidden, -np.inf, base)
