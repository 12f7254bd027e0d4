"""The typed tree: what the walk hands to every target. Expressions have types, names are unique, places are views with indices.

`source` of a statement is the line of the kernel it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np

from engine.dtypes import DType


@dataclass(frozen=True)
class ViewType:
    """What is known of a parameter before compiling.

    Attributes:
        dtype: element or block format.
        ndim: indices it takes.
        unit: the last dimension's stride is the size of an element.
        layout: "plain", or "lanesN": N rows of blocks side by side.
    """

    dtype: DType
    ndim: int
    unit: bool = True
    layout: str = "plain"


@dataclass(frozen=True)
class Type:
    """`kind` is index, f32, i32, u32, truth, span, block, tuple or number (a bare literal, which takes its partner's type)."""

    kind: str
    varying: bool = False
    view: ViewType | None = None  # of a block
    items: tuple[Type, ...] = ()  # of a tuple

    def __str__(self) -> str:
        return f"{'varying' if self.varying else 'uniform'} {self.kind}" if self.kind not in ("index", "span", "number") else self.kind


INDEX, NUMBER, SPAN = Type("index"), Type("number"), Type("span", True)
DATA = ("f32", "i32", "u32")


@dataclass(eq=False, slots=True)
class Var:
    """A name: unique in the kernel. `level` counts the masks in force where it was made; `homes` how often it is assigned."""

    name: str
    id: str
    type: Type
    level: int
    space: str | None = None
    homes: int = 0
    lane_read: bool = False  # read by lane() at a computed index: best kept in memory

    def __hash__(self) -> int:
        return hash(self.id)


@dataclass(frozen=True, eq=False)
class Table:
    """Constants that a kernel reads by subscript: 2^n words of 32 bits. `name` is an identifier, and no other table has it."""

    name: str
    values: np.ndarray  # uint32

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False, slots=True)
class Expr:
    """One value. `op` says what `args` and `data` are; `space` is the lane space of a varying value."""

    op: str
    type: Type
    args: tuple[Expr, ...] = ()
    data: Any = None
    space: str | None = None

    @property
    def constant(self) -> Any:
        """The value of a constant, else None."""
        return self.data if self.op == "const" else None

    def text(self) -> str:
        """The expression as text: equal text, equal value in the same place."""
        if self.op == "const":
            return repr(self.data)
        if self.op == "name":
            return str(self.data.id)
        if self.op in ("group", "int", "float"):
            return str(self.data)
        label = self.op if not isinstance(self.data, (str, Table)) else f"{self.op}.{self.data}"
        return f"{label}({', '.join(a.text() for a in self.args)})"


@dataclass(eq=False, slots=True)
class Assign:
    """`masked`: the name comes from outside the innermost lane space, so lanes that take no part keep what they had."""

    var: Var
    value: Expr
    masked: bool
    source: str = ""


@dataclass(eq=False, slots=True)
class Store:
    view: str
    indices: tuple[Expr, ...]
    value: Expr
    source: str = ""


@dataclass(eq=False, slots=True)
class StoreField:
    block: Expr
    field: str
    k: Expr
    value: Expr
    source: str = ""


@dataclass(eq=False, slots=True)
class Range:
    var: Var
    start: Expr
    stop: Expr
    step: Expr
    body: list[Stmt] = field(default_factory=list)
    source: str = ""


@dataclass(eq=False, slots=True)
class Tiles:
    """`for i in lanes(n)`."""

    var: Var
    n: Expr
    body: list[Stmt] = field(default_factory=list)
    source: str = ""


@dataclass(eq=False, slots=True)
class Grid:
    """`for a, b, c in lanes(A, B, C)`."""

    vars: tuple[Var, ...]
    sizes: tuple[Expr, ...]
    body: list[Stmt] = field(default_factory=list)
    source: str = ""


@dataclass(eq=False, slots=True)
class Span:
    """`with span(start, n) as i`."""

    var: Var
    start: Expr
    limit: Expr
    body: list[Stmt] = field(default_factory=list)
    source: str = ""


@dataclass(eq=False, slots=True)
class Only:
    condition: Expr
    body: list[Stmt] = field(default_factory=list)
    source: str = ""


@dataclass(eq=False, slots=True)
class If:
    condition: Expr
    body: list[Stmt] = field(default_factory=list)
    orelse: list[Stmt] = field(default_factory=list)
    source: str = ""


@dataclass(eq=False, slots=True)
class Barrier:
    source: str = ""


Stmt = Union[Assign, Store, StoreField, Range, Tiles, Grid, Span, Only, If, Barrier]


@dataclass(frozen=True)
class Kernel:
    """A checked kernel, ready for any target.

    Attributes:
        groups, views, ints, floats: parameters by kind, in the order of the parameter block.
        body: statements.
        constants: what was decided when it was bound, LANES among it.
    """

    name: str
    groups: tuple[str, ...]
    views: dict[str, ViewType]
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    body: list[Stmt]
    constants: dict[str, int]
