"""For authors of ops and backends: strategies for any legal call, a guarded run, a derived comparison, a conformance suite.

    @given(example=examples(OPS["rope"], ("rope", ("f32", "i32", "f32", "f32"))))
    def test_rope(example):
        got, guards = run_guarded(backend, example)
        assert guards.intact, guards
        assert_close(example, got)

or everything at once: `print(conformance(backend, OPS.values()))`.

Note [limits]. A result agrees if |got - want| <= c * eps * sqrt(reduction length) * sum|products| + floor, element by element. `want` and
`sum|products|` are computed in float64. Products of quantised weights are compared with a reference that takes the *quantised*
activations, made by `quantize_activations` here, which shares nothing with the kernels. Where an op has a condition (an exponential of a
large argument), the products are weighted with it: see the `_bound_of_...` functions. Nothing in them was fitted to what a kernel gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from engine.backend import HOST, Backend, Buffer, BufferType, HostBuffer, KernelRow, KernelTable, Row, ThroughRow, place
from engine.dtypes import DTYPES, F16, FLOATS, I8, I32, I64, Q4_1, Q5_1, Q8_X, RADIX, WEIGHT_BLOCKS, DType, from_bf16, to_bf16
from engine.errors import ShapeError
from engine.gguf.quants import dequantize, quantize
from engine.layouts import PackedBuffer, PackedBufferType
from engine.op import Call, Key, Op, Operand, padded
from engine.tensor import Tensor, leaf, row_major
from engine.testing_backends import FilteredBackend, FilteredTable

__all__ = ["FACTS", "Bound", "Case", "Disagreement", "Example", "Facts", "FilteredBackend", "FilteredTable", "Guards",
           "InterleavedBufferType", "Layout", "Outcome", "Report", "agrees_in_mean", "assert_close", "cases", "check_call",
           "conformance", "elements", "examples", "forced", "limits", "quantize_activations", "refusal", "run_guarded",
           "tolerance", "values"]

Array = np.ndarray[Any, Any]
Sizes = dict[str, int]
Draw = Callable[..., Any]
EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # below it float32 keeps an absolute, not a relative, precision
GUARD = 192  # bytes before and behind every tensor
NMSE = 5e-4  # of a product of quantised weights with float activations
_QUIET = np.errstate


class Disagreement(AssertionError):
    """A result that is not what the reference says, with everything needed to repeat it."""


# -- values and their stored forms ------------------------------------------------------------------------------


def values(stored: Array, dtype: DType) -> Array:
    """Stored elements or block records as float64 (integers as int64)."""
    if dtype is Q8_X:
        planes = np.ascontiguousarray(stored["qs"]).view(np.int8).astype(np.float64)
        codes = RADIX * planes[..., :32] + planes[..., 32:]
        with _QUIET(invalid="ignore"):
            return (codes * stored["d"].astype(np.float64)).reshape(*stored.shape[:-1], 32 * stored.shape[-1])
    if dtype.is_block:
        return dequantize(_rows(stored), dtype).astype(np.float64)
    if dtype in (I32, I64):
        return stored.astype(np.int64)
    with _QUIET(invalid="ignore"):  # a NaN that signals
        return from_bf16(stored).astype(np.float64) if dtype.name == "bf16" else stored.astype(np.float64)


def elements(array: Array, dtype: DType) -> Array:
    """Values as they are stored: floats rounded to nearest even, blocks quantised."""
    if dtype is Q8_X:
        return quantize_activations(array)
    with _QUIET(all="ignore"):
        if dtype.is_block:
            return _records(quantize(array, dtype), dtype)
        return to_bf16(array.astype(np.float32)) if dtype.name == "bf16" else np.asarray(array).astype(dtype.numpy)


def _rows(records: Array) -> Array:
    """Block records [..., blocks] as bytes [..., row bytes]."""
    flat = np.ascontiguousarray(records).reshape(-1).view(np.uint8)
    return flat.reshape(*records.shape[:-1], records.shape[-1] * records.dtype.itemsize)


def _records(rows: Array, dtype: DType) -> Array:
    """Bytes [..., row bytes] as block records [..., blocks]."""
    flat = np.ascontiguousarray(rows).reshape(-1).view(dtype.numpy)
    return flat.reshape(*rows.shape[:-1], rows.shape[-1] // dtype.nbytes)


def quantize_activations(x: Array) -> Array:
    """What QUANTIZE_ROWS must make of float32 rows, bit for bit: records of `Q8_X`.

    d = largest magnitude / L with L = RADIX * 127 + 126; codes = x * (L / largest), rounded to nearest even, are cut into a high byte,
    codes / RADIX rounded to nearest even, and the rest; s = d * sum of codes. A block that holds NaN or an infinity has the scale NaN; what
    such an element itself becomes is code 0.
    """
    with _QUIET(all="ignore"):
        x = np.asarray(x, np.float32)
        blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
        top = np.fmax.reduce(np.abs(blocks), axis=-1, initial=np.float32(0))
        bad = ~np.isfinite(blocks).all(-1)
        largest = np.float32(RADIX * 127 + 126)
        inverse = np.where(top > 0, np.fmin(largest / top, np.float32(3e38)), np.float32(0)).astype(np.float32)
        scaled = np.rint(blocks * inverse[..., None])
        codes = np.where(np.isfinite(scaled), scaled, 0).astype(np.int32)
        high = np.rint(codes.astype(np.float32) * np.float32(1 / RADIX)).astype(np.int32)
        planes = np.concatenate([high, codes - RADIX * high], -1).astype(np.int8)
        out = np.zeros(blocks.shape[:-1], Q8_X.numpy)
        out["d"] = np.where(bad, np.float32(np.nan), top / largest)[..., None]
        out["sums"] = planes.reshape(*planes.shape[:-1], 4, 16).sum(-1, dtype=np.int32)
        out["s"] = out["d"] * codes.sum(-1, dtype=np.int32).astype(np.float32)[..., None]
        out["qs"] = np.ascontiguousarray(planes).reshape(-1).view("<u4").reshape(*planes.shape[:-1], 16)
        return out


def _magnitudes(stored: Array, dtype: DType) -> Array:
    """|scale * (code - zero)| + |offset| of each element: what rounding errors are relative to."""
    if not dtype.has_offset:
        return np.abs(values(stored, dtype))
    positive = stored.copy()
    positive["d"] = np.abs(stored["d"])
    if dtype in (Q4_1, Q5_1):
        positive["m"] = np.abs(stored["m"])
    else:
        positive["dmin"] = -np.abs(stored["dmin"])
    return np.abs(values(positive, dtype))


# -- a call -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How an operand lies in memory, in elements (of blocks: in blocks).

    Attributes:
        order: dimensions from the outermost to the innermost in memory.
        steps: distance of neighbours, in places of the next inner dimension.
        pads: places left free behind each dimension.
        offset: places in front of the first element.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    offset: int

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides of a tensor of `shape`, in places."""
        out, pitch = [0] * len(shape), 1
        for d in reversed(self.order):
            out[d] = pitch * self.steps[d]
            pitch = out[d] * max(shape[d], 1) + self.pads[d]
        return tuple(out)


