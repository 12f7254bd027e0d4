"""FLASH_ATTN_EXT: pieces, masks, heads that share keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ShapeError
from engine.testing import Example, assert_close, check_call, run_guarded
from kernels import OPS

Array = np.ndarray[Any, Any]
OP = OPS["flash_attn_ext"]
NAMES = {np.dtype("f2"): "f16", np.dtype("f4"): "f32"}


def example(q: Array, k: Array, v: Array, mask: Array | None = None, **params: float) -> Example:
    mask_type = NAMES[mask.dtype] if mask is not None else "f16"
    key = ("flash_attn_ext", ("f32", NAMES[k.dtype], NAMES[v.dtype], mask_type, "f32"))
    return Example.of(OP, key, {"q": q, "k": k, "v": v, **({} if mask is None else {"mask": mask})}, **{"factor": 0.25, **params})


def operands(seed: int, t: int = 3, heads: int = 4, kv: int = 2, blocks: int = 2, dtype: str = "f2") -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((t, heads, 16)).astype("f4"), rng.standard_normal((kv, blocks, 16, 32)).astype(dtype),
            rng.standard_normal((kv, 32 * blocks, 16)).astype(dtype))


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 17])
def test_pieces_are_merged(blocks: int, cpu: CpuBackend, run_seed: int) -> None:
    """A piece has 8 blocks of 32 keys: below, at and above its end."""
    check_call(cpu, example(*operands(run_seed, blocks=blocks)))


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 7, 8])
def test_heads_share_keys(shared: int, cpu: CpuBackend, run_seed: int) -> None:
    check_call(cpu, example(*operands(run_seed, heads=2 * shared, kv=2)))


@pytest.mark.parametrize("blocks", [1, 2, 9])
def test_masked_blocks_change_no_bit(blocks: int, cpu: CpuBackend, run_seed: int) -> None:
    """A cache that is longer than what is visible gives the same result, whatever lies in the rest of it."""
    q, k, v = operands(run_seed, blocks=blocks)
    _, more_k, more_v = operands(run_seed + 1, blocks=3)
    short, _ = run_guarded(cpu, example(q, k, v, np.zeros((3, 32 * blocks), "f2")))
    mask = np.zeros((3, 32 * blocks + 96), "f2")
    mask[:, 32 * blocks :] = -np.inf
    long, _ = run_guarded(cpu, example(q, np.concatenate([k, more_k], 1), np.concatenate([v, more_v], 1), mask))
    assert short.tobytes() == long.tobytes()


def test_a_mask_of_zeros_is_no_mask(cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed)
    with_mask, _ = run_guarded(cpu, example(q, k, v, np.zeros((3, 64), "f2")))
    without, _ = run_guarded(cpu, example(q, k, v))
    assert with_mask.tobytes() == without.tobytes()


def test_a_row_masked_as_a_whole_gives_zeros(cpu: CpuBackend, run_seed: int) -> None:
    mask = np.zeros((3, 64), "f2")
    mask[1] = -np.inf
    got = check_call(cpu, example(*operands(run_seed), mask))
    assert not got[1].any() and got[0].any() and got[2].any()


def test_no_keys_give_zeros(cpu: CpuBackend, run_seed: int) -> None:
    got = check_call(cpu, example(*operands(run_seed, blocks=0)))
    assert not got.any()


def test_one_visible_key_gives_its_value(cpu: CpuBackend, run_seed: int) -> None:
    """exp(0) / exp(0) is exactly 1."""
    q, k, v = operands(run_seed)
    mask = np.full((3, 64), -np.inf, "f2")
    mask[[0, 1, 2], [0, 31, 63]] = 0
    got = check_call(cpu, example(q, k, v, mask))
    for t, key in enumerate((0, 31, 63)):
        assert np.array_equal(got[t], np.repeat(v[:, key], 2, 0).astype("f4"))


def test_large_scores_do_not_overflow(cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed)
    check_call(cpu, example(q * np.float32(1000), k, v, factor=1.0))


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_the_composed_graph_means_the_same(cap: float, cpu: CpuBackend, run_seed: int) -> None:
    """MUL_MAT, SOFT_MAX and MUL_MAT of each head, in float32 by these very kernels: within the limit of the fused one."""
    q, k, v = operands(run_seed, dtype="f4")
    mask = np.where(np.random.default_rng(run_seed).random((3, 64)) < 0.3, -np.inf, 0).astype("f4")
    fused = example(q, k, v, mask, cap=cap)
    out = np.zeros((3, 4, 16), "f4")
    for head in range(4):
        keys = k[head // 2].transpose(0, 2, 1).reshape(64, 16)
        scores = _run(cpu, "mul_mat", w=keys, x=np.ascontiguousarray(q[:, head])) * np.float32(0.25)
        if cap:
            scores = _run(cpu, "tanh", x=scores / np.float32(cap)) * np.float32(cap)
        p = _run(cpu, "soft_max", x=scores, mask=mask)
        out[:, head] = _run(cpu, "mul_mat", w=np.ascontiguousarray(v[head // 2].T), x=p)
    assert_close(fused, out)
    check_call(cpu, fused)


def _run(cpu: CpuBackend, name: str, **arrays: Array) -> Array:
    got, _ = run_guarded(cpu, Example.of(OPS[name], (name, ("f32",) * (len(arrays) + 1)), arrays))
    return got.reshape(-1, got.shape[-1])


def test_shapes_that_do_not_fit_are_refused(cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed)
    with pytest.raises(ShapeError, match="blocks of 32"):
        run_guarded(cpu, example(q, k, v[:, :60]))
    with pytest.raises(ShapeError, match="KV heads evenly"):
        run_guarded(cpu, example(q[:, :3], k, v))
