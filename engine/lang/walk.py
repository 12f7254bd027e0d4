"""The typed walk: the checker of the language, and the one source of types for every target.

It binds constants, unrolls static loops, inlines functions and decoders, and gives each name one type and one lane space. It repeats
until uniformity is stable: a name that becomes varying inside a loop is varying from its first line on.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.errors import KernelError
from engine.lang import rules
from engine.lang.function import Function
from engine.lang.rules import Refusal, binary, coerce, const, is_bare, make
from engine.lang.tree import (
    INDEX,
    SPAN,
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
    Table,
    Tiles,
    Type,
    Var,
    ViewType,
)
from engine.lang.words import DECODERS, INF, WORDS, Word


@dataclass
class _Frame:
    """A function being walked: its scopes, and how often each name is assigned in its text."""

    function: Function
    scopes: list[dict[str, Any]]
    assigned: Counter[str] = field(default_factory=Counter)


def check(function: Function, views: Mapping[str, ViewType], groups: Sequence[str], ints: Sequence[str], floats: Sequence[str],
          constants: Mapping[str, int]) -> Kernel:
    """Walk a kernel whose parameters and constants are known.

    Raises:
        KernelError: with file, line and caret, for anything that is not in the language.
    """
    promoted: dict[str, str | None] = {}
    while True:
        walk = Walk(function, views, constants, promoted)
        try:
            body = walk.kernel(groups, ints, floats)
        except KernelError:
            if walk.changed:  # uniformity was still being found out
                continue
            raise
        if not walk.changed:
            return Kernel(function.name, tuple(groups), dict(views), tuple(ints), tuple(floats), body, dict(constants))


def check_function(function: Function, types: Sequence[Type], constants: Mapping[str, int]) -> tuple[list[Var], list[Stmt], Expr]:
    """Walk a function with operands of these types: its parameters, statements and result."""
    promoted: dict[str, str | None] = {}
    while True:
        walk = Walk(function, {}, constants, promoted)
        params = [walk.fresh(name, type) for name, type in zip(function.parameters, types, strict=True)]
        for p in params:
            p.space = "caller" if p.type.varying else None
        result = walk.inline(function, [walk.name_of(p) for p in params])
        if not walk.changed:
            return params, walk.out, result


class Walk:
    """One pass over a kernel. `promoted` holds what earlier passes found to be varying."""

    def __init__(self, function: Function, views: Mapping[str, ViewType], constants: Mapping[str, int],
                 promoted: dict[str, str | None]) -> None:
        self.views, self.constants, self.promoted = views, constants, promoted
        self.changed = False
        self.frames = [_Frame(function, [{}])]
        self.out: list[Stmt] = []
        self.count = 0
        self.level = 0  # masks in force
        self.space: str | None = None  # innermost lane space
        self.only_depth = 0

    # -- entry --------------------------------------------------------------------------------------------------

    def kernel(self, groups: Sequence[str], ints: Sequence[str], floats: Sequence[str]) -> list[Stmt]:
        function = self.frames[0].function
        tree = _parse(function)
        scope = self.frames[0].scopes[0]
        self.check_parameters(tree)
        scope |= {g: Expr("group", INDEX, data=g) for g in groups} | {i: Expr("int", INDEX, data=i) for i in ints}
        scope |= {f: Expr("float", Type("f32"), data=f) for f in floats} | {v: _View(v) for v in self.views}
        if missing := [p for p in function.parameters if p not in scope and self.constants.get(p.upper()) != 0]:
            self.fail(tree, f"the parameter {missing[0]} is no operand, dimension, size or parameter of the op")
        self.frames[0].assigned = _assigned(tree)
        self.block(tree.body)
        return self.out

    def inline(self, function: Function, args: Sequence[Expr]) -> Expr:
        """The value of a function's text on these operands; its statements go before the current one."""
        if len(args) != len(function.parameters):
            raise Refusal(f"takes {len(function.parameters)} operands, {len(args)} given")
        if len(self.frames) > 16:
            raise Refusal("functions of the language do not call themselves")
        tree = _parse(function)
        scope: dict[str, Any] = {p: self.once(a, p) for p, a in zip(function.parameters, args, strict=True)}
        self.frames.append(_Frame(function, [scope], _assigned(tree)))
        try:
            self.check_parameters(tree)
            if not tree.body or not isinstance(tree.body[-1], ast.Return) or tree.body[-1].value is None:
                self.fail(tree, f"{function.name} must end in `return value`")
            self.block(tree.body[:-1])
            last = tree.body[-1]
            assert isinstance(last, ast.Return) and last.value is not None
            return self.expr(last.value)
        finally:
            self.frames.pop()

    # -- names --------------------------------------------------------------------------------------------------

    def fail(self, node: ast.AST, message: str) -> None:
        f = self.frames[-1].function
        line = getattr(node, "lineno", 1)
        source = " " * f.indent + f.source.splitlines()[line - 1]
        raise KernelError(message, f.file, f.line + line - 1, f.indent + getattr(node, "col_offset", 0), source)

    def fresh(self, name: str, type: Type) -> Var:
        self.count += 1
        return Var(name, f"{name}.{self.count}", type, self.level)

    def name_of(self, var: Var) -> Expr:
        return Expr("name", var.type, data=var, space=var.space)

    def once(self, e: Expr, name: str = "t") -> Expr:
        """`e`, computed here under a name of its own: used again it is not computed again."""
        if e.op in ("const", "name", "group", "int", "float", "view") or is_bare(e):
            return e
        if e.op == "tuple":
            return Expr("tuple", e.type, tuple(self.once(a, f"{name}_{k}") for k, a in enumerate(e.args)))
        var = self.fresh(name, e.type)
        var.space, var.homes = e.space, 1
        self.out.append(Assign(var, e, False))
        return self.name_of(var)

    def lookup(self, name: str, node: ast.AST) -> Any:
        frame = self.frames[-1]
        for scope in reversed(frame.scopes):
            if name in scope:
                return scope[name]
        if name in self.constants:
            return const(self.constants[name])
        if name in WORDS or name in ("range", "tuple"):
            return WORDS.get(name, name)
        if name == "INF":
            return const(INF)
        found = frame.function.globals.get(name)
        if isinstance(found, (Function, Word, Table)):
            return found
        if isinstance(found, (int, float)) and name.isupper():
            return const(found)
        if frame.assigned[name]:
            self.fail(node, f"{name} is read before it is written here (a name made inside a loop or a branch ends with it)")
        known = [*WORDS, *self.constants, *(n for s in frame.scopes for n in s)]
        near = difflib.get_close_matches(name, known, 1)
        self.fail(node, f"unknown name {name}" + (f"; did you mean {near[0]}?" if near else ""))

    def check_parameters(self, tree: ast.FunctionDef) -> None:
        for name in self.frames[-1].function.parameters:
            if name in WORDS:
                self.fail(tree, f"the parameter {name} is named like a word")

    def check_name(self, node: ast.AST, name: str) -> None:
        if name in WORDS or name in self.constants:
            self.fail(node, f"{name} is a {'word' if name in WORDS else 'constant'} and cannot be a name")

    def assign(self, target: ast.AST, name: str, value: Expr) -> None:
        """Bind or assign one name."""
        self.check_name(target, name)
        frame = self.frames[-1]
        home = next((s for s in reversed(frame.scopes) if name in s), None)
        if value.op == "tuple" or value.type.kind == "block":
            if home is not None and home is not frame.scopes[-1]:
                self.fail(target, f"{name} is made outside and cannot be made again in a loop or a branch")
            frame.scopes[-1][name] = self.once(value, name)
            return
        if is_bare(value):
            if not isinstance(value.data, int):
                self.fail(target, f"{name} = {value.data!r} has no type: write f32({value.data!r})")
            if frame.assigned[name] <= 1:
                frame.scopes[-1][name] = value
                return
            value = coerce(value, "index")
        if value.type.kind == "span" and frame.assigned[name] <= 1:
            frame.scopes[-1][name] = value
            return
        if value.type.kind == "span":
            value = coerce(value, "i32")
        if home is None:
            var = self.fresh(name, value.type)
            if var.id in self.promoted:
                var.type, var.space = Type(value.type.kind, True), self.promoted[var.id]
            frame.scopes[-1][name] = var
        else:
            var = home[name]
            if not isinstance(var, Var):
                self.fail(target, f"{name} cannot be assigned: it is a parameter, a constant or a loop's index")
        self.put(target, var, value)

    def put(self, target: ast.AST, var: Var, value: Expr) -> None:
        if is_bare(value):
            value = coerce(value, var.type.kind)
        if value.type.kind != var.type.kind:
            try:
                value = coerce(value, var.type.kind)
            except Refusal:
                self.fail(target, f"{var.name} is {var.type.kind} and cannot become {value.type.kind}")
        if value.type.varying and not var.type.varying:
            self.promote(var, value.space)
        elif value.type.varying and var.space is None:
            var.space = value.space
        elif value.type.varying and value.space is not None and var.space != value.space:
            self.fail(target, f"the lanes of {var.name} mean {var.space}, the value's {value.space}: lanes are re-used")
        if var.type.varying and self.space is not None and var.space not in (None, self.space):
            self.fail(target, f"{var.name} was made varying in {var.space} and is assigned in {self.space}: write it inside its own space")
        if self.only_depth and not var.type.varying and var.level < self.level:
            self.fail(target, f"{var.name} is uniform: under only() lanes without the condition cannot keep it")
        var.homes += 1
        self.out.append(Assign(var, value, var.level < self.level))

    def promote(self, var: Var, space: str | None) -> None:
        """Walk again: this name is varying."""
        self.promoted[var.id] = space
        self.changed = True
        var.type, var.space = Type(var.type.kind, True), space

    # -- statements ---------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for s in statements:
            method: Any = getattr(self, f"stmt_{type(s).__name__}", None)
            if method is None:
                self.fail(s, f"`{type(s).__name__.lower()}` is not in the language")
            done = len(self.out)
            try:
                method(s)
            except Refusal as why:
                self.fail(s, str(why))
            for made in self.out[done:]:
                made.source = made.source or self.frames[-1].function.source.splitlines()[s.lineno - 1].strip()

    @contextmanager
    def scope(self) -> Iterator[list[Stmt]]:
        """Statements of their own list; names made inside end with it."""
        outer, self.out = self.out, []
        self.frames[-1].scopes.append({})
        try:
            yield self.out
        finally:
            self.frames[-1].scopes.pop()
            self.out = outer

    @contextmanager
    def lane_space(self, key: str) -> Iterator[list[Stmt]]:
        outer, self.space = self.space, key
        depth, self.only_depth = self.only_depth, 0
        self.level += 1
        try:
            with self.scope() as body:
                yield body
        finally:
            self.space, self.only_depth = outer, depth
            self.level -= 1

    def stmt_Pass(self, s: ast.Pass) -> None: ...

    def stmt_Expr(self, s: ast.Expr) -> None:
        if isinstance(s.value, ast.Constant) and isinstance(s.value.value, str):
            return
        if isinstance(s.value, ast.Call) and isinstance(s.value.func, ast.Name) and s.value.func.id == "barrier":
            if self.only_depth:
                self.fail(s, "barrier() under only(): every lane must reach it")
            self.out.append(Barrier())
            return
        self.fail(s, "this value is not used")

    def stmt_AugAssign(self, s: ast.AugAssign) -> None:
        read = ast.copy_location(_load(s.target), s)
        whole = ast.Assign([s.target], ast.copy_location(ast.BinOp(read, s.op, s.value), s))
        self.stmt_Assign(ast.copy_location(whole, s))

    def stmt_Assign(self, s: ast.Assign) -> None:
        if len(s.targets) != 1:
            self.fail(s, "one target an assignment")
        target = s.targets[0]
        if isinstance(target, ast.Tuple):
            if not isinstance(s.value, ast.Tuple) or len(s.value.elts) != len(target.elts):
                self.fail(s, "several names take as many values")
            assert isinstance(s.value, ast.Tuple)
            if all(_is_private(v) for v in s.value.elts):
                for t, v in zip(target.elts, s.value.elts, strict=True):
                    self.registers(ast.copy_location(ast.Assign([t], v), s), t)
                return
            values = [self.once(self.expr(v)) for v in s.value.elts]
            for one, value in zip(target.elts, values, strict=True):
                self.assign_to(one, value)
            return
        if _is_private(s.value):
            self.registers(s, target)
            return
        self.assign_to(target, self.expr(s.value))

    def assign_to(self, target: ast.expr, value: Expr) -> None:
        if isinstance(target, ast.Name):
            self.assign(target, target.id, value)
        elif isinstance(target, ast.Attribute):
            self.store_field(target, ast.Constant(0), value)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute):
            self.store_field(target.value, target.slice, value)
        elif isinstance(target, ast.Subscript):
            self.store(target, value)
        else:
            self.fail(target, "names, subscripts and fields can be assigned")

    def registers(self, s: ast.Assign, target: ast.expr) -> None:
        call = s.value
        assert isinstance(call, ast.Call)
        if not isinstance(target, ast.Name) or not 1 <= len(call.args) <= 2:
            self.fail(s, "registers are made by `name = private(n, init)`")
        assert isinstance(target, ast.Name)
        self.check_name(s, target.id)
        n = self.constant(call.args[0])
        init = self.once(self.expr(call.args[1])) if len(call.args) > 1 else const(0.0, Type("f32"))
        if is_bare(init):
            self.fail(s, f"the registers' first value {init.data!r} has no type: write f32(..) or i32(..)")
        made = []
        for k in range(n):
            var = self.fresh(f"{target.id}_{k}", init.type)
            if var.id in self.promoted:
                var.type, var.space = Type(init.type.kind, True), self.promoted[var.id]
            made.append(var)
            self.put(s, var, init)
        self.frames[-1].scopes[-1][target.id] = _Registers(target.id, made)

    def store(self, target: ast.Subscript, value: Expr) -> None:
        if not isinstance(target.value, ast.Name):
            self.fail(target, "a subscript of a view or of registers can be assigned")
        assert isinstance(target.value, ast.Name)
        base = self.lookup(target.value.id, target)
        if isinstance(base, _Registers):
            self.put(target, base.at(self.constant(target.slice)), value)
            return
        if not isinstance(base, _View):
            self.fail(target, f"{target.value.id} is no view")
        view, indices = self.views[base.name], self.indices(base.name, target.slice)
        if view.dtype.is_block:
            self.fail(target, "blocks are written field by field")
        if value.type.varying and not any(i.type.varying for i in indices):
            self.fail(target, "a varying value is stored at a uniform index")
        if self.only_depth and not any(i.type.varying for i in indices):
            self.fail(target, "a store at a uniform index under only(): lanes without the condition cannot leave it out")
        rules.space_of([*indices, value])
        self.out.append(Store(base.name, indices, coerce(value, rules.VALUE[view.dtype.name])))

    def store_field(self, target: ast.Attribute, slice: ast.expr, value: Expr) -> None:
        block, field_, k = self.field_place(target, slice)
        if value.type.varying and not (block.type.varying or k.type.varying):
            self.fail(target, "a varying value is stored into a uniform block")
        if self.only_depth and not (block.type.varying or k.type.varying):
            self.fail(target, "a store at a uniform index under only(): lanes without the condition cannot leave it out")
        rules.space_of([block, k, value])
        unit = field_.unit
        self.out.append(StoreField(block, field_.name, k, coerce(value, rules.VALUE[unit])))

    def stmt_If(self, s: ast.If) -> None:
        c = self.expr(s.test)
        if is_bare(c):
            self.block(s.body if c.data else s.orelse)
            return
        if c.type.kind != "truth":
            self.fail(s.test, f"`if` wants a truth value, not a {c.type}")
        if c.type.varying:
            self.fail(s.test, "a varying condition in `if`: use where() or `with only(..)`")
        for name in sorted(set(_assigned_in(s.body)) & set(_assigned_in(s.orelse))):
            if not any(name in scope for scope in self.frames[-1].scopes):
                self.fail(s, f"{name} is made in both branches: give it a first value before the `if`")
        node = If(c)
        with self.scope() as node.body:
            self.block(s.body)
        with self.scope() as node.orelse:
            self.block(s.orelse)
        self.out.append(node)

    def stmt_For(self, s: ast.For) -> None:
        if s.orelse or not isinstance(s.iter, ast.Call) or not isinstance(s.iter.func, ast.Name) or s.iter.keywords:
            self.fail(s, "loops go over range(..), static(..) or lanes(..)")
        assert isinstance(s.iter, ast.Call) and isinstance(s.iter.func, ast.Name)
        word, args = s.iter.func.id, s.iter.args
        for name in _assigned_in([ast.copy_location(ast.Assign([s.target], s.iter), s)]):
            self.check_name(s, name)
        if word == "static" and isinstance(s.target, ast.Name) and len(args) == 1:
            self.static(s, s.target.id, self.constant(args[0]))
        elif word == "range" and isinstance(s.target, ast.Name):
            self.range_loop(s, s.target.id, args)
        elif word == "lanes" and isinstance(s.target, ast.Name):
            self.tiles(s, s.target.id, args)
        elif word == "lanes" and isinstance(s.target, ast.Tuple):
            self.grid(s, s.target, args)
        else:
            self.fail(s, "loops go over range(..), static(..) or lanes(..)")

    def static(self, s: ast.For, name: str, n: int) -> None:
        for k in range(n):
            self.frames[-1].scopes.append({name: const(k)})
            self.block(s.body)
            self.frames[-1].scopes.pop()

    def uniform_index(self, node: ast.expr) -> Expr:
        e = self.expr(node)
        if not is_bare(e) and (e.type.kind != "index" or e.type.varying):
            self.fail(node, f"wants a uniform index, not a {e.type}" + ("; convert with index()" if not e.type.varying else ""))
        return coerce(e, "index")

    def range_loop(self, s: ast.For, name: str, args: Sequence[ast.expr]) -> None:
        bounds = [self.uniform_index(a) for a in args]
        if not 1 <= len(bounds) <= 3:
            self.fail(s, "range takes 1 to 3 bounds")
        start, stop = (coerce(const(0), "index"), bounds[0]) if len(bounds) == 1 else bounds[:2]
        step = bounds[2] if len(bounds) == 3 else coerce(const(1), "index")
        if step.op != "const" or step.data < 1:
            self.fail(s, "a step is a constant of 1 or more")
        var = self.fresh(name, INDEX)
        node = Range(var, start, stop, step)
        with self.scope() as node.body:
            self.frames[-1].scopes[-1][name] = Expr("name", INDEX, data=var)
            self.block(s.body)
        self.out.append(node)

    def tiles(self, s: ast.For, name: str, args: Sequence[ast.expr]) -> None:
        if len(args) != 1:
            self.fail(s, "lanes(n) with one index takes one size")
        node = Tiles(self.fresh(name, SPAN), self.once(self.uniform_index(args[0])))
        with self.lane_space(f"lanes({node.n.text()})") as node.body:
            self.bind_span(name, node.var)
            self.block(s.body)
        self.out.append(node)

    def bind_span(self, name: str, var: Var) -> None:
        var.space = self.space
        self.frames[-1].scopes[-1][name] = self.name_of(var)

    def grid(self, s: ast.For, target: ast.Tuple, args: Sequence[ast.expr]) -> None:
        names = [t.id for t in target.elts if isinstance(t, ast.Name)]
        if len(names) != len(args) or len(names) < 2:
            self.fail(s, "lanes(A, B, ..) takes as many indices as sizes")
        sizes = tuple(self.once(self.uniform_index(a)) for a in args)
        if any(z.op != "const" for z in sizes[1:]):
            self.fail(s, "all sizes but the first are constants")
        node = Grid(tuple(self.fresh(n, Type("i32", True)) for n in names), sizes)
        with self.lane_space(f"lanes({', '.join(z.text() for z in sizes)})") as node.body:
            for n, v in zip(names, node.vars, strict=True):
                self.bind_span(n, v)
            self.block(s.body)
        self.out.append(node)

    def stmt_With(self, s: ast.With) -> None:
        call = s.items[0].context_expr
        if len(s.items) != 1 or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
            self.fail(s, "`with` takes span(start, n) or only(c)")
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        name = s.items[0].optional_vars
        if call.func.id == "only" and name is None and len(call.args) == 1:
            self.only(s, call.args[0])
        elif call.func.id == "span" and isinstance(name, ast.Name) and len(call.args) == 2:
            self.check_name(s, name.id)
            start, limit = (self.once(self.uniform_index(a)) for a in call.args)
            node = Span(self.fresh(name.id, SPAN), start, limit)
            with self.lane_space(f"span({start.text()}, {limit.text()})") as node.body:
                self.bind_span(name.id, node.var)
                self.block(s.body)
            self.out.append(node)
        else:
            self.fail(s, "`with` takes span(start, n) as i, or only(c)")

    def only(self, s: ast.With, condition: ast.expr) -> None:
        if self.space is None:
            self.fail(s, "only() stands inside a lane space")
        c = self.expr(condition)
        if c.type.kind != "truth":
            self.fail(condition, f"only() wants a truth value, not a {c.type}")
        node = Only(self.once(c))
        self.level += 1
        self.only_depth += 1
        with self.scope() as node.body:
            self.block(s.body)
        self.only_depth -= 1
        self.level -= 1
        self.out.append(node)

    # -- expressions --------------------------------------------------------------------------------------------

    def expr(self, node: ast.expr) -> Expr:
        method: Any = getattr(self, f"expr_{type(node).__name__}", None)
        if method is None:
            self.fail(node, f"`{ast.unparse(node)}` is not in the language")
        try:
            return method(node)
        except Refusal as why:
            name = node.func.id + ": " if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            self.fail(node, name + str(why))
            raise

    def constant(self, node: ast.expr) -> int:
        e = self.expr(node)
        if not (is_bare(e) and isinstance(e.data, int)):
            self.fail(node, f"{ast.unparse(node)} must be known when the kernel is bound")
        return e.data

    def expr_Constant(self, node: ast.Constant) -> Expr:
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            self.fail(node, f"the literal {node.value!r} is no number")
        return const(node.value)

    def expr_Name(self, node: ast.Name) -> Expr:
        found = self.lookup(node.id, node)
        if isinstance(found, Var):
            found = self.name_of(found)
        if not isinstance(found, Expr):
            kind = "view" if isinstance(found, _View) else "table" if isinstance(found, Table) else "word or function"
            self.fail(node, f"{node.id} is a {kind}, not a value")
        if found.type.varying and self.space is not None and found.space not in (None, self.space, "caller"):
            self.fail(node, f"{node.id} belongs to {found.space} and is used inside {self.space}: lanes mean something else here")
        return found

    def expr_Tuple(self, node: ast.Tuple) -> Expr:
        return _tuple([self.expr(e) for e in node.elts])

    def expr_UnaryOp(self, node: ast.UnaryOp) -> Expr:
        if isinstance(node.op, ast.USub):
            return rules.negate(self.expr(node.operand))
        if isinstance(node.op, ast.Not):
            e = self.expr(node.operand)
            if is_bare(e):
                return const(int(not e.data))
        self.fail(node, f"`{ast.unparse(node)}` is not in the language")
        raise AssertionError

    def expr_BinOp(self, node: ast.BinOp) -> Expr:
        if type(node.op) not in rules.OPERATORS:
            self.fail(node, f"`{ast.unparse(node)}` is not in the language")
        return binary(*rules.OPERATORS[type(node.op)], self.expr(node.left), self.expr(node.right))

    def expr_Compare(self, node: ast.Compare) -> Expr:
        if len(node.ops) != 1 or type(node.ops[0]) not in rules.OPERATORS:
            self.fail(node, "one comparison at a time: combine with &")
        return binary(*rules.OPERATORS[type(node.ops[0])], self.expr(node.left), self.expr(node.comparators[0]))

    def expr_BoolOp(self, node: ast.BoolOp) -> Expr:
        values = [self.expr(v) for v in node.values]
        if not all(is_bare(v) for v in values):
            self.fail(node, "`and` and `or` work on constants: combine truth values with & and |")
        fold = all if isinstance(node.op, ast.And) else any
        return const(int(fold(v.data for v in values)))

    def expr_IfExp(self, node: ast.IfExp) -> Expr:
        c = self.expr(node.test)
        if not is_bare(c):
            self.fail(node, "a conditional expression works on constants: use where()")
        return self.expr(node.body if c.data else node.orelse)

    def indices(self, view: str, slice: ast.expr) -> tuple[Expr, ...]:
        t = self.views[view]
        parts = slice.elts if isinstance(slice, ast.Tuple) else [slice]
        if len(parts) != t.ndim:
            self.fail(slice, f"{view} takes {t.ndim} indices, {len(parts)} given")
        out = []
        for p in parts:
            e = self.expr(p)
            if is_bare(e):
                e = coerce(e, "index")
            if e.type.kind not in ("index", "span", "i32"):
                self.fail(p, f"an index is an integer, not a {e.type}")
            out.append(e)
        if t.layout != "plain" and out[-2].type.kind != "span":
            self.fail(slice, f"{view} lies {t.layout}: its row index is a span")
        if t.layout != "plain" and any(i.type.varying for i in (*out[:-2], out[-1])):
            self.fail(slice, f"{view} lies {t.layout}: only its row index may vary")
        return tuple(out)

    def expr_Subscript(self, node: ast.Subscript) -> Expr:
        if isinstance(node.value, ast.Attribute):
            return self.read_field(node.value, node.slice)
        if not isinstance(node.value, ast.Name):
            self.fail(node, "views, registers, tuples and fields take subscripts")
        assert isinstance(node.value, ast.Name)
        base = self.lookup(node.value.id, node)
        if isinstance(base, _Registers):
            var = base.at(self.constant(node.slice))
            if var.type.varying and self.space is not None and var.space not in (None, self.space):
                self.fail(node, f"{var.name} belongs to {var.space} and is used inside {self.space}: lanes mean something else here")
            return self.name_of(var)
        if isinstance(base, Expr) and base.op == "tuple":
            return base.args[self.constant(node.slice)]
        if isinstance(base, Table):
            return rules.entry(base, self.expr(node.slice))
        if not isinstance(base, _View):
            self.fail(node, f"{node.value.id} takes no subscript")
        return self.read(base.name, self.indices(base.name, node.slice), node)

    def read(self, view: str, indices: tuple[Expr, ...], node: ast.AST) -> Expr:
        t = self.views[view]
        varying = any(i.type.varying for i in indices)
        space = rules.space_of(indices) if varying else None
        if t.dtype.is_block:
            return Expr("block", Type("block", varying, t), indices, view, space)
        kind = rules.VALUE[t.dtype.name]
        if kind == "index" and varying:
            self.fail(node, "i64 elements are read one at a time")
        return Expr("read", Type(kind, varying), indices, view, space)

    def field_place(self, node: ast.Attribute, slice: ast.expr) -> tuple[Expr, Any, Expr]:
        block = self.expr(node.value)
        if block.type.kind != "block" or block.type.view is None:
            self.fail(node, f"{ast.unparse(node.value)} is no block")
        assert block.type.view is not None
        dtype = block.type.view.dtype
        found = dtype.field(node.attr)
        if found is None:
            self.fail(node, f"{dtype} blocks have the fields {', '.join(f.name for f in dtype.fields)}, not {node.attr}")
        assert found is not None
        k = self.expr(slice)
        if is_bare(k):
            if not 0 <= k.data < found.count:
                self.fail(node, f"{node.attr}[{k.data}] of {found.count}")
            k = coerce(k, "index")
        if k.type.kind not in ("index", "i32", "span"):
            self.fail(slice, f"an index is an integer, not a {k.type}")
        return block, found, k

    def read_field(self, node: ast.Attribute, slice: ast.expr) -> Expr:
        block, found, k = self.field_place(node, slice)
        return make("field", rules.VALUE[found.unit], (block, k), found.name)

    def expr_Attribute(self, node: ast.Attribute) -> Expr:
        return self.read_field(node, ast.Constant(0))

    def expr_Call(self, node: ast.Call) -> Expr:
        if not isinstance(node.func, ast.Name) or node.keywords:
            self.fail(node, "words and functions are called by name, without keywords")
        assert isinstance(node.func, ast.Name)
        if node.func.id == "tuple":
            return self.comprehension(node)
        callee = self.lookup(node.func.id, node)
        if isinstance(callee, Word) and callee.rule in ("inside", "first"):
            return self.about_span(callee, node)
        if isinstance(callee, Word) and callee.rule == "table":
            return self.through_table(callee, node)
        args = self.arguments(node)
        if isinstance(callee, Function):
            return self.inline(callee, args)
        if not isinstance(callee, Word):
            self.fail(node, f"{node.func.id} cannot be called")
        if callee.rule == "decoder":
            return self.decode(callee, args)
        if callee.rule not in rules.RULES:
            self.fail(node, f"{callee.name} is written as `{callee.form}`")
        return rules.RULES[callee.rule](callee.name, args)

    def arguments(self, node: ast.Call) -> list[Expr]:
        out = []
        for a in node.args:
            if isinstance(a, ast.Starred) and isinstance(a.value, ast.GeneratorExp):
                out += self.generate(a.value)
            elif isinstance(a, ast.Starred):
                e = self.expr(a.value)
                if e.op != "tuple":
                    self.fail(a, "only a tuple is spread with *")
                out += e.args
            else:
                out.append(self.expr(a))
        return out

    def comprehension(self, node: ast.Call) -> Expr:
        if len(node.args) != 1 or not isinstance(node.args[0], ast.GeneratorExp):
            self.fail(node, "a tuple is made by tuple(f(k) for k in static(n))")
        assert isinstance(node.args[0], ast.GeneratorExp)
        return _tuple(self.generate(node.args[0]))

    def generate(self, node: ast.GeneratorExp) -> list[Expr]:
        g = node.generators[0]
        if (len(node.generators) != 1 or g.ifs or not isinstance(g.target, ast.Name) or not isinstance(g.iter, ast.Call)
                or not isinstance(g.iter.func, ast.Name) or g.iter.func.id != "static" or len(g.iter.args) != 1):
            self.fail(node, "generators go over one static(n)")
        assert isinstance(g.target, ast.Name) and isinstance(g.iter, ast.Call)
        self.check_name(g.target, g.target.id)
        out = []
        for k in range(self.constant(g.iter.args[0])):
            self.frames[-1].scopes.append({g.target.id: const(k)})
            out.append(self.once(self.expr(node.elt), f"{g.target.id}_{k}"))
            self.frames[-1].scopes.pop()
        return out

    def about_span(self, word: Word, node: ast.Call) -> Expr:
        name = node.args[0] if len(node.args) == 1 else None
        found = self.lookup(name.id, node) if isinstance(name, ast.Name) else None
        if not isinstance(found, Expr) or found.op != "name" or found.data.space is None:
            self.fail(node, f"{word.name} takes the index of a lane space")
            raise AssertionError
        if word.rule == "first":
            if found.type.kind != "span":
                self.fail(node, "first takes the index of lanes(n) or of a span")
            return Expr("first", INDEX, data=found.data)
        if found.space != self.space:
            self.fail(node, f"{found.data.name} belongs to {found.space}, not to {self.space}")
        return Expr("inside", Type("truth", True), data=found.data, space=self.space)

    def through_table(self, word: Word, node: ast.Call) -> Expr:
        name = node.args[0] if node.args else None
        found = self.lookup(name.id, node) if isinstance(name, ast.Name) else None
        if not isinstance(found, Table):
            raise Refusal("takes a table first")
        return rules.nibbles(found, [self.expr(a) for a in node.args[1:]])

    def decode(self, word: Word, args: list[Expr]) -> Expr:
        if not args or args[0].type.kind != "block" or args[0].type.view is None:
            raise Refusal("takes a block first")
        assert args[0].type.view is not None
        dtype = args[0].type.view.dtype
        functions = DECODERS.get(dtype.name)
        if functions is None:
            raise Refusal(f"{dtype} has no decoders in kernels/quants.py")
        if word.name not in functions:
            if word.name == "offset" and not dtype.has_offset:
                return const(0.0, Type("f32"))
            raise Refusal(f"{dtype} has no function for it")
        return self.inline(functions[word.name], args)


@dataclass(frozen=True)
class _View:
    name: str


@dataclass(frozen=True)
class _Registers:
    name: str
    vars: list[Var]

    def at(self, k: int) -> Var:
        if not 0 <= k < len(self.vars):
            raise Refusal(f"{self.name}[{k}] of {len(self.vars)} registers")
        return self.vars[k]


def _tuple(items: list[Expr]) -> Expr:
    return Expr("tuple", Type("tuple", any(i.type.varying for i in items), items=tuple(i.type for i in items)), tuple(items))


def _is_private(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "private"


def _parse(function: Function) -> ast.FunctionDef:
    tree = ast.parse(function.source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _assigned_in(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for s in statements:
        for node in ast.walk(s):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _assigned(tree: ast.FunctionDef) -> Counter[str]:
    """How often each name is assigned in the text; an augmented assignment counts twice, it reads as well."""
    counts = Counter(_assigned_in(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            counts[node.target.id] += 1
    return counts


def _load(target: ast.expr) -> ast.expr:
    """The target of an assignment, to be read."""
    copy = ast.parse(ast.unparse(target), mode="eval").body
    for node in ast.walk(copy):
        ast.copy_location(node, target)
    return copy
