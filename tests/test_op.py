"""Ops: contract lines, shape inference and its errors, optional operands, keys of the table, results written into an operand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.dtypes import F16, F32, I32, Q4_1, Q8_0, Q8_X, WEIGHT_BLOCKS
from engine.errors import KernelError, ShapeError
from engine.op import Call, Contract, Op, Operand, Step, Variant
from engine.tensor import Tensor, leaf
from kernels import OPS
from kernels.arithmetic import add, scaled
from kernels.attention import flash_attn_ext
from kernels.copy import cont, cpy
from kernels.get_rows import get_rows
from kernels.mul_mat import mul_mat, quantize_rows
from kernels.norm import rms_norm
from kernels.rope import rope
from kernels.set_rows import set_keys, set_rows
from kernels.soft_max import soft_max


def f32(*shape: int, name: str = "") -> Tensor:
    return leaf(F32, shape, name)


# -- contract lines ---------------------------------------------------------------------------------------------


def test_a_contract_line_is_read() -> None:
    c = Contract.parse("q[t, h, d], k[kv, blocks, d, 32], mask?[t, m] -> y[t, h, e]")
    assert c.operands == (Operand("q", ("t", "h", "d")), Operand("k", ("kv", "blocks", "d", 32)), Operand("mask", ("t", "m"), True))
    assert c.result == Operand("y", ("t", "h", "e")) and not c.writes
    assert c.views == (*c.operands, c.result)
    assert c.dims == ("t", "h", "d", "kv", "blocks", "m", "e")


def test_a_result_without_brackets_is_an_operand_that_is_written() -> None:
    c = Contract.parse("x[r, n], ids[r], y[m, n] -> y")
    assert c.writes and c.result is c.operands[2] and c.views == c.operands


@pytest.mark.parametrize(
    "text", ["x[n]", "x[n] y[n]", "x[n] -> z", "-> y[n]", "x -> y[n]", "x[n], w -> y[n]", "x[n -> y[n]", "x[n]; w[n] -> y[n]", ""]
)
def test_a_contract_line_that_is_none(text: str) -> None:
    with pytest.raises(KernelError):
        Contract.parse(text)


@given(dims=st.lists(st.sampled_from(["a", "b", "n1", "7"]), min_size=1, max_size=4), is_optional=st.booleans())
def test_spaces_do_not_matter(dims: list[str], is_optional: bool) -> None:
    mark = "?" if is_optional else ""
    tight, loose = f"x{mark}[{','.join(dims)}]->y[a]", f"  x{mark}[ {' , '.join(dims)} ]  ->  y[ a ] "
    assert Contract.parse(tight).operands == Contract.parse(loose).operands


def test_every_op_has_a_contract_a_general_kernel_and_a_reference() -> None:
    for name, op in OPS.items():
        assert op.name == name and op.variants and op.__doc__, name
        assert [v.name for v in op.variants][-1] == "general", name
        assert op._reference is not None or op.fuses is not None, name
        assert len(op.keys()) == len(set(op.keys())) > 0, name


# -- shapes -----------------------------------------------------------------------------------------------------

SHAPES: list[tuple[Op, tuple[Tensor | None, ...], tuple[int, ...]]] = [
    (rms_norm, (f32(5, 8),), (5, 8)),
    (rms_norm, (f32(8),), (8,)),
    (add, (f32(2, 3, 8), f32(8)), (2, 3, 8)),
    (add, (f32(2, 3, 8), f32(3, 1)), (2, 3, 8)),
    (mul_mat, (f32(16, 8), f32(5, 8)), (5, 16)),
    (mul_mat, (f32(16, 8), f32(8)), (1, 16)),
    (mul_mat, (f32(2, 16, 8), f32(4, 5, 8)), (4, 5, 16)),
    (mul_mat, (leaf(Q8_0, (16, 64), "w"), f32(0, 64)), (0, 16)),
    (get_rows, (f32(10, 8), leaf(I32, (3,), "ids")), (3, 8)),
    (get_rows, (leaf(Q4_1, (10, 32), "w"), leaf(I32, (0,), "ids")), (0, 32)),
    (soft_max, (f32(2, 3, 4, 5), None, None), (2, 3, 4, 5)),
    (flash_attn_ext, (f32(3, 4, 8), f32(2, 1, 8, 32), f32(2, 32, 6), None, None), (3, 4, 6)),
    (flash_attn_ext, (f32(1, 3, 4, 8), f32(2, 1, 8, 32), f32(2, 32, 6), None, None), (1, 3, 4, 6)),
    (rope, (f32(1, 4, 8), leaf(I32, (4, 1), "pos"), f32(2, 4), None), (1, 4, 8)),
]


@pytest.mark.parametrize("op,operands,shape", SHAPES, ids=lambda v: getattr(v, "name", None))
def test_the_shape_of_a_result(op: Op, operands: tuple[Tensor | None, ...], shape: tuple[int, ...]) -> None:
    node = op(*operands, name="y")
    assert node.shape == shape and node.dtype is F32 and node.op is op and node.srcs == operands
    assert not node.is_leaf and not node.is_view_op and node.view_of is None


MISTAKES: list[tuple[Op, tuple[Tensor | None, ...], dict[str, object], str]] = [
    (rms_norm, (), {}, "operand x is missing"),
    (rms_norm, (None,), {}, "operand x is missing"),
    (rms_norm, (f32(4), f32(4)), {}, "2 operands given, 1 expected"),
    (rms_norm, (f32(4),), {"epsilon": 1.0}, "unknown parameter 'epsilon'; it has eps"),
    (add, (f32(4),), {}, "operand w is missing"),
    (add, (f32(3, 4, name="x"), f32(5, name="b")), {}, r"cannot be repeated to \[1, 1, 3, 4\]"),
    (mul_mat, (f32(16, 8, name="w"), f32(5, 9, name="x")), {}, r"x 'x' has shape \[5, 9\], but k is 8 here"),
    (mul_mat, (f32(3, 16, 8, name="w"), f32(4, 5, 8)), {}, "3 matrices of w are not shared evenly by 4 of x"),
    (get_rows, (f32(10, 8), leaf(I32, (1, 2, 3, 4), "ids")), {}, r"ids 'ids' has shape \[1, 2, 3, 4\], 3 dimensions are allowed"),
    (rope, (f32(2, 4, 8), leaf(I32, (2,), "pos"), f32(2, 5, name="freqs")), {}, "10 rotated dimensions of 8"),
    (
        flash_attn_ext,
        (f32(3, 4, 8), f32(2, 1, 8, 16, name="k"), f32(2, 32, 6), None),
        {},
        r"k 'k' has shape \[2, 1, 8, 16\], but 32 is 32 here",
    ),
    (flash_attn_ext, (f32(3, 4, 8), f32(3, 1, 8, 32), f32(3, 32, 6), None), {}, "4 heads do not share 3 KV heads evenly"),
    (flash_attn_ext, (f32(3, 4, 8), f32(2, 1, 8, 32), f32(2, 33, 6), None), {}, "V has 33 keys, K 1 blocks of 32"),
    (set_rows, (f32(2, 4), leaf(I32, (3,), "ids"), f32(8, 4)), {}, r"ids 'ids' has shape \[3\], but r is 2 here"),
    (set_keys, (f32(2, 1, 4), leaf(I32, (2,), "ids"), None), {}, "operand y is missing"),
]


@pytest.mark.parametrize("op,operands,params,words", MISTAKES, ids=lambda v: getattr(v, "name", None))
def test_a_wrong_call_says_what_is_wrong(op: Op, operands: tuple[Tensor | None, ...], params: dict[str, object], words: str) -> None:
    with pytest.raises(ShapeError, match=words) as caught:
        op(*operands, **params)
    assert op.name in str(caught.value) and "\n" not in str(caught.value)


def test_a_tensor_of_a_type_no_row_takes_still_makes_a_node() -> None:
    """Which types can run is the question of a backend's table, not of the graph."""
    node = rms_norm(leaf(I32, (4, 8), "x"))
    assert node.types == ("i32", "f32") and ("rms_norm", ("i32", "f32")) not in rms_norm.keys()


