# ruff: noqa: F821, B007 (kernels: free names are constants)
# mypy: disable-error-code="name-defined, arg-type"
"""The CPU's meaning of the words, at every width and in every form, against NumPy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kernels.quants  # noqa: F401 (the decoders of block formats)
from engine.backends.cpu.compile import ENTRY, Compiler, Request
from engine.backends.cpu.features import features, host_features
from engine.backends.cpu.words import Features
from engine.dtypes import BF16, F16, F32, I8, I16, I32, I64, Q4_1, Q8_X, DType
from engine.lang.function import Function
from engine.lang.tree import ViewType
from engine.lang.words import (
    INF,
    abs,
    as_f32,
    as_i32,
    as_u32,
    barrier,
    byte,
    codes,
    cos,
    dot,
    dot4,
    exp,
    exp2,
    f32,
    first,
    fma,
    function,
    group_max,
    group_min,
    group_sum,
    i32,
    index,
    inside,
    lane,
    lanes,
    log,
    log1p,
    maximum,
    minimum,
    nibbles,
    only,
    pack,
    private,
    rint,
    round_away,
    rsqrt,
    sin,
    span,
    sqrt,
    static,
    table,
    tanh,
    u32,
    ubyte,
    where,
)
from engine.object_cache import ObjectCache

COMPILER = Compiler(ObjectCache(None))
PORTABLE: frozenset[str] = frozenset()
AVX2 = frozenset({"avx2", "fma", "ssse3", "f16c"})
FORMS = {"4 portable": Features(4, PORTABLE), "4 ssse3": Features(4, frozenset({"ssse3"})), "4 host": Features(4, host_features()),
         "8 portable": Features(8, PORTABLE), "8 avx2": Features(8, AVX2), "8 host": Features(8, host_features()),
         "16 portable": Features(16, PORTABLE), "16 avx512bw": Features(16, frozenset({"avx512f", "avx512bw"})),
         "16 host": Features(16, host_features())}
HERE = {name: f for name, f in FORMS.items() if f.names <= host_features()}
WIDTHS = pytest.mark.parametrize("width", [Features(n, host_features()) for n in (4, 8, 16)], ids=lambda f: str(f.lanes))
FORM = pytest.mark.parametrize("form", HERE.values(), ids=HERE)
ELEMENTS = {t.numpy: t for t in (F32, F16, I8, I16, I32, I64)}


def run(kernel: FunctionType, target: Features, groups: tuple[int, ...] = (1,), types: Mapping[str, DType] | None = None,
        constants: Mapping[str, int] | None = None, **operands: Any) -> None:
    """Run a kernel over all its groups: arrays are views (their dtype says what they hold, unless `types` does), ints sizes, floats
    scalars."""
    f = Function(kernel)
    names = f.parameters[len(groups) :]
    arrays = {n: operands[n] for n in names if isinstance(operands[n], np.ndarray)}
    ints = {n: operands[n] for n in names if isinstance(operands[n], int)}
    floats = {n: operands[n] for n in names if isinstance(operands[n], float)}
    views = {}
    for n, a in arrays.items():
        dtype = (types or {}).get(n) or ELEMENTS[a.dtype]
        views[n] = ViewType(dtype, a.ndim, a.strides[-1] == dtype.nbytes)
    known = {"LANES": target.lanes, **(constants or {})}
    (address,) = COMPILER.addresses([Request(f, views, f.parameters[: len(groups)], tuple(ints), tuple(floats), known, target)])
    block: list[int] = []
    for a in arrays.values():
        block += [a.ctypes.data, *a.strides]
    block += [*groups, *ints.values(), *np.array(list(floats.values()), np.float32).view(np.uint32).tolist()]
    params = np.array(block, np.int64)
    ENTRY(address)(params.ctypes.data, 0, int(np.prod(groups)))


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bit for bit, any NaN equal to any NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype.kind == "f":
        assert np.array_equal(np.isnan(a), np.isnan(b))
        a, b = np.where(np.isnan(a), a.dtype.type(0), a), np.where(np.isnan(b), b.dtype.type(0), b)
    raw = np.dtype(f"u{a.dtype.itemsize}")
    assert np.array_equal(np.ascontiguousarray(a).view(raw), np.ascontiguousarray(b).view(raw))


# -- elementary functions ---------------------------------------------------------------------------------------

ELEMENTARY = ("exp", "exp2", "log", "log1p", "tanh", "sin", "cos", "sqrt", "rsqrt", "rint", "round_away", "abs")


@function
def elementary(k, v):
    if k == 0:
        r = exp(v)
    elif k == 1:
        r = exp2(v)
    elif k == 2:
        r = log(v)
    elif k == 3:
        r = log1p(v)
    elif k == 4:
        r = tanh(v)
    elif k == 5:
        r = sin(v)
    elif k == 6:
        r = cos(v)
    elif k == 7:
        r = sqrt(v)
    elif k == 8:
        r = rsqrt(v)
    elif k == 9:
        r = rint(v)
    elif k == 10:
        r = round_away(v)
    else:
        r = abs(v)
    return r


def elementary_varying(row, x, y, n):
    for i in lanes(n):
        v = x[i]
        for k in static(12):
            y[k, i] = elementary(k, v)


def elementary_uniform(row, x, y, n):
    for i in range(n):
        for k in static(12):
            y[k, i] = elementary(k, x[i])


def everywhere() -> np.ndarray:
    """f32 of every sign and exponent, a dense sample where functions are used, and the special values."""
    bits = np.arange(0, 1 << 32, 6007, dtype=np.uint64).astype(np.uint32).view(np.float32)
    dense = np.linspace(-20, 20, 200_001).astype(np.float32)
    small = np.linspace(-3.2, 3.2, 200_001).astype(np.float32)
    edges = np.array([88.72283, 88.72284, -87.33655, -103.97207, -103.97208, -103.972084, -104, 127.99999, 128, -126, -149, -149.5, -150,
                      -1, -0.99999994, 0.5, 1.5, 2.5, -0.5, -2.5, 8388607.5, 0.49999997, 0.625, -0.625], np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38], np.float32)
    return np.concatenate([bits, dense, small, edges, special])


X = everywhere()


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    """The elementary functions of X on this machine's own width."""
    y = np.zeros((12, X.size), np.float32)
    run(elementary_varying, features(), x=X, y=y, n=X.size)
    return dict(zip(ELEMENTARY, y, strict=True))


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance from a float64 result in units of the last place of its float32 neighbour; 0 where both are the same infinity or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = exact.astype(np.float32)
    settled = (np.isnan(got) & np.isnan(near)) | (got == near)
    with np.errstate(invalid="ignore"):
        distance = np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(np.where(np.isfinite(near), near, np.float32(3.4e38))))
    distance[~np.isfinite(got) & ~settled] = np.inf
    return np.where(settled, 0, distance)


