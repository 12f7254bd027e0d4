"""From the typed tree to text for targets where a lane is a work-item or a thread: OpenCL C, and Python for numba.cuda.

Every lane runs the whole text with its own number `lane`; what is uniform is computed by each of them alike. A lane space becomes a branch,
or, where its body needs all lanes (words across lanes, spaces inside, uniform names), a predicate on each read and write.

Words across lanes go through arrays the group shares. `_Fences` puts a barrier only where an array is read after another lane's write, or
written after another lane's read. After a branch, or a loop that may not run at all, what was open before it or in it counts as open; a
loop whose next turn would meet what this one leaves open ends in a barrier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.dtypes import UNIT_NBYTES, Field
from engine.lang.functions import FUNCTIONS
from engine.lang.tree import (
    Assign,
    Barrier,
    Expr,
    Grid,
    If,
    Kernel,
    Only,
    Range,
    Span,
    Stmt,
    Store,
    StoreField,
    Tiles,
    Type,
    Var,
    ViewType,
)
from engine.lang.walk import check_function

SPACES = (Tiles, Grid, Span)


@dataclass(frozen=True)
class SpanText:
    """The index of a lane space: where its tile starts, and this lane's own index."""

    start: str
    value: str


@dataclass(frozen=True)
class Place:
    """Where a block is: its address, and whether LANES blocks lie interleaved there."""

    address: str
    packed: int


@dataclass
class _Fences:
    """Shared arrays written or read since the last barrier."""

    written: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)

    def clear(self) -> None:
        self.written, self.read = set(), set()

    def __or__(self, other: _Fences) -> _Fences:
        return _Fences(self.written | other.written, self.read | other.read)


