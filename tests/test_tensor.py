"""Tensors and their views: the same memory seen another way, as NumPy sees it; and graphs: order, leaves, dump."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backend import HOST, HostBuffer, place
from engine.dtypes import F16, F32, Q4_1, Q8_0, DType
from engine.errors import ShapeError
from engine.graph import Graph
from engine.tensor import Tensor, input_tensor, leaf, row_major
from kernels.arithmetic import add, mul, scaled
from kernels.copy import cont
from kernels.set_rows import set_rows

Array = np.ndarray[Any, Any]


def filled(*shape: int, dtype: DType = F32, name: str = "x") -> tuple[Tensor, Array]:
    """A tensor in memory of its own, and the array that it holds: 0, 1, 2, ..."""
    t = leaf(dtype, shape, name)
    data = np.arange(np.prod(shape)).astype(dtype.numpy).reshape(shape)
    buffer = HOST.allocate(max(1, data.nbytes), "cache")
    buffer.set(place(t, buffer), data)
    return t, data


def seen(t: Tensor) -> Array:
    """What the tensor's memory looks like through its shape and strides."""
    buffer = t.root.buffer
    assert isinstance(buffer, HostBuffer)
    return buffer.array(t)


# -- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape,dtype,strides",
    [
        ((5,), F32, (4,)),
        ((3, 5), F32, (20, 4)),
        ((2, 3, 5), F16, (30, 10, 2)),
        ((4, 3, 2, 1), F32, (24, 8, 4, 4)),
        ((3, 64), Q4_1, (40, 20)),
        ((2, 3, 32), Q8_0, (102, 34, 34)),
        ((0, 5), F32, (20, 4)),
    ],
)
def test_strides_are_those_of_dense_rows(shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> None:
    t = leaf(dtype, shape, "t")
    assert row_major(shape, dtype) == t.strides == strides
    assert t.is_contiguous and t.is_leaf and t.root is t and t.root_offset == 0
    assert t.nbytes == np.prod(shape[:-1], dtype=int) * dtype.row_nbytes(shape[-1])


@pytest.mark.parametrize(
    "shape,dtype,words",
    [
        ((), F32, "'w' has 0 dimensions"),
        ((1, 2, 3, 4, 5), F32, "'w' has 5 dimensions"),
        ((2, -1), F32, r"'w' has the shape \[2, -1\]"),
        ((2, 33), Q8_0, "'w': rows of 33 are no multiple of the 32"),
    ],
)
def test_impossible_shapes_name_the_tensor(shape: tuple[int, ...], dtype: DType, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        Tensor(dtype, shape, name="w")


def test_an_unnamed_tensor_has_a_name_all_the_same() -> None:
    x = leaf(F32, (4,), "")
    assert x.name.startswith("leaf-") and scaled(x).name.startswith("scale-")
    assert repr(leaf(F32, (4, 2), "x")) == "<x: leaf f32[4, 2]>"


# -- slices -----------------------------------------------------------------------------------------------------

INDEXES: list[Any] = [
    1,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    (slice(None), 2),
    (0, slice(1, 4)),
    (slice(1, None), slice(None), slice(2, 5)),
    (2, 1, slice(None)),
    (slice(3, 1), slice(None)),
    (slice(-2, None), -1),
    (slice(None), slice(None), slice(None, None, 3)),
    (1, 2, 3),
]


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_slices_are_numpys(index: Any) -> None:
    t, data = filled(4, 3, 6)
    view, want = t[index], np.atleast_1d(data[index])
    assert view.shape == want.shape and view.view_of is t and view.is_view_op
    assert np.array_equal(seen(view), want)


@st.composite
def sliced(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, ...]]]:
    """A shape, and slices to apply one after the other."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    part = st.one_of(st.just(slice(None)), st.slices(5).filter(lambda p: p.step is None or p.step > 0))
    return shape, draw(st.lists(st.lists(part, min_size=1, max_size=len(shape)).map(tuple), min_size=1, max_size=3))


@given(case=sliced())
def test_views_of_views_are_numpys(case: tuple[tuple[int, ...], list[tuple[Any, ...]]]) -> None:
    shape, steps = case
    t, data = filled(*shape)
    root = t
    for index in steps:
        t, data = t[index], data[index]
    assert t.shape == data.shape and t.root is root
    assert np.array_equal(seen(t), data)


def test_rows_of_blocks_are_not_cut() -> None:
    t = leaf(Q8_0, (4, 64), "w")
    assert t[1:3].shape == (2, 64) and t[1:3].root_offset == 68
    with pytest.raises(ShapeError, match="rows of q8_0 blocks cannot be cut"):
        t[:, :32]


@pytest.mark.parametrize("wrong", [4, -5])
def test_an_index_outside_is_an_error(wrong: int) -> None:
    with pytest.raises(IndexError):
        leaf(F32, (4, 2), "x")[wrong]


def test_more_indexes_than_dimensions_are_an_error() -> None:
    with pytest.raises(ShapeError, match=r"'x'.*3 indexes.*2 dimensions"):
        leaf(F32, (4, 2), "x")[0, 0, 0]


def test_backward_slices_are_an_error() -> None:
    with pytest.raises(ShapeError, match="'x'"):
        leaf(F32, (4,), "x")[::-1]


# -- view, reshape, permute, transpose --------------------------------------------------------------------------


def test_view_with_strides_and_offset() -> None:
    t, data = filled(4, 6)
    assert np.array_equal(seen(t.view((2, 3), (48, 8), 4)), data[::2, 1::2])
    assert np.array_equal(seen(t.view((24,))), data.reshape(-1))
    assert np.array_equal(seen(t.view((3,), (0,), 8)), [2, 2, 2])  # a repeated element


@pytest.mark.parametrize(
    "shape,strides,offset", [((25,), None, 0), ((24,), None, 4), ((4, 6), (28, 4), 0), ((4,), None, -4), ((2,), (-4,), 8)]
)
def test_a_view_stays_inside_its_tensor(shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> None:
    with pytest.raises(ShapeError, match=r"leaves tensor 'x' of 96 bytes"):
        leaf(F32, (4, 6), "x").view(shape, strides, offset)


def test_a_view_of_a_view_stays_inside_the_root() -> None:
    t = leaf(F32, (4, 6), "x")
    with pytest.raises(ShapeError, match="leaves tensor 'x'"):
        t[2:].view((13,))


def test_an_empty_view_is_legal() -> None:
    t = leaf(F32, (4, 6), "x")
    assert t[4:].shape == (0, 6) and t[4:].nbytes == 0


@pytest.mark.parametrize("shape", [(24,), (6, 4), (2, 3, 4), (1, 24, 1, 1)])
def test_reshape(shape: tuple[int, ...]) -> None:
    t, data = filled(4, 6)
    assert np.array_equal(seen(t.reshape(*shape)), data.reshape(shape))
    assert np.array_equal(seen(t[1:3].reshape(12)), data[1:3].reshape(-1))


def test_reshape_says_why_not() -> None:
    t = leaf(F32, (4, 6), "x")
    with pytest.raises(ShapeError, match=r"\[4, 6\] has 24 elements, \[5, 5\] has 25"):
        t.reshape(5, 5)
    with pytest.raises(ShapeError, match=r"tensor 'x \(transposed\)' is not contiguous"):
        t.transpose().reshape(24)
    with pytest.raises(ShapeError, match=r"'x \(view\)' is not contiguous"):
        t[:, ::2].reshape(12)


@given(axes=st.permutations(range(4)), data=st.data())
def test_permute_is_numpys_transpose(axes: list[int], data: st.DataObject) -> None:
    t, array = filled(*data.draw(st.tuples(*[st.integers(1, 4)] * 4)))
    view = t.permute(*axes)
    assert np.array_equal(seen(view), array.transpose(axes)) and view.params["axes"] == tuple(axes)
    assert view.is_contiguous == all(n == 1 or s == d for n, s, d in zip(view.shape, view.strides, row_major(view.shape, F32), strict=True))


def test_transpose_swaps_the_last_two_dimensions() -> None:
    t, data = filled(2, 3, 5)
    view = t.transpose()
    assert np.array_equal(seen(view), data.swapaxes(1, 2))
    assert view.op.name == "transpose"
    assert np.array_equal(seen(view.transpose()), data)


def test_permute_says_why_not() -> None:
    t = leaf(F32, (2, 3), "x")
    for axes in ((0,), (0, 0), (1, 2), (0, 1, 2)):
        with pytest.raises(ShapeError, match="'x'"):
            t.permute(*axes)
    with pytest.raises(ShapeError, match="the last dimension of q8_0 blocks stays last"):
        leaf(Q8_0, (2, 32), "w").permute(1, 0)
    with pytest.raises(ShapeError, match="'x'.*1 dimension"):
        leaf(F32, (3,), "x").transpose()


# -- graphs -----------------------------------------------------------------------------------------------------


def test_a_graph_has_sources_first_and_each_node_once() -> None:
    x, w = input_tensor(F32, (2, 4), "x"), leaf(F32, (4,), "w")
    a = scaled(x, factor=2.0, name="a")
    b = mul(a, w, name="b")
    c = add(b, a[1:].reshape(4), name="c")
    graph = Graph([c])
    assert [t.name for t in graph.leaves] == ["x", "w"] and [t.name for t in graph.inputs] == ["x"]
    assert [t.name for t in graph.nodes] == ["a", "b", "a (view)", "a (view) (reshaped)", "c"]
    assert graph.tensors == [*graph.leaves, *graph.nodes] and len(graph) == 5 and list(graph) == graph.nodes
    assert c.is_output and not b.is_output


def test_a_graph_of_several_results_holds_what_they_need_only() -> None:
    x = input_tensor(F32, (4,), "x")
    a, b = scaled(x, name="a"), scaled(x, factor=3.0, name="b")
    scaled(b, name="unused")
    assert [t.name for t in Graph([b, a]).nodes] == ["a", "b"]
    assert [t.name for t in Graph([a]).nodes] == ["a"]
    assert Graph([x]).nodes == [] and Graph([x]).leaves == [x]


def test_a_write_into_a_view_brings_its_root_along() -> None:
    cache, x, ids = leaf(F32, (1, 1, 8, 4), "cache"), input_tensor(F32, (2, 4), "x"), input_tensor(F32, (2,), "ids")
    ids.dtype = next(t for t in set_rows.types["ids"])
    written = set_rows(x, ids, cache[:, :, 2:], name="written")
    graph = Graph([cont(written, name="read")])
    assert {t.name for t in graph.leaves} == {"cache", "x", "ids"}
    assert written.root is cache
    assert [t.name for t in graph.nodes] == ["cache (view)", "written", "read"]


def test_deep_graphs_need_no_recursion() -> None:
    t = input_tensor(F32, (4,), "x")
    for _ in range(5000):
        t = scaled(t)
    assert len(Graph([t])) == 5000


def test_dump_is_a_line_a_node() -> None:
    x, w = input_tensor(F32, (2, 4), "x"), leaf(F16, (4,), "w")
    graph = Graph([add(scaled(x, name="a").transpose().transpose(), w, name="y")])
    assert graph.dump().splitlines() == [
        "a: scale f32[2, 4] <- x",
        "a (transposed): transpose f32[4, 2] <- a",
        "a (transposed) (transposed): transpose f32[2, 4] <- a (transposed)",
        "y: add f32[2, 4] <- a (transposed) (transposed), w",
    ]
