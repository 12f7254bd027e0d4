"""The living definition of the lane language: a kernel's text, run on NumPy values with any number of lanes.

Nothing is compiled and nothing is assumed. The text runs as it stands but for a few names put in front of its operators and
assignments (`_Rewrite`), so a debugger steps through it. Every subscript is checked; every place of writable memory knows whether it
was written, by which lane and group, and since which barrier; every varying value knows the lane space it was made in.

Note [exactness]. f32 arithmetic rounds to float32 after each operation and `fma` once. The words `exp` to `erf` are computed in
float64 and rounded. `group_sum` folds the upper half of the lanes onto the lower half until one is left, in float32; a target may use
any other fixed order.

Note [shadow]. Lane `l` may read what it wrote itself. What another lane wrote it reads only behind a `barrier()`, what another group
wrote never. A uniform read is a read by every lane, a uniform write a write by one lane, nobody knows which.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, TracebackType
from typing import Any

import numpy as np

from engine.dtypes import F32, NUMPY_UNIT, UNIT_NBYTES, DType, Field, to_bf16
from engine.errors import KernelError
from engine.lang import binding
from engine.lang.binding import Binding
from engine.lang.function import Function
from engine.lang.rules import VALUE
from engine.lang.tree import Table
from engine.lang.words import DECODERS
from engine.op import Call, Variant, padded
from engine.tensor import Tensor, row_major

Number = Any  # a Value, or a Python int (an index) or float (a literal)
Memory = Callable[[Tensor], tuple[np.ndarray, int]]
_NUMPY: dict[str, Any] = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "truth": np.bool_}
_EVERY, _ONE = -1, -2  # as reader: all lanes; as writer: one of them


class Refused(Exception):
    """A fault of the kernel; the place in its text is added where the text was called."""


# -- the machine ------------------------------------------------------------------------------------------------


class _Frame:
    """A lane space, or an `only` inside one: who takes part. `mask` is None where all lanes do."""

    __slots__ = ("key", "home", "owner", "mask", "is_only")

    def __init__(self, key: tuple[Any, ...], home: _Space, owner: object, mask: np.ndarray | None, is_only: bool = False) -> None:
        self.key, self.home, self.owner, self.mask, self.is_only = key, home, owner, mask, is_only


class _Machine:
    """The state of the one group that runs."""

    def __init__(self) -> None:
        self.lanes, self.ids = 1, np.arange(1)
        self.frames: list[_Frame] = []
        self.group = self.launch = self.epoch = 0
        self.skipped = False  # a loop had no turn: what it makes varying is still uniform

    def start(self, lanes: int) -> None:
        """A launch with this many lanes."""
        self.lanes, self.ids = lanes, np.arange(lanes)
        self.launch = self.group + 1

    def next_group(self) -> None:
        self.group += 1
        self.epoch += 1
        self.skipped = False
        self.frames.clear()

    @property
    def mask(self) -> np.ndarray | None:
        return self.frames[-1].mask if self.frames else None


_M = _Machine()
_LOCK = threading.RLock()


class _Space:
    """What an index of a lane space points back to. `tile` says which lanes of the present tile take part (None: all)."""

    __slots__ = ("key", "tile")

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.key = key
        self.tile: np.ndarray | None = None

    def enter(self, taking_part: np.ndarray) -> None:
        self.tile = None if taking_part.all() else taking_part
        _M.frames.append(_Frame(self.key, self, self, self.tile))


def _space_text(key: tuple[Any, ...] | None) -> str:
    return f"{key[0]}({', '.join(map(str, key[1:]))})" if key else "no single lane space"


# -- values -----------------------------------------------------------------------------------------------------


class Value:
    """f32, i32, u32 or truth: uniform (a NumPy scalar) or varying (an array with one element a lane, made in `space`)."""

    __slots__ = ("a", "elem", "space", "wide")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, a: Any, elem: str, space: tuple[Any, ...] | None = None) -> None:
        self.a, self.elem, self.space = a, elem, space
        self.wide = type(a) is np.ndarray

    def __bool__(self) -> bool:
        if self.wide:
            raise Refused("a varying condition: use where() or `with only(..)`")
        if self.elem != "truth":
            raise Refused(f"a condition is a truth value, not {self.elem}: write a comparison")
        return bool(self.a)

    def __neg__(self) -> Value:
        if self.elem not in ("f32", "i32"):
            raise Refused(f"{self.elem} has no minus")
        return Value(-self.a, self.elem, _joint_space((self,)))

    def __repr__(self) -> str:
        return f"{self.elem} {self.a}" + (f" in {_space_text(self.space)}" if self.wide else "")


class Place(Value):
    """The index of a lane space: consecutive from `start` for a span, None for an index of a grid."""

    __slots__ = ("start", "home")

    def __init__(self, a: np.ndarray, home: _Space, start: int | None) -> None:
        super().__init__(a.astype(np.int32), "i32", home.key)
        self.start, self.home = start, home

    def __add__(self, k: Number) -> Value:
        if self.start is None or type(k) is not int:
            return _combine(operator.add, "numbers", self, k)
        _joint_space((self,))
        return Place(self.a + np.int32(k), self.home, self.start + k)

    __radd__ = __add__

    def __sub__(self, k: Number) -> Value:
        return self + -k if type(k) is int else _combine(operator.sub, "numbers", self, k)


def _joint_space(xs: Sequence[Any]) -> tuple[Any, ...] | None:
    """The lane space of a result; refuses varying operands of another one. At group level spaces may meet."""
    found: tuple[Any, ...] | None = None
    here = _M.frames[-1] if _M.frames else None
    for x in xs:
        if not isinstance(x, Value) or not x.wide:
            continue
        if isinstance(x, Place) and (here is None or x.home is not here.home):
            raise Refused(f"an index of {_space_text(x.space)} is used {'outside of it' if here is None else 'in another lane space'}: "
                          f"lanes mean something else there")
        if here is not None and x.space != here.key:
            raise Refused(f"a varying value made in {_space_text(x.space)} is used in {_space_text(here.key)}: lanes mean something else "
                          f"there")
        found = x.space if found is None or found == x.space else ("several spaces",)
    return None if found == ("several spaces",) else found


def _elem(*xs: Number) -> str:
    """The element type operands share."""
    found = ""
    for x in xs:
        e = x.elem if isinstance(x, Value) else "f32" if isinstance(x, float) else ""
        if e and found and e != found:
            raise Refused(f"{found} and {e} meet: convert with f32(), i32() or u32()")
        found = found or e
    return found or "i32"


def _fit(x: int, elem: str) -> Any:
    """An index or a literal as `elem`."""
    if elem == "f32":
        return np.float32(x)
    if not -(2**31) <= x < 2**32:
        raise Refused(f"{x} does not fit {elem}")
    bits = np.uint32(x & 0xFFFFFFFF)
    return bits if elem == "u32" else bits.view(np.int32)


def _raw(x: Number, elem: str) -> Any:
    """The NumPy scalar or array of an operand; a literal takes the type `elem`."""
    if isinstance(x, Value):
        if x.elem != elem:
            raise Refused(f"{elem} is wanted, {x.elem} given: convert")
        return x.a
    if elem == "truth" and isinstance(x, (bool, np.bool_)):
        return np.bool_(x)
    if isinstance(x, float) and elem == "f32":
        return np.float32(x)
    if isinstance(x, int) and not isinstance(x, bool) and elem != "truth":
        return _fit(x, elem)
    raise Refused(f"{_kind(x)} is given where {elem} is wanted")


def _kind(x: Any) -> str:
    """What an operand is, for messages."""
    if isinstance(x, Value):
        return f"{'a varying' if x.wide else 'a uniform'} {x.elem}"
    if isinstance(x, bool):
        return "a truth value"
    if isinstance(x, _Absent):
        return f"{x.name}, which was left out,"
    return f"the index {x}" if isinstance(x, int) else f"the literal {x!r}" if isinstance(x, float) else f"a {type(x).__name__.lower()}"


_ALLOWED = {"numbers": ("f32", "i32", "u32"), "f32": ("f32",), "bits": ("i32", "u32", "truth"), "integers": ("i32", "u32"),
            "any": ("f32", "i32", "u32", "truth")}


def _combine(fn: Callable[[Any, Any], Any], takes: str, x: Number, y: Number) -> Value:
    """One operator on operands of one type. The result of a comparison is a truth."""
    elem = _elem(x, y)
    if elem not in _ALLOWED[takes]:
        raise Refused(f"{getattr(fn, '__name__', 'operator')} does not take {elem}")
    a = fn(_raw(x, elem), _raw(y, elem))
    return Value(a, "truth" if a.dtype == np.bool_ else elem, _joint_space((x, y)))


def _shift(fn: Callable[[Any, Any], Any], x: Number, y: Number) -> Value:
    """Shifts: the amount may have another integer type."""
    if isinstance(x, Value):
        elem = x.elem
    else:
        if y.wide:
            raise Refused("an index is shifted by a uniform amount")
        elem = y.elem
    if elem not in ("i32", "u32") or (isinstance(y, Value) and y.elem not in ("i32", "u32")) or isinstance(y, float):
        raise Refused(f"{_kind(x)} is shifted by {_kind(y)}: shifts work on integers")
    amount = y.a.astype(np.int64) if isinstance(y, Value) else np.int64(y)
    _none((amount < 0) | (amount > 31), f"{fn.__name__} of 32 bits by {{}}", amount)
    return Value(fn(_raw(x, elem), (amount & 31).astype(_NUMPY[elem])), elem, _joint_space((x, y)))


def _none(bad: Any, message: str, values: Any) -> None:
    """Refuse where an active lane is bad."""
    if not bad.any():
        return
    if bad.ndim and (mask := _M.mask) is not None:
        bad = bad & mask
        if not bad.any():
            return
    values = np.broadcast_to(values, bad.shape)
    raise Refused(message.format(np.atleast_1d(values)[np.atleast_1d(bad)][0]))


def _install_operators() -> None:
    """Give Value its operators, both ways round."""
    plain = {"add": (operator.add, "numbers"), "sub": (operator.sub, "numbers"), "mul": (operator.mul, "numbers"),
             "truediv": (operator.truediv, "f32"), "and": (operator.and_, "bits"), "or": (operator.or_, "bits"),
             "xor": (operator.xor, "bits"), "lshift": (operator.lshift, ""), "rshift": (operator.rshift, "")}
    compare = {"lt": "numbers", "le": "numbers", "gt": "numbers", "ge": "numbers", "eq": "numbers", "ne": "numbers"}

    def add(name: str, fn: Callable[[Any, Any], Any], takes: str, reverse: bool) -> None:
        def run(x: Number, y: Number) -> Value:
            return _combine(fn, takes, x, y) if takes else _shift(fn, x, y)

        setattr(Value, f"__{name}__", run)
        if reverse:
            setattr(Value, f"__r{name}__", lambda x, y: run(y, x))

    for name, (fn, takes) in plain.items():
        add(name, fn, takes, True)
    for name, takes in compare.items():
        add(name, getattr(operator, name), takes, False)


_install_operators()


def _division(remainder: bool) -> Callable[[Number, Number], Number]:
    """`//` and `%`: on indices never negative, on i32 truncating as in C."""
    sign = "%" if remainder else "//"

    def run(x: Number, y: Number) -> Number:
        if isinstance(x, int) and isinstance(y, int):
            if x < 0 or y <= 0:
                raise Refused(f"{x} {sign} {y}: operands of {sign} are never negative, divisors never zero")
            return x % y if remainder else x // y
        elem = _elem(x, y)
        if elem not in ("i32", "u32"):
            raise Refused(f"{sign} works on integers, not on {elem}")
        a, b = _raw(x, elem), _raw(y, elem)
        zero = b == 0
        _none(zero, f"{sign} by {{}}", b)
        b = np.where(zero, 1, b).astype(_NUMPY[elem])[()]
        rest = np.fmod(a, b)
        return Value(rest if remainder else (a - rest) // b, elem, _joint_space((x, y)))

    return run


_quotient, _remainder = _division(False), _division(True)


def _over(x: Number, y: Number) -> Number:
    """`/`, which indices do not have."""
    if isinstance(x, Value) or isinstance(y, Value) or (isinstance(x, float) and isinstance(y, float)):
        return x / y
    raise Refused(f"{_kind(x)} / {_kind(y)}: / divides f32; use // on indices, or convert with f32()")


# -- words: numbers ---------------------------------------------------------------------------------------------


def _convert(elem: str) -> Callable[[Number], Value]:
    def word(x: Number) -> Value:
        if isinstance(x, Value) and x.elem == "truth" or isinstance(x, bool):
            raise Refused("a truth value is no number: use where(c, 1, 0)")
        if isinstance(x, int):
            return Value(_fit(x, elem), elem)
        if isinstance(x, float):
            x = Value(np.float32(x), "f32")
        if not isinstance(x, Value):
            raise Refused(f"{_kind(x)} is no number")
        a = _saturate(x.a, elem) if x.elem == "f32" and elem != "f32" else x.a.astype(_NUMPY[elem])
        return Value(a, elem, _joint_space((x,)))

    return word


def _saturate(a: Any, elem: str) -> Any:
    """f32 -> integer: truncate, saturate, NaN gives 0."""
    low, high = (-(2**31), 2**31 - 1) if elem == "i32" else (0, 2**32 - 1)
    finite = np.nan_to_num(a.astype(np.float64), nan=0.0, posinf=high, neginf=low)
    return np.clip(np.trunc(finite), low, high).astype(np.int64).astype(_NUMPY[elem])


def _same_bits(elem: str) -> Callable[[Value], Value]:
    def word(x: Value) -> Value:
        if not isinstance(x, Value) or x.elem == "truth":
            raise Refused(f"{_kind(x)} has no 32 bits")
        return Value(x.a.view(_NUMPY[elem]), elem, _joint_space((x,)))

    return word


def _index(x: Number) -> int:
    if isinstance(x, int) and not isinstance(x, bool):
        return x
    if not isinstance(x, Value) or x.wide or x.elem not in ("i32", "u32"):
        raise Refused(f"index() wants a uniform integer, not {_kind(x)}")
    return int(x.a)


def _uniform_int(x: Any, what: str) -> int:
    """An index; everything else is refused."""
    if isinstance(x, int) and not isinstance(x, bool):
        return x
    hint = ": convert with index()" if isinstance(x, Value) and not x.wide and x.elem != "f32" else ""
    raise Refused(f"{what} is a uniform index, not {_kind(x)}{hint}")


def _where(c: Any, x: Number, y: Number) -> Number:
    if not isinstance(c, Value | bool | int) or (isinstance(c, Value) and c.elem != "truth"):
        raise Refused(f"where() wants a truth value first, not {_kind(c)}")
    if not isinstance(c, Value) or not c.wide:
        if not isinstance(x, Value) and not isinstance(y, Value) and not isinstance(x, float) and not isinstance(y, float):
            return x if c else y
        elem = _elem(x, y)
        chosen = x if c else y
        a = _raw(chosen, elem)
        other = y if c else x
        if isinstance(other, Value) and other.wide and not (isinstance(chosen, Value) and chosen.wide):
            a = np.full(_M.lanes, a)
        return Value(a, elem, _joint_space((x, y)))
    elem = _elem(x, y)
    return Value(np.where(c.a, _raw(x, elem), _raw(y, elem)), elem, _joint_space((c, x, y)))


def _float_word(name: str, fn: Callable[..., Any], n: int = 1) -> Callable[..., Value]:
    """A word on f32; `fn` takes and gives float32."""

    def word(*xs: Number) -> Value:
        if len(xs) != n:
            raise Refused(f"{name} takes {n} operands, {len(xs)} given")
        if all(isinstance(x, int) for x in xs):
            raise Refused(f"{name} wants f32, not {_kind(xs[0])}: convert with f32()")
        return Value(fn(*(_raw(x, "f32") for x in xs)), "f32", _joint_space(xs))

    return word


def _through_f64(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda a: fn(a.astype(np.float64)).astype(np.float32)


def _erf(a: Any) -> Any:
    return np.array([math.erf(v) for v in a.tolist()]) if a.ndim else np.float64(math.erf(a))


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding. The product is exact in float64; where the float64 sum might be rounded twice it is made odd."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    if not ((total.view(np.int64) & 0xFFFFFFF) == 0).any():  # cannot be a tie of float32
        return total.astype(np.float32)
    shape, product, c, total = np.shape(total), *np.atleast_1d(product, c, total)
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    odd = np.where(inexact, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64).astype(np.float32)
    return odd if shape else odd[0]


def _extreme(ints: Callable[..., int], floats: Callable[[Any, Any], Any], words: Callable[[Any, Any], Any]) -> Callable[..., Number]:
    """maximum and minimum: on indices, on integers, on f32 where a number wins over NaN."""

    def word(x: Number, y: Number) -> Number:
        if isinstance(x, int) and isinstance(y, int):
            return ints(x, y)
        return _combine(floats if _elem(x, y) == "f32" else words, "numbers", x, y)

    return word


# -- words: bytes -----------------------------------------------------------------------------------------------


def _bytes(x: Value, type: Any) -> np.ndarray:
    """The bytes of a u32, lowest first, in a last dimension of 4."""
    if not isinstance(x, Value) or x.elem != "u32":
        raise Refused(f"a u32 word of four bytes is wanted, not {_kind(x)}")
    four: np.ndarray = np.ascontiguousarray(x.a, "<u4").view(type).reshape(*np.shape(x.a), 4).astype(np.int32)
    return four


def _byte_word(type: Any) -> Callable[[Value, int], Value]:
    def word(q: Value, e: int) -> Value:
        if not isinstance(e, int) or not 0 <= e < 4:
            raise Refused(f"byte {e} of a u32: 0 to 3 are there")
        return Value(_bytes(q, type)[..., e][()], "i32", _joint_space((q,)))

    return word


def _pack(*xs: Number) -> Value:
    if len(xs) != 4:
        raise Refused(f"pack takes 4 operands, {len(xs)} given")
    out: Any = np.uint32(0)
    for k, x in enumerate(xs):
        a = _raw(x, "i32")
        _none((a < -128) | (a > 127), f"pack: operand {k} is {{}}, which does not fit a signed byte", a)
        out = out | ((a.view(np.uint32) & np.uint32(255)) << np.uint32(8 * k))
    return Value(out, "u32", _joint_space(xs))


def _products(word: str, x: Value, y: Value, low: int, high: int) -> tuple[Any, Any]:
    """The sum of four products, and of y's bytes; both operands are checked."""
    codes, numbers = _bytes(x, np.int8 if low < 0 else np.uint8), _bytes(y, np.int8)
    _none(((codes < low) | (codes > high)).any(-1), f"{word}: codes {{}} are not all in {low} .. {high}", _rows(codes))
    _none((numbers < -127).any(-1), f"{word}: the second operand's bytes {{}} are not all in -127 .. 127", _rows(numbers))
    return (codes * numbers).sum(-1, dtype=np.int32), numbers.sum(-1, dtype=np.int32)