class SpmdPrinter(ABC):
    """A printer's walk. A dialect says how types, operators, memory and control flow are written.

    Attributes:
        names: text of each kind of value ("float", "int", ...).
        reserved: names of the dialect that a kernel's names must not have.
    """

    names: dict[str, str]
    reserved: frozenset[str] = frozenset()

    def __init__(self, kernel: Kernel, options: Any = None) -> None:
        self.kernel, self.options, self.lanes = kernel, options, int(kernel.constants["LANES"])
        self.out: list[str] = []
        self.depth = 0
        self.env: dict[str, str | SpanText | Place] = {}
        self.insides: dict[str, str] = {}
        self.mask: str | None = None
        self.taken: set[str] = set()
        self.fences = _Fences()
        self.turns: list[_Fences] = []  # what the loops around write and read in a turn
        self.shared: dict[str, str] = {}  # array -> kind of its elements
        self.functions: dict[str, list[str]] = {}  # elementary functions in use -> their text
        self.tables: dict[str, Any] = {}
        self.commented = ""

    # -- the dialect --------------------------------------------------------------------------------------------

    @abstractmethod
    def literal(self, kind: str, value: Any) -> str: ...

    @abstractmethod
    def infix(self, op: str, kind: str, x: str, y: str) -> str:
        """add, sub, mul, div, floordiv, mod, shl, shr, and, or, xor, or a comparison, of two numbers of one kind."""

    @abstractmethod
    def minus(self, kind: str, x: str) -> str: ...

    @abstractmethod
    def convert(self, have: str, want: str, x: str) -> str: ...

    @abstractmethod
    def bits(self, have: str, want: str, x: str) -> str: ...

    @abstractmethod
    def choose(self, kind: str, condition: str, x: str, y: str) -> str: ...

    @abstractmethod
    def both(self, x: str, y: str) -> str:
        """Two truth values, both of which hold."""

    @abstractmethod
    def word(self, name: str, kind: str, args: Sequence[str]) -> str:
        """fma, maximum, minimum, abs, rint, round_away, sqrt, rsqrt, pack, byte0 .. byte3, ubyte0 .. ubyte3."""

    @abstractmethod
    def dot4(self, x: str, y: str, acc: str, low: int, high: int) -> str: ...

    def dot(self, xs: Sequence[str], ys: Sequence[str], low: int, high: int) -> str:
        out = self.literal("i32", 0)
        for x, y in zip(xs, ys, strict=True):
            out = self.dot4(x, y, out, low, high)
        return out

    @abstractmethod
    def table(self, table: Any, index: str) -> str:
        """One value of a constant table."""

    @abstractmethod
    def nibbles(self, table: Any, quad: str) -> str:
        """Four bytes 0 .. 15, each replaced by that byte of a table of 16."""

    @abstractmethod
    def offset(self, base: str, terms: Sequence[tuple[str, int | str]], constant: int = 0) -> str:
        """base + the sum of index * stride + constant: an address."""

    @abstractmethod
    def load(self, unit: str, address: str, alignment: int) -> str:
        """The stored element as a value."""

    @abstractmethod
    def store(self, unit: str, address: str, alignment: int, value: str) -> str:
        """A statement that stores a value."""

    @abstractmethod
    def declare(self, kind: str, name: str, value: str, constant: bool) -> None: ...

    @abstractmethod
    def assign(self, name: str, value: str) -> None: ...

    @abstractmethod
    def open_if(self, condition: str) -> None: ...

    @abstractmethod
    def open_else(self) -> None: ...

    @abstractmethod
    def open_loop(self, name: str, start: str, stop: str, step: int) -> None:
        """A loop of an index; `close` ends it."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def statement(self, text: str) -> None: ...

    @abstractmethod
    def comment(self, text: str) -> None: ...

    @abstractmethod
    def fence(self, everything: bool) -> None:
        """A barrier of the group: of the arrays it shares, or of all memory."""

    @abstractmethod
    def share(self, array: str, value: str) -> None:
        """This lane writes its slot of a shared array."""

    @abstractmethod
    def slot(self, array: str, lane: str) -> str:
        """Another lane's slot."""

    @abstractmethod
    def fold(self, word: str, kind: str, array: str) -> str:
        """group_sum, group_max or group_min of a shared array: the upper half folded onto the lower half, until one is left."""

    @abstractmethod
    def function_text(self, name: str, params: Sequence[tuple[str, str]], kind: str, body: Sequence[str], result: str) -> list[str]:
        """The definition of an elementary function."""

    @abstractmethod
    def call(self, name: str, args: Sequence[str]) -> str: ...

    # -- names --------------------------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        """A name not used yet: the kernel's own where it can be."""
        base = f"{name}_" if name in self.reserved else name
        made, n = base, 2
        while made in self.taken:
            made, n = f"{base}_{n}", n + 1
        self.taken.add(made)
        return made

    def zero(self, kind: str) -> str:
        return self.literal(kind, 0)

    # -- statements ---------------------------------------------------------------------------------------------

    def block(self, body: Sequence[Stmt]) -> None:
        for s in body:
            if s.source and s.source != self.commented:
                self.comment(s.source)
                self.commented = s.source
            getattr(self, f"stmt_{type(s).__name__}")(s)

    def stmt_Barrier(self, s: Barrier) -> None:
        self.fence(everything=True)
        self.fences.clear()

    def stmt_Assign(self, s: Assign) -> None:
        var = s.var
        if s.value.type.kind == "block":
            place = self.block_place(s.value)
            name = self.fresh(var.name)
            self.declare("block", name, place.address, constant=True)
            self.env[var.id] = Place(name, place.packed)
            return
        if s.value.type.kind == "span":
            self.env[var.id] = self.span(s.value)
            return
        value = self.value(s.value)
        known = self.env.get(var.id)
        if known is None:
            name = self.fresh(var.name)
            self.env[var.id] = name
            self.declare(var.type.kind, name, value, constant=var.homes == 1)
        else:
            assert isinstance(known, str)
            name = known
            keeps = s.masked and self.mask is not None and var.type.varying
            self.assign(name, self.choose(var.type.kind, str(self.mask), value, name) if keeps else value)
        if var.lane_read:
            self.write_shared(self.array(f"{name}_of", var.type.kind), name)

    def stmt_Store(self, s: Store) -> None:
        self.store_value(s, self.value(s.value))

    def store_value(self, s: Store, value: str) -> None:
        view = self.kernel.views[s.view]
        varying = any(i.type.varying for i in s.indices)
        unit = view.dtype.name
        self.put(self.store(unit, self.place(s.view, s.indices).address, UNIT_NBYTES[unit], value), varying)

    def stmt_StoreField(self, s: StoreField) -> None:
        place, value = self.block_place(s.block), self.value(s.value)
        address, unit, alignment = self.field_place(place, s.block, s.field, s.k)
        self.put(self.store(unit, address, alignment, value), s.block.type.varying or s.k.type.varying)

    def put(self, statement: str, varying: bool) -> None:
        """A store: by the lanes that take part, or by one lane where all would write the same."""
        condition = self.mask if varying else self.infix("eq", "i32", "lane", self.literal("i32", 0))
        if condition is None:
            self.statement(statement)
            return
        self.open_if(condition)
        self.statement(statement)
        self.close()

    def stmt_Range(self, s: Range) -> None:
        start, stop = self.value(s.start), self.steady(s.stop, "stop")
        name = self.fresh(s.var.name)
        self.env[s.var.id] = name
        with self.turn(s.body):
            self.open_loop(name, start, stop, s.step.data)
            self.block(s.body)
        self.close()

    def stmt_If(self, s: If) -> None:
        if _only_stores_folds(s):
            self.stores_if(s)
            return
        self.open_if(self.value(s.condition))
        before = self.fences
        self.fences = before | _Fences()
        self.block(s.body)
        after = before | self.fences
        if s.orelse:
            self.open_else()
            self.fences = before | _Fences()
            self.block(s.orelse)
            after |= self.fences
        self.fences = after
        self.close()

    def stores_if(self, s: If) -> None:
        """Words across lanes before the branch, the stores in it. A compiler may copy what follows a branch with a barrier in it once for
        either way (PoCL does), which makes a hundred copies of a kernel with seven such branches in a row."""
        condition, values = self.value(s.condition), []
        for t in s.body:
            assert isinstance(t, Store)
            self.comment(t.source)
            self.commented = t.source
            values.append((t, self.value(t.value)))
        self.open_if(condition)
        for t, value in values:
            self.store_value(t, value)
        self.close()

    @contextmanager
    def turn(self, body: Sequence[Stmt]) -> Iterator[None]:
        """The body of a loop, its head and all but its end."""
        if self.fences.written and _meets(body):
            self.fence(everything=False)  # once here, not in each turn
            self.fences.clear()
        before = self.fences
        self.fences = before | _Fences()
        self.turns.append(_Fences())
        yield
        mine = self.turns.pop()
        if self.fences.read & mine.written or self.fences.written & mine.read:
            self.fence(everything=False)
            self.fences = before
        else:
            self.fences = before | self.fences
        if self.turns:
            self.turns[-1] |= mine

    def stmt_Only(self, s: Only) -> None:
        condition = self.value(s.condition)
        if self.mask is None and not needs_all_lanes(s.body):
            self.open_if(condition)
            self.block(s.body)
            self.close()
            return
        whole = condition if self.mask is None else self.both(self.mask, condition)
        with self.masked(self.named("truth", "active", whole)):
            self.block(s.body)

    @contextmanager
    def masked(self, mask: str | None) -> Iterator[None]:
        outer, self.mask = self.mask, mask
        yield
        self.mask = outer

    def named(self, kind: str, name: str, value: str) -> str:
        made = self.fresh(name)
        self.declare(kind, made, value, constant=True)
        return made

    def stmt_Tiles(self, s: Tiles) -> None:
        n = self.steady(s.n, "n")
        with self.turn(s.body):
            self.tiles(s, n)
        self.close()

    def tiles(self, s: Tiles, n: str) -> None:
        """The head and the body of a loop over tiles."""
        if not needs_all_lanes(s.body):
            name = self.fresh(s.var.name)
            self.open_loop(name, self.lane_index(), n, self.lanes)
            self.env[s.var.id] = SpanText(self.infix("sub", "index", name, self.lane_index()), name)
            self.insides[s.var.id] = self.literal("truth", 1)
            with self.masked(None):
                self.block(s.body)
        else:
            start = self.fresh(f"{s.var.name}_first")
            self.open_loop(start, self.literal("index", 0), n, self.lanes)
            self.tile(s.var, start, n)
            with self.masked(self.insides[s.var.id]):
                self.block(s.body)

    def lane_index(self) -> str:
        return self.convert("i32", "index", "lane")

    def tile(self, var: Var, start: str, limit: str | None) -> None:
        """One tile of indices; `limit` is None where all lanes take part."""
        value = self.named("index", var.name, self.infix("add", "index", start, self.lane_index()))
        self.env[var.id] = SpanText(start, value)
        whole = self.infix("lt", "index", value, limit) if limit is not None else ""
        self.insides[var.id] = self.named("truth", f"inside_{var.name}", whole) if whole else self.literal("truth", 1)

    def stmt_Span(self, s: Span) -> None:
        start = self.steady(s.start, "start")
        full = s.start.op == s.limit.op == "const" and s.start.data + self.lanes <= s.limit.data
        self.tile(s.var, start, None if full else self.steady(s.limit, "limit"))
        if full:
            with self.masked(None):
                self.block(s.body)
        elif needs_all_lanes(s.body):
            with self.masked(self.insides[s.var.id]):
                self.block(s.body)
        else:
            self.open_if(self.insides[s.var.id])
            with self.masked(None):
                self.block(s.body)
            self.close()

    def stmt_Grid(self, s: Grid) -> None:
        sizes = [z.data if z.op == "const" else None for z in s.sizes]
        total = self.steady(s.sizes[0], "n")
        inner = 1
        for z in sizes[1:]:
            assert z is not None
            inner *= z
        total = self.named("index", "total", self.infix("mul", "index", total, self.literal("index", inner)))
        with self.turn(s.body):
            self.grid(s, sizes, total)
        self.close()

    def grid(self, s: Grid, sizes: Sequence[int | None], total: str) -> None:
        """The head and the body of a loop over the places of a grid."""
        mask: str | None = None
        if needs_all_lanes(s.body):
            start = self.fresh("first")
            self.open_loop(start, self.literal("index", 0), total, self.lanes)
            place = self.named("index", "place", self.infix("add", "index", start, self.lane_index()))
            mask = self.named("truth", "inside", self.infix("lt", "index", place, total))
            last = self.infix("sub", "index", total, self.literal("index", 1))
            place = self.named("index", "place", self.choose("index", mask, place, last))
        else:
            place = self.fresh("place")
            self.open_loop(place, self.lane_index(), total, self.lanes)
        rest = self.named("i32", "rest", self.convert("index", "i32", place))
        for var, size in zip(s.vars[:0:-1], sizes[:0:-1], strict=True):
            self.env[var.id] = self.named("i32", var.name, self.infix("mod", "i32", rest, self.literal("i32", size)))
            rest = self.named("i32", "rest", self.infix("floordiv", "i32", rest, self.literal("i32", size)))
        self.env[s.vars[0].id] = rest
        for var in s.vars:
            self.insides[var.id] = mask or self.literal("truth", 1)
        with self.masked(mask):
            self.block(s.body)

    # -- shared memory ------------------------------------------------------------------------------------------

    def array(self, name: str, kind: str) -> str:
        if name not in self.shared:
            self.shared[name] = kind
        return name

    def write_shared(self, array: str, value: str) -> None:
        if array in self.fences.read:
            self.fence(everything=False)
            self.fences.clear()
        self.share(array, value)
        for f in (self.fences, *self.turns[-1:]):
            f.written.add(array)

    def read_shared(self, array: str) -> None:
        if array in self.fences.written:
            self.fence(everything=False)
            self.fences.clear()
        for f in (self.fences, *self.turns[-1:]):
            f.read.add(array)

    def scratch(self, kind: str, value: str) -> str:
        """A shared array that holds this value of every lane, ready to be read."""
        pool = [f"scratch_{kind}_{k}" for k in range(4)]
        array = self.array(next((a for a in pool if a not in self.fences.read | self.fences.written), pool[0]), kind)
        self.write_shared(array, value)
        self.read_shared(array)
        return array

    # -- memory -------------------------------------------------------------------------------------------------

    def place(self, name: str, indices: Sequence[Expr]) -> Place:
        view = self.kernel.views[name]
        packed = 0 if view.layout == "plain" else int(view.layout.removeprefix("lanes"))
        terms: list[tuple[str, int | str]] = []
        for d, e in enumerate(indices):
            stride = self.stride(name, view, d, max(packed, 1))
            index = self.span(e).start if packed and e.type.kind == "span" else self.position(e)
            terms.append((index, stride))
        masked = self.mask is not None and not packed and any(e.type.varying for e in indices)
        if not masked:
            return Place(self.offset(name, terms), packed)
        some = [(self.choose("index", str(self.mask), i, self.zero("index")) if e.type.varying else i, s)
                for (i, s), e in zip(terms, indices, strict=True)]
        return Place(self.offset(name, some), packed)

    def stride(self, name: str, view: ViewType, d: int, times: int) -> int | str:
        if view.unit and d == view.ndim - 1:
            return view.dtype.nbytes * times
        return f"{name}_stride_{d}"

    def position(self, e: Expr) -> str:
        """An index of 64 bits."""
        if e.type.kind == "span":
            return self.span(e).value
        text = self.value(e)
        return text if e.type.kind == "index" else self.convert("i32", "index", text)

    def block_place(self, e: Expr) -> Place:
        if e.op == "name":
            found = self.env[e.data.id]
            assert isinstance(found, Place)
            return found
        return self.place(e.data, e.args)

    def field_place(self, place: Place, block: Expr, name: str, k: Expr) -> tuple[str, str, int]:
        """Address, unit and alignment of unit k of a field."""
        assert block.type.view is not None
        dtype = block.type.view.dtype
        found: Field | None = dtype.field(name)
        assert found is not None
        unit, times = UNIT_NBYTES[found.unit], max(1, place.packed)
        terms: list[tuple[str, int | str]] = []
        constant = found.offset * times
        if k.op == "const":
            constant += k.data * unit * times
        else:
            at = self.position(k)
            if self.mask is not None and k.type.varying:
                at = self.choose("index", self.mask, at, self.zero("index"))
            terms.append((at, unit * times))
        if place.packed:
            terms.append((self.lane_index(), unit))
        return self.offset(place.address, terms, constant), found.unit, unit if place.packed else dtype.alignment(found)

    # -- expressions --------------------------------------------------------------------------------------------

    def steady(self, e: Expr, name: str) -> str:
        """A value that stays what it is while a loop runs."""
        text = self.value(e)
        if e.op in ("const", "int", "group") or (e.op == "name" and e.data.homes <= 1):
            return text
        return self.named("index", name, text)

    def span(self, e: Expr) -> SpanText:
        if e.op == "name":
            found = self.env[e.data.id]
            assert isinstance(found, SpanText)
            return found
        base, by = self.span(e.args[0]), self.value(e.args[1])
        return SpanText(self.infix(e.op, "index", base.start, by), self.infix(e.op, "index", base.value, by))

    def value(self, e: Expr) -> str:
        """The value of an expression; a span as its i32 number."""
        if e.type.kind == "span":
            return self.convert("index", "i32", self.span(e).value)
        return getattr(self, f"op_{e.op}", self.op_infix)(e)

    def op_const(self, e: Expr) -> str:
        return self.literal(e.type.kind, e.data)

    def op_name(self, e: Expr) -> str:
        found = self.env[e.data.id]
        assert isinstance(found, str), f"{e.data.name} is no number"
        return found

    def op_int(self, e: Expr) -> str:
        return str(self.env[f"parameter {e.data}"])

    op_float = op_group = op_int

    def op_first(self, e: Expr) -> str:
        return self.span(Expr("name", Type("span", True), data=e.data)).start

    def op_inside(self, e: Expr) -> str:
        return self.insides[e.data.id]

    def op_convert(self, e: Expr) -> str:
        (x,) = e.args
        have = "i32" if x.type.kind == "span" else x.type.kind
        text = self.value(x)
        return text if have == e.type.kind else self.convert(have, e.type.kind, text)

    def op_bits(self, e: Expr) -> str:
        return self.bits(e.args[0].type.kind, e.type.kind, self.value(e.args[0]))

    def op_neg(self, e: Expr) -> str:
        return self.minus(e.type.kind, self.value(e.args[0]))

    def op_where(self, e: Expr) -> str:
        return self.choose(e.type.kind, *(self.value(a) for a in e.args))

    def op_infix(self, e: Expr) -> str:
        x, y = (self.value(a) for a in e.args)
        return self.infix(e.op, e.data or e.type.kind, x, y)

    def op_word(self, e: Expr) -> str:
        args = [self.value(a) for a in e.args]
        if e.data in FUNCTIONS:
            self.define(e.data, [a.type.kind for a in e.args])
            return self.call(e.data, args)
        return self.word(e.data, e.args[0].type.kind if e.args else e.type.kind, args)

    def define(self, name: str, kinds: Sequence[str]) -> None:
        """The text of an elementary function, once, behind those it calls."""
        if name in self.functions:
            return
        params, body, result = check_function(FUNCTIONS[name], [Type(k) for k in kinds], self.kernel.constants)
        inner = type(self)(self.kernel, self.options)
        inner.functions, inner.tables = self.functions, self.tables
        for p in params:
            inner.env[p.id] = inner.fresh(p.name)
        inner.block(body)
        text = inner.value(result)
        listed = [(p.type.kind, str(inner.env[p.id])) for p in params]
        self.functions[name] = self.function_text(name, listed, result.type.kind, inner.out, text)

    def op_dot(self, e: Expr) -> str:
        values = [self.value(a) for a in e.args]
        n = len(values) // 2
        return self.dot(values[:n], values[n:-1], *e.data)

    def op_dot4(self, e: Expr) -> str:
        x, y, acc = (self.value(a) for a in e.args)
        return self.dot4(x, y, acc, *e.data)

    def op_reduce(self, e: Expr) -> str:
        kind = e.type.kind
        array = self.scratch(kind, self.value(e.args[0]))
        return self.named(kind, e.data, self.fold(e.data, kind, array))

    def op_lane(self, e: Expr) -> str:
        x, j = e.args
        kind, at = e.type.kind, self.value(j)
        if x.op == "name" and x.data.lane_read:
            array = self.array(f"{self.env[x.data.id]}_of", kind)
            self.read_shared(array)
        else:
            array = self.scratch(kind, self.value(x))
        return self.named(kind, "of_lane", self.slot(array, at))

    def op_table(self, e: Expr) -> str:
        self.tables[e.data.name] = e.data
        (i,) = e.args
        text = self.value(i)
        return self.table(e.data, text if i.type.kind == "index" else self.convert(i.type.kind, "index", text))

    def op_nibbles(self, e: Expr) -> str:
        self.tables[e.data.name] = e.data
        return self.nibbles(e.data, self.value(e.args[0]))

    def op_read(self, e: Expr) -> str:
        view = self.kernel.views[e.data]
        unit = view.dtype.name
        place = self.place(e.data, e.args)
        text = self.load(unit, place.address, UNIT_NBYTES[unit])
        if self.mask is None or place.packed or not any(i.type.varying for i in e.args):
            return text
        return self.choose(e.type.kind, self.mask, text, self.zero(e.type.kind))

    def op_field(self, e: Expr) -> str:
        address, unit, alignment = self.field_place(self.block_place(e.args[0]), e.args[0], e.data, e.args[1])
        return self.load(unit, address, alignment)


