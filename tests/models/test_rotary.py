"""Angles of ROPE made on the host: YaRN's mixture, tables of two float32, axes of M-RoPE."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.errors import ModelError
from engine.models.hparams import read_hparams
from engine.models.rotary import Yarn, axes, section_turns, table, turns
from engine.testing import Example, check_call
from kernels import OPS

METADATA: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 4096, "llama.embedding_length": 64, "llama.block_count": 1,
    "llama.feed_forward_length": 64, "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.mark.parametrize("base", [1e4, 5e5])
def test_plain_turns(base: float) -> None:
    got = turns(32, base, 4.0, np.full(32, 2.0))
    assert np.allclose(got, [base ** (-2 * i / 64) / (2 * math.pi) / 8 for i in range(32)], rtol=1e-15)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    """Published values of a head of 128 with base 10,000 stretched from 4,096: full speed up to pair 20, stretched from pair 46 on."""
    yarn = Yarn(4096)
    own, mixed = turns(64, 1e4), turns(64, 1e4, 16.0, yarn=yarn)
    assert np.array_equal(mixed[:21], own[:21]) and np.allclose(mixed[46:], own[46:] / 16, rtol=1e-15)
    share = (mixed[21:46] - own[21:46] / 16) / (own[21:46] * 15 / 16)
    assert np.allclose(share, 1 - (np.arange(21, 46) - 20) / 26, rtol=0, atol=1e-12)
    assert yarn.magnitude(16.0) == 1 + 0.1 * math.log(16.0)


def test_yarn_without_a_mixture_is_linear() -> None:
    yarn = Yarn(4096, ext_factor=0.0, attn_factor=1.25)
    assert np.array_equal(turns(64, 1e4, 16.0, yarn=yarn), turns(64, 1e4, 16.0)) and yarn.magnitude(16.0) == 1.25


def test_a_table_holds_twice_the_bits_of_a_float() -> None:
    made = turns(32, 5e5, 3.0)
    high, low = table(made).astype(np.float64)
    assert (np.abs(high + low - made) <= 2.0**-46 * made).all()


@pytest.mark.parametrize(("sections", "interleaved", "want"), [
    ((2, 3, 3, 0), False, [0, 0, 1, 1, 1, 2, 2, 2]), ((2, 0, 1, 1), False, [0, 0, 2, 3, 0, 0, 2, 3]),
    ((3, 3, 2, 0), True, [0, 1, 2, 0, 1, 2, 0, 1]), ((2, 1, 2, 3), True, [0, 1, 2, 0, 3, 2, 3, 3]), ((0, 0, 0, 0), False, [3] * 8)])
def test_axes_of_pairs(sections: tuple[int, ...], interleaved: bool, want: list[int]) -> None:
    assert axes(8, sections, interleaved).tolist() == want


def test_vision_encoders_turn_by_row_and_column(cpu: CpuBackend, run_seed: int) -> None:
    """Half of the pairs turn with the row, half with the column, both from the fastest frequency on: the op with these tables."""
    sections, rng = (4, 4, 0, 0), np.random.default_rng(run_seed)
    x, pos = rng.standard_normal((1, 6, 2, 16)).astype("f4"), np.stack([np.arange(6) // 3, np.arange(6) % 3]).astype("i4")
    operands = {"x": x, "pos": pos, "freqs": table(section_turns(8, 1e4, sections)), "axes": axes(8, sections)}
    got = check_call(cpu, Example.of(OPS["rope"], ("rope", ("f32", "i32", "f32", "i32", "f32")), operands, neox=1))
    for pair in range(8):
        theta = pos[pair // 4] * 1e4 ** (-(pair % 4) / 4)
        z = (x[0, :, :, pair] + 1j * x[0, :, :, pair + 8]) * np.exp(1j * theta)[:, None]
        assert np.allclose(got[0, :, :, pair], z.real, rtol=0, atol=1e-5) and np.allclose(got[0, :, :, pair + 8], z.imag, rtol=0, atol=1e-5)


def test_yarn_is_read_from_metadata() -> None:
    made = read_hparams({**METADATA, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
                         "llama.rope.scaling.original_context_length": 1024, "llama.rope.scaling.yarn_beta_fast": 16.0}, 32)
    assert made.yarn == Yarn(1024, beta_fast=16.0) and made.rope_scale == 4.0
    assert read_hparams({**METADATA, "llama.rope.scaling.type": "linear"}, 32).yarn is None
    with pytest.raises(ModelError, match="longrope"):
        read_hparams({**METADATA, "llama.rope.scaling.type": "longrope"}, 32)
    for wrong in ({"llama.rope.freq_base": 1.0}, {"llama.rope.scaling.yarn_ext_factor": math.nan}):
        with pytest.raises(ModelError, match="a base above 1"):
            read_hparams({**METADATA, "llama.rope.scaling.type": "yarn", **wrong}, 32)
