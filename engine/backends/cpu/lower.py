"""From the typed tree to LLVM: a varying value is a vector of LANES elements.

Every lane loop becomes a loop of full tiles without masks and one masked copy of its body. The entry of a kernel is
`void f(int64 params, int64 begin, int64 end)` over its groups. The parameter block holds 8-byte slots: per view its address and byte
strides, then group extents, sizes, float32 scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.backends.cpu import words
from engine.backends.cpu.words import I1, I32, I64, PTR, SCALAR, STORED, Features, Target, wide
from engine.dtypes import UNIT_NBYTES, Field
from engine.lang.functions import FUNCTIONS
from engine.lang.tree import Assign, Barrier, Expr, Grid, If, Kernel, Only, Range, Span, Stmt, Store, StoreField, Tiles, Var, ViewType
from engine.lang.walk import check_function

CACHE_LINE, BLOCKS_AHEAD = 64, 2


@dataclass
class _View:
    type: ViewType
    address: Any
    strides: list[Any]

    @property
    def packed(self) -> int:
        """Rows side by side, 0 for the plain layout."""
        return 0 if self.type.layout == "plain" else int(self.type.layout.removeprefix("lanes"))


@dataclass
class _SpanValue:
    """start, start + 1, ...: one index for each lane."""

    start: Any


@dataclass
class _Place:
    """Where an element or block is: one address, LANES elements in a row, or one address per lane."""

    address: Any
    kind: str  # "one", "row" or "each"
    packed: int = 0


@dataclass
class _Cell:
    """A name's memory; LLVM promotes it to a register unless a lane of it is read at a computed index."""

    pointer: Any
    type: Any


def lower(builder: Any, kernel: Kernel, features: Features, args: Sequence[Any]) -> None:
    """Emit the kernel's entry at the builder: args are params, begin, end."""
    Lower(builder, kernel, features).entry(*args)