# -- what a body needs ------------------------------------------------------------------------------------------


def needs_all_lanes(body: Sequence[Stmt]) -> bool:
    """Whether lanes that take no part must come along: for words across lanes, lane spaces inside, uniform names and uniform stores."""
    for s in body:
        if isinstance(s, (Barrier, *SPACES)):
            return True
        if isinstance(s, Assign) and (s.var.lane_read or (s.masked and not s.var.type.varying)):
            return True
        if isinstance(s, Store) and not any(i.type.varying for i in s.indices):
            return True
        if isinstance(s, StoreField) and not (s.block.type.varying or s.k.type.varying):
            return True
        if any(_crosses(e) for e in expressions(s)):
            return True
        if isinstance(s, (Range, If, Only)) and (needs_all_lanes(s.body) or (isinstance(s, If) and needs_all_lanes(s.orelse))):
            return True
    return False


def _only_stores_folds(s: If) -> bool:
    """Whether a branch only stores values across lanes, made of names: what costs no memory access to compute where it is not wanted."""
    values = [t.value for t in s.body if isinstance(t, Store)]
    return not s.orelse and len(values) == len(s.body) and any(_crosses(v) for v in values) and not any(_touches_memory(v) for v in values)


def _touches_memory(e: Expr) -> bool:
    return e.op in ("read", "field", "table") or any(_touches_memory(a) for a in e.args)


def _meets(body: Sequence[Stmt]) -> bool:
    """Whether lanes meet anywhere in a body."""
    return any((isinstance(s, Assign) and s.var.lane_read) or any(_crosses(e) for e in expressions(s)) or _meets(getattr(s, "body", ()))
               or _meets(getattr(s, "orelse", ())) for s in body)


def _crosses(e: Expr) -> bool:
    return e.op in ("reduce", "lane") or any(_crosses(a) for a in e.args)


def expressions(s: Stmt) -> tuple[Expr, ...]:
    """The expressions a statement holds itself."""
    if isinstance(s, Assign):
        return (s.value,)
    if isinstance(s, Store):
        return (*s.indices, s.value)
    if isinstance(s, StoreField):
        return (s.block, s.k, s.value)
    if isinstance(s, Range):
        return (s.start, s.stop)
    if isinstance(s, Tiles):
        return (s.n,)
    if isinstance(s, Grid):
        return s.sizes
    if isinstance(s, Span):
        return (s.start, s.limit)
    return (s.condition,) if isinstance(s, (If, Only)) else ()