# -- parameters, optional operands ------------------------------------------------------------------------------


def test_parameters_have_defaults_and_cannot_be_changed() -> None:
    node = scaled(f32(4), factor=2.0)
    assert dict(node.params) == {"factor": 2.0, "bias": 0.0}
    with pytest.raises(TypeError):
        node.params["factor"] = 3.0  # type: ignore[index]


def test_a_parameter_can_choose_the_results_type() -> None:
    assert cpy(f32(2, 8), dtype="f16").dtype is F16
    assert cont(leaf(F16, (4, 8), "h").transpose()).types == ("f16", "f16")
    assert cont(leaf(F16, (4, 8), "h").transpose()).is_contiguous


def test_an_operand_left_out_is_a_constant_of_the_kernel() -> None:
    with_mask = soft_max(f32(1, 2, 3, 8), leaf(F16, (1, 1, 3, 8), "mask"))
    without = soft_max(f32(1, 2, 3, 8))
    assert without.srcs == (without.srcs[0], None, None)
    general = soft_max.variants[-1]
    assert Call.of(with_mask).constants(general)["MASK"] == 1
    assert Call.of(without).constants(general)["MASK"] == 0
    assert Call.of(with_mask).key == ("soft_max", ("f32", "f16", "-", "f32"))
    assert Call.of(without).key == ("soft_max", ("f32", "-", "-", "f32"))