def _rows(quads: np.ndarray) -> np.ndarray:
    """Four bytes of every lane as text."""
    out = np.empty(quads.shape[:-1], object)
    for at in np.ndindex(out.shape):
        out[at] = str(quads[at].tolist())
    return out


def _limits(word: str, low: int, high: int) -> None:
    if not isinstance(low, int) or not isinstance(high, int) or not -128 <= low <= high <= (127 if low < 0 else 255):
        raise Refused(f"{word}: codes {low} .. {high} do not fit a byte")


def _dot4(x: Value, y: Value, acc: Number, low: int, high: int) -> Value:
    _limits("dot4", low, high)
    part, _ = _products("dot4", x, y, low, high)
    return Value((part + _raw(acc, "i32"))[()], "i32", _joint_space((x, y, acc)))


def _dot(xs: tuple[Value, ...], ys: tuple[Value, ...], total: Number, low: int, high: int) -> Value:
    _limits("dot", low, high)
    if not isinstance(xs, tuple) or not isinstance(ys, tuple) or len(xs) != len(ys):
        raise Refused("dot wants two tuples of equally many u32 words")
    out: Any = np.int32(0)
    whole: Any = np.int32(0)
    for x, y in zip(xs, ys, strict=True):
        part, sum_y = _products("dot", x, y, low, high)
        out, whole = out + part, whole + sum_y
    claimed = _raw(total, "i32")
    wrong = np.asarray(claimed != whole)
    _none(wrong, f"dot: total is {{}}, but the bytes of the second operand add up to {np.unique(whole).tolist()}", claimed)
    return Value(out[()], "i32", _joint_space((*xs, *ys, total)))


