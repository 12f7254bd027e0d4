"""A tensor is a node of the compute graph: what makes it (op, sources, parameters), what it looks like, where its memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.dtypes import F32, DType
from engine.errors import ShapeError

if TYPE_CHECKING:
    from engine.backend import Buffer
    from engine.op import Op

MAX_DIMS = 4
_serial = count()
_NO_PARAMS: Mapping[str, Any] = MappingProxyType({})


def row_major(shape: Sequence[int], dtype: DType) -> tuple[int, ...]:
    """Byte strides of a dense tensor; the last one is the size of an element or block."""
    strides, step = [dtype.nbytes], dtype.row_nbytes(shape[-1]) if shape else dtype.nbytes
    for extent in reversed(shape[1:-1] if len(shape) > 1 else ()):
        strides.append(step)
        step *= extent
    if len(shape) > 1:
        strides.append(step)
    return tuple(reversed(strides[: len(shape)]))


class Tensor:
    """Up to four dimensions in NumPy order, strides in bytes.

    A leaf has no op: an input (set before each run), a weight, or memory kept between runs. A node has an op and sources. A view
    shares the memory of its `root`, `offset` bytes further. For block formats `shape` counts elements and the last stride steps from
    block to block.
    """

    __slots__ = ("name", "dtype", "shape", "strides", "op", "srcs", "params", "view_of", "offset", "is_input", "is_output", "buffer",
                 "buffer_offset", "serial")

    def __init__(self, dtype: DType = F32, shape: Sequence[int] = (), *, name: str = "", op: Op | None = None,
                 srcs: Sequence[Tensor | None] = (), params: Mapping[str, Any] = _NO_PARAMS, strides: Sequence[int] | None = None,
                 view_of: Tensor | None = None, offset: int = 0) -> None:
        if not 0 < len(shape) <= MAX_DIMS:
            raise ShapeError(f"tensor '{name}' has {len(shape)} dimensions: 1 to {MAX_DIMS} are possible")
        if min(shape) < 0:
            raise ShapeError(f"tensor '{name}' has the shape {list(shape)}: extents are not negative")
        if shape[-1] % dtype.block_size:
            raise ShapeError(f"tensor '{name}': rows of {shape[-1]} are no multiple of the {dtype.block_size} elements of a {dtype} block")
        self.serial = next(_serial)
        self.dtype, self.shape, self.op, self.srcs, self.params = dtype, tuple(shape), op, tuple(srcs), params
        self.name = name or (f"{op.name}-{self.serial}" if op else f"leaf-{self.serial}")
        self.strides = tuple(strides) if strides is not None else row_major(self.shape, dtype)
        self.view_of, self.offset = view_of, offset
        self.is_input = self.is_output = False
        self.buffer: Buffer | None = None  # of a root; a view looks at its root's
        self.buffer_offset = 0

    # -- where it is --------------------------------------------------------------------------------------------

    @property
    def root(self) -> Tensor:
        """The tensor that owns the memory: itself, unless it is a view."""
        t = self
        while t.view_of is not None:
            t = t.view_of
        return t

    @property
    def root_offset(self) -> int:
        """Bytes from the root's first element to this tensor's."""
        t, total = self, 0
        while t.view_of is not None:
            total += t.offset
            t = t.view_of
        return total

    @property
    def is_weight(self) -> bool:
        buffer = self.root.buffer
        return buffer is not None and buffer.usage == "weights"

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def is_leaf(self) -> bool:
        return self.op is None

    @property
    def is_view_op(self) -> bool:
        """Made by VIEW, RESHAPE, PERMUTE or TRANSPOSE: nothing to compute."""
        return self.op is not None and self.op.is_view

    @property
    def first_weight(self) -> Tensor | None:
        return next((s for s in self.srcs if s is not None and s.is_weight), None)

    @property
    def types(self) -> tuple[str, ...]:
        """Type names of the sources and of the result, as error messages and keys show them."""
        return (*(s.dtype.name if s is not None else "-" for s in self.srcs), self.dtype.name)

    @property
    def n_elements(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    @property
    def nbytes(self) -> int:
        """Bytes from the first to behind the last element."""
        if self.n_elements == 0:
            return 0
        reach = self.dtype.nbytes + (self.shape[-1] // self.dtype.block_size - 1) * self.strides[-1]
        return reach + sum((n - 1) * s for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True))

    @property
    def is_contiguous(self) -> bool:
        expected = row_major(self.shape, self.dtype)
        return all(n == 1 or s == e for n, s, e in zip(self.shape, self.strides, expected, strict=True))

    # -- views --------------------------------------------------------------------------------------------------

    def view(self, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0, name: str = "") -> Tensor:
        """VIEW: another shape and other byte strides over the same memory, `offset` bytes further."""
        view = Tensor(self.dtype, shape, name=name or f"{self.name} (view)", op=VIEW, srcs=(self,), strides=strides, view_of=self,
                      offset=offset)
        if offset < 0 or min(view.strides) < 0 or (view.n_elements and self.root_offset + offset + view.nbytes > self.root.nbytes):
            raise ShapeError(f"view: {list(shape)} at byte {offset} leaves tensor '{self.root.name}' of {self.root.nbytes} bytes")
        return view

    def __getitem__(self, index: Any) -> Tensor:
        """VIEW by slices and integers, as NumPy's basic indexing (steps of 1 or more; the last dimension of blocks stays whole)."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise ShapeError(f"view: '{self.name}' was given {len(parts)} indexes and has {len(self.shape)} dimensions")
        shape, strides, offset = [], [], 0
        for d, (n, step) in enumerate(zip(self.shape, self.strides, strict=True)):
            part = parts[d] if d < len(parts) else slice(None)
            if self.dtype.is_block and d == len(self.shape) - 1 and part != slice(None):
                raise ShapeError(f"view: rows of {self.dtype} blocks cannot be cut")
            if isinstance(part, slice):
                start, stop, by = part.indices(n)
                shape.append(max(0, -(-(stop - start) // by)))
                strides.append(step * by)
                offset += start * step
            else:
                offset += range(n)[part] * step
        return self.view(shape or [1], strides or [self.dtype.nbytes], offset if 0 not in shape else 0)

    def reshape(self, *shape: int) -> Tensor:
        """RESHAPE: the same elements of a contiguous tensor in another shape."""
        if not self.is_contiguous:
            raise ShapeError(f"reshape: tensor '{self.name}' is not contiguous; use cont() first")
        out = Tensor(self.dtype, shape, name=f"{self.name} (reshaped)", op=RESHAPE, srcs=(self,), view_of=self)
        if out.n_elements != self.n_elements:
            raise ShapeError(f"reshape: {list(self.shape)} has {self.n_elements} elements, {list(shape)} has {out.n_elements}")
        return out

    def permute(self, *axes: int) -> Tensor:
        """PERMUTE: dimension `i` of the result is dimension `axes[i]` of this tensor, as `numpy.transpose`."""
        if sorted(axes) != list(range(len(self.shape))):
            raise ShapeError(f"permute: {list(axes)} is no order of the {len(self.shape)} dimensions of '{self.name}'")
        if self.dtype.is_block and axes[-1] != len(axes) - 1:
            raise ShapeError(f"permute: the last dimension of {self.dtype} blocks stays last")
        return Tensor(self.dtype, [self.shape[a] for a in axes], name=f"{self.name} (permuted)", op=PERMUTE, srcs=(self,),
                      strides=[self.strides[a] for a in axes], view_of=self, params={"axes": tuple(axes)})

    def transpose(self) -> Tensor:
        """TRANSPOSE: the last two dimensions change places."""
        n = len(self.shape)
        if n < 2:
            raise ShapeError(f"transpose: '{self.name}' has 1 dimension, 2 or more are needed")
        out = self.permute(*range(n - 2), n - 1, n - 2)
        out.op, out.name = TRANSPOSE, f"{self.name} (transposed)"
        return out

    def __repr__(self) -> str:
        return f"<{self.name}: {self.op.name if self.op else 'leaf'} {self.dtype}{list(self.shape)}>"


class _ViewOp:
    """An op without a kernel: it only describes memory, and every backend supports it."""

    is_view = True

    def __init__(self, name: str) -> None:
        self.name = name


VIEW: Any = _ViewOp("view")
RESHAPE: Any = _ViewOp("reshape")
PERMUTE: Any = _ViewOp("permute")
TRANSPOSE: Any = _ViewOp("transpose")


def leaf(dtype: DType, shape: Sequence[int], name: str) -> Tensor:
    """A tensor without an op: a weight, or memory kept between runs."""
    return Tensor(dtype, shape, name=name)


def input_tensor(dtype: DType, shape: Sequence[int], name: str) -> Tensor:
    """A leaf the user sets before each run."""
    t = Tensor(dtype, shape, name=name)
    t.is_input = True
    return t
