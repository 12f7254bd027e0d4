"""MUL_MAT and QUANTIZE_ROWS: few columns, few rows, permuted operands, shared matrices, empty extents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backend import KernelRow, KernelTable
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import BF16, F16, F32, FLOATS, NVFP4, Q1_0, Q2_K, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, Q8_X, WEIGHT_BLOCKS, DType
from engine.errors import ShapeError
from engine.gguf.quants import QUANTIZERS
from engine.op import Call
from engine.tensor import leaf
from engine.testing import Example, InterleavedBufferType, Layout, check_call, elements, quantize_activations, run_guarded, values
from kernels import OPS

Array = np.ndarray[Any, Any]


def example(dtype: DType, w_shape: tuple[int, ...], x_shape: tuple[int, ...], seed: int, **layouts: Layout) -> Example:
    rng = np.random.default_rng(seed)
    w, x = elements(rng.standard_normal(w_shape), dtype), rng.standard_normal(x_shape).astype("f4")
    return Example.of(OPS["mul_mat"], ("mul_mat", (dtype.name, "f32", "f32")), {"w": w, "x": x}, layouts)


def random_blocks(dtype: DType, m: int, n: int, k: int, kind: str, seed: int) -> Example:
    """Weights of any codes (`codes`), or all at an end of their range."""
    return Example.parse(f"mul_mat[{dtype},f32,f32] w={m},{k}:{kind} x={n},{k} seed={seed % 2**31}", OPS)


@pytest.mark.parametrize("kind", ["codes", "highest", "lowest"])
@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_every_block_format(dtype: DType, kind: str, cpu: CpuBackend, run_seed: int) -> None:
    """Both layouts, one column, some, and more than a tile holds; a column has the same bits with others beside it."""
    for memory in (None, cpu.packed):
        made = random_blocks(dtype, cpu.table.lanes + 3, 9, 512, kind, run_seed)
        nine = check_call(cpu, made, weights=memory)
        for n in (1, 3):
            few = Example.of(OPS["mul_mat"], made.key, {"w": made.operands["w"], "x": made.operands["x"][:n]})
            assert np.array_equal(check_call(cpu, few, weights=memory), nine[:n])


@pytest.mark.parametrize("dtype", WEIGHT_BLOCKS, ids=str)
def test_every_block_format_in_plain_python(dtype: DType, run_seed: int) -> None:
    """Sums of products are exact integers there, and codes that leave their range are refused."""
    sim = SimBackend([OPS["mul_mat"], OPS["quantize_rows"]], lanes=4)
    for memory in (None, InterleavedBufferType(4)):
        check_call(sim, random_blocks(dtype, 3, 2, 256, "codes", run_seed), weights=memory)


@pytest.mark.parametrize("k", [64, 128, 256])
@pytest.mark.parametrize("dtype", [*FLOATS, *(t for t in WEIGHT_BLOCKS if t.block_size == 32 and t.name in QUANTIZERS)], ids=str)
def test_few_columns(dtype: DType, k: int, cpu: CpuBackend, run_seed: int) -> None:
    """Two columns with k = 64 or 128 have run over memory elsewhere."""
    for n in range(1, 10):
        check_call(cpu, example(dtype, (16, k), (n, k), run_seed + n))


@pytest.mark.parametrize("m", [1, 2, 3, 5, 16, 17])
@pytest.mark.parametrize("dtype", [Q4_K, Q5_K, Q6_K], ids=str)
def test_few_rows(dtype: DType, m: int, cpu: CpuBackend, run_seed: int) -> None:
    for memory in (None, cpu.packed):
        check_call(cpu, example(dtype, (m, 256), (3, 256), run_seed), weights=memory)


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1)], ids=str)
@pytest.mark.parametrize("operand", ["w", "x"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_permuted_operands(dtype: DType, operand: str, axes: tuple[int, ...], cpu: CpuBackend, run_seed: int) -> None:
    layout = Layout(axes, (1, 1, 1, 1), (0, 0, 0, 0), 0)
    check_call(cpu, example(dtype, (2, 3, 5, 256), (2, 3, 4, 256), run_seed, **{operand: layout}))


@pytest.mark.parametrize("dtype", [F32, Q8_0, Q4_K], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_batches_share_matrices(dtype: DType, packed: bool, cpu: CpuBackend, run_seed: int) -> None:
    """Grouped heads: matrix a // ratio, in memory of either layout, whatever the number of rows."""
    for m in (1, 5, cpu.table.lanes, cpu.table.lanes + 1):
        check_call(cpu, example(dtype, (2, 2, m, 256), (4, 6, 3, 256), run_seed), weights=cpu.packed if packed else None)