# -- words: tables ----------------------------------------------------------------------------------------------


class _Entries:
    """A constant table."""

    __slots__ = ("table",)

    def __init__(self, table: Table) -> None:
        self.table = table

    def __getitem__(self, i: Any) -> Value:
        values = self.table.values
        if not isinstance(i, Value):
            i = Value(_fit(_uniform_int(i, f"an index of {self.table.name}"), "i32"), "i32")
        if i.elem not in ("i32", "u32"):
            raise Refused(f"{self.table.name}: an index is an integer, not {_kind(i)}")
        at = i.a.astype(np.int64)
        _none((at < 0) | (at >= values.size), f"{self.table.name}: index {{}} is out of range, there are {values.size} entries", at)
        return Value(values[at % values.size], "u32", _joint_space((i,)))


def _nibbles(entries: Any, quad: Value) -> Value:
    if not isinstance(entries, _Entries) or entries.table.values.size != 4:
        raise Refused("nibbles() takes a table of 16 bytes first")
    places = _bytes(quad, np.uint8)
    _none((places > 15).any(-1), "nibbles: the bytes {} are not all in 0 .. 15", _rows(places))
    found = entries.table.values.view(np.uint8)[places & 15]
    return Value(found.view("<u4")[..., 0][()], "u32", _joint_space((quad,)))


# -- words: across lanes ----------------------------------------------------------------------------------------


def _across(name: str, fn: Callable[[np.ndarray], Any]) -> Callable[[Number], Value]:
    def word(v: Number) -> Value:
        if _M.skipped and isinstance(v, Value) and not v.wide:  # the loop that makes it varying had no turn
            v = Value(np.full(_M.lanes, v.a), v.elem, _M.frames[-1].key if _M.frames else None)
        if not isinstance(v, Value) or not v.wide:
            raise Refused(f"{name} reduces over the lanes, but its operand is {_kind(v)}")
        if v.elem not in ("f32", "i32"):
            raise Refused(f"{name} wants f32 or i32, not {v.elem}")
        _joint_space((v,))
        return Value(fn(v.a), v.elem)

    return word


