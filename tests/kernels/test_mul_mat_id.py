"""MUL_MAT_ID: the bits of MUL_MAT for each token's experts, shared and own rows of x, ids that name no expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import BF16, F16, F32, Q2_K, Q4_0, Q4_K, Q5_1, Q6_K, Q8_0, WEIGHT_BLOCKS, DType
from engine.errors import ShapeError
from engine.testing import Example, InterleavedBufferType, agrees_in_mean, check_call, elements, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]


def example(dtype: DType, e: int, m: int, k: int, ids: Any, xu: int = 1, seed: int = 0) -> Example:
    rng = np.random.default_rng(seed)
    ids = np.array(ids, "i4")
    w, x = elements(rng.standard_normal((e, m, k)), dtype), rng.standard_normal((len(ids), xu, k)).astype("f4")
    return Example.of(OPS["mul_mat_id"], ("mul_mat_id", (dtype.name, "f32", "i32", "f32")), {"w": w, "x": x, "ids": ids})


def memory(cpu: CpuBackend, packed: bool) -> Any:
    return cpu.packed if packed else None


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, Q4_0, Q5_1, Q8_0, Q4_K, Q6_K, Q2_K], ids=str)
def test_each_row_has_the_bits_of_its_expert(dtype: DType, packed: bool, cpu: CpuBackend, run_seed: int) -> None:
    """MUL_MAT of one expert and one row of x, in memory of the same layout."""
    ids = [[3, 0], [1, 1], [4, 3]]
    made = example(dtype, 5, 13, 256, ids, xu=2, seed=run_seed)
    got = check_call(cpu, made, weights=memory(cpu, packed))
    for t, u in np.ndindex(3, 2):
        operands = {"w": made.operands["w"][ids[t][u]], "x": made.operands["x"][t, u : u + 1]}
        one, _ = run_guarded(cpu, Example.of(OPS["mul_mat"], ("mul_mat", (dtype.name, "f32", "f32")), operands),
                             weights=memory(cpu, packed))
        assert got[t, u].tobytes() == one.tobytes()


@pytest.mark.parametrize("dtype", [F32, BF16, Q4_0, Q8_0, Q4_K], ids=str)
def test_slices_of_k_are_those_of_mul_mat(dtype: DType, run_seed: int) -> None:
    """On a GPU's 32 lanes; slices in turn have the bits of slices in launches of their own."""
    sim = SimBackend([OPS[n] for n in ("mul_mat", "mul_mat_id", "quantize_rows")], lanes=32)
    memory = InterleavedBufferType(32) if dtype in WEIGHT_BLOCKS else None
    made = example(dtype, 3, 33, 544 if dtype.block_size <= 32 else 768, [[2, 0]], seed=run_seed)
    got = check_call(sim, made, "mul_mat_id_rows_split" if memory else "mul_mat_id_split", memory)
    assert got.tobytes() == check_call(sim, made, "mul_mat_id_rows_in_turn" if memory else None, memory).tobytes()
    one = Example.of(OPS["mul_mat"], ("mul_mat", (dtype.name, "f32", "f32")), {"w": made.operands["w"][2], "x": made.operands["x"][0]})
    assert got[0, 0].tobytes() == run_guarded(sim, one, weights=memory)[0].tobytes()


@pytest.mark.parametrize("dtype", [F32, Q8_0, Q4_K], ids=str)
def test_products_agree_with_float_activations(dtype: DType, cpu: CpuBackend, run_seed: int) -> None:
    made = example(dtype, 4, 8, 256, [[0, 3], [2, 1]], seed=run_seed)
    got = check_call(cpu, made)
    assert agrees_in_mean(made, got, 1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [F32, Q8_0], ids=str)
def test_a_row_of_x_serves_all_ids_of_its_token(dtype: DType, packed: bool, cpu: CpuBackend, run_seed: int) -> None:
    shared = example(dtype, 3, 5, 64, [[0, 1, 2], [2, 2, 0]], seed=run_seed)
    x = shared.operands["x"]
    own = Example.of(shared.op, shared.key, {**shared.operands, "x": np.repeat(x, 3, 1)})
    one, two = (run_guarded(cpu, e, weights=memory(cpu, packed))[0] for e in (shared, own))
    assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_ids_outside_are_clamped(packed: bool, cpu: CpuBackend, run_seed: int) -> None:
    wild = check_call(cpu, example(Q8_0, 3, 9, 64, [[-1, 3], [2**31 - 1, -(2**31)]], seed=run_seed), weights=memory(cpu, packed))
    tame = check_call(cpu, example(Q8_0, 3, 9, 64, [[0, 2], [2, 0]], seed=run_seed), weights=memory(cpu, packed))
    assert wild.tobytes() == tame.tobytes()


@pytest.mark.parametrize("tokens", [1, 17, 33])
@pytest.mark.parametrize(("experts", "used"), [(8, 2), (64, 10), (1, 1)])
def test_many_tokens_and_idle_experts(experts: int, used: int, tokens: int, cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    ids = np.stack([rng.permutation(experts)[:used] for _ in range(tokens)])
    check_call(cpu, example(Q4_0, experts, 16, 64, ids, seed=run_seed), weights=cpu.packed)


@pytest.mark.parametrize("dtype", [F32, Q8_0], ids=str)
def test_empty_extents(dtype: DType, cpu: CpuBackend) -> None:
    for e, m, k, shape in ((2, 3, 0, (2, 2)), (2, 0, 64, (2, 2)), (2, 3, 64, (0, 2)), (0, 3, 64, (0, 2))):
        assert not check_call(cpu, example(dtype, e, m, k, np.zeros(shape, "i4"))).any()


def test_what_does_not_fit_is_refused(cpu: CpuBackend) -> None:
    with pytest.raises(ShapeError, match="1 or 3, one for each id"):
        run_guarded(cpu, example(F32, 4, 3, 8, [[0, 1, 2]], xu=2))
    with pytest.raises(ShapeError, match="no expert"):
        run_guarded(cpu, example(F32, 0, 3, 8, [[0, 1]]))