@dataclass(frozen=True, eq=False)
class Example:
    """A legal call of an op: its shape is drawn, its data comes from `seed`.

    Attributes:
        shapes: operand -> extents in elements; operands left out are missing.
        layouts: operand -> how it lies, None for dense.
        kinds: operand -> what its values look like.
        given: operand -> stored elements that replace the generated ones.
    """

    op: Op
    key: Key
    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    layouts: Mapping[str, Layout | None]
    kinds: Mapping[str, str]
    params: Mapping[str, Any]
    seed: int
    given: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, op: Op, key: Key, operands: Mapping[str, Array], layouts: Mapping[str, Layout] = MappingProxyType({}), /,
           **params: Any) -> Example:
        """A call on these stored elements (block records for block types)."""
        dtypes = dict(zip((o.name for o in op.contract.views), (DTYPES[t] for t in key[1]), strict=True))
        shapes = {n: (*a.shape[:-1], a.shape[-1] * dtypes[n].block_size) for n, a in operands.items()}
        sizes = op.match({o.name: leaf(dtypes[o.name], shapes[o.name], o.name) if o.name in shapes else None for o in op.contract.operands})
        return cls(op, key, sizes, shapes, {n: layouts.get(n) for n in shapes}, {}, {**op.params, **params}, 0, dict(operands))

    @property
    def dtypes(self) -> dict[str, DType]:
        """Types by operand, the result's included."""
        return {o.name: DTYPES[t] for o, t in zip(self.op.contract.views, self.key[1], strict=True)}

    @cached_property
    def operands(self) -> dict[str, Array]:
        """Stored elements of each operand that is there, dense, in operand order."""
        facts, out = FACTS.get(self.op.name, Facts()), {}
        for i, o in enumerate(self.op.contract.operands):
            if o.name in self.given:
                out[o.name] = self.given[o.name]
            elif o.name in self.shapes:
                rng = np.random.default_rng([self.seed, i])
                out[o.name] = _generate(rng, self, o.name, facts)
        return out

    @cached_property
    def decoded(self) -> dict[str, Array | None]:
        """Operands as the reference takes them; activations quantised where a backend will do so."""
        return self.decode(converted=True)

    def decode(self, converted: bool) -> dict[str, Array | None]:
        """Operands in float64 with the contract's number of dimensions, after or before the conversion some keys ask for."""
        out: dict[str, Array | None] = {}
        for o in self.op.contract.operands:
            if (stored := self.operands.get(o.name)) is None:
                out[o.name] = None
                continue
            dtype = self.dtypes[o.name]
            if converted and self.is_converted(o.name):
                dtype = self.op.through[o.name][1]
                stored = elements(stored, dtype)
            array = values(stored, dtype)
            out[o.name] = array.reshape(padded(array.shape, len(o.dims), 1))
        return out

    def is_converted(self, operand: str) -> bool:
        """Does a backend convert this operand first (MUL_MAT of quantised weights with float activations)?"""
        return operand in self.op.through and self.key not in self.op.keys()

    @cached_property
    def want(self) -> Array:
        """The reference's result in float64."""
        with _QUIET(all="ignore"):
            out = np.asarray(self.op.reference_of(list(self.decoded.values()), self.params), np.float64)
        return values(quantize_activations(out), Q8_X) if self.result_dtype is Q8_X else out

    @property
    def result_dtype(self) -> DType:
        return self.dtypes[self.op.contract.result.name]

    def dense(self) -> Example:
        """The same call on contiguous copies."""
        return self.with_data(**self.operands, layouts=dict.fromkeys(self.layouts))

    def with_data(self, layouts: Mapping[str, Layout | None] | None = None, **given: Array) -> Example:
        """The same call on other stored elements."""
        return replace(self, given={**self.given, **given}, layouts=self.layouts if layouts is None else layouts)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n} {self.dtypes[n]}{list(s)}{'' if self.layouts.get(n) is None else '~'} {self.kinds.get(n, '')}".rstrip()
                           for n, s in self.shapes.items())
        return f"{self.op.name}({shapes}; {', '.join(f'{k}={v}' for k, v in self.params.items())}) -> {self.result_dtype}, seed {self.seed}"


# -- data -------------------------------------------------------------------------------------------------------


KINDS = ("mild", "mild", "decade", "equal", "signs", "wide", "special")
BLOCK_KINDS = ("codes", "codes", "quantized", "highest", "lowest")
_SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 1e-40, -3e-42)
_LIMITS = {"f16": (-7, 4), "bf16": (-37, 37), "f32": (-37, 37)}


def _generate(rng: np.random.Generator, e: Example, name: str, facts: Facts) -> Array:
    """Stored elements of one operand."""
    shape, dtype, kind = e.shapes[name], e.dtypes[name], e.kinds[name]
    if name in facts.values:
        return elements(facts.values[name](rng, shape, e), dtype)
    if dtype in WEIGHT_BLOCKS:
        return _blocks(rng, shape, dtype, kind)
    low, high = facts.decades.get(name, (-30, 30))
    bounds = _LIMITS.get(dtype.name, _LIMITS["f32"])
    x = _floats(rng, shape, kind, (max(low, bounds[0]), min(high, bounds[1])), facts.specials)
    return elements(x, dtype)