def _tree_sum(a: np.ndarray) -> Any:
    """Upper half onto lower half, until one is left."""
    while a.size > 1:
        half = (a.size + 1) // 2
        a, upper = a[:half].copy(), a[half:]
        a[: upper.size] += upper
    return a[0]


def _lane(v: Number, j: Number) -> Value:
    if _M.skipped and isinstance(v, Value) and not v.wide:
        return v
    if not isinstance(v, Value) or not v.wide or v.elem == "truth":
        raise Refused(f"lane() wants a varying number, not {_kind(v)}")
    at = _index(j)
    if not 0 <= at < _M.lanes:
        raise Refused(f"lane {at} of {_M.lanes}")
    return Value(v.a[at], v.elem)


def _barrier() -> None:
    if _M.frames and _M.frames[-1].is_only:
        raise Refused("barrier() under only(): every lane must reach it")
    _M.epoch += 1


# -- words: lane spaces -----------------------------------------------------------------------------------------


def _lanes(*sizes: int) -> Iterator[Any]:
    """Tiles of LANES indices, or of the places of a row-major grid; lanes past a grid's end repeat its last place."""
    for n in sizes:
        if _uniform_int(n, "a size of lanes()") < 0:
            raise Refused(f"lanes({', '.join(map(str, sizes))}): a size is never negative")
    home, total = _Space(("lanes", *sizes)), math.prod(sizes)
    _M.skipped |= total == 0
    for start in range(0, total, _M.lanes):
        places = _M.ids + start
        home.enter(places < total)
        depth = len(_M.frames)
        yield Place(places, home, start) if len(sizes) == 1 else _grid(np.minimum(places, total - 1), sizes, home)
        del _M.frames[depth - 1 :]


def _grid(flat: np.ndarray, sizes: Sequence[int], home: _Space) -> tuple[Place, ...]:
    out = []
    for n in reversed(sizes):
        out.append(Place(flat % n, home, None))
        flat = flat // n
    return tuple(reversed(out))


class _Span:
    """`with span(start, n) as i`."""

    def __init__(self, start: int, n: int) -> None:
        self.start, self.n = _uniform_int(start, "the start of a span"), _uniform_int(n, "the end of a span")
        if self.start < 0:
            raise Refused(f"span({start}, {n}): a start is never negative")

    def __enter__(self) -> Place:
        home, places = _Space(("span", self.start, self.n)), _M.ids + self.start
        home.enter(places < self.n)
        return Place(places, home, self.start)

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            _M.frames.pop()


class _Only:
    """`with only(c)`."""

    def __init__(self, c: Any) -> None:
        if isinstance(c, bool):
            c = Value(np.bool_(c), "truth")
        if not isinstance(c, Value) or c.elem != "truth":
            raise Refused(f"only() wants a truth value, not {_kind(c)}")
        if not _M.frames:
            raise Refused("only() stands inside a lane space")
        _joint_space((c,))
        self.c = np.broadcast_to(c.a, _M.lanes)

    def __enter__(self) -> None:
        f = _M.frames[-1]
        mask = self.c if f.mask is None else f.mask & self.c
        _M.frames.append(_Frame(f.key, f.home, self, None if mask.all() else mask, True))

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            _M.frames.pop()


def _inside(i: Value) -> Value:
    if not isinstance(i, Place):
        raise Refused(f"inside() takes the index of a lane space, not {_kind(i)}")
    _joint_space((i,))
    return Value(np.ones(_M.lanes, bool) if i.home.tile is None else i.home.tile, "truth", i.space)


def _first(i: Value) -> int:
    if not isinstance(i, Place) or i.start is None:
        raise Refused(f"first() takes the index of lanes(n) or of a span, not {_kind(i)}")
    return i.start


def _range(*bounds: int) -> range:
    out = range(*(_uniform_int(b, "a bound of range()") for b in bounds))
    _M.skipped |= not out
    return out


class Registers:
    """`private(n, init)`: n registers, unwritten where there is no first value."""

    __slots__ = ("values", "owner")

    def __init__(self, n: int, init: Number = None) -> None:
        if isinstance(init, float):
            raise Refused(f"the registers' first value {init!r} has no type: write f32({init!r})")
        self.values: list[Any] = [init] * _uniform_int(n, "the number of registers")
        self.owner = _M.frames[-1].owner if _M.frames else None

    def _at(self, k: Any) -> int:
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k < len(self.values):
            raise Refused(f"register [{k if isinstance(k, int) else _kind(k)}] of {len(self.values)} registers")
        return k

    def __getitem__(self, k: int) -> Any:
        v = self.values[self._at(k)]
        if v is None:
            raise Refused(f"register [{k}] is read before it is written")
        return v

    def __setitem__(self, k: int, v: Any) -> None:
        old = self.values[self._at(k)]
        outside = bool(_M.frames) and _M.frames[-1].owner is not self.owner
        self.values[k] = _keep(v, old) if outside else _adopt(v, old)


def _adopt(new: Any, old: Any) -> Any:
    """A value for a name or register that holds `old`: the type stays."""
    if isinstance(new, float) and not isinstance(old, Value):
        raise Refused(f"the literal {new!r} has no type here: write f32({new!r})")
    if isinstance(old, Value):
        if not isinstance(new, Value | int | float):
            raise Refused(f"{_kind(old)} cannot become {_kind(new)}")
        return new if isinstance(new, Value) and new.elem == old.elem else Value(_raw(new, old.elem), old.elem)
    if isinstance(new, Value) and isinstance(old, int) and not isinstance(old, bool):
        raise Refused(f"an index cannot become {_kind(new)}")
    return new


def _keep(new: Any, old: Any = None) -> Any:
    """What a name from outside the lane space holds after an assignment: lanes that take no part keep what they had."""
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(map(_keep, new, old))
    new = _adopt(new, old)
    frame = _M.frames[-1]
    if not isinstance(new, Value) or not isinstance(old, Value):
        if frame.is_only and isinstance(old, int) and new != old:
            raise Refused("an index cannot change under only(): lanes without the condition keep what they had")
        return new
    space = _joint_space((new, old))
    if not new.wide and not old.wide and not frame.is_only:
        return new
    if frame.mask is None and (new.wide or not old.wide):
        return new
    mask = np.True_ if frame.mask is None else frame.mask
    return Value(np.broadcast_to(np.where(mask, new.a, old.a), _M.lanes), new.elem, space or frame.key)


# -- memory -----------------------------------------------------------------------------------------------------