def test_constants_state_the_weight_format() -> None:
    call = Call.of(mul_mat(leaf(Q4_1, (16, 64), "w"), f32(3, 64)), lanes=8)
    constants = call.constants(mul_mat.variants[-1])
    assert constants["LANES"] == 8 and constants["BLOCK"] == 32 and constants["RUNS"] == 1
    assert (constants["LOW"], constants["HIGH"], constants["ZERO"], constants["OFFSET"]) == (0, 15, 0, 1)
    assert call.weight_format is Q4_1 and call["m"] == 16 and call["n"] == 3


def test_groups_are_rounded_up() -> None:
    call = Call.of(mul_mat(f32(10, 8), f32(7, 8)))
    general = mul_mat.variants[-1]
    assert general.groups == ("a", "b", "m/ROWS", "n/COLUMNS")
    assert call.extents(general, {"ROWS": 4, "COLUMNS": 2}) == (1, 1, 3, 4)


def test_bytes_and_operations_of_a_call() -> None:
    call = Call.of(mul_mat(leaf(Q8_0, (16, 64), "w"), f32(3, 64)))
    assert call.nbytes == 16 * 2 * 34 + 3 * 64 * 4 + 3 * 16 * 4
    assert call.flop == 2 * 3 * 16 * 64
    assert Call.of(scaled(f32(5, 7))).flop == 70 and Call.of(cpy(f32(5, 7))).flop == 0


# -- keys -------------------------------------------------------------------------------------------------------


def test_keys_are_what_some_variant_takes() -> None:
    keys = mul_mat.keys()
    types = {k[1] for k in keys}
    assert ("f32", "f32", "f32") in types and ("f16", "f32", "f32") in types
    for block in WEIGHT_BLOCKS:
        assert any(t[0] == block.name and t[1] != "f32" for t in types)  # through quantised activations
        assert (block.name, "f32", "f32") not in types
    assert mul_mat.through["x"][0] is quantize_rows and mul_mat.through["x"][1] is Q8_X


def test_keys_that_a_predicate_leaves_out() -> None:
    kinds = {(k[1][1], k[1][2]) for k in flash_attn_ext.keys()}
    assert ("f16", "f16") in kinds and ("f32", "f32") in kinds


def test_variants_are_asked_in_order_and_the_general_one_last() -> None:
    def kernel(a, x, y, n):  # type: ignore[no-untyped-def]
        pass

    made = Op("made", "x[a, n] -> y[a, n]", params={})
    made.variant("a", name="general")(kernel)
    made.variant("a", name="first", when=lambda call: None if call["n"] > 4 else "too short")(kernel)
    made.variant("a", name="second", types={"x": (F16,)})(kernel)
    assert [v.name for v in made.variants] == ["first", "second", "general"]
    assert isinstance(made.variants[0], Variant) and made.variants[0].group_names == ("a",)
    assert made.keys() == [("made", ("f32", "f32")), ("made", ("f16", "f32"))]
    assert made.variants[0].when is not None and made.variants[0].when(Call.of(made(f32(2, 4)))) == "too short"


# -- results written into an operand ----------------------------------------------------------------------------


def test_a_write_is_a_view_of_what_it_writes() -> None:
    cache = f32(1, 2, 64, 8, name="cache")
    node = set_rows(f32(2, 3, 8), leaf(I32, (3,), "ids"), cache, name="written")
    assert node.view_of is cache and node.root is cache and node.shape == cache.shape and node.strides == cache.strides
    assert not node.is_view_op and node.dtype is F32
    assert node[:, :, :32].root is cache


def test_a_write_into_a_strided_view_keeps_its_strides() -> None:
    cache = leaf(F16, (1, 2, 64, 8), "cache")
    part = cache[:, :, ::2]
    node = set_rows(f32(2, 3, 8), leaf(I32, (3,), "ids"), part)
    assert node.strides == part.strides and node.root_offset == part.root_offset and node.dtype is F16


def test_ops_that_may_run_in_place_say_so() -> None:
    for name, op in OPS.items():
        if op.inplace:
            assert op.inplace in {o.name for o in op.contract.operands}, name
            assert not op.contract.writes, name
            first = next(o for o in op.contract.operands if o.name == op.inplace)
            assert first.dims == op.contract.result.dims, name


def test_a_step_is_a_node_as_it_stands() -> None:
    node = add(f32(3, 4), f32(4), name="y")
    step = Step.of(node)
    assert step.op is add and step.srcs == node.srcs and step.out is node and step.replaces == (node,)
    assert Call.of(step).dims == Call.of(node).dims


# -- references -------------------------------------------------------------------------------------------------


def test_a_reference_takes_operands_in_order_and_parameters_with_their_defaults() -> None:
    x = np.array([[1.0, 2.0, 3.0]])
    assert np.allclose(scaled.reference_of([x[None, None]], {"factor": 2.0}), 2 * x)
    assert np.allclose(rms_norm.reference_of([x], {}), x / np.sqrt((x**2).mean() + 1e-5))
