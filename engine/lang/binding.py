"""A call bound to a variant: what a target needs to compile it, and what its parameter block holds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod

from engine.dtypes import F32
from engine.lang.function import Function
from engine.lang.tree import Kernel, ViewType
from engine.op import Call, Variant, padded
from engine.tensor import Tensor, row_major


@dataclass(frozen=True)
class Binding:
    """One launch.

    Attributes:
        views: name -> type, in the order of the parameter block.
        tensors: name -> tensor; scratch memory is under `scratch` instead, as name -> shape.
        extents: groups in each group index.
        ints, floats: sizes and scalars by name.
        constants: what is decided when the kernel is bound.
    """

    function: Function
    views: Mapping[str, ViewType]
    tensors: Mapping[str, Tensor]
    scratch: Mapping[str, tuple[int, ...]]
    groups: tuple[str, ...]
    extents: tuple[int, ...]
    ints: Mapping[str, int]
    floats: Mapping[str, float]
    constants: Mapping[str, int]

    @property
    def n_groups(self) -> int:
        return prod(self.extents)

    @property
    def identity(self) -> Hashable:
        """Launches of equal identity have the same text, on whatever tensors."""
        return (self.function, tuple(self.views.items()), self.groups, tuple(self.ints), tuple(self.floats), tuple(self.constants.items()))

    def kernel(self) -> Kernel:
        """The typed tree of the launch. Raises KernelError where the text is not in the language."""
        from engine.lang.walk import check  # only what compiles needs the checker

        return check(self.function, self.views, self.groups, tuple(self.ints), tuple(self.floats), self.constants)

    def strides(self, name: str) -> tuple[int, ...]:
        """Byte strides of a view, zero in front for dimensions the tensor lacks."""
        if name in self.scratch:
            return row_major(self.scratch[name], F32)
        t, view = self.tensors[name], self.views[name]
        if view.layout == "plain" or len(t.shape) < 2:
            return padded(t.strides, view.ndim, 0)
        lanes = int(view.layout.removeprefix("lanes"))
        whole = (*t.shape[:-2], -(-t.shape[-2] // lanes) * lanes, t.shape[-1])  # each matrix is padded to whole groups of rows
        return padded(row_major(whole, t.dtype), view.ndim, 0)


def bind(call: Call, variant: Variant) -> list[Binding]:
    """The launches of a call: one, or two where the variant has a second."""
    scratch = {name: tuple(shape(call)) for name, shape in variant.scratch.items()}
    constants = call.constants(variant)
    launches = [variant] if variant.then is None else [variant, variant.then]
    return [_bind(call, variant, launch, scratch, constants) for launch in launches]


def _bind(call: Call, variant: Variant, launch: Variant, scratch: Mapping[str, tuple[int, ...]], constants: Mapping[str, int]) -> Binding:
    names = launch.kernel.parameters[len(launch.groups) :]
    views: dict[str, ViewType] = {}
    tensors: dict[str, Tensor] = {}
    ints: dict[str, int] = {}
    floats: dict[str, float] = {}
    operands = {o.name: o for o in call.op.contract.views}
    for name in names:
        if name in scratch:
            views[name] = ViewType(F32, len(scratch[name]))
        elif name in operands:
            if (t := call.tensors.get(name)) is not None:
                views[name], tensors[name] = view_type(t, len(operands[name].dims), call.layouts.get(name, "plain")), t
        elif name in variant.sizes:
            ints[name] = variant.sizes[name](call)
        elif name in call.dims:
            ints[name] = call.dims[name]
        elif name in call.params:
            value = call.params[name]
            if isinstance(value, float):
                floats[name] = value
            else:
                ints[name] = int(value)
    used = {n: s for n, s in scratch.items() if n in views}
    extents = call.extents(_with_sizes(launch, variant), constants)
    return Binding(launch.kernel, views, tensors, used, launch.group_names, extents, ints, floats, constants)


def _with_sizes(launch: Variant, variant: Variant) -> Variant:
    """A second launch computes its sizes as the first one does."""
    if launch is variant:
        return variant
    return Variant(launch.name, launch.kernel, launch.groups, variant.sizes)


def view_type(t: Tensor, ndim: int, layout: str) -> ViewType:
    """What a kernel knows of a tensor before it is compiled."""
    n = t.shape[-1] // t.dtype.block_size
    return ViewType(t.dtype, ndim, t.strides[-1] == t.dtype.nbytes or n <= 1, layout)
