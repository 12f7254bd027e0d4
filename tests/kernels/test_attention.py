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


def example(q: Array, k: Array, v: Array, mask: Array | None = None, sinks: Array | None = None, **params: float) -> Example:
    mask_type = NAMES[mask.dtype] if mask is not None else "f16"
    key = ("flash_attn_ext", ("f32", NAMES[k.dtype], NAMES[v.dtype], mask_type, "f32", "f32"))
    given = {"q": q, "k": k, "v": v, "mask": mask, "sinks": sinks}
    return Example.of(OP, key, {n: a for n, a in given.items() if a is not None}, **{"factor": 0.25, **params})


def reference(e: Example) -> Array:
    """What the op must mean, head by head and row by row, in float64: no text shared with the op's own reference."""
    q, k, v = (e.operands[n].astype("f8") for n in ("q", "k", "v"))
    q4 = q.reshape((1, *q.shape) if q.ndim == 3 else q.shape)
    mask, sinks, (streams, tokens, heads, _) = e.operands.get("mask"), e.operands.get("sinks"), q4.shape
    own, keys = len(v) // streams, v.shape[1]
    n2 = max(n for n in (1, 2, 4, 8, 16, 32) if n <= heads)
    out = np.zeros((streams, tokens, heads, v.shape[2]))
    for s, t, h in np.ndindex(streams, tokens, heads):
        kv = s * own + h // (heads // own)
        bias = e.params["max_bias"]
        slope = 2 ** (-bias * (h + 1) / n2) if h < n2 else 2 ** (-bias / 2 * (2 * (h - n2) + 1) / n2)
        scores = np.array([q4[s, t, h] @ k[kv, i // 32, :, i % 32] for i in range(keys)]) * e.params["factor"]
        if mask is not None:
            rows = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).astype("f8")
            scores = scores + slope * rows[s % rows.shape[0], h % rows.shape[1], t]
        logits = np.append(scores, [] if sinks is None else [float(sinks[h])])
        top = logits.max(initial=-np.inf)
        if top > -np.inf:
            out[s, t, h] = np.exp(scores - top) @ v[kv] / np.exp(logits - top).sum()
    return out.reshape(*q.shape[:-1], v.shape[2])


def check_both(cpu: CpuBackend, e: Example) -> Array:
    """Within the limit of the op's reference, which is the one above."""
    got = check_call(cpu, e)
    largest = float(np.abs(e.operands["v"]).max(initial=1))
    assert np.allclose(e.want.reshape(got.shape), reference(e), rtol=0, atol=1e-12 * largest)
    return got


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
    got, _ = run_guarded(cpu, Example.of(OPS[name], (name, ("f32",) * len(OPS[name].contract.views)), arrays))
    return got.reshape(-1, got.shape[-1])


def test_shapes_that_do_not_fit_are_refused(cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed)
    with pytest.raises(ShapeError, match="blocks of 32"):
        run_guarded(cpu, example(q, k, v[:, :32]))
    with pytest.raises(ShapeError, match="KV heads evenly"):
        run_guarded(cpu, example(q[:, :3], k, v))


# -- sinks, slopes, streams, keys that fill no block ------------------------------------------------------------------


def test_a_sink_takes_its_share(cpu: CpuBackend, run_seed: int) -> None:
    """Scores of 0 and a sink of 0: each key has 1 / (n + 1)."""
    q, k, v = operands(run_seed, blocks=1)
    got = check_both(cpu, example(np.zeros_like(q), k, v, sinks=np.zeros(4, "f4")))
    assert np.allclose(got[0], np.repeat(v.astype("f8").sum(1), 2, 0) / 33, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sink", [-np.inf, -1e30])
def test_a_sink_far_below_changes_no_bit(sink: float, cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed, blocks=9)
    without, _ = run_guarded(cpu, example(q, k, v))
    with_sinks, _ = run_guarded(cpu, example(q, k, v, sinks=np.full(4, sink, "f4")))
    assert with_sinks.tobytes() == without.tobytes()


def test_a_large_sink_leaves_nothing(cpu: CpuBackend, run_seed: int) -> None:
    assert not check_both(cpu, example(*operands(run_seed), sinks=np.full(4, 3e38, "f4"))).any()


@pytest.mark.parametrize("blocks", [0, 1, 9])
def test_a_row_masked_as_a_whole_gives_zeros_beside_a_sink(blocks: int, cpu: CpuBackend, run_seed: int) -> None:
    mask = np.zeros((3, 32 * blocks), "f2")
    mask[1] = -np.inf
    got = check_both(cpu, example(*operands(run_seed, blocks=blocks), mask, np.ones(4, "f4")))
    assert not got[1].any() and got[0].any() == (blocks > 0)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_slopes_of_any_number_of_heads(heads: int, cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed, heads=heads, kv=1 if heads % 2 else 2)
    distance = -np.abs(np.arange(64) - np.arange(3)[:, None] - 61).astype("f2")
    check_both(cpu, example(q, k, v, np.where(distance < -60, -np.inf, distance).astype("f2"), max_bias=8.0))


def test_slopes_without_a_mask_do_nothing(cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed)
    without, _ = run_guarded(cpu, example(q, k, v))
    bent, _ = run_guarded(cpu, example(q, k, v, max_bias=8.0))
    assert bent.tobytes() == without.tobytes()


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("more", [False, True], ids=["plain", "sinks and slopes"])
def test_streams_have_their_own_keys_and_masks(shape: tuple[int, int], more: bool, cpu: CpuBackend, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    _, k, v = operands(run_seed, kv=4, blocks=2)
    q = rng.standard_normal((2, 3, 4, 16)).astype("f4")
    mask = np.where(rng.random((*shape, 3, 64)) < 0.4, -np.inf, rng.standard_normal((*shape, 3, 64))).astype("f2")
    check_both(cpu, example(q, k, v, mask, rng.standard_normal(4).astype("f4") if more else None, max_bias=8.0 * more))


def test_a_stream_gives_the_bits_it_gives_alone(cpu: CpuBackend, run_seed: int) -> None:
    _, k, v = operands(run_seed, kv=4, blocks=9)
    q = np.random.default_rng(run_seed).standard_normal((2, 3, 4, 16)).astype("f4")
    both, _ = run_guarded(cpu, example(q, k, v))
    for s in range(2):
        alone, _ = run_guarded(cpu, example(q[s], k[2 * s : 2 * s + 2], v[2 * s : 2 * s + 2]))
        assert both[s].tobytes() == alone.tobytes()


@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 63, 257, 290])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_keys_of_any_number(n: int, masked: bool, cpu: CpuBackend, run_seed: int) -> None:
    """Attention without a cache: what stands behind the last key is no key, whatever it is."""
    rng = np.random.default_rng(run_seed)
    k, v = rng.standard_normal((2, n, 2, 16)).astype("f4")
    packed = check_call(cpu, Example.of(OPS["pack_keys"], ("pack_keys", ("f32", "f32")), {"k": k}, dtype="f32"))
    mask = np.where(rng.random((3, n)) < 0.3, -np.inf, 0).astype("f4") if masked else None
    call = example(rng.standard_normal((3, 4, 16)).astype("f4"), packed, np.ascontiguousarray(v.transpose(1, 0, 2)), mask)
    got = check_both(cpu, call)
    if n % 32:
        packed[:, -1, :, n % 32 :] = 1e30
        again, _ = run_guarded(cpu, call.with_data(k=packed))
        assert again.tobytes() == got.tobytes()


def test_keys_that_fill_blocks_give_the_same_bits_masked_or_not_there(cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed)
    mask = np.zeros((3, 64), "f2")
    mask[:, 45:] = -np.inf
    masked, _ = run_guarded(cpu, example(q, k, v, mask))
    cut, _ = run_guarded(cpu, example(q, k, np.ascontiguousarray(v[:, :45])))
    assert masked.tobytes() == cut.tobytes()


def test_masks_and_slopes_that_do_not_fit_are_refused(cpu: CpuBackend, run_seed: int) -> None:
    q, k, v = operands(run_seed)
    with pytest.raises(ShapeError, match="cannot be repeated to 4"):
        run_guarded(cpu, example(q, k, v, np.zeros((3, 3, 64), "f2")))
    with pytest.raises(ShapeError, match="max_bias is -1"):
        run_guarded(cpu, example(q, k, v, max_bias=-1.0))
    with pytest.raises(ShapeError, match="streams evenly"):
        run_guarded(cpu, example(q.repeat(3, 0).reshape(3, 3, 4, 16), k, v))
