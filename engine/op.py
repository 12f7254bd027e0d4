"""An op: a contract line, one or more kernels in the lane language, and a float64 reference, all in one file of `kernels/`.

The contract line `"x[a, n], w[n] -> y[a, n]"` names operands and dimensions. From it come shape inference, launch sizes, the tests'
strategies, byte counts and the help text. Calling the op on tensors makes a graph node.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np

from engine.dtypes import F32, WEIGHT_BLOCKS, DType
from engine.errors import KernelError, ShapeError
from engine.lang.function import Function
from engine.pattern import Pattern
from engine.tensor import Tensor

Key = tuple[str, tuple[str, ...]]  # (op name, type names in contract order)
Constants = Mapping[str, "int | Callable[[Call], int]"]
_OPERAND = re.compile(r"\s*(\w+)(\??)\[([^\]]*)\]\s*")


@dataclass(frozen=True)
class Operand:
    """One tensor of a contract: its name, its dimensions (names or numbers), whether it may be left out."""

    name: str
    dims: tuple[str | int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Contract:
    """`"x[r, n], ids[r], y[m, n] -> y"`: operands, and a result that is new or (without brackets) a source that is written."""

    text: str
    operands: tuple[Operand, ...]
    result: Operand
    writes: bool  # the result is one of the operands, written in place

    @classmethod
    def parse(cls, text: str) -> Contract:
        left, arrow, right = text.partition("->")
        if not arrow:
            raise KernelError(f"contract {text!r} has no '->'")
        operands = tuple(_operands(left))
        writes = "[" not in right
        if writes:
            result = next((o for o in operands if o.name == right.strip()), None)
            if result is None:
                raise KernelError(f"contract {text!r}: the result {right.strip()!r} is no operand")
        else:
            (result,) = _operands(right)
        return cls(text, operands, result, writes)

    @property
    def views(self) -> tuple[Operand, ...]:
        """Operands, then the result where it is a new tensor."""
        return self.operands if self.writes else (*self.operands, self.result)

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d for o in self.views for d in o.dims if isinstance(d, str)))


def _operands(text: str) -> Iterator[Operand]:
    end = 0
    for m in _OPERAND.finditer(text):
        if text[end : m.start()].strip() != ("," if end else ""):
            break
        dims = tuple(int(d) if d.strip().isdigit() else d.strip() for d in m[3].split(",") if d.strip())
        yield Operand(m[1], dims, bool(m[2]))
        end = m.end()
    if not end or text[end:].strip(", "):
        raise KernelError(f"contract {text!r}: expected operands like x[m, n]")


@dataclass(frozen=True)
class Variant:
    """One way to compute an op: a kernel, its groups and constants, and when it fits.

    Attributes:
        groups: extents of the group indices, each a dimension or `dimension/CONSTANT` (rounded up); the kernel's first parameters.
        sizes: parameters that are computed from the call.
        constants: names decided when the kernel is bound.
        when: gives a reason where this variant does not fit a call, else None.
        layouts: operands that must lie interleaved ("lanes"), LANES rows side by side.
        least_lanes: it is a row of the tables of targets with so many lanes or more.
        then: a second launch over the same operands, reading what the first one wrote.
        scratch: float32 memory shared by the launches: name -> shape.
    """

    name: str
    kernel: Function
    groups: tuple[str, ...]
    sizes: Mapping[str, Callable[[Call], int]] = field(default_factory=dict)
    constants: Constants = field(default_factory=dict)
    when: Callable[[Call], str | None] | None = None
    layouts: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, tuple[DType, ...]] = field(default_factory=dict)
    then: Variant | None = None
    scratch: Mapping[str, Callable[[Call], tuple[int, ...]]] = field(default_factory=dict)
    least_lanes: int = 1

    @property
    def group_names(self) -> tuple[str, ...]:
        return self.kernel.parameters[: len(self.groups)]


@dataclass(frozen=True)
class Step:
    """One op to run: what a graph node becomes after a backend has rewritten its split.

    Attributes:
        srcs: operands in contract order.
        out: the tensor that is written; the graph node itself, or one the backend added.
        replaces: the graph nodes this step stands for, none for one that was added.
    """

    op: Op
    srcs: tuple[Tensor | None, ...]
    out: Tensor
    params: Mapping[str, Any]
    replaces: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, node: Tensor) -> Step:
        assert isinstance(node.op, Op), f"{node} has no kernel"
        return cls(node.op, node.srcs, node, node.params, (node,))


class Call:
    """An op applied to operands: what predicates, sizes and constants are computed from. `dims` maps names to extents."""

    def __init__(self, op: Op, tensors: Mapping[str, Tensor | None], params: Mapping[str, Any],
                 layouts: Mapping[str, str] = MappingProxyType({}), lanes: int = 1) -> None:
        self.op, self.tensors, self.params, self.layouts, self.lanes = op, tensors, params, layouts, lanes
        self.dims = op.match(tensors)

    @classmethod
    def of(cls, step: Step | Tensor, layouts: Mapping[str, str] = MappingProxyType({}), lanes: int = 1) -> Call:
        """The call a step, or a graph node as it stands, makes."""
        if isinstance(step, Tensor):
            step = Step.of(step)
        op = step.op
        tensors: dict[str, Tensor | None] = dict(zip((o.name for o in op.contract.operands), step.srcs, strict=True))
        if not op.contract.writes:
            tensors[op.contract.result.name] = step.out
        return cls(op, tensors, step.params, layouts, lanes)

    def __getitem__(self, dim: str) -> int:
        return self.dims[dim]

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(t.dtype.name if (t := self.tensors.get(o.name)) is not None else "-" for o in self.op.contract.views)

    @property
    def key(self) -> Key:
        return self.op.name, self.types

    @property
    def weight_format(self) -> DType | None:
        """The block format of the first operand that has one."""
        return next((t.dtype for t in self.tensors.values() if t is not None and t.dtype in WEIGHT_BLOCKS), None)

    def constants(self, variant: Variant) -> dict[str, int]:
        """Everything a kernel's free names stand for: LANES, optional operands, the weight format's facts, the variant's own."""
        out = {"LANES": self.lanes}
        for o in self.op.contract.operands:
            if o.optional:
                out[o.name.upper()] = int(self.tensors.get(o.name) is not None)
        if w := self.weight_format:
            low, high = w.code_range
            out |= {"BLOCK": w.block_size, "RUNS": w.block_size // 32, "LOW": low, "HIGH": high, "ZERO": w.zero,
                    "OFFSET": int(w.has_offset), "SCALE_RUN": w.scale_run}
        for name, value in {**self.op.constants, **variant.constants}.items():
            out[name] = int(value(self)) if callable(value) else value
        return out

    def extents(self, variant: Variant, constants: Mapping[str, int]) -> tuple[int, ...]:
        """Groups of a launch: one extent per group index."""
        out = []
        for text in variant.groups:
            dim, _, by = text.partition("/")
            extent = variant.sizes[dim](self) if dim in variant.sizes else self.dims[dim]
            out.append(-(-extent // (constants[by] if by in constants else int(by or 1))))
        return tuple(out)

    @property
    def nbytes(self) -> int:
        """Bytes a perfect kernel would move: every operand once, the result once."""
        own = self.op.cost_bytes
        if own is not None:
            return own(self)
        return sum(t.n_elements // t.dtype.block_size * t.dtype.nbytes for t in self.tensors.values() if t is not None)

    @property
    def flop(self) -> int:
        return self.op.flop(self) if self.op.flop else 0


Infer = Callable[[Mapping[str, int], Mapping[str, Any]], Mapping[str, int]]


class Op:
    """An operator written once. Calling it on tensors makes a node; its variants are rows of every backend's kernel table.

    Of what `@op` takes, `result` is the operand whose type the result has, or gives the type from the parameters; without it the result
    has the first of its types. `rank` is the operand whose number of dimensions it has; without it no operand has more. `fuses` is the
    piece of a graph that the op stands for (engine/rewrite.py).
    """

    is_view = False

    def __init__(self, name: str, contract: str, *, types: Mapping[str, Sequence[DType]] | None = None, params: Mapping[str, Any],
                 infer: Infer | None = None, check: Callable[[Call], str | None] | None = None, constants: Constants | None = None,
                 flop: Callable[[Call], int] | None = None, cost_bytes: Callable[[Call], int] | None = None, inplace: str = "",
                 result: str | Callable[[Mapping[str, Any]], DType] = "", c: float = 4.0,
                 keys: Callable[[Mapping[str, DType]], bool] | None = None, fuses: Pattern | None = None,
                 rank: str = "") -> None:
        self.name, self.contract = name, Contract.parse(contract)
        self.types = {o.name: tuple((types or {}).get(o.name, (F32,))) for o in self.contract.views}
        if isinstance(result, str) and result:
            self.types[self.contract.result.name] = self.types[result]
        self.params, self.infer, self.check, self.constants = dict(params), infer, check, dict(constants or {})
        self.flop, self.cost_bytes, self.inplace, self.c = flop, cost_bytes, inplace, c
        self._follows = result if isinstance(result, str) else ""
        self._decides = None if isinstance(result, str) else result
        self._keys, self.fuses, self._rank = keys, fuses, rank
        self._special: list[Variant] = []
        self._general: Variant | None = None
        self.through: dict[str, tuple[Op, DType]] = {}  # operand -> (op that converts it, the type it then has)
        self._reference: Callable[..., np.ndarray] | None = None
        self.__doc__ = ""

    @property
    def variants(self) -> list[Variant]:
        """Rows of the table, fastest first, general last."""
        return [*self._special, *([self._general] if self._general else [])]

    # -- definition ---------------------------------------------------------------------------------------------

    def variant(self, groups: str, *, name: str = "", then: str = "", sizes: Mapping[str, Callable[[Call], int]] | None = None,
                constants: Constants | None = None, when: Callable[[Call], str | None] | None = None,
                layouts: Mapping[str, str] | None = None, types: Mapping[str, Sequence[DType]] | None = None,
                scratch: Mapping[str, Callable[[Call], tuple[int, ...]]] | None = None,
                least_lanes: int = 1) -> Callable[[FunctionType], FunctionType]:
        """Add a kernel: a row of the table. Rows are asked in the order they are written, the general one last."""

        def add(fn: FunctionType) -> FunctionType:
            made = Variant(name or fn.__name__, Function(fn), tuple(groups.split()), dict(sizes or {}), dict(constants or {}), when,
                           dict(layouts or {}), {k: tuple(v) for k, v in (types or {}).items()}, _second(then, fn, groups),
                           dict(scratch or {}), least_lanes)
            if name == "general":
                self._general = made
            else:
                self._special.append(made)
            return fn

        return add

    def reference(self, fn: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        """Mark the float64 NumPy meaning: called with operands in contract order (None where left out) and the parameters by name."""
        self._reference = fn
        return fn

    def reference_of(self, operands: Sequence[np.ndarray | None], params: Mapping[str, Any]) -> np.ndarray:
        """The op in float64 on dequantised operands. A fused op's is that of the ops it stands for."""
        if self._reference is None and self.fuses is not None:
            names = (o.name for o in self.contract.operands)
            return self.fuses.reference_of(dict(zip(names, operands, strict=True)), {**self.params, **params})
        assert self._reference is not None, f"{self.name} has no reference"
        return self._reference(*operands, **{**self.params, **params})

    def pattern(self, *operands: Pattern | str, **params: str) -> Pattern:
        """This op as a part of what a fused op stands for: operands and parameters of that one by name."""
        return Pattern(self, operands, params)

    def keys(self) -> list[Key]:
        """Every combination of types some variant takes, in contract order."""
        out: dict[Key, None] = {}
        names = [o.name for o in self.contract.views]
        for v in self.variants:
            pools = [v.types.get(o.name, self.types[o.name]) for o in self.contract.views]
            for combination in itertools.product(*pools):
                types = dict(zip(names, combination, strict=True))
                if self._is_key(types):
                    out[self.name, tuple(t.name for t in combination)] = None
        return list(out)

    def _is_key(self, types: Mapping[str, DType]) -> bool:
        if self._follows and types[self.contract.result.name] is not types[self._follows]:
            return False
        return self._keys is None or self._keys(types)

    # -- use ----------------------------------------------------------------------------------------------------

    def __call__(self, *srcs: Tensor | None, name: str = "", **params: Any) -> Tensor:
        """A node with these sources (None for an operand left out) and parameters.

        Raises:
            ShapeError: shapes or types do not meet the contract.
        """
        if unknown := set(params) - set(self.params):
            raise ShapeError(f"{self.name}: unknown parameter {sorted(unknown)[0]!r}; it has {', '.join(self.params) or 'none'}")
        operands = self.contract.operands
        srcs = (*srcs, *[None] * (len(operands) - len(srcs)))
        if len(srcs) > len(operands):
            raise ShapeError(f"{self.name}: {len(srcs)} operands given, {len(operands)} expected: {self.contract.text}")
        tensors = dict(zip((o.name for o in operands), srcs, strict=True))
        merged = MappingProxyType({**self.params, **{k: float(v) if isinstance(self.params[k], float) else v for k, v in params.items()}})
        if self.contract.writes:
            self.match(tensors)
            target = tensors[self.contract.result.name]
            assert target is not None
            node = Tensor(target.dtype, target.shape, name=name, op=self, srcs=srcs, params=merged, strides=target.strides, view_of=target)
        else:
            node = Tensor(self._dtype(tensors, merged), self._shape(tensors, merged), name=name, op=self, srcs=srcs, params=merged)
        if self.check and (wrong := self.check(Call.of(node))):
            raise ShapeError(f"{self.name} '{node.name}': {wrong}")
        return node

    def _dtype(self, tensors: Mapping[str, Tensor | None], params: Mapping[str, Any]) -> DType:
        if self._decides:
            return self._decides(params)
        follows = tensors.get(self._follows)
        return follows.dtype if follows is not None else self.types[self.contract.result.name][0]

    def _shape(self, tensors: Mapping[str, Tensor | None], params: Mapping[str, Any]) -> tuple[int, ...]:
        dims = self.match(tensors)
        if self.infer:
            dims |= self.infer(dims, params)
        shape = [d if isinstance(d, int) else dims[d] for d in self.contract.result.dims]
        rank = max(len(t.shape) for name, t in tensors.items() if t is not None and self._rank in ("", name))
        while len(shape) > max(rank, 1) and shape[0] == 1:
            shape.pop(0)
        return tuple(shape)

    def match(self, tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
        """Extents of the contract's dimensions, shorter operands padded with ones in front.

        Raises:
            ShapeError: two operands disagree, or one is missing.
        """
        dims: dict[str, int] = {}
        for o in self.contract.views:
            if o.name not in tensors:
                continue
            t = tensors[o.name]
            if t is None:
                if not o.optional:
                    raise ShapeError(f"{self.name}: operand {o.name} is missing: {self.contract.text}")
                continue
            if len(t.shape) > len(o.dims):
                raise ShapeError(f"{self.name}: {o.name} '{t.name}' has shape {list(t.shape)}, {len(o.dims)} dimensions are allowed: "
                                 f"{self.contract.text}")
            for d, extent in zip(o.dims, padded(t.shape, len(o.dims), 1), strict=True):
                want = d if isinstance(d, int) else dims.setdefault(d, extent)
                if want != extent:
                    raise ShapeError(f"{self.name}: {o.name} '{t.name}' has shape {list(t.shape)}, but {d} is {want} here: "
                                     f"{self.contract.text}")
        return dims

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def padded(values: Sequence[int], rank: int, fill: int) -> tuple[int, ...]:
    """`values` with `fill` in front, up to `rank` of them."""
    return (*[fill] * (rank - len(values)), *values)


def _second(then: str, fn: FunctionType, groups: str) -> Variant | None:
    """The second launch, a kernel of the same module named by `then`: "merge: t h"."""
    if not then:
        return None
    name, _, own = then.partition(":")
    return Variant(name.strip(), Function(fn.__globals__[name.strip()]), tuple((own or groups).split()))


def op(contract: str, *, groups: str, name: str = "", types: Mapping[str, Sequence[DType]] | None = None,
       variant: Mapping[str, Any] = MappingProxyType({}), **facts: Any) -> Callable[[FunctionType], Op]:
    """Define an op by its general kernel. What is no fact of `Op` is a parameter of the op with its default."""
    known = set(inspect.signature(Op.__init__).parameters)
    own = {k: v for k, v in facts.items() if k in known}
    params = {k: v for k, v in facts.items() if k not in known}

    def make(fn: FunctionType) -> Op:
        made = Op(name or fn.__name__, contract, types=types, params=params, **own)
        made.__doc__ = (fn.__doc__ or inspect.getmodule(fn).__doc__ or "").strip()  # type: ignore[union-attr]
        made.variant(groups, name="general", **variant)(fn)
        return made

    return make
