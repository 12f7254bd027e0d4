"""A piece of a graph that one op stands for: ops on ops, down to the operands and parameters of that one, which are names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine.op import Op
    from engine.tensor import Tensor


@dataclass(frozen=True)
class Pattern:
    """`mul(rms_norm(x, eps=eps), w)`, written `mul.pattern(rms_norm.pattern("x", eps="eps"), "w")`.

    Attributes:
        operands: in contract order, each the name of an operand of the fused op, or a pattern. Those not named are left out.
        params: parameter -> the name of a parameter of the fused op. Those not named have their default.
    """

    op: Op
    operands: tuple[Pattern | str, ...]
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def n_ops(self) -> int:
        return 1 + sum(p.n_ops for p in self.inner)

    @property
    def inner(self) -> Iterator[Pattern]:
        return (p for p in self.operands if isinstance(p, Pattern))

    def build(self, tensors: Mapping[str, Tensor | None], params: Mapping[str, Any]) -> Tensor:
        """The graph this stands for; its last node."""
        srcs = [p.build(tensors, params) if isinstance(p, Pattern) else tensors.get(p) for p in self.operands]
        return self.op(*srcs, **{own: params[name] for own, name in self.params.items()})

    def reference_of(self, operands: Mapping[str, np.ndarray | None], params: Mapping[str, Any]) -> np.ndarray:
        """The ops' references in turn: float64, nothing rounded between."""
        arrays: list[np.ndarray | None] = []
        for p, o in zip(self.operands, self.op.contract.operands, strict=False):
            array = p.reference_of(operands, params) if isinstance(p, Pattern) else operands[p]
            arrays.append(None if array is None else _of_rank(array, len(o.dims)))
        arrays += [None] * (len(self.op.contract.operands) - len(arrays))
        return self.op.reference_of(arrays, {own: params[name] for own, name in self.params.items()})

    def __str__(self) -> str:
        parts = [*map(str, self.operands), *(f"{own}={name}" if own != name else name for own, name in self.params.items())]
        return f"{self.op.name}({', '.join(parts)})"


def _of_rank(array: np.ndarray, rank: int) -> np.ndarray:
    """Ones in front of the shape, added or taken away."""
    shape: Sequence[int] = array.shape
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return array.reshape(*[1] * (rank - len(shape)), *shape)
