"""The words of the printed text in Numba's CUDA simulator: plain Python on NumPy scalars, one thread a lane.

An address is the host's. Every access must lie in a tensor of the launch and be aligned; a word across lanes that not every lane of the
group reaches is an error. An index is a Python int, a truth value a bool.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.dtypes import from_bf16, to_bf16
from engine.errors import KernelError
from engine.lang.tree import Table

f32, i32, u32 = np.float32, np.int32, np.uint32
TYPES: dict[str, Any] = {"f32": f32, "i32": i32, "u32": u32}
SECONDS_APART = 120.0  # a lane that comes later than this to a word across lanes never will


# -- memory -----------------------------------------------------------------------------------------------------


class Memory:
    """The pieces of memory a launch may touch: address, bytes."""

    def __init__(self, pieces: Sequence[tuple[int, np.ndarray]]) -> None:
        self.pieces = [(start, start + memory.nbytes, memory) for start, memory in pieces]

    def at(self, base: int, offset: int, size: int, by: int) -> np.ndarray:
        """`size` bytes at an address that must be a multiple of `by`."""
        p = base + offset
        for start, end, memory in self.pieces:
            if start <= p and p + size <= end:
                if p % by:
                    raise KernelError(f"an access of {by} bytes at {p - start} bytes into a tensor at {start} is not aligned")
                return memory[p - start : p - start + size]
        nearest = min((abs(p - s), s, e) for s, e, _ in self.pieces) if self.pieces else (0, 0, 0)
        raise KernelError(f"an access of {size} bytes leaves every tensor: {p - nearest[1]} bytes into one of {nearest[2] - nearest[1]}")


UNITS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "f32": ("<f4", f32), "i32": ("<i4", i32), "u32": ("<u4", u32), "i64": ("<i8", int), "f16": ("<f2", f32),
    "bf16": ("<u2", lambda v: f32(from_bf16(v))), "u8": ("u1", i32), "i8": ("i1", i32), "u16": ("<u2", i32), "i16": ("<i2", i32)}


def _stored(unit: str, dtype: np.dtype, v: Any) -> Any:
    """A value as an element: floats round to nearest even, integers keep their low bits."""
    if unit == "bf16":
        return to_bf16(np.asarray([v], np.float32))[0]
    if unit in ("f32", "f16"):
        with np.errstate(over="ignore"):
            return dtype.type(v)
    return np.int64(v).astype(dtype)


def _memory(memory: Memory) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for unit, (code, grow) in UNITS.items():
        dtype = np.dtype(code)
        for by in (1, 2, 4, 8):
            if by > dtype.itemsize:
                continue
            name = unit if by == dtype.itemsize else f"{unit}_by{by}"

            def load(base: int, offset: int, dtype: np.dtype = dtype, by: int = by, grow: Any = grow) -> Any:
                return grow(memory.at(base, offset, dtype.itemsize, by).view(dtype)[0])

            def store(base: int, offset: int, v: Any, unit: str = unit, dtype: np.dtype = dtype, by: int = by) -> None:
                memory.at(base, offset, dtype.itemsize, by).view(dtype)[0] = _stored(unit, dtype, v)

            out[f"load_{name}"], out[f"store_{name}"] = load, store
    return out


# -- operators and conversions ----------------------------------------------------------------------------------


def _wrapped(kind: str) -> Callable[[Any], Any]:
    """An integer of any size as a number of this kind."""
    if kind == "index":
        return int
    return lambda v: TYPES[kind](((int(v) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31) if kind == "i32" else int(v) & 0xFFFFFFFF)


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "floordiv": _quotient,
    "mod": lambda a, b: a - b * _quotient(a, b)}
_FLOAT: dict[str, Callable[[Any, Any], Any]] = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
                                                "div": lambda a, b: a / b}


def _operators() -> dict[str, Any]:
    out: dict[str, Any] = {f"{n}_f32": (lambda a, b, f=f: f32(f(f32(a), f32(b)))) for n, f in _FLOAT.items()}
    for kind in ("i32", "u32", "index"):
        wrap = _wrapped(kind)
        out |= {f"{n}_{kind}": (lambda a, b, f=f, wrap=wrap: wrap(f(int(a), int(b)))) for n, f in _INTEGER.items()}
    out |= {f"{n}_truth": (lambda a, b, f=f: bool(f(bool(a), bool(b)))) for n, f in _INTEGER.items() if n in ("and", "or", "xor")}
    out |= {f"where_{k}": (lambda c, x, y, t=t: t(x) if c else t(y)) for k, t in {**TYPES, "index": int, "truth": bool}.items()}
    return out | {"neg_f32": lambda x: -f32(x), "neg_i32": lambda x: _wrapped("i32")(-int(x))}


def _saturated(kind: str) -> Callable[[Any], Any]:
    low, high = (-(1 << 31), (1 << 31) - 1) if kind == "i32" else (0, (1 << 32) - 1)
    return lambda v: TYPES[kind](0 if v != v else int(min(max(float(v), float(low)), float(high))))


def _conversions() -> dict[str, Any]:
    out: dict[str, Any] = {f"{w}_from_{h}": _wrapped(w) for w in ("i32", "u32", "index") for h in ("i32", "u32", "index") if w != h}
    out |= {f"f32_from_{h}": f32 for h in ("i32", "u32")} | {"f32_from_index": lambda v: f32(np.int64(v))}
    out |= {f"{w}_from_f32": _saturated(w) for w in ("i32", "u32")}
    return out | {f"{w}_bits_of_{h}": (lambda v, w=w, h=h: TYPES[h](v).view(TYPES[w])) for w in TYPES for h in TYPES if w != h}


# -- words of the language --------------------------------------------------------------------------------------


def _fma(a: Any, b: Any, c: Any) -> Any:
    """One rounding: the product is exact in float64; a sum that is not is made odd, so that the second rounding decides rightly."""
    product, c = float(a) * float(b), float(c)
    total = product + c
    if not math.isfinite(total):
        return f32(total)
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = np.float64(total).view(np.int64)
    if error and not bits & 1:
        total = float((bits + (1 if (error > 0) == (total > 0) else -1)).view(np.float64))
    return f32(total)


def _round_away(x: Any) -> Any:
    return f32(math.copysign(math.floor(abs(float(x)) + 0.5), float(x))) if math.isfinite(x) else f32(x)


def _signed(q: Any, e: int) -> int:
    return ((int(q) >> 8 * int(e) & 255) ^ 128) - 128


def _ubyte(q: Any, e: int) -> int:
    return int(q) >> 8 * int(e) & 255


def _dot4(first: Callable[[Any, int], int]) -> Callable[[Any, Any, Any], Any]:
    return lambda x, y, acc: _wrapped("i32")(sum(first(x, e) * _signed(y, e) for e in range(4)) + int(acc))


def _language() -> dict[str, Any]:
    out: dict[str, Any] = {
        "fma": _fma, "abs_f32": lambda x: abs(f32(x)), "rint": lambda x: f32(np.rint(f32(x))), "round_away": _round_away,
        "sqrt": lambda x: np.sqrt(f32(x)), "rsqrt": lambda x: f32(1) / np.sqrt(f32(x)), "byte": lambda q, e: i32(_signed(q, e)),
        "maximum_f32": lambda a, b: np.fmax(f32(a), f32(b)), "minimum_f32": lambda a, b: np.fmin(f32(a), f32(b)),
        "ubyte": lambda q, e: i32(_ubyte(q, e)), "pack": lambda *xs: u32(sum((int(x) & 255) << 8 * e for e, x in enumerate(xs))),
        "dot4_i32": _dot4(_signed), "dot4_u32": _dot4(_ubyte)}
    for kind, t in {"i32": i32, "u32": u32, "index": int}.items():
        out[f"maximum_{kind}"] = lambda a, b, t=t: t(max(a, b))
        out[f"minimum_{kind}"] = lambda a, b, t=t: t(min(a, b))
    return out


def table_words(table: Table) -> dict[str, Any]:
    values = table.values
    out: dict[str, Any] = {table.name: lambda i: values[_within(table, i)]}
    if values.size == 4:
        bytes_ = values.view(np.uint8)
        out[f"{table.name}_nibbles"] = lambda q: u32(sum(int(bytes_[_ubyte(q, e) & 15]) << 8 * e for e in range(4)))
    return out


def _within(table: Table, i: int) -> int:
    if not 0 <= i < table.values.size:
        raise KernelError(f"{table.name}[{i}] of {table.values.size} entries")
    return i


# -- across lanes -----------------------------------------------------------------------------------------------


class Group:
    """The lanes of one group, on their way through a kernel. Two rows of slots take turns, so that one meeting serves an exchange."""

    def __init__(self, lanes: int) -> None:
        self.barrier, self.gone = threading.Barrier(lanes), False
        self.slots: list[list[Any]] = [[None] * lanes, [None] * lanes]
        self.turns = [0] * lanes

    def exchange(self, lane: int, word: str, value: Any) -> list[Any]:
        """What every lane brought to this word."""
        slots = self.slots[self.turns[lane] % 2]
        self.turns[lane] += 1
        slots[lane] = (word, value)
        try:
            if self.gone:
                self.barrier.abort()
            self.barrier.wait(SECONDS_APART)
        except threading.BrokenBarrierError:
            raise KernelError(f"{word} is not reached by every lane of its group") from None
        if any(other[0] != word for other in slots):
            raise KernelError(f"lanes of one group meet at different words: {', '.join(sorted({s[0] for s in slots}))}")
        return [other[1] for other in slots]

    def leave(self) -> None:
        """A lane is done: those that still wait for it, or will, are told."""
        self.gone = True
        if self.barrier.n_waiting:
            self.barrier.abort()


class Crowd:
    """Every group of the block that runs, and the first error of a lane."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def group(self) -> tuple[Group, int]:
        """The group and the number of the calling lane."""
        thread: Any = threading.current_thread()
        place = thread.threadIdx
        with self._lock:
            groups: dict[int, Group] = thread._manager.__dict__.setdefault("lanewise_groups", {})
            if place.y not in groups:
                groups[place.y] = Group(self.lanes)
            return groups[place.y], place.x

    def across(self, word: str, merge: Callable[..., Any]) -> Callable[..., Any]:
        def meet(value: Any = None, *more: Any) -> Any:
            group, lane = self.group()
            return merge(group.exchange(lane, word, value), *more)

        return meet

    def guarded(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """The kernel of one lane, whose end and errors the others learn of."""

        def run(*args: Any) -> None:
            group, _ = self.group()
            try:
                kernel(*args)
            except BaseException as why:
                with self._lock:
                    self.error = self.error or why
                raise KernelError(str(why)) from why
            finally:
                group.leave()

        return run


def _fold(combine: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    def fold(values: list[Any]) -> Any:
        while len(values) > 1:  # the upper half onto the lower half
            n = len(values) // 2
            values = [combine(a, b) for a, b in zip(values[:n], values[n:], strict=True)]
        return values[0]

    return fold


def _across(crowd: Crowd) -> dict[str, Any]:
    folds: dict[str, Callable[[Any, Any], Any]] = {
        "group_sum_f32": lambda a, b: f32(a + b), "group_max_f32": np.fmax, "group_min_f32": np.fmin,
        "group_sum_i32": lambda a, b: _wrapped("i32")(int(a) + int(b)), "group_max_i32": max, "group_min_i32": min}
    out: dict[str, Any] = {name: crowd.across(name, _fold(f)) for name, f in folds.items()}
    out |= {f"lane_value_{k}": crowd.across(f"lane_value_{k}", lambda values, j: values[int(j)]) for k in TYPES}
    out["barrier"] = crowd.across("barrier", lambda values: None)
    return out


def _lane_number() -> Any:
    return i32(threading.current_thread().threadIdx.x)  # type: ignore[attr-defined]


def _group_number() -> int:
    thread: Any = threading.current_thread()
    return int(thread.blockIdx.x) * int(thread._manager._block_dim[1]) + int(thread.threadIdx.y)


# -- all of them ------------------------------------------------------------------------------------------------


def words(memory: Memory, crowd: Crowd) -> dict[str, Any]:
    """Every word, for one launch."""
    return {**_memory(memory), **_operators(), **_conversions(), **_language(), **_across(crowd), "lane_number": _lane_number,
            "group_number": _group_number, "f32": f32, "i32": i32, "u32": u32, "INF": f32(np.inf), "NINF": f32(-np.inf), "NAN": f32(np.nan)}