@pytest.mark.parametrize(("word", "exact", "limit"), [
    ("exp", np.exp, 2), ("exp2", np.exp2, 3), ("log", np.log, 3), ("log1p", np.log1p, 4), ("tanh", np.tanh, 3)],
    ids=["exp", "exp2", "log", "log1p", "tanh"])
def test_error_in_ulp(values: dict[str, np.ndarray], word: str, exact: Any, limit: float) -> None:
    with np.errstate(all="ignore"):
        distance = ulps(values[word], exact(X.astype(np.float64)))
    worst = np.argmax(distance)
    assert distance[worst] <= limit, f"{word}({X[worst]!r}) = {values[word][worst]!r} is {distance[worst]} ulp off"


@pytest.mark.parametrize(("word", "exact"), [("sin", np.sin), ("cos", np.cos)], ids=["sin", "cos"])
def test_absolute_error_of_angles(values: dict[str, np.ndarray], word: str, exact: Any) -> None:
    near = np.abs(X) <= 3.2
    error = np.abs(values[word][near] - exact(X[near].astype(np.float64)))
    assert error.max() < 2e-7
    assert np.isnan(values[word][~np.isfinite(X)]).all()


def test_exact_words(values: dict[str, np.ndarray]) -> None:
    wide = X.astype(np.float64)
    with np.errstate(all="ignore"):
        same_bits(values["sqrt"], np.sqrt(X))
        same_bits(values["rsqrt"], np.float32(1) / np.sqrt(X))
        same_bits(values["rint"], np.rint(X))
        same_bits(values["round_away"], (np.trunc(wide + np.copysign(0.5, wide))).astype(np.float32))
        same_bits(values["abs"], np.abs(X))


def test_limits_of_the_functions(values: dict[str, np.ndarray]) -> None:
    def at(word: str, x: float) -> float:
        (k,) = np.flatnonzero(X.view(np.uint32) == np.float32(x).view(np.uint32))[-1:]
        return float(values[word][k])

    assert at("exp", -np.inf) == 0 and at("exp", np.inf) == np.inf and at("exp", 0) == 1 and at("exp", -104) == 0
    assert at("exp2", -150) == 0 and at("exp2", 128) == np.inf and at("exp2", -149) == 2.0**-149 and at("exp2", -126) == 2.0**-126
    assert at("log", 0) == -np.inf and at("log", -0.0) == -np.inf and at("log", np.inf) == np.inf and np.isnan(at("log", -1))
    assert at("log1p", -1) == -np.inf and at("log1p", 0) == 0 and at("log1p", np.inf) == np.inf and np.isnan(at("log1p", -np.inf))
    assert at("tanh", np.inf) == 1 and at("tanh", -np.inf) == -1 and at("tanh", 0) == 0
    for word in ELEMENTARY:
        assert np.isnan(at(word, np.nan)), word