def _floats(rng: np.random.Generator, shape: tuple[int, ...], kind: str, decades: tuple[int, int], specials: str) -> Array:
    """Values of one kind; `decades` are the powers of ten they may have. Never beyond 4 times the largest."""
    base = np.clip(rng.standard_normal(shape), -4, 4)
    if kind == "decade":
        base *= 10.0 ** rng.integers(decades[0], decades[1] + 1)
    elif kind == "equal":
        base = np.full(shape, rng.choice([-1, 1]) * 10.0 ** rng.uniform(max(decades[0], -3), min(decades[1], 3)))
    elif kind == "signs":
        base = np.where(rng.random(shape) < 0.5, -1.0, 1.0) * 10.0 ** rng.uniform(max(decades[0], -3), min(decades[1], 3))
    elif kind == "wide":
        base *= 10.0 ** rng.integers(decades[0], decades[1] + 1, shape)
    elif kind == "special" and specials:
        pool = _SPECIALS if specials == "all" else (math.nan, -0.0)
        base = np.where(rng.random(shape) < 0.1, rng.choice(pool, shape), base)
    return base.astype(np.float32)


def _blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, kind: str) -> Array:
    """Block records: quantised values, or any codes at all; `highest` and `lowest` have every code at an end of its range."""
    if kind == "quantized":
        return elements(rng.standard_normal(shape), dtype)
    n = (*shape[:-1], shape[-1] // dtype.block_size)
    raw = rng.integers(0, 256, (*n, dtype.nbytes), np.uint8)
    if kind in ("highest", "lowest"):
        signed = dtype.code_range[0] < 0
        raw[...] = (0x7F if signed else 0xFF) if kind == "highest" else (0x80 if signed else 0)
    out = _records(raw.reshape(*n[:-1], n[-1] * dtype.nbytes), dtype)
    for f in dtype.fields:
        if f.unit == "f16":
            out[f.name] = (rng.standard_normal(out[f.name].shape) * 10.0 ** rng.integers(-3, 2)).astype(np.float16)
    if kind in ("highest", "lowest") and dtype.field("scales"):
        spread = out["scales"].view(np.uint8)
        spread[...] = rng.integers(0, 256, spread.shape, np.uint8)
    return out


def _ids(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Row ids, some of them outside the matrix: those are clamped."""
    m = e.sizes["m"]
    wild = rng.choice([-1, m, -(2**31), 2**31 - 1, m + 7], shape)
    return np.where(rng.random(shape) < 0.2, wild, rng.integers(0, max(m, 1), shape))


def _cells(extent: str, unit: int) -> Callable[..., Array]:
    """Distinct ids inside the tensor."""
    return lambda rng, shape, e: rng.permutation(e.sizes[extent] * unit)[: math.prod(shape)].reshape(shape)


def _mask(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Causal-looking, scattered, whole rows and whole stretches of -inf, and finite values as ALiBi has."""
    base = np.where(rng.random(shape) < 0.5, 0.0, rng.standard_normal(shape))
    hidden = rng.random(shape) < rng.choice([0.0, 0.3, 0.95])
    hidden |= np.arange(shape[-1]) >= rng.integers(0, shape[-1] + 2)
    hidden |= rng.random((*shape[:-1], 1)) < 0.1
    return np.where(hidden, -np.inf, base)


def _positions(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    return rng.integers(0, rng.choice([2, 4096, 1 << 20]), shape)


def _frequencies(rng: np.random.Generator, shape: tuple[int, ...], e: Example) -> Array:
    """Turns per position, as a float32 and what is missing from it."""
    turns = rng.choice([1e4, 5e5]) ** (-np.arange(shape[-1]) / max(shape[-1], 1)) / (2 * np.pi)
    high = turns.astype(np.float32).astype(np.float64)
    return np.stack([high, turns - high])


# -- limits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """sum|products|, the reduction length, and an absolute floor: what float32 cannot represent any better."""

    products: Array
    length: int = 1
    floor: Array | float = TINY


def _bound_of_one_number(e: Example) -> Bound:
    return Bound(np.abs(e.want))


def _bound_of_copies(e: Example) -> Bound:
    return Bound(np.zeros_like(e.want), floor=0.0)


def _bound_of_rows(e: Example) -> Bound:
    """GET_ROWS: floats are copied; a block's value is rounded once, twice where scales are multiplied first."""
    exact = next(iter(e.dtypes.values())) in FLOATS
    if exact:
        return _bound_of_copies(e)
    w, ids = e.operands["w"], e.decoded["ids"]
    size = _magnitudes(w, e.dtypes["w"])
    return Bound(e.op.reference_of([size.reshape(padded(size.shape, 4, 1)), ids], e.params) / e.op.c, floor=0.0)


def _bound_of_scale(e: Example) -> Bound:
    x = e.decoded["x"]
    assert x is not None
    return Bound(np.abs(x * e.params["factor"]) + abs(e.params["bias"]))


SILU_FLOOR = 128 * math.log(2) / 2.0**128  # 1 + exp(-v) overflows from v = -128 ln 2 on: what follows may be zero


def _bound_of_gates(e: Example) -> Bound:
    """SILU, GELU and their gated forms. exp(-2 z) magnifies the error of z by |2 z|, as far as it matters beside 1."""
    x, u = e.decoded["x"], e.decoded.get("u")
    assert x is not None
    condition: Array | float = 0.0
    if e.op.name in ("gelu", "geglu"):
        z = 2 * 0.7978845608028654 * (x * (1 + 0.044715 * x * x))
        condition = np.where(z < -700, 1.0, 1 / (1 + np.exp(np.minimum(z, 700)))) * np.abs(z)
    products = np.abs(e.want) * (1 + condition)
    return Bound(np.where(e.want == 0, 0, products), floor=TINY + SILU_FLOOR * (1 if u is None else np.abs(u)))


def _bound_of_rms_norm(e: Example) -> Bound:
    return Bound(np.abs(e.want), e.sizes["n"])


def _bound_of_soft_max(e: Example) -> Bound:
    """An error of the exponent, relative to its terms, is one of the result: for a row's element and, on average, for its sum."""
    x, mask = e.decoded["x"], e.decoded["mask"]
    assert x is not None
    v, size = x * e.params["factor"], np.abs(x * e.params["factor"])
    if mask is not None:
        times = [n // m if m else 1 for n, m in zip(x.shape[:2], mask.shape[:2], strict=True)]
        tiled = np.tile(mask, [*times, 1, 1])
        v, size = v + tiled, size + np.abs(np.where(np.isinf(tiled), 0, tiled))
    return Bound(_softmax_products(e, v, size, e.want), e.sizes["n"])


def _softmax_products(e: Example, v: Array, size: Array, p: Array) -> Array:
    top = np.max(v, axis=-1, keepdims=True, initial=-np.inf)
    delta = np.where(np.isneginf(v), 0, size + np.abs(v - np.where(np.isneginf(top), 0, top)))
    delta = delta + np.sum(p * delta, axis=-1, keepdims=True)
    first_order = p * (1 + delta)
    return np.where(e.op.c * EPS * delta > 0.5, 1 / EPS, first_order)


def _bound_of_rope(e: Example) -> Bound:
    """|u| + |v| of each pair, times 1 + the angle within a turn: an angle is rounded thrice, sine and cosine err by 2e-7."""
    x, freqs = e.decoded["x"], e.decoded["freqs"]
    assert x is not None and freqs is not None
    half = freqs.shape[1]
    one, two = (slice(0, half), slice(half, 2 * half)) if e.params["neox"] else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    out = np.zeros_like(x)
    out[..., one] = out[..., two] = (np.abs(x[..., one]) + np.abs(x[..., two])) * (1 + np.pi)
    return Bound(out, floor=np.where(out > 0, TINY, 0.0))


def _bound_of_mul_mat(e: Example) -> Bound:
    """Products of integers are exact, so only scales, offsets and the sum are rounded. Below the normal range a scale d * xs.d keeps an
    absolute precision, and multiplies up to 128 * 127 * RADIX."""
    w, x = e.decoded["w"], e.decoded["x"]
    assert w is not None and x is not None
    size = _magnitudes(e.operands["w"], e.dtypes["w"]).reshape(w.shape)
    k = e.sizes["k"]
    products = e.op.reference_of([size, np.abs(x)], e.params)
    if e.dtypes["w"] in WEIGHT_BLOCKS:
        return Bound(products, k, TINY + k * 128 * 127 * RADIX * 2.0**-149)
    return Bound(products, k, TINY + k * 2.0**-149)


def _bound_of_attention(e: Example) -> Bound:
    """First order: an error of a score weighs its own value of V, and, averaged, all of them. Beyond it only |V| itself bounds."""
    q, k, v, mask = (e.decoded[n] for n in ("q", "k", "v", "mask"))
    assert q is not None and k is not None and v is not None
    shared = q.shape[1] // k.shape[0]
    keys = np.repeat(k.transpose(0, 1, 3, 2).reshape(k.shape[0], -1, k.shape[2]), shared, 0)
    cells = np.abs(np.repeat(v, shared, 0))
    s = np.einsum("thd,hkd->htk", q, keys) * e.params["factor"]
    size = math.sqrt(max(q.shape[2], 1)) * np.einsum("thd,hkd->htk", np.abs(q), np.abs(keys)) * abs(e.params["factor"])
    if cap := e.params["cap"]:
        s, size = cap * np.tanh(s / cap), size + abs(cap)
    if mask is not None:
        s, size = s + mask, size + np.abs(np.where(np.isinf(mask), 0, mask))
    top = s.max(-1, keepdims=True, initial=-np.inf)
    weight = np.where(np.isneginf(s), 0, np.exp(s - np.where(np.isneginf(top), 0, top)))
    whole = weight.sum(-1, keepdims=True)
    p = np.where(whole == 0, 0, weight / np.where(whole == 0, 1, whole))
    delta = np.where(np.isneginf(s), 0, size + np.abs(s - np.where(np.isneginf(top), 0, top)))
    delta = delta + np.sum(p * delta, axis=-1, keepdims=True)
    products = np.einsum("htk,hke->the", p * (1 + delta), cells)
    lost = (e.op.c * EPS * delta.max(-1, initial=0) > 0.5).T[..., None]
    most = 2 * np.max(cells, axis=1, initial=0)[None]
    return Bound(np.where(lost, most / EPS, products), max(k.shape[1] * 32, 1))


# -- what is to be known of an op -------------------------------------------------------------------------------


def _nothing(draw: Draw, sizes: Sizes) -> None:
    """Dimensions that are free of each other."""


@dataclass(frozen=True)
class Facts:
    """What strategies and limits must know of an op beyond its contract line. Ops that are not in `FACTS` have these defaults.

    Attributes:
        relate: sets dimensions that depend on others.
        extents: dimension -> the extents it may have, instead of any; 0 among them if it may be empty.
        params: parameter -> a strategy.
        decades: operand -> the powers of ten of its values.
        values: operand -> its values, from (generator, shape, example).
        specials: "all" (NaN, infinities, -0, subnormals), "nan" or "" (none): what operands may hold.
        bound: the terms of the limit.
    """

    relate: Callable[[Draw, Sizes], None] = _nothing
    extents: Mapping[str, Sequence[int]] = field(default_factory=dict)
    params: Mapping[str, st.SearchStrategy[Any]] = field(default_factory=dict)
    decades: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    values: Mapping[str, Callable[..., Array]] = field(default_factory=dict)
    specials: str = "all"
    bound: Callable[[Example], Bound] = _bound_of_one_number


def _divisor(draw: Draw, n: int, label: str) -> int:
    """1, n, or something that divides n; 0 divides only 0."""
    whole = [d for d in range(2, n) if n % d == 0]
    return int(draw(st.sampled_from([1, n, *(whole[:1])]), label=label))


def _shorter(*pairs: tuple[str, str]) -> Callable[[Draw, Sizes], None]:
    def relate(draw: Draw, sizes: Sizes) -> None:
        for short, whole in pairs:
            sizes[short] = _divisor(draw, sizes[whole], short)

    return relate


def _at_least_one_row(draw: Draw, sizes: Sizes) -> None:
    sizes["m"] = max(sizes["m"], 1)
    sizes["wa"], sizes["wb"] = (_divisor(draw, max(sizes[d], 1), f"w{d}") for d in "ab")


def _rotated(draw: Draw, sizes: Sizes) -> None:
    half = sizes["n"] // 2
    sizes["half"] = draw(st.sampled_from([half, half // 2, min(half, 1)]), label="half")


def _shared_heads(draw: Draw, sizes: Sizes) -> None:
    sizes["m"] = 32 * sizes["blocks"]
    sizes["h"] = sizes["kv"] * draw(st.sampled_from([1, 2, 3, 4, 5]), label="heads of a KV head")
    sizes["e"] = sizes["d"] if draw(st.booleans(), label="e = d") else sizes["e"]


def _room(extent: str, unit: int) -> Callable[[Draw, Sizes], None]:
    def relate(draw: Draw, sizes: Sizes) -> None:
        sizes["r"] = min(sizes["r"], sizes[extent] * unit)

    return relate


def _exact(*numbers: float) -> st.SearchStrategy[float]:
    """Parameters that float32 holds exactly, so that the reference takes the same ones."""
    return st.sampled_from([float(np.float32(n)) for n in numbers])


_REPEATED = Facts(_shorter(("wa", "a"), ("wb", "b"), ("wc", "c"), ("wn", "n")))
_GATES = Facts(bound=_bound_of_gates, decades={"x": (-30, 4)})
# What underflows and is then multiplied by an infinity is NaN in float32 and infinite in float64: no infinities here.
_GATED = Facts(bound=_bound_of_gates, decades={"x": (-30, 4), "u": (-30, 30)}, specials="nan")
_COPIES = Facts(bound=_bound_of_copies)
# Head dimensions are compiled in: few of them, of every shape a tile can have.
_HEADS = (1, 5, 8, 16, 33, 64)

FACTS: dict[str, Facts] = {
    "add": _REPEATED, "mul": _REPEATED, "silu": _GATES, "gelu": _GATES, "swiglu": _GATED, "geglu": _GATED,
    "scale": Facts(params={"factor": _exact(1, 0, -0.375, 1e-3, 1e3), "bias": _exact(0, 1.5, -1e-3)}, bound=_bound_of_scale),
    "rms_norm": Facts(params={"eps": st.sampled_from([1e-5, 1e-6])}, decades={"x": (-30, 16)}, bound=_bound_of_rms_norm),
    "soft_max": Facts(_shorter(("ma", "a"), ("mh", "h")), params={"factor": _exact(1, 0.125, 0, -2)}, values={"mask": _mask},
                      bound=_bound_of_soft_max),
    "rope": Facts(_rotated, params={"neox": st.sampled_from([0, 1])}, values={"pos": _positions, "freqs": _frequencies}, specials="nan",
                  bound=_bound_of_rope),
    "cpy": _COPIES, "quantize_rows": _COPIES,
    "get_rows": Facts(_at_least_one_row, values={"ids": _ids}, bound=_bound_of_rows),
    "set_rows": Facts(_room("m", 1), values={"ids": _cells("m", 1)}, bound=_bound_of_copies),
    "set_keys": Facts(_room("blocks", 32), extents={"blocks": (1, 2, 3)}, values={"ids": _cells("blocks", 32)}, bound=_bound_of_copies),
    "mul_mat": Facts(_shorter(("wa", "a"), ("wb", "b")), decades={"w": (-15, 15), "x": (-15, 15)}, bound=_bound_of_mul_mat),
    "flash_attn_ext": Facts(_shared_heads, extents={"d": _HEADS, "e": _HEADS, "blocks": (0, 1, 2, 3, 9), "kv": (1, 2, 3)},
                            params={"factor": _exact(1, 0.125, -0.5), "cap": _exact(0, 0, 5)}, values={"mask": _mask}, specials="",
                            decades={"q": (-6, 2), "k": (-4, 2), "v": (-4, 4)}, bound=_bound_of_attention),
}


def tolerance(example: Example) -> Array:
    """The largest difference allowed for each element, in float64. See Note [limits]."""
    facts = FACTS.get(example.op.name, Facts())
    with _QUIET(all="ignore"):
        bound = facts.bound(example)
        limit: Array = example.op.c * EPS * math.sqrt(max(bound.length, 1)) * bound.products + bound.floor
    return np.where(np.isnan(limit), 0, limit)


def limits(example: Example) -> tuple[Array, Array]:
    """The least and the largest value allowed for each element, rounded to the result's type as the result was."""
    wide, dtype = tolerance(example), example.result_dtype
    if dtype is Q8_X:
        return example.want, example.want
    with _QUIET(all="ignore"):
        ends = [np.where(np.isfinite(example.want), example.want + d, example.want) for d in (-wide, wide)]
        low, high = (values(elements(_toward(end, dtype), dtype), dtype) for end in ends)
    return low, high


def _toward(x: Array, dtype: DType) -> Array:
    """float64 -> what is rounded to `dtype` next. Through float32 as a kernel does, where that is what is stored from."""
    return x.astype(np.float32) if dtype is not F16 else x.astype(np.float32).astype(np.float64)


def assert_close(example: Example, got: Array) -> None:
    """Raise Disagreement, with the worst element, unless the stored result `got` is what the reference allows.

    NaN and infinities must be in the same places.
    """
    have = values(got, example.result_dtype)
    want = example.want.reshape(have.shape)
    low, high = (a.reshape(have.shape) for a in limits(example))
    both_nan = np.isnan(have) & np.isnan(want)
    right = both_nan | ((have >= low) & (have <= high))
    if right.all():
        return
    with _QUIET(all="ignore"):
        excess = np.where(right, -1.0, np.nan_to_num(np.maximum(low - have, have - low), nan=np.inf, posinf=np.inf))
    at = np.unravel_index(int(np.argmax(excess)), have.shape)
    raise Disagreement(
        f"{example}\n{int((~right).sum())} of {right.size} elements are wrong; the worst is {[int(i) for i in at]}: got {have[at]!r}, want "
        f"{want[at]!r}, allowed {low[at]!r} .. {high[at]!r}\nkey {example.key}, extents {dict(example.sizes)}, seed {example.seed}")


def agrees_in_mean(example: Example, got: Array, limit: float = NMSE) -> bool:
    """NMSE within `limit` of the product with the float activations as they were given."""
    want = example.op.reference_of(list(example.decode(converted=False).values()), example.params).reshape(-1)
    have = values(got, example.result_dtype).reshape(-1)
    return bool(((have - want) ** 2).sum() <= limit * (want**2).sum())


# -- strategies -------------------------------------------------------------------------------------------------


def _wide_extents(lanes: int) -> st.SearchStrategy[int]:
    """Extents that lanes run over."""
    pool = [1, 2, 3, 5, 7, 13, lanes - 1, lanes, lanes + 1, 2 * lanes + 1, 3 * lanes + 2, 2 * lanes, 67]
    return st.sampled_from([n for n in dict.fromkeys(pool) if n > 0])


_FEW = st.sampled_from([1, 2, 3, 5])


def _sizes(draw: Draw, op: Op, dtypes: Mapping[str, DType], facts: Facts, lanes: int, budget: int) -> Sizes:
    """Extents of all dimensions: whole blocks where blocks lie along one, at most `budget` in their product."""
    sizes: Sizes = {}
    unit: dict[str, int] = {}
    last = {o.dims[-1] for o in op.contract.views} | {"m"}
    for o in op.contract.views:
        if isinstance(o.dims[-1], str):
            through = op.through[o.name][1].block_size if o.name in op.through and any(t.is_block for t in dtypes.values()) else 1
            unit[o.dims[-1]] = math.lcm(unit.get(o.dims[-1], 1), dtypes[o.name].block_size, through)
    for d in op.contract.dims:
        if d in facts.extents:
            sizes[d] = draw(st.sampled_from([n for n in facts.extents[d] if n]), label=d)
        elif unit.get(d, 1) > 1:
            sizes[d] = unit[d] * draw(_FEW, label=f"{d} in blocks")
        else:
            sizes[d] = draw(_wide_extents(lanes) if d in last else _FEW, label=d)
    _shrink(sizes, [d for d in sizes if unit.get(d, 1) == 1 and d not in facts.extents], budget)
    if draw(st.integers(0, 14), label="14: an empty extent") == 14:
        sizes[draw(st.sampled_from([d for d in sizes if 0 in facts.extents.get(d, (0,))]), label="empty")] = 0
    facts.relate(draw, sizes)
    return sizes


def _shrink(sizes: Sizes, free: Sequence[str], budget: int) -> None:
    """Halve the largest extents until their product is no more than `budget`."""
    while free and math.prod(max(n, 1) for n in sizes.values()) > budget:
        largest = max(free, key=lambda d: sizes[d])
        if sizes[largest] <= 1:
            return
        sizes[largest] //= 2


def _layout(draw: Draw, shape: Sequence[int], is_block: bool) -> Layout | None:
    """Dense, rows with gaps, every dimension with gaps (the last one too), or permuted; behind an offset."""
    kind = draw(st.sampled_from(["dense", "rows", "strided", "permuted", "dense"]), label="layout")
    n = len(shape)
    if kind == "dense":
        return None
    gaps = st.sampled_from([1, 2, 3])
    steps = [draw(gaps) if kind == "strided" else 1 for _ in range(n)]
    if is_block:
        steps[-1] = 1
    pads = [draw(st.sampled_from([0, 1, 3, 8])) for _ in range(n)]
    order = draw(st.permutations(range(n - 1 if is_block else n))) if kind == "permuted" else list(range(n))
    if is_block and kind == "permuted":
        order = [*order, n - 1]
    return Layout(tuple(order), tuple(steps), tuple(pads), draw(st.sampled_from([0, 1, 2, 5]), label="offset"))


def _shape(o: Operand, sizes: Mapping[str, int], trim: bool) -> tuple[int, ...]:
    shape = [d if isinstance(d, int) else sizes[d] for d in o.dims]
    while trim and len(shape) > 1 and shape[0] == 1:
        shape.pop(0)
    return tuple(shape)


def _params(draw: Draw, op: Op, facts: Facts, result: DType) -> dict[str, Any]:
    """A value for each parameter; the one that decides the result's type gives the key's."""
    params = {name: draw(facts.params[name], label=name) if name in facts.params else default for name, default in op.params.items()}
    if "dtype" in params:
        params["dtype"] = result.name
    return params


@st.composite
def examples(draw: Draw, op: Op, key: Key, *, lanes: int = 8, budget: int = 20_000, whole: Collection[str] = (),
             kinds: Mapping[str, str] = MappingProxyType({})) -> Example:
    """Any legal call of `op` with the types of `key`.

    Args:
        lanes: the width that extents are chosen around.
        budget: about the most places a launch may have.
        whole: operands that lie dense (weights in packed memory).
        kinds: operand -> the kind of its values, instead of any.
    """
    facts = FACTS.get(op.name, Facts())
    dtypes = {o.name: DTYPES[t] for o, t in zip(op.contract.views, key[1], strict=True)}
    sizes = _sizes(draw, op, dtypes, facts, lanes, budget)
    trim = draw(st.booleans(), label="leading ones dropped")
    shapes: dict[str, tuple[int, ...]] = {}
    layouts: dict[str, Layout | None] = {}
    drawn: dict[str, str] = {}
    for o in op.contract.operands:
        if o.optional and dtypes[o.name] is op.types[o.name][0] and draw(st.booleans(), label=f"without {o.name}"):
            continue
        shapes[o.name] = _shape(o, sizes, trim)
        blocks = dtypes[o.name].is_block
        units = (*shapes[o.name][:-1], shapes[o.name][-1] // dtypes[o.name].block_size)
        layouts[o.name] = None if o.name in whole else _layout(draw, units, blocks)
        pool = BLOCK_KINDS if dtypes[o.name] in WEIGHT_BLOCKS else KINDS
        drawn[o.name] = kinds.get(o.name) or draw(st.sampled_from(pool), label=f"kind of {o.name}")
    params = _params(draw, op, facts, dtypes[op.contract.result.name])
    return Example(op, key, sizes, shapes, layouts, drawn, params, draw(st.integers(0, 2**32 - 1), label="seed"))


# -- a guarded run ----------------------------------------------------------------------------------------------


class _InterleavedBuffer(HostBuffer):
    def __init__(self, type: BufferType, memory: Array, usage: str, packed: PackedBufferType) -> None:
        super().__init__(type, memory, usage)
        self._packed = PackedBuffer(packed, memory, usage)

    def set(self, tensor: Tensor, data: Array) -> None:
        self._packed.set(tensor, data)

    def get(self, tensor: Tensor) -> Array:
        return self._packed.get(tensor)


class InterleavedBufferType(PackedBufferType):
    """Host memory with `lanes` rows of quantised weights side by side, for backends that read the host's memory as it lies."""

    def allocate(self, nbytes: int, usage: str = "weights") -> Any:
        return _InterleavedBuffer(self, HOST.allocate(nbytes, usage).memory, usage, self)


@dataclass
class Guards:
    """What a run changed that it must not: names of tensors whose inputs, gaps or surroundings differ."""

    changed: list[str] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        return not self.changed


@dataclass
class _Held:
    """A tensor, the memory around it, and what that memory held before the run."""

    tensor: Tensor
    buffer: Buffer
    before: Array
    start: int
    is_result: bool = False

    def now(self) -> Array:
        return _bytes_of(self.buffer, len(self.before))

    def array(self, image: Array) -> Array:
        t = self.tensor
        return np.ndarray(_units(t), t.dtype.numpy, image.data, self.start + t.root_offset, t.strides)

    def is_intact(self) -> bool:
        now = self.now()
        if self.is_result:
            self.array(now)[...] = self.array(self.before)
        return bool(np.array_equal(now, self.before))


def _units(t: Tensor) -> tuple[int, ...]:
    return (*t.shape[:-1], t.shape[-1] // t.dtype.block_size)


def _bytes_of(buffer: Buffer, n: int) -> Array:
    if isinstance(buffer, PackedBuffer | HostBuffer):
        return buffer.memory.copy()
    return buffer.get(place(leaf(I8, (n,), "memory"), buffer)).copy()


def _hold(memory: BufferType, root: Tensor, tensor: Tensor, data: Array | None, is_result: bool = False) -> _Held:
    """Give `root` memory between guards. Gaps and guards hold NaN for operands, so that a stray read shows in the result."""
    fill = 0xFF if root.dtype.name[0] not in "iu" else 0xA5
    image = np.full(2 * GUARD + root.nbytes, 0xA5 if is_result else fill, np.uint8)
    image[GUARD : GUARD + root.nbytes] = 0xFF if is_result and data is None else fill
    buffer = memory.allocate(len(image))
    place(root, buffer, GUARD)
    held = _Held(tensor, buffer, image, GUARD, is_result)
    if data is not None and data.size:
        held.array(image)[...] = data
    buffer.set(place(leaf(I8, (len(image),), "memory"), buffer), image)
    return held


def _hold_packed(memory: BufferType, root: Tensor, data: Array) -> _Held:
    """Weights in memory with a layout of its own."""
    buffer = memory.allocate(memory.nbytes_of(root) + 2 * GUARD, "weights")
    place(root, buffer, GUARD)
    buffer.set(root, _rows(data))
    return _Held(root, buffer, _bytes_of(buffer, buffer.nbytes), GUARD)


def _operand(example: Example, name: str, memory: BufferType, weights: BufferType | None) -> _Held:
    dtype, shape, layout = example.dtypes[name], example.shapes[name], example.layouts.get(name)
    data = example.operands[name]
    if weights is not None and weights.layout_of(dtype) != "plain":
        return _hold_packed(weights, leaf(dtype, shape, name), data)
    is_result = example.op.contract.writes and name == example.op.contract.result.name
    if layout is None:
        root = leaf(dtype, shape, name)
        return _hold(memory, root, root, data, is_result)
    units = (*shape[:-1], shape[-1] // dtype.block_size)
    strides = layout.strides(units)
    reach = 1 + sum((n - 1) * s for n, s in zip(units, strides, strict=True)) if 0 not in units else 1
    root = leaf(dtype, ((layout.offset + reach + 3) * dtype.block_size,), f"{name} (memory)")
    view = root.view(shape, [s * dtype.nbytes for s in strides], layout.offset * dtype.nbytes, name)
    return _hold(memory, root, view, data, is_result)


class _ForcedTable(KernelTable):
    """Another table where one op runs one variant only."""

    def __init__(self, table: KernelTable, op: Op, variant: str) -> None:
        super().__init__((), table.lanes, native=table.rows)
        self._table, self._op, self._variant = table, op, variant

    def first(self, call: Call, variant: str | None) -> tuple[Row | None, str, str]:
        return self._table.first(call, self._variant if variant is None and call.op is self._op else variant)


@contextmanager
def forced(backend: Backend, op: Op, variant: str | None) -> Iterator[None]:
    """Inside, `backend` runs `op` by the row named `variant` and by no other; None leaves the choice to the table."""
    if variant is None:
        yield
        return
    own = backend.table
    backend.table = _ForcedTable(own, op, variant)
    try:
        yield
    finally:
        backend.table = own


def run_guarded(backend: Backend, example: Example, variant: str | None = None, weights: BufferType | None = None,
                in_place: bool = False) -> tuple[Array, Guards]:
    """Run one call between guard bytes; the stored result, dense, and what was changed beside it.

    Args:
        variant: the row of the kernel table to run; the first that fits by default.
        weights: memory for operands that it has a layout for.
        in_place: the result overwrites the operand that `op.inplace` names.

    Raises:
        LanewiseError: the backend refuses the call.
    """
    memory: BufferType = HOST if backend.reads(HOST) else backend.buffer_type
    held = {n: _operand(example, n, memory, weights) for n in example.shapes}
    srcs = [held[o.name].tensor if o.name in held else None for o in example.op.contract.operands]
    node = example.op(*srcs, **example.params)
    result = _result(example, node, held, memory, in_place)
    with forced(backend, example.op, variant):
        backend.require(node)
        steps = backend.optimize([node])
        added = [_hold(memory, s.out, s.out, None, True) for s in steps if s.out is not node]
        plan = backend.prepare(steps)
        plan.run()
        backend.synchronize()
    got = result.array(result.now()).copy()
    return got, Guards([h.tensor.name for h in (*held.values(), *added, result) if not h.is_intact()])


def _result(example: Example, node: Tensor, held: dict[str, _Held], memory: BufferType, in_place: bool) -> _Held:
    """Where the result goes: memory of its own, the operand that is written, or the operand it may overwrite."""
    op = example.op
    if op.contract.writes:
        return held[op.contract.result.name]
    if not in_place:
        return _hold(memory, node, node, None, True)
    under = held[op.inplace]
    assert under.tensor.is_contiguous and under.tensor.root is under.tensor, f"{under.tensor} cannot be overwritten"
    place(node, under.buffer, GUARD)
    under.is_result = True
    return replace(under, tensor=node)


# -- a suite ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of a kernel table, to be tested: an op, a key, a variant, and operands that variant wants interleaved."""

    op: Op
    key: Key
    variant: str
    packed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op.name}-{'-'.join(self.key[1])}-{self.variant}"

    def memory(self, backend: Backend, extra: Sequence[BufferType] = ()) -> BufferType | None:
        """Weight memory in the layout this variant reads, None where it reads the file's.

        Raises:
            LookupError: the backend has no such memory.
        """
        if not self.packed:
            return None
        dtype = DTYPES[self.key[1][[o.name for o in self.op.contract.views].index(self.packed[0])]]
        want = f"lanes{backend.table.lanes}"
        return next(_found(t for t in (*extra, *backend.weight_types) if t.layout_of(dtype) == want))


def _found(types: Iterable[BufferType]) -> Iterator[BufferType]:
    yield from types
    raise LookupError("no memory with the layout this variant reads")


def cases(table: KernelTable, ops: Iterable[Op]) -> list[Case]:
    """Every row of a backend's table for these ops."""
    out: dict[Case, None] = {}
    for op in ops:
        for key in table.keys_of(op):
            for row in table.rows[key]:
                for inner in row.inner if isinstance(row, ThroughRow) else (row,):
                    packed = tuple(inner.variant.layouts) if isinstance(inner, KernelRow) else ()
                    out[Case(op, key, inner.name, packed)] = None
    return list(out)


@dataclass(frozen=True)
class Outcome:
    """What became of a case: "passed", "failed", "refused" (every call was) or "not run", after how many calls, and why."""

    case: Case
    status: str
    n_calls: int = 0
    reason: str = ""


@dataclass
class Report:
    """Outcomes of a suite. Nothing run is a failure."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(o.status for o in self.outcomes)

    @property
    def ok(self) -> bool:
        return self.counts["passed"] > 0 and not self.counts["failed"]

    def __str__(self) -> str:
        counts = self.counts
        line = ", ".join(f"{counts[s]} {s}" for s in ("passed", "failed", "refused", "not run"))
        return "\n".join([line, *(f"{o.case}: {o.status}: {o.reason}" for o in self.outcomes if o.status != "passed")])


def conformance(backend: Backend, ops: Iterable[Op], *, examples: int = 10, seed: int = 0, budget: int = 20_000,
                weights: Sequence[BufferType] = (), only: Callable[[Case], bool] = lambda case: True) -> Report:
    """Run every row of the backend's table on `examples` calls each, and say what became of it.

    Args:
        seed: repeats a run exactly.
        weights: memory with layouts, beside the backend's own.
        only: leaves cases out; they count as not run.
    """
    report = Report()
    for case in cases(backend.table, ops):
        if not only(case):
            report.outcomes.append(Outcome(case, "not run", reason="left out"))
            continue
        try:
            memory = case.memory(backend, weights)
        except LookupError as why:
            report.outcomes.append(Outcome(case, "not run", reason=str(why)))
            continue
        report.outcomes.append(_run_case(backend, case, memory, examples, seed, budget))
    return report


def check_call(backend: Backend, example: Example, variant: str | None = None, weights: BufferType | None = None) -> Array:
    """Run one call between guards and compare it; the stored result. Raises Disagreement."""
    got, guards = run_guarded(backend, example, variant, weights)
    if not guards.intact:
        raise Disagreement(f"{example}\nmemory that is not the result's was changed: {', '.join(guards.changed)}")
    assert_close(example, got)
    return got


def _run_case(backend: Backend, case: Case, memory: BufferType | None, n: int, seed: int, budget: int) -> Outcome:
    hits: Counter[str] = Counter()
    reasons: list[str] = []

    @seeded(seed)
    @settings(max_examples=n, deadline=None, database=None, phases=(Phase.generate, Phase.shrink), print_blob=False,
              suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    @given(example=examples(case.op, case.key, lanes=backend.table.lanes, budget=budget, whole=case.packed))
    def check(example: Example) -> None:
        if why := refusal(backend, example, case.variant, memory):
            reasons.append(why)
            assume(False)
        hits["run"] += 1
        check_call(backend, example, case.variant, memory)

    try:
        check()
    except Exception as why:  # a suite reports whatever a backend does
        if hits["run"]:
            return Outcome(case, "failed", hits["run"], f"{type(why).__name__}: {why}")
    if hits["run"]:
        return Outcome(case, "passed", hits["run"])
    return Outcome(case, "refused" if reasons else "not run", reason=reasons[0] if reasons else "no call was generated")


def refusal(backend: Backend, example: Example, variant: str | None = None, weights: BufferType | None = None) -> str:
    """Why the table does not take this call, or an empty string. Nothing is allocated."""
    leaves = [_shaped(example, o.name) if o.name in example.shapes else None for o in example.op.contract.operands]
    try:
        node = example.op(*leaves, **example.params)
    except ShapeError as why:
        return str(why)
    as_if = {t: weights for t in leaves if t is not None and weights is not None and weights.layout_of(t.dtype) != "plain"}
    answer = backend.table.supports(node, as_if, variant)
    return "" if answer else answer.reason


def _shaped(example: Example, name: str) -> Tensor:
    """An operand without memory."""
    dtype, shape, layout = example.dtypes[name], example.shapes[name], example.layouts.get(name)
    t = leaf(dtype, shape, name)
    if layout is not None:
        units = (*shape[:-1], shape[-1] // dtype.block_size)
        t.strides = tuple(s * dtype.nbytes for s in layout.strides(units))
    else:
        t.strides = row_major(shape, dtype)
    return t