class _Shadow:
    """What is known of every place of a writable piece of memory. See Note [shadow]."""

    def __init__(self, start: int, nbytes: int, granule: int) -> None:
        self.start, self.granule = start, granule
        n = -(-nbytes // granule)
        self.written = np.zeros(n, bool)
        self.lane, self.group, self.epoch = np.zeros(n, np.int32), np.zeros(n, np.int64), np.zeros(n, np.int64)

    def cells(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        """[units, cells of a unit]"""
        return (address - self.start)[:, None] // self.granule + np.arange(nbytes // self.granule)

    def reading(self, cells: np.ndarray, readers: np.ndarray) -> tuple[int, str] | None:
        """Which unit may not be read, and why."""
        if not (written := self.written[cells]).all():
            return _which(~written), "is read before it is written"
        group = self.group[cells]
        if (foreign := (group >= _M.launch) & (group != _M.group)).any():
            return _which(foreign), "was written by another group: groups run in any order"
        lane = self.lane[cells]
        if (stale := (self.epoch[cells] == _M.epoch) & (lane != readers[:, None])).any():
            at = _which(stale)
            return at, f"was written by {_lane_text(lane[at].max())} since the last barrier()"
        return None

    def writing(self, cells: np.ndarray, writers: np.ndarray) -> tuple[int, str] | None:
        """Which unit may not be written, and why; marks all of them as written."""
        if len(cells) > 1:
            order = cells[:, 0].argsort(kind="stable")
            if (twice := np.diff(cells[order, 0]) < cells.shape[1]).any():
                return int(order[_which(twice[:, None]) + 1]), "is written by two lanes in one store"
        group, lane = self.group[cells], self.lane[cells]
        if (foreign := (group >= _M.launch) & (group != _M.group)).any():
            return _which(foreign), "was written by another group: groups are independent"
        if (race := (self.epoch[cells] == _M.epoch) & (lane != writers[:, None])).any():
            at = _which(race)
            return at, f"was written by {_lane_text(lane[at].max())} since the last barrier()"
        self.written[cells] = True
        self.lane[cells], self.group[cells], self.epoch[cells] = writers[:, None], _M.group, _M.epoch
        return None


def _which(bad: np.ndarray) -> int:
    return int(bad.any(1).argmax())


def _lane_text(lane: int) -> str:
    return f"lane {lane}" if lane >= 0 else "one lane (a uniform store)"


class View:
    """A parameter: memory with a type, extents in elements or blocks, and byte strides.

    Attributes:
        memory: uint8, all of it; `offset` is the byte of the first element.
        side: how many rows of blocks lie side by side (1: the file's layout); then their number is rounded up, padding included.
        shadow: what is known of its places, None for memory that nothing writes.
    """

    def __init__(self, name: str, memory: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: DType,
                 layout: str = "plain", is_writable: bool = False) -> None:
        self.name, self.memory, self.offset, self.dtype, self.is_writable = name, memory, offset, dtype, is_writable
        self.side = int(layout.removeprefix("lanes")) if layout != "plain" else 1
        self.shape = tuple(shape) if self.side == 1 else (*shape[:-2], -(-shape[-2] // self.side) * self.side, shape[-1])
        self.strides = tuple(strides) if self.side == 1 else self._side_by_side()
        self.address = memory.__array_interface__["data"][0] + offset
        self.shadow: _Shadow | None = None
        self.array = None
        if not dtype.is_block:
            self.array = np.ndarray(self.shape, dtype.numpy, memory.data if memory.size else None, offset, self.strides)

    def _side_by_side(self) -> tuple[int, ...]:
        """Strides of leading dimensions; the last two are worked out by `_block`."""
        step, out = self.shape[-2] * self.shape[-1] * self.dtype.nbytes, [0, 0]
        for extent in reversed(self.shape[:-2]):
            out.insert(0, step)
            step *= extent
        return tuple(out)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to behind the last."""
        if 0 in self.shape:
            return 0
        inner = self.dtype.nbytes
        if self.side > 1:
            inner = self.shape[-2] * self.shape[-1] * self.dtype.nbytes
        return inner + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def __getitem__(self, index: Any) -> Any:
        at, wide, space = self._indices(index)
        if self.dtype.is_block:
            return self._block(index, at, wide, space)
        mask = _M.mask if wide else None
        elem = VALUE[self.dtype.name]
        if wide and elem == "index":
            raise Refused(f"{self.name}: i64 elements are read one at a time")
        if mask is not None and not mask.any():
            return Value(np.zeros(_M.lanes, _NUMPY[elem]), elem, space)
        if self.shadow is not None:
            _check_read(self, self._address(at), wide, self.dtype.nbytes, lambda lane: self._text(at, lane))
        assert self.array is not None
        a = _grow(self.array[tuple(at)], self.dtype.name)
        if elem == "index":
            return int(a)
        return Value(a if mask is None else np.where(mask, a, 0).astype(a.dtype), elem, space)

    def __setitem__(self, index: Any, value: Number) -> None:
        if self.dtype.is_block:
            raise Refused(f"{self.name} holds blocks: they are written field by field")
        at, wide, _ = self._indices(index)
        stored = _stored(value, self.dtype.name, wide, self.name)
        if wide:
            _joint_space((value,))
        mask = _M.mask if wide else None
        if mask is not None and not mask.any():
            return
        _check_write(self, self._address(at), wide, self.dtype.nbytes, lambda lane: self._text(at, lane))
        if mask is not None:
            at = [p[mask] if isinstance(p, np.ndarray) else p for p in at]
            stored = stored[mask] if stored.ndim else stored
        assert self.array is not None
        self.array[tuple(at)] = stored

    def _indices(self, index: Any) -> tuple[list[Any], bool, tuple[Any, ...] | None]:
        """Checked indices: ints and int64 arrays; lanes that take no part are moved to a valid place."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) != len(self.shape):
            raise Refused(f"{self.name} takes {len(self.shape)} indices, {len(parts)} given")
        space = _joint_space(parts)
        wide = any(isinstance(p, Value) and p.wide for p in parts)
        mask = _M.mask if wide else None
        at = [_within(p, n, mask, f"{self.name}, dimension {d}") for d, (p, n) in enumerate(zip(parts, self.shape, strict=True))]
        return at, wide, space

    def _address(self, at: Sequence[Any]) -> Any:
        """Bytes from the start of `memory`."""
        return self.offset + sum(p * s for p, s in zip(at, self.strides, strict=True))

    def _text(self, at: Sequence[Any], lane: int) -> str:
        return f"{self.name}[{', '.join(str(p[lane] if isinstance(p, np.ndarray) else p) for p in at)}]"

    def _block(self, index: Any, at: list[Any], wide: bool, space: tuple[Any, ...] | None) -> Block:
        base, row = self._address(at), 0
        if self.side > 1:
            rows = index[-2]
            if not isinstance(rows, Place) or rows.start is None or rows.start % self.side or self.side != _M.lanes:
                raise Refused(f"{self.name} lies lanes{self.side}: with {_M.lanes} lanes its row index must be a span that starts at a "
                              f"multiple of {self.side}")
            row = at[-2] % self.side
            base = base + ((at[-2] // self.side) * self.shape[-1] + at[-1]) * self.dtype.nbytes * self.side
        return Block(self, base, row, wide, space, at)

    def __repr__(self) -> str:
        return f"<view {self.name}: {self.dtype}{list(self.shape)}>"


def _within(part: Any, extent: int, mask: np.ndarray | None, what: str) -> Any:
    """An index that is in range where it counts."""
    if isinstance(part, Value) and part.wide:
        if part.elem != "i32":
            raise Refused(f"{what}: an index is an integer (i32), not {part.elem}")
        a = part.a.astype(np.int64)
        if not ((a < 0) | (a >= extent)).any():
            return a
        _none((a < 0) | (a >= extent), f"{what}: index {{}} is out of range, the extent is {extent}", a)
        return np.clip(a, 0, max(extent - 1, 0))
    if isinstance(part, Value) and part.elem != "i32" or not isinstance(part, Value | int) or isinstance(part, bool):
        raise Refused(f"{what}: an index is an integer, not {_kind(part)}")
    at = int(part.a) if isinstance(part, Value) else part
    if not 0 <= at < extent:
        if mask is None or mask.any():
            raise Refused(f"{what}: index {at} is out of range, the extent is {extent}")
        return 0
    return at


def _grow(a: Any, unit: str) -> Any:
    """Stored units as f32, i32, u32 or i64."""
    if unit == "bf16":
        return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elem = VALUE[unit]
    return a if elem == "index" else a.astype(_NUMPY[elem])


def _stored(value: Number, unit: str, wide: bool, what: str) -> Any:
    """A value as the unit that holds it: f16 and bf16 round to nearest even, integers keep their low bits."""
    if isinstance(value, Value) and value.wide and not wide:
        raise Refused(f"{what}: a varying value is stored at a uniform index")
    elem = VALUE[unit]
    if elem == "index":
        return np.int64(_uniform_int(value, f"what is stored into {what}"))
    if isinstance(value, Value) and value.elem != elem or (isinstance(value, float) and elem != "f32"):
        raise Refused(f"{what} holds {unit}: {elem} is wanted, not {_kind(value)}")
    a = _raw(value, elem)
    if unit == "bf16":
        return to_bf16(np.atleast_1d(a)) if a.ndim else to_bf16(np.atleast_1d(a))[0]
    return a.astype(NUMPY_UNIT[unit])


def _accesses(address: Any, wide: bool, uniform: int) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and lane numbers of the lanes that take part; a uniform access has one, by lane `uniform`."""
    if not wide:
        return np.array([address]), np.array([uniform if _M.lanes > 1 else 0])
    mask = _M.mask
    address = np.broadcast_to(address, _M.lanes)
    return (address, _M.ids) if mask is None else (address[mask], _M.ids[mask])


def _check_read(view: View, address: Any, wide: bool, nbytes: int, text: Callable[[int], str]) -> None:
    shadow = view.shadow
    if shadow is None:
        return
    addresses, lanes = _accesses(address, wide, _EVERY)
    if fault := shadow.reading(shadow.cells(addresses + (view.address - view.offset), nbytes), lanes):
        _raise_at(fault, lanes, text)


def _check_write(view: View, address: Any, wide: bool, nbytes: int, text: Callable[[int], str]) -> None:
    shadow = view.shadow
    if shadow is None or not view.is_writable:
        raise Refused(f"{view.name} is an operand that is only read")
    if not wide and (mask := _M.mask) is not None and not mask.any():
        raise Refused(f"{text(0)}: a uniform store where no lane takes part")
    addresses, lanes = _accesses(address, wide, _ONE)
    if fault := shadow.writing(shadow.cells(addresses + (view.address - view.offset), nbytes), lanes):
        _raise_at(fault, lanes, text)


def _raise_at(fault: tuple[int, str], lanes: np.ndarray, text: Callable[[int], str]) -> None:
    lane = int(lanes[fault[0]])
    raise Refused(f"{text(max(lane, 0))} {fault[1]}" + (f" (lane {lane})" if lane >= 0 else ""))


class Block:
    """`w[row, b]`: a record whose fields are read and written, whatever the layout."""

    __slots__ = ("_view", "_base", "_row", "_wide", "_space", "_at")

    def __init__(self, view: View, base: Any, row: Any, wide: bool, space: tuple[Any, ...] | None, at: list[Any]) -> None:
        for name, v in zip(self.__slots__, (view, base, row, wide, space, at), strict=True):
            object.__setattr__(self, name, v)

    def _field(self, name: str) -> _Units:
        found = self._view.dtype.field(name)
        if found is None:
            known = ", ".join(f.name for f in self._view.dtype.fields)
            raise Refused(f"{self._view.dtype} blocks have the fields {known}, not {name}")
        return _Units(self, found)

    def __getattr__(self, name: str) -> Any:
        units = self._field(name)
        return units if units.field.count > 1 else units[0]

    def __setattr__(self, name: str, value: Number) -> None:
        self._field(name)[0] = value


class _Units:
    """A field of a block."""

    __slots__ = ("block", "field")

    def __init__(self, block: Block, field: Field) -> None:
        self.block, self.field = block, field

    def _place(self, k: Any) -> tuple[Any, bool, tuple[Any, ...] | None]:
        """Byte address of unit k (or of one a lane), whether it varies, and its lane space."""
        b, f = self.block, self.field
        own = Value(_M.ids, "i32", b._space) if b._wide else None
        space = _joint_space((own, k))
        wide = b._wide or (isinstance(k, Value) and k.wide)
        at = _within(k, f.count, _M.mask if wide else None, f"{b._view.name}: field {f.name}")
        unit, side = UNIT_NBYTES[f.unit], b._view.side
        return b._base + (f.offset + at * unit) * side + b._row * unit, wide, space

    def _text(self, lane: int) -> str:
        return f"{self.block._view._text(self.block._at, lane)}.{self.field.name}"

    def __getitem__(self, k: Any) -> Value:
        address, wide, space = self._place(k)
        view, f, elem = self.block._view, self.field, VALUE[self.field.unit]
        mask = _M.mask if wide else None
        if 0 in view.shape and mask is not None and not mask.any():
            return Value(np.zeros(_M.lanes, _NUMPY[elem]), elem, space)
        if view.shadow is not None and (mask is None or mask.any()):
            _check_read(view, address, wide, UNIT_NBYTES[f.unit], self._text)
        addresses = np.broadcast_to(address, _M.lanes if wide else 1)
        raw = view.memory[addresses[:, None] + np.arange(UNIT_NBYTES[f.unit])].view(NUMPY_UNIT[f.unit])[:, 0]
        a = _grow(raw, f.unit)
        return Value(a if wide else a[0], elem, space)

    def __setitem__(self, k: Any, value: Number) -> None:
        address, wide, _ = self._place(k)
        view, f = self.block._view, self.field
        stored = _stored(value, f.unit, wide, f"{view.name}.{f.name}")
        if wide:
            _joint_space((value,))
        mask = _M.mask if wide else None
        if mask is not None and not mask.any():
            return
        n = UNIT_NBYTES[f.unit]
        _check_write(view, address, wide, n, self._text)
        addresses = np.broadcast_to(address, _M.lanes if wide else 1)
        rows = np.ascontiguousarray(np.broadcast_to(stored, addresses.shape)).view(np.uint8).reshape(-1, n)
        if mask is not None:
            addresses, rows = addresses[mask], rows[mask]
        view.memory[addresses[:, None] + np.arange(n)] = rows


class _Absent:
    """An operand that was left out, or a dimension that only such an operand has."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: Any) -> Any:
        raise Refused(f"the operand {self.name} was left out: guard what reads it with `if {self.name.upper()}:`")

    def __setitem__(self, index: Any, value: Any) -> None:
        self[index]


def watch(views: Sequence[View], fresh: Sequence[str] = ()) -> None:
    """Give views that may be written, and those that share memory with them, their shadow; `fresh` ones start as poison."""
    pieces = sorted((v for v in views if v.nbytes), key=lambda v: v.address)
    while pieces:
        piece, end = [pieces[0]], pieces[0].address + pieces[0].nbytes
        while len(piece) < len(pieces) and pieces[len(piece)].address < end:
            end = max(end, pieces[len(piece)].address + pieces[len(piece)].nbytes)
            piece.append(pieces[len(piece)])
        pieces = pieces[len(piece) :]
        if any(v.is_writable for v in piece):
            _share(piece, end, set(fresh))
    for v in views:
        if v.is_writable and v.shadow is None:
            v.shadow = _Shadow(v.address, 0, 1)


def _share(piece: Sequence[View], end: int, fresh: set[str]) -> None:
    """One shadow for views that overlap. What an operand holds counts as written, the rest is poison."""
    start = piece[0].address
    granule = math.gcd(*(g for v in piece for g in (v.address - start, *_grains(v))))
    shadow = _Shadow(start, end - start, granule)
    for v in piece:
        v.shadow = shadow
        if v.name not in fresh:
            _cells_of(v, shadow)[...] = True
    for v in piece:
        if v.name in fresh and v.side == 1:
            places = np.ndarray((*v.shape, v.dtype.nbytes), np.uint8, v.memory.data, v.offset, (*v.strides, 1))
            places[~np.repeat(_cells_of(v, shadow), granule, -1)] = 0xFF  # NaN in every float format


def _grains(v: View) -> Iterator[int]:
    """Byte distances between units of a view."""
    yield from (s for n, s in zip(v.shape, v.strides, strict=True) if n > 1)
    if not v.dtype.is_block:
        yield v.dtype.nbytes
    for f in (*v.dtype.fields, *v.dtype.aliases):
        yield from (f.offset * v.side, UNIT_NBYTES[f.unit], v.dtype.nbytes * v.side)


def _cells_of(v: View, shadow: _Shadow) -> np.ndarray:
    """The `written` cells of a view: [its shape, cells of an element]."""
    g, at = shadow.granule, (v.address - shadow.start) // shadow.granule
    if v.side > 1:
        return shadow.written[at : at + v.nbytes // g]
    return np.lib.stride_tricks.as_strided(shadow.written[at:], (*v.shape, v.dtype.nbytes // g), (*(s // g for s in v.strides), 1))


# -- the text ---------------------------------------------------------------------------------------------------

_FOREIGN = (ast.While, ast.Break, ast.Continue, ast.Lambda, ast.Try, ast.Raise, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal,
            ast.ClassDef, ast.Assert, ast.Delete, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.Yield, ast.Await, ast.Dict,
            ast.List, ast.Set, ast.JoinedStr, ast.keyword, ast.AnnAssign)
_CALLS: dict[type[ast.operator], str] = {ast.FloorDiv: "_quotient", ast.Mod: "_remainder", ast.Div: "_over"}


class _Rewrite(ast.NodeTransformer):
    """`v = e` on a name from outside a lane space becomes `v = _keep(e, v)`; `//`, `%` and `/` become calls. Lines stay."""

    def __init__(self, fail: Callable[[ast.AST, str], KernelError]) -> None:
        self.fail = fail
        self.sure: set[str] = set()  # names that have a value
        self.maybe: set[str] = set()  # names that have one on some way here
        self.outer: set[str] = set()  # names made outside the innermost lane space

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _FOREIGN):
            raise self.fail(node, f"`{type(node).__name__.lower()}` is not in the language")
        return super().visit(node)

    def _block(self, node: Any, new: set[str], is_space: bool) -> Any:
        """A loop's or a `with`'s body: names made inside end with it."""
        before = set(self.sure), set(self.maybe), set(self.outer)
        if is_space:
            self.outer = self.sure | self.maybe
        self.sure |= new
        node.body = [self.visit(s) for s in node.body]
        self.sure, self.maybe, self.outer = before
        return node

    def visit_For(self, node: ast.For) -> Any:
        word = node.iter.func.id if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) else ""
        if word not in ("lanes", "range", "static") or node.orelse:
            raise self.fail(node, "loops go over range(..), static(..) or lanes(..)")
        node.iter = self.visit(node.iter)
        new = set(_names(node.target))
        self._check_names(node.target, new)
        return self._block(node, new, word == "lanes")

    def visit_With(self, node: ast.With) -> Any:
        call = node.items[0].context_expr
        word = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if len(node.items) != 1 or word not in ("span", "only"):
            raise self.fail(node, "`with` takes span(start, n) or only(c)")
        node.items[0].context_expr = self.visit(call)
        target = node.items[0].optional_vars
        new = set(_names(target)) if target else set()
        self._check_names(node, new)
        return self._block(node, new, True)

    def visit_If(self, node: ast.If) -> Any:
        node.test = self.visit(node.test)
        before = set(self.sure)
        node.body = [self.visit(s) for s in node.body]
        one, self.sure = self.sure, set(before)
        node.orelse = [self.visit(s) for s in node.orelse]
        self.maybe |= one | self.sure
        self.sure &= one
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        for part in ast.walk(read):
            ast.copy_location(part, node.target)
        whole = ast.copy_location(ast.BinOp(read, node.op, node.value), node)
        return self.visit(ast.copy_location(ast.Assign([node.target], whole), node))

    def visit_Assign(self, node: ast.Assign) -> Any:
        if len(node.targets) != 1:
            raise self.fail(node, "one target an assignment")
        node.value = self.visit(node.value)
        target = node.targets[0]
        names = set(_names(target))
        self._check_names(target, names)
        if isinstance(target, ast.Name):
            node.value = self._kept(target, node.value)
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) == len(node.value.elts):
            pairs = zip(target.elts, node.value.elts, strict=True)
            node.value.elts = [self._kept(t, v) if isinstance(t, ast.Name) else v for t, v in pairs]
        elif isinstance(target, ast.Tuple):
            raise self.fail(node, "several names take as many values")
        node.targets = [self.visit(target)]
        self.sure |= names
        return node

    def _kept(self, target: ast.Name, value: ast.expr) -> ast.expr:
        bare = value.operand if isinstance(value, ast.UnaryOp) else value
        is_float = isinstance(bare, ast.Constant) and isinstance(bare.value, float)
        if is_float and target.id not in self.sure:
            raise self.fail(target, f"{target.id} = {ast.unparse(value)} has no type: write f32({ast.unparse(value)})")
        old: ast.expr = ast.Name(target.id, ast.Load())
        if target.id not in self.outer:
            return _call("_adopt", [value, old], value) if is_float else value
        if target.id not in self.sure:  # no value where the branch that makes it was not taken
            old = _call("_locals().get", [ast.Constant(target.id)], value)
        return _call("_keep", [value, old], value)

    def _check_names(self, node: ast.AST, names: set[str]) -> None:
        if taken := names & (set(WORDS) - set(_DECODER_WORDS)):
            raise self.fail(node, f"{sorted(taken)[0]} is a word and cannot be a name")

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        name = _CALLS.get(type(node.op))
        return _call(name, [node.left, node.right], node) if name else node

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            raise self.fail(node, "one comparison at a time: combine with &")
        return self.generic_visit(node)


def _names(node: ast.AST) -> Iterator[str]:
    """Names a piece of text assigns."""
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _call(name: str, args: list[ast.expr], at: ast.AST) -> ast.expr:
    head = ast.parse(name, mode="eval").body
    made = ast.Call(head, args, [])
    for part in (*ast.walk(head), made, *args):
        if not hasattr(part, "lineno"):
            ast.copy_location(part, at)
    for part in ast.walk(head):
        ast.copy_location(part, at)
    return ast.copy_location(made, at)


class _Text:
    """A function's rewritten code and its free names with the place of their first use."""

    def __init__(self, function: Function) -> None:
        self.function = function
        tree = ast.parse(function.source).body[0]
        assert isinstance(tree, ast.FunctionDef)
        tree.decorator_list, tree.returns = [], None
        bound = {*function.parameters, *_names(tree)}
        self.free: dict[str, tuple[int, int]] = {}
        for n in ast.walk(tree):
            if isinstance(n, ast.Name) and n.id not in bound:
                self.free.setdefault(n.id, (function.line + n.lineno - 1, n.col_offset))
        rewrite = _Rewrite(self.error)
        rewrite._check_names(tree, set(function.parameters))
        rewrite.sure = set(function.parameters)
        tree.body = [rewrite.visit(s) for s in tree.body]
        ast.fix_missing_locations(tree)
        ast.increment_lineno(tree, function.line - 1)
        module = compile(ast.Module([tree], []), function.file, "exec")
        self.code = next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.name)

    def error(self, node: ast.AST, message: str) -> KernelError:
        return located(self.function, message, self.function.line + getattr(node, "lineno", 1) - 1, getattr(node, "col_offset", 0))


def located(function: Function, message: str, line: int, column: int) -> KernelError:
    """An error at a line of the file that holds `function`."""
    lines = function.source.splitlines()
    at = line - function.line
    return KernelError(message, function.file, line, column, lines[at] if 0 <= at < len(lines) else "")


# -- binding ----------------------------------------------------------------------------------------------------

_DECODER_WORDS = ("codes", "scale", "offset")
WORDS: dict[str, Any] = {
    "lanes": _lanes, "span": _Span, "only": _Only, "inside": _inside, "first": _first, "static": _range, "range": _range, "tuple": tuple,
    "private": Registers, "f32": _convert("f32"), "i32": _convert("i32"), "u32": _convert("u32"), "as_f32": _same_bits("f32"),
    "as_i32": _same_bits("i32"), "as_u32": _same_bits("u32"), "index": _index, "where": _where, "fma": _float_word("fma", _fma, 3),
    "maximum": _extreme(max, np.fmax, np.maximum), "minimum": _extreme(min, np.fmin, np.minimum),
    "abs": _float_word("abs", np.abs), "rint": _float_word("rint", np.rint),
    "round_away": _float_word("round_away", _through_f64(lambda a: np.trunc(a + np.copysign(0.5, a)))),
    "sqrt": _float_word("sqrt", np.sqrt), "rsqrt": _float_word("rsqrt", lambda a: np.float32(1) / np.sqrt(a)),
    **{f.__name__: _float_word(f.__name__, _through_f64(f)) for f in (np.exp, np.exp2, np.log, np.log1p, np.tanh, np.sin, np.cos)},
    "erf": _float_word("erf", _through_f64(_erf)), "byte": _byte_word(np.int8), "ubyte": _byte_word(np.uint8), "pack": _pack,
    "dot4": _dot4, "dot": _dot, "nibbles": _nibbles, "group_sum": _across("group_sum", _tree_sum),
    "group_max": _across("group_max", np.fmax.reduce), "group_min": _across("group_min", np.fmin.reduce), "lane": _lane,
    "barrier": _barrier, "INF": math.inf, **dict.fromkeys(_DECODER_WORDS)}
"""What every word means here; the three decoder words mean the functions of a block's format."""

_HIDDEN = {"__builtins__": {}, "_keep": _keep, "_adopt": _adopt, "_locals": builtins.locals, "_quotient": _quotient,
           "_remainder": _remainder, "_over": _over}
_texts: dict[Function, _Text] = {}
_bound: dict[tuple[Function, tuple[tuple[str, int], ...]], Callable[..., Any]] = {}


def bind(function: Function, constants: Mapping[str, int]) -> Callable[..., Any]:
    """A callable that runs the text with its free names replaced: constants, words, decoders, functions of the language.

    Raises:
        KernelError: an unknown name, or text that is not in the language; called, any fault of the kernel, with its place.
    """
    key = function, tuple(sorted(constants.items()))
    if key in _bound:
        return _bound[key]
    text = _texts.get(function)
    if text is None:
        text = _texts[function] = _Text(function)
    space: dict[str, Any] = dict(_HIDDEN)
    code = FunctionType(text.code, space, function.name)

    def run(*args: Any) -> Any:
        try:
            return code(*args)
        except KernelError:
            raise
        except Exception as error:
            raise _explain(function, error) from error

    _bound[key] = run  # before names are resolved: a function may name itself
    try:
        space.update((name, _resolve(text, name, constants)) for name in text.free)
    except KernelError:
        del _bound[key]
        raise
    return run


def _resolve(text: _Text, name: str, constants: Mapping[str, int]) -> Any:
    """What a free name of the text stands for."""
    if name in constants:
        return constants[name]
    if name in _DECODER_WORDS:
        return _decoder(name, constants)
    if name in WORDS:
        return WORDS[name]
    found = text.function.globals.get(name)
    if isinstance(found, Function):
        return bind(found, constants)
    if isinstance(found, Table):
        return _Entries(found)
    if isinstance(found, int | float) and name.isupper():
        return found
    raise located(text.function, f"unknown name {name}: it is no parameter, constant, word or function of the language", *text.free[name])


def _decoder(word: str, constants: Mapping[str, int]) -> Callable[..., Any]:
    def run(block: Any, *places: Any) -> Any:
        if not isinstance(block, Block):
            raise Refused(f"{word} takes a block first, not {_kind(block)}")
        dtype = block._view.dtype
        meaning = DECODERS.get(dtype.name, {}).get(word)
        if meaning is not None:
            return bind(meaning, constants)(block, *places)
        if word == "offset" and dtype.name in DECODERS and not dtype.has_offset:
            return Value(np.float32(0), "f32")
        raise Refused(f"{dtype} blocks have no {word}: no decoder is registered for it")

    return run


def _explain(function: Function, error: Exception) -> Exception:
    """A fault as a KernelError at the line of the text where it happened; an error of our own as it is."""
    line, column, is_inner = function.line, 0, False
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        is_inner = code.co_filename == function.file
        if is_inner:
            place = next(itertools.islice(code.co_positions(), trace.tb_lasti // 2, None), (trace.tb_lineno,))
            line, column = trace.tb_lineno, (place[2] or 0) if len(place) > 2 else 0
        trace = trace.tb_next
    if isinstance(error, Refused):
        return located(function, str(error), line, column)
    if isinstance(error, RecursionError):
        return located(function, "functions of the language do not call themselves", line, column)
    if not is_inner:
        return error
    if isinstance(error, NameError):
        name = str(error).partition("'")[2].partition("'")[0]
        return located(function, f"{name} is read before it is written", line, column)
    return located(function, f"{type(error).__name__}: {error}", line, column)


# -- launching --------------------------------------------------------------------------------------------------


def launch(call: Call, variant: Variant, memory: Memory) -> None:
    """Run a variant, and the launch behind it, for every group.

    `memory` gives, for a tensor, the uint8 memory it lies in and the byte of its first element. The number of lanes is the call's.

    Raises:
        KernelError: any fault of the kernel, with its place in the text.
    """
    with _LOCK, np.errstate(all="ignore"):
        launches = binding.bind(call, variant)
        views = _views(call, launches, memory)
        contract = call.op.contract
        present = [v for v in views.values() if isinstance(v, View)]
        watch(present, [v.name for v in present if v.is_writable and not (contract.writes and v.name == contract.result.name)])
        try:
            for one in launches:
                _run_groups(one, {**{d: _Absent(d) for d in contract.dims}, **views})
        finally:
            _M.frames.clear()


def _views(call: Call, launches: Sequence[Binding], memory: Memory) -> dict[str, View | _Absent]:
    """Operands and scratch memory by name."""
    out: dict[str, View | _Absent] = {}
    for o in call.op.contract.views:
        t = call.tensors.get(o.name)
        if t is None:
            out[o.name] = _Absent(o.name)
            continue
        where, offset = memory(t)
        shape = (*t.shape[:-1], t.shape[-1] // t.dtype.block_size)
        out[o.name] = View(o.name, where, offset, padded(shape, len(o.dims), 1), padded(t.strides, len(o.dims), 0), t.dtype,
                           call.layouts.get(o.name, "plain"), o.name == call.op.contract.result.name)
    for name, shape in {n: s for one in launches for n, s in one.scratch.items()}.items():
        fresh = np.full(F32.nbytes * math.prod(shape), 0xFF, np.uint8)
        out[name] = View(name, fresh, 0, shape, row_major(shape, F32), F32, is_writable=True)
    return out


def _run_groups(one: Binding, views: Mapping[str, Any]) -> None:
    function = one.function
    kernel = bind(function, one.constants)
    floats = {name: Value(np.float32(value), "f32") for name, value in one.floats.items()}
    names = function.parameters[len(one.groups) :]
    known = {**{n: _Absent(n) for n in names if one.constants.get(n.upper()) == 0}, **views, **one.ints, **floats}
    if missing := [n for n in names if n not in known]:
        raise located(function, f"the parameter {missing[0]} is no operand, dimension, size or parameter of the op", function.line, 0)
    args = [known[name] for name in names]
    _M.start(one.constants["LANES"])
    for group in itertools.product(*map(range, one.extents)):
        _M.next_group()
        kernel(*group, *args)