@FORM
@pytest.mark.slow
def test_functions_have_the_same_bits_in_every_form(values: dict[str, np.ndarray], form: Features) -> None:
    some = X[:: max(1, X.size // 50_000)].copy()
    for kernel in (elementary_varying, elementary_uniform):
        y = np.zeros((12, some.size), np.float32)
        run(kernel, form, x=some, y=y, n=some.size)
        for word, got in zip(ELEMENTARY, y, strict=True):
            same_bits(got, values[word][:: max(1, X.size // 50_000)])


# -- operators and words on numbers -----------------------------------------------------------------------------


@function
def float_word(k, a, b, c):
    if k == 0:
        r = a + b
    elif k == 1:
        r = a - b
    elif k == 2:
        r = a * b
    elif k == 3:
        r = a / b
    elif k == 4:
        r = a * b + c
    elif k == 5:
        r = fma(a, b, c)
    elif k == 6:
        r = maximum(a, b)
    elif k == 7:
        r = minimum(a, b)
    elif k == 8:
        r = where(a < b, f32(1), f32(0)) + where(a <= b, f32(2), f32(0)) + where(a == b, f32(4), f32(0))
    elif k == 9:
        r = where(a > b, f32(1), f32(0)) + where(a >= b, f32(2), f32(0)) + where(a != b, f32(4), f32(0))
    elif k == 10:
        r = where((a < b) & (b < c) | (a > b) ^ (b > c), -a, c)
    elif k == 11:
        r = f32(i32(a))
    elif k == 12:
        r = as_f32(as_i32(a) ^ as_i32(b))
    else:
        r = maximum(a, 2) - minimum(0.5, b)
    return r


def floats_varying(row, a, b, c, y, n):
    for i in lanes(n):
        for k in static(14):
            y[k, i] = float_word(k, a[i], b[i], c[i])


def floats_uniform(row, a, b, c, y, n):
    for i in range(n):
        for k in static(14):
            y[k, i] = float_word(k, a[i], b[i], c[i])


def float_expectations(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    def bit(c: np.ndarray, v: float) -> np.ndarray:
        return np.where(c, np.float32(v), np.float32(0))

    clipped = np.where(np.isnan(a), 0, np.clip(np.trunc(a.astype(np.float64)), -(2.0**31), 2.0**31 - 1)).astype(np.int32)
    chosen = ((a < b) & (b < c)) | ((a > b) ^ (b > c))
    return [a + b, a - b, a * b, a / b, a * b + c, exact_fma(a, b, c), np.fmax(a, b), np.fmin(a, b),
            bit(a < b, 1) + bit(a <= b, 2) + bit(a == b, 4), bit(a > b, 1) + bit(a >= b, 2) + bit(a != b, 4),
            np.where(chosen, -a, c), clipped.astype(np.float32), (a.view(np.int32) ^ b.view(np.int32)).view(np.float32),
            np.fmax(a, np.float32(2)) - np.fmin(np.float32(0.5), b)]


def exact_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One rounding: the long double of this machine holds the product of two f32, and is rounded to odd where the sum is inexact."""
    p, q = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    s = p + q
    t = s - p
    e = (p - (s - t)) + (q - t)
    odd = np.isfinite(s) & np.isfinite(e) & (e != 0) & (s.view(np.int64) & 1 == 0)
    s = np.where(odd, np.nextafter(s, np.where(e > 0, np.inf, -np.inf)), s)
    return s.astype(np.float32)


def same_numbers(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal, zeros of either sign alike (maximum and minimum may give either)."""
    same_bits(got + np.float32(0), expected + np.float32(0))


def float_operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 2147483520, 2147483648, -2147483648,
                        4294967040, 4294967296, 0.99999994, -0.5], np.float32)
    a, b = (m.ravel() for m in np.meshgrid(special, special))
    n = 20_000
    bits = rng.integers(0, 1 << 32, (3, n), np.uint32).view(np.float32)
    mild = rng.normal(size=(3, n)).astype(np.float32)
    mild[2] = -(mild[0] * mild[1]) * rng.choice([1, 1, 1.0000001, 3], n).astype(np.float32)
    return tuple(np.concatenate(p) for p in zip((a, b, a[::-1]), bits, mild, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("kernel", [floats_varying, floats_uniform])
@WIDTHS
def test_float_operators(kernel: FunctionType, width: Features) -> None:
    a, b, c = float_operands()
    y = np.zeros((14, a.size), np.float32)
    run(kernel, width, a=a, b=b, c=c, y=y, n=a.size)
    with np.errstate(all="ignore"):
        for k, (got, expected) in enumerate(zip(y, float_expectations(a, b, c), strict=True)):
            (same_numbers if k in (6, 7, 13) else same_bits)(got, expected)


@function
def integer_word(k, a, b, s):
    if k == 0:
        r = a + b
    elif k == 1:
        r = a - b
    elif k == 2:
        r = a * b
    elif k == 3:
        r = -a
    elif k == 4:
        r = (a & 0x7FFFFFFF) // ((b & 0x7FFFFFFF) | 1)
    elif k == 5:
        r = (a & 0x7FFFFFFF) % ((b & 0x7FFFFFFF) | 1)
    elif k == 6:
        r = i32(u32(a) // (u32(b) | 1))
    elif k == 7:
        r = i32(u32(a) % (u32(b) | 1))
    elif k == 8:
        r = a << s
    elif k == 9:
        r = a >> s
    elif k == 10:
        r = i32(u32(a) >> s)
    elif k == 11:
        r = (a & b) | (a ^ 5)
    elif k == 12:
        r = maximum(a, b) ^ minimum(a, 7)
    elif k == 13:
        r = as_i32(maximum(u32(a), u32(b)) - minimum(u32(a), u32(b)))
    elif k == 14:
        r = where(a < b, i32(1), 0) + where(u32(a) < u32(b), i32(2), 0) + where(a == b, i32(4), 0) + where(u32(a) >= u32(b), i32(8), 0)
    elif k == 15:
        r = byte(u32(a), 0) + 3 * byte(u32(a), 1) + 5 * byte(u32(a), 2) + 7 * byte(u32(a), 3)
    elif k == 16:
        r = ubyte(u32(a), 0) + 3 * ubyte(u32(a), 1) + 5 * ubyte(u32(a), 2) + 7 * ubyte(u32(a), 3)
    elif k == 17:
        r = as_i32(pack(byte(u32(a), 3), byte(u32(b), 2), byte(u32(a), 1), byte(u32(b), 0)))
    elif k == 18:
        r = as_i32(f32(a))
    elif k == 19:
        r = as_i32(f32(u32(a)))
    elif k == 20:
        r = i32(as_f32(a))
    elif k == 21:
        r = as_i32(u32(as_f32(a)))
    else:
        r = as_i32(as_u32(as_f32(as_u32(a))) * 3 + 0xFFFFFFF0)
    return r


def integers_varying(row, a, b, s, y, n):
    for i in lanes(n):
        for k in static(23):
            y[k, i] = integer_word(k, a[i], b[i], s[i])


def integers_uniform(row, a, b, s, y, n):
    for i in range(n):
        for k in static(23):
            y[k, i] = integer_word(k, a[i], b[i], s[i])


def integer_expectations(a: np.ndarray, b: np.ndarray, s: np.ndarray) -> list[np.ndarray]:
    i32_, u32_ = np.int32, np.uint32
    ua, ub, us = a.view(u32_), b.view(u32_), s.view(u32_)
    pa, pb = a & 0x7FFFFFFF, (b & 0x7FFFFFFF) | 1
    bytes_, codes_ = (a.view(t).reshape(-1, 4).astype(i32_) for t in (np.int8, np.uint8))
    factors = np.array([1, 3, 5, 7], i32_)
    packed = np.stack([a.view(np.uint8)[3::4], b.view(np.uint8)[2::4], a.view(np.uint8)[1::4], b.view(np.uint8)[0::4]], 1)
    f = a.view(np.float32).astype(np.float64)
    whole = np.where(np.isnan(f), 0, np.trunc(f))
    flags = np.where(a < b, 1, 0) + np.where(ua < ub, 2, 0) + np.where(a == b, 4, 0) + np.where(ua >= ub, 8, 0)
    return [a + b, a - b, a * b, -a, pa // pb, pa % pb, (ua // (ub | 1)).view(i32_), (ua % (ub | 1)).view(i32_), a << s, a >> s,
            (ua >> us).view(i32_), (a & b) | (a ^ 5), np.maximum(a, b) ^ np.minimum(a, 7),
            (np.maximum(ua, ub) - np.minimum(ua, ub)).view(i32_), flags.astype(i32_), bytes_ @ factors, codes_ @ factors,
            packed.reshape(-1).view(i32_), a.astype(np.float32).view(i32_), ua.astype(np.float32).view(i32_),
            np.clip(whole, -(2**31), 2**31 - 1).astype(i32_), np.clip(whole, 0, 2**32 - 1).astype(u32_).view(i32_),
            (ua * u32_(3) + u32_(0xFFFFFFF0)).view(i32_)]


@pytest.mark.parametrize("kernel", [integers_varying, integers_uniform])
@WIDTHS
def test_integer_operators(kernel: FunctionType, width: Features) -> None:
    rng = np.random.default_rng(2)
    special = np.array([0, 1, -1, 2, 127, -128, 128, 255, 2**31 - 1, -(2**31), 0x01010101, 0x7F807F80, 16777217], np.int32)
    a, b = (m.ravel() for m in np.meshgrid(special, special))
    more = rng.integers(0, 1 << 32, (2, 20_000), np.uint32).view(np.int32)
    a, b = np.concatenate([a, more[0]]), np.concatenate([b, more[1]])
    s = rng.integers(0, 32, a.size).astype(np.int32)
    y = np.zeros((23, a.size), np.int32)
    run(kernel, width, a=a, b=b, s=s, y=y, n=a.size)
    with np.errstate(all="ignore"):
        for k, (got, expected) in enumerate(zip(y, integer_expectations(a, b, s), strict=True)):
            assert np.array_equal(got, expected), f"integer word {k}"


def convert_saturating(row, x, y, z, n):
    for i in lanes(n):
        y[i] = i32(x[i])
        z[i] = as_i32(u32(x[i]))


def test_conversion_to_integers_truncates_and_saturates() -> None:
    x = np.array([1.9, -1.9, 2147483520, 2147483648, 1e20, -2147483648, -2147483904, -1e20, np.inf, -np.inf, np.nan, 4294967040, 4294967296,
                  -0.5, -1], np.float32)
    y, z = np.zeros(x.size, np.int32), np.zeros(x.size, np.int32)
    run(convert_saturating, features(), x=x, y=y, z=z, n=x.size)
    top, low = 2**31 - 1, -(2**31)
    assert y.tolist() == [1, -1, 2147483520, top, top, low, low, low, top, low, 0, top, top, 0, -1]
    assert z.view(np.uint32).tolist() == [1, 0, 2147483520, 2**31, 2**32 - 1, 0, 0, 0, 2**32 - 1, 0, 0, 4294967040, 2**32 - 1, 0, 0]


# -- memory types -----------------------------------------------------------------------------------------------


def copy(row, x, y, n):
    for i in lanes(n):
        y[i] = x[i]


def copy_one_by_one(row, x, y, n):
    for i in range(n):
        y[i] = x[i]


@pytest.mark.parametrize("kernel", [copy, copy_one_by_one])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@WIDTHS
def test_all_short_floats_are_read_exactly(kernel: FunctionType, dtype: DType, width: Features) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = bits.view(np.float16 if dtype is F16 else ml_dtypes.bfloat16).astype(np.float32)
    y = np.zeros(bits.size, np.float32)
    run(kernel, width, types={"x": dtype}, x=bits, y=y, n=bits.size)
    same_bits(y, expected)


@pytest.mark.parametrize("kernel", [copy, copy_one_by_one])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@WIDTHS
def test_short_floats_are_rounded_to_nearest_even(kernel: FunctionType, dtype: DType, width: Features) -> None:
    short = np.float16 if dtype is F16 else ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        every = np.arange(1 << 16, dtype=np.uint16).view(short).astype(np.float32)
        after = np.arange(1, (1 << 16) + 1, dtype=np.uint32).astype(np.uint16).view(short).astype(np.float32)
        middle = ((every.astype(np.float64) + after) / 2).astype(np.float32)  # ties, exact in f32
        random = np.random.default_rng(3).integers(0, 1 << 32, 50_000, np.uint32).view(np.float32)
        nan = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
        above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
        x = np.concatenate([every, middle, above, below, random, nan])
        expected = x.astype(short)
    y = np.zeros(x.size, np.uint16)
    run(kernel, width, types={"y": dtype}, x=x, y=y, n=x.size)
    is_nan = np.isnan(x)
    assert np.isnan(y[is_nan].view(short).astype(np.float32)).all()
    assert np.array_equal(y[~is_nan], expected[~is_nan].view(np.uint16))


@pytest.mark.parametrize("kernel", [copy, copy_one_by_one])
@pytest.mark.parametrize("short", [np.int8, np.int16])
@WIDTHS
def test_short_integers(kernel: FunctionType, short: type, width: Features) -> None:
    x = np.random.default_rng(4).integers(-(2**31), 2**31, 1003).astype(np.int32)
    y, back = np.zeros(x.size, short), np.zeros(x.size, np.int32)
    run(kernel, width, x=x, y=y, n=x.size)
    assert np.array_equal(y, x.astype(short))
    run(kernel, width, x=y, y=back, n=x.size)
    assert np.array_equal(back, y.astype(np.int32))


def fields(row, x, q, y, n):
    block = q[row, 0]
    for i in lanes(32):
        block.q[i] = i32(x[i]) + 300
    block.sums[0] = i32(x[0]) - 40000
    block.sums[1] = i32(x[1])
    block.d = x[2] * 0.5
    block.qs[7] = u32(0x80FF7F01)
    y[0] = f32(block.sums[0])
    y[1] = block.d + f32(block.q[31])
    for i in lanes(n):
        y[2 + i] = f32(block.q[i])


@WIDTHS
def test_fields_of_blocks(width: Features) -> None:
    x = np.arange(32, dtype=np.float32)
    q, y = np.zeros((1, 1), Q8_X.numpy), np.zeros(23, np.float32)
    run(fields, width, types={"q": Q8_X}, x=x, q=q, y=y, n=20)
    written = (np.arange(32) + 300).astype(np.int8)
    assert np.array_equal(q[0, 0]["qs"][:7], written.view(np.uint32)[:7])
    assert q[0, 0]["qs"][7] == 0x80FF7F01
    assert q[0, 0]["sums"][:2].tolist() == [np.int32(-40000).astype(np.int16), 1] and q[0, 0]["d"] == 1
    assert y[0] == np.int32(-40000).astype(np.int16) and y[1] == 1 - 128
    assert np.array_equal(y[2:22], written[:20].astype(np.float32)) and y[22] == 0


# -- lane spaces ------------------------------------------------------------------------------------------------


def tails(row, x, y, totals, n):
    total, count, top = f32(0), i32(0), f32(-INF)
    for i in lanes(n):
        total = total + x[row, i]
        count = count + 1
        top = maximum(top, where(inside(i), x[row, i], -INF))
        y[row, i] = x[row, i] * 2.0
    totals[row, 0] = group_sum(total)
    totals[row, 1] = group_max(top)
    totals[row, 2] = f32(count)


@WIDTHS
def test_tails_of_every_length_leave_guards_untouched(width: Features) -> None:
    x = np.random.default_rng(5).integers(-9, 9, (3, 64)).astype(np.float32)
    for n in range(3 * width.lanes + 2):
        y, totals = np.full((3, 64), -7, np.float32), np.zeros((3, 3), np.float32)
        run(tails, width, groups=(3,), x=x, y=y, totals=totals, n=n)
        assert np.array_equal(y[:, :n], 2 * x[:, :n]) and (y[:, n:] == -7).all()
        assert np.array_equal(totals[:, 0], x[:, :n].sum(1))
        assert np.array_equal(totals[:, 1], x[:, :n].max(1, initial=-np.inf))
        assert (totals[:, 2] == -(-n // width.lanes)).all()


def strided(row, x, y, z, n):
    for i in lanes(n):
        y[i, row] = x[row, i] + 1.0
        z[row, i] = y[i, row]


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
@WIDTHS
def test_strided_views_gather_and_scatter(width: Features, dtype: type) -> None:
    rng = np.random.default_rng(6)
    for n in (0, 1, width.lanes - 1, width.lanes, 2 * width.lanes + 3):
        x = rng.integers(-50, 50, (4, 120)).astype(dtype)[::2, ::3][:, :40]
        y = np.full((80, 2), -7, dtype)
        z = np.full((2, 40), -7, dtype)
        run(strided, width, groups=(2,), x=x, y=y[::2], z=z, n=n)
        assert np.array_equal(y[: 2 * n : 2], (x[:, :n] + 1).T)
        assert (y[1::2] == -7).all() and (y[2 * n :] == -7).all()
        assert np.array_equal(z[:, :n], x[:, :n] + 1) and (z[:, n:] == -7).all()


def gathered(row, x, ids, y, n):
    for i in lanes(n):
        j = ids[i]
        y[i] = x[j] + x[(i * 2) % 5]
        with only(j % 2 == 1):
            y[i] = -x[j]


@WIDTHS
def test_computed_indices(width: Features) -> None:
    n = 3 * width.lanes + 1
    rng = np.random.default_rng(7)
    x, ids, y = rng.normal(size=90).astype(np.float32), rng.permutation(90)[:n].astype(np.int32), np.full(n + 4, -7, np.float32)
    run(gathered, width, x=x, ids=ids, y=y, n=n)
    expected = np.where(ids % 2 == 1, -x[ids], x[ids] + x[(np.arange(n) * 2) % 5])
    assert np.array_equal(y[:n], expected) and (y[n:] == -7).all()


def diagonal(row, x, ids, y, n):
    for i in lanes(n):
        y[i, i] = x[i, i] + x[ids[i], i] + x[i, ids[i]]


@WIDTHS
def test_several_indices_that_differ_by_lane(width: Features) -> None:
    n = 2 * width.lanes + 3
    rng = np.random.default_rng(12)
    x, ids, y = rng.normal(size=(n, n)).astype(np.float32), rng.permutation(n).astype(np.int32), np.full((n, n), -7, np.float32)
    run(diagonal, width, x=x, ids=ids, y=y, n=n)
    k = np.arange(n)
    expected = np.full((n, n), -7, np.float32)
    expected[k, k] = x[k, k] + x[ids, k] + x[k, ids]
    assert np.array_equal(y, expected)


def grid(row, w, y, seen, size):
    count = i32(0)
    for b, s, t in lanes(size, OUTER, INNER):
        count = count + where(inside(t), i32(1), 0)
        y[b * OUTER + s, t] = f32(b * 10000 + s * 100 + t) + f32(ubyte(codes(w[row, b], 0, t % 8), 0)) * 0.0
        seen[(b * OUTER + s) * INNER + t] = where(inside(t), i32(1), 0)
    seen[size * OUTER * INNER] = group_sum(count)


@pytest.mark.parametrize(("outer", "inner"), [(3, 2), (2, 5), (2, 16), (1, 8), (5, 4), (3, 24)])
@WIDTHS
def test_grids(width: Features, outer: int, inner: int) -> None:
    for size in (0, 1, 2, 5):
        w = np.zeros((1, 8), Q4_1.numpy)
        y, seen = np.full((size * outer + 1, inner), -7, np.float32), np.full(size * outer * inner + 2, -7, np.int32)
        run(grid, width, types={"w": Q4_1}, constants={"OUTER": outer, "INNER": inner}, w=w, y=y, seen=seen, size=size)
        b, s, t = np.indices((size, outer, inner))
        assert np.array_equal(y[:-1].reshape(b.shape), b * 10000 + s * 100 + t)
        assert (y[-1] == -7).all() and (seen[:-2] == 1).all() and seen[-1] == -7
        assert seen[-2] == size * outer * inner


def spans(row, x, y, z, start, n):
    with span(start, n) as i:
        y[row, i] = x[row, i] + f32(first(i))
        z[row, i - 1] = f32(i + 2)
    with span(4, 4 + LANES) as j:
        y[row + 1, j] = x[row, j]
    with span(4, 7) as j:
        y[row + 2, j] = x[row, j]
    with span(4, 4) as j:
        y[row + 3, j] = x[row, j]


@WIDTHS
def test_spans(width: Features) -> None:
    x = np.arange(128, dtype=np.float32).reshape(1, -1)
    for start in (1, 3, 40):
        for n in (0, start, start + 1, start + width.lanes - 1, start + width.lanes, start + width.lanes + 5):
            y, z = np.full((4, 128), -7, np.float32), np.full((1, 128), -7, np.float32)
            run(spans, width, x=x, y=y, z=z, start=start, n=n)
            index_ = np.arange(128)
            taken = (index_ >= start) & (index_ < min(n, start + width.lanes))
            assert np.array_equal(y[0], np.where(taken, x[0] + start, -7))
            assert np.array_equal(z[0], np.where(np.roll(taken, -1), index_ + 3, -7))
            assert np.array_equal(y[1], np.where((index_ >= 4) & (index_ < 4 + width.lanes), x[0], -7))
            assert np.array_equal(y[2], np.where((index_ >= 4) & (index_ < 7), x[0], -7))
            assert (y[3] == -7).all()


def kept(row, x, y, n):
    last, count, sign = f32(-1), i32(0), i32(0)
    acc = private(2, f32(0))
    for i in lanes(n):
        last = x[i]
        sign = i32(3)
        with only(x[i] > 0.0):
            count = count + where(x[i] > 0.0, i32(1), 9)
            acc[0] = acc[0] + x[i]
            with only(x[i] > 2.0):
                acc[1] = acc[1] + (x[i] * 0.0 + 1.0)
                sign = i32(x[i])
        v = x[i]
        with only(v < 0.0):
            v = f32(0)
        y[0, i] = v
    for l in static(LANES):
        y[1, l] = lane(last, l)
        y[2, l] = f32(lane(count, l))
        y[3, l] = lane(acc[0], l)
        y[4, l] = lane(acc[1], l)
        y[5, l] = f32(lane(sign, l))


@WIDTHS
def test_lanes_that_take_no_part_keep_what_they_had(width: Features) -> None:
    for n in range(3 * width.lanes + 2):
        x = np.random.default_rng(n).integers(-4, 5, n).astype(np.float32)
        y = np.zeros((6, 64), np.float32)
        run(kept, width, x=x, y=y, n=n)
        last, count, acc, sign = (np.zeros(width.lanes), np.zeros(width.lanes), np.zeros((2, width.lanes)), np.zeros(width.lanes))
        last -= 1
        for i, v in enumerate(x):
            at = i % width.lanes
            last[at], sign[at] = v, v if v > 2 else 3
            count[at] += v > 0
            acc[0, at] += max(v, 0)
            acc[1, at] += v > 2
        assert np.array_equal(y[0, :n], np.maximum(x, 0))
        assert np.array_equal(y[1:, : width.lanes], np.stack([last, count, *acc, sign]))


def nested(row, x, y, z, n, m):
    inner = f32(0)
    for i in lanes(n):
        v = x[i]
        low = first(i)
        for l in range(LANES):
            one = lane(v, l)
            if low + l < n:
                for j in lanes(m):
                    y[low + l, j] = one * 100.0 + f32(j)
        with span(0, m) as j:
            inner = group_sum(where(inside(j), f32(1), 0))
        z[i] = v * 2.0 + (inner - inner)
        barrier()


@WIDTHS
def test_a_space_inside_a_space_replaces_it(width: Features) -> None:
    for n, m in ((1, 3), (width.lanes, width.lanes + 1), (width.lanes + 3, 2), (2 * width.lanes + 1, width.lanes)):
        x, y, z = np.arange(n, dtype=np.float32) + 1, np.full((n + 1, m + 1), -7, np.float32), np.full(n + 1, -7, np.float32)
        run(nested, width, x=x, y=y, z=z, n=n, m=m)
        assert np.array_equal(y[:n, :m], x[:, None] * 100 + np.arange(m))
        assert (y[n] == -7).all() and (y[:, m] == -7).all()
        assert np.array_equal(z, [*(2 * x), -7])


def across(row, x, k, y, z):
    with span(0, LANES) as i:
        v, w = x[row, i], k[row, i]
        half = v * 0.5
        y[row, 0] = group_sum(v)
        y[row, 1] = group_max(v)
        y[row, 2] = group_min(v)
        y[row, 3] = lane(v, 1) + lane(half, LANES - 1)
        z[row, 0] = group_sum(w)
        z[row, 1] = group_max(w)
        z[row, 2] = group_min(w)
        z[row, 3] = group_sum(i)
        for j in range(LANES):
            y[row, 4 + j] = lane(v, j) + lane(half * 2.0, j)
            z[row, 4 + j] = lane(w, j) + as_i32(lane(u32(w), index(i32(j))))


@WIDTHS
def test_words_across_lanes(width: Features) -> None:
    n = width.lanes
    rng = np.random.default_rng(8)
    x = rng.normal(size=(6, n)).astype(np.float32)
    x[1], x[2, 1], x[3, 0], x[4, 2:] = np.nan, np.nan, np.inf, np.nan
    k = rng.integers(-(2**31), 2**31, (6, n)).astype(np.int32)
    y, z = np.zeros((6, 4 + n), np.float32), np.zeros((6, 4 + n), np.int32)
    run(across, width, groups=(6,), x=x, k=k, y=y, z=z)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(y[:, 0], x.astype(np.float64).sum(1), rtol=2e-6, atol=2e-6)
        same_numbers(y[:, 1], np.fmax.reduce(x, 1))
        same_numbers(y[:, 2], np.fmin.reduce(x, 1))
        same_bits(y[:, 3], x[:, 1] + x[:, -1] * np.float32(0.5))
        same_bits(y[:, 4:], x + x)
        assert np.array_equal(z[:, 0], k.sum(1, dtype=np.int32))
        assert np.array_equal(z[:, 4:], k + k)
    assert np.array_equal(z[:, 1], k.max(1)) and np.array_equal(z[:, 2], k.min(1)) and (z[:, 3] == n * (n - 1) // 2).all()


def several_groups(a, b, c, x, y, n, by):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * by + f32(a * 100 + b * 10 + c)


@WIDTHS
def test_groups_are_unravelled_in_row_major_order(width: Features) -> None:
    x = np.random.default_rng(9).integers(0, 9, (2, 3, 4, 11)).astype(np.float32)
    y = np.zeros((4, 11, 3, 2), np.float32).transpose(3, 2, 0, 1)
    run(several_groups, width, groups=(2, 3, 4), x=x, y=y, n=11, by=0.5)
    a, b, c, _ = np.indices(x.shape)
    assert np.array_equal(y, x * 0.5 + a * 100 + b * 10 + c)


def wide_ids(r, ids, x, y, n):
    row = index(ids[r])
    for i in lanes(n):
        y[r, i] = x[row, i]


def test_64_bit_ids_are_indices() -> None:
    x = np.random.default_rng(10).normal(size=(9, 7)).astype(np.float32)
    y, ids = np.zeros((3, 7), np.float32), np.array([8, 0, 3])
    run(wide_ids, features(), groups=(3,), ids=ids, x=x, y=y, n=7)
    assert np.array_equal(y, x[ids])


def branches(row, x, y, n, m):
    v = x[0]
    if (n > 3) & (m == 2):
        v = v * 2.0
    else:
        v = v * 3.0
        for j in range(m, n, 2):
            v = v + f32(j)
    y[row] = v + f32(minimum(n, m) + maximum(n, m) * 10 + n // 3 + n % 3 + (n << 2) + (m >> 1))


def test_uniform_branches_and_loops() -> None:
    x = np.array([1.5], np.float32)
    for n, m in ((1, 2), (4, 2), (9, 4), (3, 2)):
        y = np.zeros(1, np.float32)
        run(branches, features(), x=x, y=y, n=n, m=m)
        v = 3.0 if n > 3 and m == 2 else 4.5 + sum(range(m, n, 2))
        assert y[0] == v + min(n, m) + max(n, m) * 10 + n // 3 + n % 3 + (n << 2) + (m >> 1)


def previous(row, x, y, n):
    for i in lanes(n):
        with only(i >= 5):
            y[i] = x[i - 5]
        with only(i < 3):
            y[i] = x[i + n - 3]


@WIDTHS
def test_lanes_that_take_no_part_touch_no_memory(width: Features) -> None:
    """The view lies between two pages that cannot be read, so an access outside of it ends the process."""
    page, n = mmap.PAGESIZE, 3 * width.lanes + 1
    area = mmap.mmap(-1, 3 * page)
    base = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for closed in (0, 2 * page):
        assert libc.mprotect(ctypes.c_void_p(base.ctypes.data + closed), ctypes.c_size_t(page), 0) == 0
    middle = base[page : 2 * page].view(np.float32)
    middle[:] = np.arange(middle.size)
    step = (middle.size - 1) // (n - 1)
    dense_low, dense_high = middle[:n], middle[middle.size - n :]
    sparse_low, sparse_high = middle[: n * step : step][:n], middle[::-1][::step][:n][::-1]
    for x in (dense_low, dense_high, sparse_low, sparse_high):
        y, i = np.full(n, -7, np.float32), np.arange(n)
        run(previous, width, x=x, y=y, n=n)
        assert np.array_equal(y, np.where(i < 3, x[(i + n - 3) % n], np.where(i >= 5, x[i - 5], -7)))


# -- tables -----------------------------------------------------------------------------------------------------

ENTRIES = np.random.default_rng(5).integers(0, 2**32, 64, np.uint32)
SIXTEEN = np.random.default_rng(6).integers(-128, 128, 16).astype(np.int8)
MANY, BYTES = table("CPU_MANY", ENTRIES), table("CPU_BYTES", SIXTEEN)


def looked_up(row, x, y, z, n):
    for i in lanes(n):
        y[row, i] = i32(MANY[x[row, i]])
        z[row, i] = i32(nibbles(BYTES, u32(x[row, i])))


def looked_up_one_by_one(row, x, y, z, n):
    for i in range(n):
        y[row, i] = i32(MANY[u32(x[row, i])])
        z[row, i] = i32(nibbles(BYTES, u32(x[row, i])))


def by_span(row, x, y, z, n):
    for i in lanes(n):
        y[row, i] = i32(MANY[i])
        z[row, i] = i32(MANY[i % 8 + 1])


@pytest.mark.parametrize("kernel", [looked_up, looked_up_one_by_one])
@FORM
def test_tables(kernel: FunctionType, form: Features) -> None:
    bytes_ = np.random.default_rng(7).integers(0, 16, (3, 37, 4)).astype(np.uint8)
    x = np.ascontiguousarray(bytes_).view(np.int32)[..., 0]
    y, z = np.zeros((2, 3, 37), np.int32)
    run(kernel, form, (3,), x=x, y=y, z=z, n=37)
    assert np.array_equal(y, ENTRIES.view(np.int32)[x & 63])  # an index is wrapped
    assert np.array_equal(z, np.ascontiguousarray(SIXTEEN[bytes_]).view(np.int32)[..., 0])


@WIDTHS
def test_a_table_read_at_the_lanes_own_index(width: Features) -> None:
    """Lanes past the end of the table take no part."""
    for n in (1, 37, 61, 64):
        x, y, z = np.zeros((3, 1, n), np.int32)
        run(by_span, width, x=x, y=y, z=z, n=n)
        assert np.array_equal(y[0], ENTRIES.view(np.int32)[:n])
        assert np.array_equal(z[0], ENTRIES.view(np.int32)[np.arange(n) % 8 + 1])


# -- integer dot products ---------------------------------------------------------------------------------------

RANGES = [(0, 2), (0, 15), (0, 31), (0, 63), (0, 127), (0, 255), (-12, 12), (-43, 43), (-127, 113), (-127, 127), (-128, 127)]


def products(row, x, y, out, n):
    for i in lanes(n):
        xs = tuple(u32(x[k, i]) for k in static(QUADS))
        ys = tuple(u32(y[k, i]) for k in static(QUADS))
        total, sums = i32(row), i32(0)
        for k in static(QUADS):
            total = dot4(xs[k], ys[k], total, LOW, HIGH)
            sums = sums + ((byte(ys[k], 0) + byte(ys[k], 1)) + (byte(ys[k], 2) + byte(ys[k], 3)))
        out[0, i] = total
        out[1, i] = dot(xs, ys, sums, LOW, HIGH)
        same, whole = tuple(u32(y[k, 0]) for k in static(QUADS)), i32(0)
        for k in static(QUADS):
            whole = whole + ((byte(same[k], 0) + byte(same[k], 1)) + (byte(same[k], 2) + byte(same[k], 3)))
        out[2, i] = dot(xs, same, whole, LOW, HIGH)


def products_uniform(row, x, y, out, n):
    for i in range(n):
        xs = tuple(u32(x[k, i]) for k in static(QUADS))
        ys = tuple(u32(y[k, i]) for k in static(QUADS))
        total, sums = i32(row), i32(0)
        for k in static(QUADS):
            total = dot4(xs[k], ys[k], total, LOW, HIGH)
            sums = sums + ((byte(ys[k], 0) + byte(ys[k], 1)) + (byte(ys[k], 2) + byte(ys[k], 3)))
        out[0, i] = total
        out[1, i] = dot(xs, ys, sums, LOW, HIGH)


def dot_operands(low: int, high: int, quads: int, lanes_: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [quads, n, 4]: extreme codes against extreme bytes in every combination, then random ones."""
    rng = np.random.default_rng(11)
    parts = []
    for code in (low, high):
        for value in (-127, 127):
            parts.append((np.full((quads, lanes_, 4), code), np.full((quads, lanes_, 4), value)))
    parts.append((np.full((quads, lanes_, 4), high), rng.choice([-127, 127], (quads, lanes_, 4))))
    parts.append((rng.choice([low, high], (quads, lanes_, 4)), rng.choice([-127, 127], (quads, lanes_, 4))))
    parts.append((rng.integers(low, high + 1, (quads, 40, 4)), rng.integers(-127, 128, (quads, 40, 4))))
    return tuple(np.concatenate(p, 1) for p in zip(*parts, strict=True))  # type: ignore[return-value]


def words_of(bytes_: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bytes_.astype(np.uint8)).view(np.int32)[..., 0]


@pytest.mark.parametrize(("low", "high"), RANGES)
@FORM
@pytest.mark.slow
def test_dot_products(form: Features, low: int, high: int) -> None:
    for quads in (1, 8):
        x, y = dot_operands(low, high, quads, form.lanes)
        n = x.shape[1]
        exact = (x * y).sum((0, 2))
        constants = {"QUADS": quads, "LOW": low, "HIGH": high}
        out = np.zeros((3, n), np.int32)
        run(products, form, constants=constants, x=words_of(x), y=words_of(y), out=out, n=n)
        assert np.array_equal(out[0], exact) and np.array_equal(out[1], exact)
        assert np.array_equal(out[2], (x * y[:, :1]).sum((0, 2)))


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_dot_products_of_uniform_values(low: int, high: int) -> None:
    x, y = dot_operands(low, high, 4, 8)
    constants, out = {"QUADS": 4, "LOW": low, "HIGH": high}, np.zeros((2, x.shape[1]), np.int32)
    run(products_uniform, features(8), constants=constants, x=words_of(x), y=words_of(y), out=out, n=x.shape[1])
    assert np.array_equal(out[0], (x * y).sum((0, 2))) and np.array_equal(out[1], out[0])