@pytest.mark.parametrize(("w_shape", "x_shape"), [((0, 64), (3, 64)), ((5, 64), (0, 64)), ((5, 0), (3, 0)), ((1, 1, 5, 64), (0, 1, 3, 64)),
                                                  ((0, 1, 5, 64), (0, 1, 3, 64)), ((1, 0, 5, 64), (2, 0, 3, 64))])
@pytest.mark.parametrize("dtype", [F32, Q8_0], ids=str)
def test_empty_extents(dtype: DType, w_shape: tuple[int, ...], x_shape: tuple[int, ...], cpu: CpuBackend) -> None:
    got = check_call(cpu, example(dtype, w_shape, x_shape, 0))
    assert not got.any()


@pytest.mark.parametrize(("w_shape", "x_shape"), [((2, 5, 64), (3, 4, 64)), ((0, 5, 64), (3, 4, 64))])
def test_batches_that_cannot_share_are_refused(w_shape: tuple[int, ...], x_shape: tuple[int, ...], cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="not shared evenly"):
        run_guarded(cpu, example(F32, w_shape, x_shape, 0))


@pytest.mark.parametrize("dtype", [F32, F16, Q8_0, Q6_K], ids=str)
def test_a_long_sum(dtype: DType, cpu: CpuBackend, run_seed: int) -> None:
    check_call(cpu, example(dtype, (3, 8192), (2, 8192), run_seed))


# -- slices of k ------------------------------------------------------------------------------------------------


def wide() -> SimBackend:
    return SimBackend([OPS["mul_mat"], OPS["quantize_rows"]], lanes=32)


def lies(dtype: DType) -> InterleavedBufferType | None:
    return InterleavedBufferType(32) if dtype in WEIGHT_BLOCKS else None


def chosen(dtype: DType, m: int, k: int, n: int, batches: int = 1) -> tuple[str, dict[str, int]]:
    """The variant that 32 lanes take, and the sizes it is launched with."""
    node = OPS["mul_mat"](leaf(dtype, (1, 1, m, k), "w"), leaf(Q8_X if dtype in WEIGHT_BLOCKS else F32, (1, batches, n, k), "x"))
    call = Call.of(node, {"w": "lanes32"} if dtype in WEIGHT_BLOCKS else {}, 32)
    row, why = KernelTable([OPS["mul_mat"]], 32).lookup(call)
    assert isinstance(row, KernelRow), why
    return row.name, {name: row.variant.sizes[name](call) for name in ("slices", "length") if name in row.variant.sizes}


@pytest.mark.parametrize(("dtype", "m", "k"), [(Q8_0, 33, 544), (Q4_1, 5, 800), (Q4_K, 3, 768), (Q2_K, 2, 512), (F32, 6, 1300),
                                               (BF16, 5, 512)], ids=str)