class Lower:
    def __init__(self, builder: Any, kernel: Kernel, features: Features) -> None:
        self.t, self.b, self.kernel, self.lanes = Target(builder, features), builder, kernel, features.lanes
        self.env: dict[str, Any] = {}  # name id -> value, span or cell
        self.masks: list[Any] = []  # the innermost mask, None where all lanes take part
        self.insides: dict[str, Any] = {}  # span id -> its mask
        self.views: dict[str, _View] = {}
        self.scalars: dict[str, Any] = {}

    # -- entry --------------------------------------------------------------------------------------------------

    def slot(self, params: Any, k: int, type: Any = I64) -> Any:
        p = self.b.gep(params, [ir.Constant(I64, 8 * k)], source_etype=words.I8)
        return self.b.load(p, typ=type)

    def entry(self, params: Any, begin: Any, end: Any) -> None:
        params = self.b.inttoptr(params, PTR)
        k = 0
        for name, t in self.kernel.views.items():
            strides = [self.slot(params, k + 1 + d) for d in range(t.ndim)]
            if t.unit:
                packed = 1 if t.layout == "plain" else int(t.layout.removeprefix("lanes"))
                strides[-1] = ir.Constant(I64, t.dtype.nbytes * packed)
            self.views[name] = _View(t, self.slot(params, k), strides)
            k += 1 + t.ndim
        extents = [self.slot(params, k + i) for i in range(len(self.kernel.groups))]
        k += len(extents)
        for name in self.kernel.ints:
            self.scalars[name] = self.slot(params, k)
            k += 1
        for name in self.kernel.floats:
            self.scalars[name] = self.slot(params, k, words.F32)
            k += 1
        with self.loop(begin, end, ir.Constant(I64, 1)) as g:
            self.groups(g, extents)
            self.block(self.kernel.body)

    def groups(self, g: Any, extents: list[Any]) -> None:
        for name, extent in zip(self.kernel.groups[:0:-1], extents[:0:-1], strict=True):
            self.scalars[name] = self.b.urem(g, extent)
            g = self.b.udiv(g, extent)
        self.scalars[self.kernel.groups[0]] = g

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any) -> Iterator[Any]:
        """A counted loop; the counter is a phi."""
        entry, fn = self.b.block, self.b.function
        head, body, done = (fn.append_basic_block(n) for n in ("head", "body", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(start, entry)
        self.b.cbranch(self.b.icmp_signed("<", i, stop), body, done)
        self.b.position_at_end(body)
        yield i
        i.add_incoming(self.b.add(i, step, flags=("nsw",)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(done)

    # -- names and masks ----------------------------------------------------------------------------------------

    @property
    def mask(self) -> Any:
        return self.masks[-1] if self.masks else None

    @contextmanager
    def masked(self, mask: Any) -> Iterator[None]:
        self.masks.append(mask)
        yield
        self.masks.pop()

    def cell(self, var: Var) -> _Cell:
        type = SCALAR[var.type.kind]
        type = self.t.vector(type) if var.type.varying else type
        return _Cell(cgutils.alloca_once(self.b, type, name=var.name), type)

    def stmt_Assign(self, s: Assign) -> None:
        var = s.var
        if s.value.type.kind == "block":
            place = self.env[var.id] = self.block_place(s.value)
            self.fetch_ahead(place, s.value)
            return
        value = self.number(s.value) if s.value.type.kind != "span" else self.span(s.value)
        if var.homes == 1 and not var.lane_read:
            self.env[var.id] = value
            return
        known = self.env.get(var.id)
        first = not isinstance(known, _Cell)
        home = known if isinstance(known, _Cell) else self.cell(var)
        self.env[var.id] = home
        value = self.t.splat(value) if var.type.varying else value
        if s.masked and not first and self.mask is not None and var.type.varying:
            value = self.b.select(self.mask, value, self.b.load(home.pointer, typ=home.type))
        self.b.store(value, home.pointer)

    # -- statements ---------------------------------------------------------------------------------------------

    def block(self, body: Sequence[Stmt]) -> None:
        for s in body:
            getattr(self, f"stmt_{type(s).__name__}")(s)

    def stmt_Barrier(self, s: Barrier) -> None:
        """The lanes of a vector never run apart."""

    def stmt_Range(self, s: Range) -> None:
        with self.loop(self.number(s.start), self.number(s.stop), self.number(s.step)) as i:
            self.env[s.var.id] = i
            self.block(s.body)

    def stmt_If(self, s: If) -> None:
        with self.b.if_else(self.number(s.condition)) as (then, orelse):
            with then:
                self.block(s.body)
            with orelse:
                self.block(s.orelse)

    def stmt_Only(self, s: Only) -> None:
        condition = self.t.splat(self.number(s.condition))
        outer = self.mask
        with self.masked(condition if outer is None else self.b.and_(condition, outer)):
            self.block(s.body)

    def tile_mask(self, start: Any, limit: Any) -> Any:
        """Lanes whose index start + lane is below the limit."""
        rest = self.b.trunc(self.b.sub(limit, start), I32)
        return self.b.icmp_signed("<", self.t.iota(), self.t.splat(rest))

    def tile(self, var: Var, start: Any, mask: Any, body: Sequence[Stmt]) -> None:
        self.env[var.id], self.insides[var.id] = _SpanValue(start), mask
        with self.masked(mask):
            self.block(body)

    def split(self, n: Any, each: Callable[[Any, Any], None]) -> None:
        """Full tiles without a mask, then one masked copy for the rest."""
        fixed = n.constant if isinstance(n, ir.Constant) else None
        end = self.b.and_(n, ir.Constant(I64, -self.lanes)) if fixed is None else ir.Constant(I64, fixed // self.lanes * self.lanes)
        if fixed is None or fixed >= self.lanes:
            with self.loop(ir.Constant(I64, 0), end, ir.Constant(I64, self.lanes)) as start:
                each(start, None)
        if fixed is None:
            with self.b.if_then(self.b.icmp_signed("<", end, n)):
                each(end, self.tile_mask(end, n))
        elif fixed % self.lanes:
            each(end, self.tile_mask(end, n))

    def stmt_Tiles(self, s: Tiles) -> None:
        self.split(self.number(s.n), lambda start, mask: self.tile(s.var, start, mask, s.body))

    def stmt_Span(self, s: Span) -> None:
        start, limit = self.number(s.start), self.number(s.limit)
        if isinstance(start, ir.Constant) and isinstance(limit, ir.Constant):
            full = start.constant + self.lanes <= limit.constant
            self.tile(s.var, start, None if full else self.tile_mask(start, limit), s.body)
            return
        whole = self.b.icmp_signed("<=", self.b.add(start, ir.Constant(I64, self.lanes)), limit)
        with self.b.if_else(whole) as (then, orelse):
            with then:
                self.tile(s.var, start, None, s.body)
            with orelse:
                self.tile(s.var, start, self.tile_mask(start, limit), s.body)

    def stmt_Grid(self, s: Grid) -> None:
        sizes = [self.number(z) for z in s.sizes]
        inner = sizes[-1].constant
        if inner % self.lanes == 0:
            self.nested(s, sizes, [])
            return
        total = sizes[0]
        for z in sizes[1:]:
            total = self.b.mul(total, z)
        self.split(total, lambda start, mask: self.flat(s, sizes, total, start, mask))

    def nested(self, s: Grid, sizes: list[Any], done: list[Any]) -> None:
        """LANES divides the last extent: all indices but the last are uniform here."""
        at = len(done)
        step = self.lanes if at == len(sizes) - 1 else 1
        with self.loop(ir.Constant(I64, 0), sizes[at], ir.Constant(I64, step)) as i:
            if at < len(sizes) - 1:
                self.nested(s, sizes, [*done, i])
                return
            for var, v in zip(s.vars, done, strict=False):
                self.env[var.id] = self.b.trunc(v, I32)
            self.env[s.vars[-1].id] = _SpanValue(i)
            self.insides[s.vars[-1].id] = None
            with self.masked(None):
                self.block(s.body)

    def flat(self, s: Grid, sizes: list[Any], total: Any, start: Any, mask: Any) -> None:
        """One tile of the flattened grid; lanes past the end repeat the last place, so that decoders stay inside their blocks."""
        place = self.b.add(self.t.splat(self.b.trunc(start, I32)), self.t.iota())
        if mask is not None:
            last = self.t.splat(self.b.trunc(self.b.sub(total, ir.Constant(I64, 1)), I32))
            place = self.b.select(mask, place, last)
        for var, size in zip(s.vars[:0:-1], sizes[:0:-1], strict=True):
            n = ir.Constant(self.t.vector(I32), [size.constant] * self.lanes)
            self.env[var.id] = self.b.urem(place, n)
            place = self.b.udiv(place, n)
        self.env[s.vars[0].id] = place
        for var in s.vars:
            self.insides[var.id] = mask
        with self.masked(mask):
            self.block(s.body)

    def stmt_Store(self, s: Store) -> None:
        view = self.views[s.view]
        place = self.place(view, s.indices)
        self.store(place, view.type.dtype.name, self.number(s.value))

    def stmt_StoreField(self, s: StoreField) -> None:
        block = self.block_place(s.block)
        field = self.field_of(s.block, s.field)
        self.store(self.field_place(block, field, s.k), field.unit, self.number(s.value))

    # -- memory -------------------------------------------------------------------------------------------------

    def position(self, e: Expr) -> Any:
        """An index: a span, a scalar of 64 bits, or a vector of 64-bit numbers."""
        if e.op == "name" and isinstance(self.env.get(e.data.id), _SpanValue):
            return self.env[e.data.id]
        if e.type.kind == "span":
            return self.span(e)
        v = self.number(e)
        if wide(v):
            return self.b.sext(v, self.t.vector(I64))
        return v if v.type == I64 else self.b.sext(v, I64)

    def place(self, view: _View, indices: Sequence[Expr]) -> _Place:
        base, kind = view.address, "one"
        each: Any = None
        positions = [self.position(e) for e in indices]
        contiguous = view.type.unit and not view.type.dtype.is_block and not any(_differs(p) for p in positions[:-1])
        for d, (i, stride) in enumerate(zip(positions, view.strides, strict=True)):
            if isinstance(i, _SpanValue):
                if view.packed or (contiguous and d == view.type.ndim - 1):
                    base, kind = self.b.add(base, self.b.mul(i.start, stride)), kind if view.packed else "row"
                    continue
                offsets = self.b.mul(self.b.add(self.t.splat(i.start), self.t.iota(I64)), self.t.splat(stride))
            elif wide(i):
                offsets = self.b.mul(i, self.t.splat(stride))
            else:
                base = self.b.add(base, self.b.mul(i, stride))
                continue
            kind, each = "each", offsets if each is None else self.b.add(each, offsets)
        if kind != "each":
            return _Place(base, kind, view.packed)
        if self.mask is not None:  # lanes that take no part look at a place that exists
            each = self.b.select(self.mask, each, self.t.const(each.type, 0))
        return _Place(self.b.add(self.t.splat(base), each), "each")

    def block_place(self, e: Expr) -> _Place:
        if e.op == "name":
            return self.env[e.data.id]
        return self.place(self.views[e.data], e.args)

    def fetch_ahead(self, place: _Place, block: Expr) -> None:
        """Ask for the block after the next one of the same rows, where blocks are large: their many instructions leave the core too little
        room to look ahead by itself. Past the end of the weights this asks for nothing that is used, and never faults."""
        assert block.type.view is not None
        if not place.packed or block.type.view.dtype.block_size <= 32:
            return
        nbytes = block.type.view.dtype.nbytes * place.packed
        for line in range(0, nbytes, CACHE_LINE):
            p = self.b.inttoptr(self.b.add(place.address, ir.Constant(I64, BLOCKS_AHEAD * nbytes + line)), PTR)
            self.t.call("llvm.prefetch.p0", ir.VoidType(), [p, *(ir.Constant(I32, k) for k in (0, 3, 1))])

    @staticmethod
    def field_of(block: Expr, name: str) -> Field:
        assert block.type.view is not None
        found = block.type.view.dtype.field(name)
        assert found is not None
        return found

    def field_place(self, block: _Place, field: Field, k: Expr) -> _Place:
        """Unit k of a field: LANES units side by side in an interleaved block, else one, a row of them, or one per lane."""
        at = self.position(k)
        unit, times = UNIT_NBYTES[field.unit], max(1, block.packed)
        if isinstance(at, _SpanValue):
            if block.kind == "one" and not block.packed:
                start = self.b.add(self.b.mul(at.start, ir.Constant(I64, unit)), ir.Constant(I64, field.offset))
                return _Place(self.b.add(block.address, start), "row")
            at = self.b.add(self.t.splat(at.start), self.t.iota(I64))
        if wide(at) and self.mask is not None:
            at = self.b.select(self.mask, at, self.t.const(at.type, 0))
        offset = self.b.add(self.b.mul(at, self.t.const(at.type, unit * times)), self.t.const(at.type, field.offset * times))
        if block.packed:
            assert not wide(offset), "a field of interleaved blocks takes a uniform index"
            return _Place(self.b.add(block.address, offset), "row")
        address, offset = self.t.level(block.address, offset)
        return _Place(self.b.add(address, offset), "each" if wide(address) else "one")

    def load(self, place: _Place, unit: str) -> Any:
        """The stored elements as values; lanes that take no part read zero."""
        type, mask = STORED[unit], self.mask
        if place.kind == "one":
            v = self.b.load(self.b.inttoptr(place.address, PTR), typ=type)
            v.align = 1
        elif place.kind == "row":
            v = self.load_row(place.address, self.t.vector(type), None if place.packed else mask)
        else:
            v = ir.Constant(self.t.vector(type), ir.Undefined)
            for k in range(self.lanes):
                p = self.b.inttoptr(self.b.extract_element(place.address, ir.Constant(I32, k)), PTR)
                one = self.b.load(p, typ=type)
                one.align = 1
                v = self.b.insert_element(v, one, ir.Constant(I32, k))
            if mask is not None:
                v = self.b.select(mask, v, ir.Constant(v.type, None))
        return words.grow(self.t, v, unit)

    def load_row(self, address: Any, type: Any, mask: Any) -> Any:
        p = self.b.inttoptr(address, PTR)
        if mask is None:
            v = self.b.load(p, typ=type)
            v.align = 1
            return v
        name = f"llvm.masked.load.{words.mangle(type)}.p0"
        return self.t.call(name, type, [p, ir.Constant(I32, 1), mask, ir.Constant(type, None)])

    def store(self, place: _Place, unit: str, value: Any) -> None:
        v, mask = words.shrink(self.t, value, unit), self.mask
        if place.kind == "one":
            self.b.store(v, self.b.inttoptr(place.address, PTR)).align = 1
        elif place.kind == "row" and mask is None:
            self.b.store(self.t.splat(v), self.b.inttoptr(place.address, PTR)).align = 1
        elif place.kind == "row":
            v = self.t.splat(v)
            name = f"llvm.masked.store.{words.mangle(v.type)}.p0"
            self.t.call(name, ir.VoidType(), [v, self.b.inttoptr(place.address, PTR), ir.Constant(I32, 1), mask])
        else:
            self.scatter(place.address, self.t.splat(v), mask)

    def scatter(self, addresses: Any, v: Any, mask: Any) -> None:
        for k in range(self.lanes):
            at = ir.Constant(I32, k)
            p, one = self.b.inttoptr(self.b.extract_element(addresses, at), PTR), self.b.extract_element(v, at)
            if mask is None:
                self.b.store(one, p).align = 1
                continue
            with self.b.if_then(self.b.extract_element(mask, at)):
                self.b.store(one, p).align = 1

    # -- expressions --------------------------------------------------------------------------------------------

    def span(self, e: Expr) -> _SpanValue:
        if e.op == "name":
            return self.env[e.data.id]
        base = self.span(e.args[0])
        by = self.number(e.args[1])
        return _SpanValue((self.b.add if e.op == "add" else self.b.sub)(base.start, by))

    def number(self, e: Expr) -> Any:
        """The value of an expression: a scalar, or a vector of LANES; a span as its i32 numbers."""
        if e.type.kind == "span":
            return self.indices(self.span(e))
        return getattr(self, f"op_{e.op}", self.op_binary)(e)

    def indices(self, s: _SpanValue) -> Any:
        return self.b.add(self.t.splat(self.b.trunc(s.start, I32)), self.t.iota())

    def op_const(self, e: Expr) -> Any:
        return ir.Constant(SCALAR[e.type.kind], float(e.data) if e.type.kind == "f32" else _wrap(e.data, SCALAR[e.type.kind].width))

    def op_name(self, e: Expr) -> Any:
        found = self.env[e.data.id]
        if isinstance(found, _SpanValue):
            return self.indices(found)
        return self.b.load(found.pointer, typ=found.type) if isinstance(found, _Cell) else found

    def op_reduce(self, e: Expr) -> Any:
        return words.group(self.t, e.data, e.type.kind, self.t.splat(self.number(e.args[0])))

    def op_int(self, e: Expr) -> Any:
        return self.scalars[e.data]

    op_float = op_group = op_int

    def op_first(self, e: Expr) -> Any:
        return self.env[e.data.id].start

    def op_inside(self, e: Expr) -> Any:
        mask = self.insides[e.data.id]
        return ir.Constant(self.t.vector(I1), [1] * self.lanes) if mask is None else mask

    def op_convert(self, e: Expr) -> Any:
        (x,) = e.args
        have = "i32" if x.type.kind == "span" else x.type.kind
        return words.convert(self.t, self.number(x), have, e.type.kind)

    def op_bits(self, e: Expr) -> Any:
        v = self.number(e.args[0])
        return self.b.bitcast(v, self.t.like(SCALAR[e.type.kind], v))

    def op_neg(self, e: Expr) -> Any:
        v = self.number(e.args[0])
        return self.b.fneg(v) if e.type.kind == "f32" else self.b.neg(v)

    def op_where(self, e: Expr) -> Any:
        c, x, y = (self.number(a) for a in e.args)
        if wide(c) or wide(x) or wide(y):
            x, y = self.t.splat(x), self.t.splat(y)
        return self.b.select(c, x, y)

    def op_binary(self, e: Expr) -> Any:
        x, y = self.t.level(*(self.number(a) for a in e.args))
        return words.OPERATORS[e.data or e.type.kind][e.op](self.b, x, y)

    def op_word(self, e: Expr) -> Any:
        args = self.t.level(*(self.number(a) for a in e.args))
        if e.data in FUNCTIONS:
            return self.function(e.data, e, args)
        return words.WORDS[e.data](self.t, e.args[0].type.kind if e.args else e.type.kind, *args)

    def function(self, name: str, e: Expr, args: list[Any]) -> Any:
        """A word written in the language: its text, on these values."""
        params, body, result = check_function(FUNCTIONS[name], [a.type for a in e.args], self.kernel.constants)
        outer = self.env
        self.env = {p.id: v for p, v in zip(params, args, strict=True)}
        with self.masked(None):
            self.block(body)
            value = self.number(result)
        self.env = outer
        return value

    def op_dot(self, e: Expr) -> Any:
        values = [self.number(a) for a in e.args]
        n = len(values) // 2
        return words.dot(self.t, values[:n], values[n:-1], values[-1], *e.data)

    def op_dot4(self, e: Expr) -> Any:
        return words.dot4(self.t, *(self.number(a) for a in e.args), *e.data)

    def op_table(self, e: Expr) -> Any:
        return words.gather(self.t, e.data, self.position(e.args[0]))

    def op_nibbles(self, e: Expr) -> Any:
        return words.nibbles(self.t, e.data, self.number(e.args[0]))

    def op_lane(self, e: Expr) -> Any:
        x, j = e.args
        at = self.number(j)
        if x.op == "name" and isinstance(self.env[x.data.id], _Cell) and not isinstance(at, ir.Constant):
            cell = self.env[x.data.id]
            p = self.b.gep(cell.pointer, [at], source_etype=cell.type.element)
            return self.b.load(p, typ=cell.type.element)
        return self.b.extract_element(self.t.splat(self.number(x)), at)

    def op_read(self, e: Expr) -> Any:
        view = self.views[e.data]
        return self.load(self.place(view, e.args), view.type.dtype.name)

    def op_field(self, e: Expr) -> Any:
        field = self.field_of(e.args[0], e.data)
        return self.load(self.field_place(self.block_place(e.args[0]), field, e.args[1]), field.unit)


def _differs(position: Any) -> bool:
    """Whether an index is another one for each lane."""
    return isinstance(position, _SpanValue) or wide(position)


def _wrap(value: int, bits: int) -> int:
    """A literal as two's complement of `bits`."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) and bits > 1 else value