def test_a_column_has_the_bits_it_has_alone_in_slices_too(dtype: DType, m: int, k: int, run_seed: int) -> None:
    """Slices in launches of their own, in turn, and as the table chooses."""
    sim, memory = wide(), lies(dtype)
    five = example(dtype, (m, k), (5, k), run_seed) if dtype in FLOATS else random_blocks(dtype, m, 5, k, "codes", run_seed)
    names = ["mul_mat_split"] if dtype in FLOATS else ["mul_mat_rows_split", "mul_mat_rows_in_turn"]
    got = [check_call(sim, five, name, memory) for name in names]
    for n in (1, 2):
        few = Example.of(OPS["mul_mat"], five.key, {"w": five.operands["w"], "x": five.operands["x"][:n]})
        assert chosen(dtype, m, k, n)[0] == names[0]
        for name, whole in zip([None, *names], [got[0], *got], strict=True):
            assert check_call(sim, few, name, memory).tobytes() == got[0][:n].tobytes() == whole[:n].tobytes()


@pytest.mark.parametrize("dtype", [Q4_0, Q6_K, NVFP4, Q1_0, F16], ids=str)
def test_slices_follow_from_m_and_k_alone_and_fill_the_chip(dtype: DType) -> None:
    block, tile = (dtype.block_size, 32) if dtype in WEIGHT_BLOCKS else (1, 4)
    for m in (1, 32, 33, 576, 4096, 16384, 151936):
        for k in (256, 512, 768, 2304, 4096, 14336):
            name, sizes = chosen(dtype, m, k, 1)
            if not sizes:
                assert k < 512 or -(-m // tile) >= 2048
                continue
            slices, length = sizes["slices"], sizes["length"] * block
            assert name.endswith("split") and slices > 1 and (slices - 1) * length < k <= slices * length and length >= 256
            assert -(-m // tile) * slices >= 1024 or length < 512, "slices could be shorter"
            assert -(-m // tile) * (slices - 1) < 2048, "slices could be longer"
            for n, batches in ((2, 1), (9, 3), (512, 1), (8192, 1)):
                assert chosen(dtype, m, k, n, batches)[1].get("length") == sizes["length"]


def test_columns_enough_make_slices_needless() -> None:
    for n, batches in ((1024, 1), (64, 16)):
        assert chosen(Q8_0, 512, 4096, n, batches)[0] == "mul_mat_rows_in_turn"
        assert chosen(Q8_0, 512, 4096, n // 2, batches)[0] == "mul_mat_rows_split"
    assert chosen(Q8_0, 512, 256, 1)[0] == "mul_mat_rows"


@pytest.mark.parametrize("dtype", [F32, Q8_0, Q4_K], ids=str)
def test_batches_in_slices_share_matrices(dtype: DType, run_seed: int) -> None:
    check_call(wide(), example(dtype, (2, 1, 35, 512), (2, 3, 2, 512), run_seed), weights=lies(dtype))


def test_cpus_have_no_slices() -> None:
    for lanes in (1, 4, 8, 16):
        rows = KernelTable([OPS["mul_mat"], OPS["mul_mat_id"]], lanes).rows.values()
        assert not any(name in row.name for one in rows for row in one for name in ("split", "in_turn"))


# -- activations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-30, -20, 0, 20, 37])
def test_quantized_activations_are_within_half_a_step(exponent: int, cpu: CpuBackend, run_seed: int) -> None:
    """Independent of how codes are laid out: each value is off by no more than half the block's scale, and four roundings."""
    x = (np.random.default_rng(run_seed).uniform(-1, 1, (4, 96)) * 10.0**exponent).astype("f4")
    got, guards = run_guarded(cpu, Example.of(OPS["quantize_rows"], ("quantize_rows", ("f32", "q8_x")), {"x": x}))
    assert guards.intact and got.tobytes() == quantize_activations(x).tobytes()
    d = np.repeat(got["d"][..., 0].astype("f8"), 32, -1)
    assert (np.abs(values(got, Q8_X) - x) <= d / 2 + 4 * 2.0**-24 * np.abs(x)).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_reaches_the_whole_column(poison: float, cpu: CpuBackend, run_seed: int) -> None:
    made = example(Q8_0, (5, 64), (3, 64), run_seed)
    x = made.operands["x"].copy()
    x[1, 40] = poison
    for memory in (None, cpu.packed):
        got = check_call(cpu, made.with_data(x=x), weights=memory)
        assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()
