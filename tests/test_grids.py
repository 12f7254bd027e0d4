"""The constant tables of block formats, against the checksums of the tables as ggml lays them out."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from engine.grids import FP4, GRIDS, IQ4_NL, SIGNS

SHA256 = {"iq2_xxs": "05826b5d3e472a3a", "iq2_xs": "06e47aaca60b4dc1", "iq2_s": "e1aa1473412b0552", "iq3_xxs": "46e35f5a997efdee",
          "iq3_s": "bd1af4945a1717c6", "iq1_s": "07540ffc1aeaf6ad"}  # the first 16 digits


def checksum(table: np.ndarray) -> str:
    return hashlib.sha256(table.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", GRIDS)
def test_grids_hold_the_points_of_the_format(name: str) -> None:
    assert checksum(GRIDS[name]) == SHA256[name]
    assert GRIDS[name].dtype == np.int8 and GRIDS[name].shape[1] == (4 if name.startswith("iq3") else 8)


def test_signs_have_an_even_number_of_set_bits() -> None:
    assert checksum(SIGNS) == "a76742a603f8beca"
    assert not (np.unpackbits(SIGNS[:, None], axis=1).sum(1) % 2).any()


def test_the_iq1_grid_in_nibbles_is_what_gpus_read() -> None:
    """Values + 1: the low nibbles hold elements 0 to 3, the high ones 4 to 7."""
    up = (GRIDS["iq1_s"] + 1).astype(np.uint8)
    assert checksum(np.ascontiguousarray(up[:, :4] | up[:, 4:] << 4)) == "29bb0f4450fab4aa"


def test_values_of_four_bit_codes() -> None:
    assert IQ4_NL.shape == FP4.shape == (16,)
    assert (np.diff(IQ4_NL.astype(int)) > 0).all() and IQ4_NL[0] == -127 and IQ4_NL[-1] == 113
    exponent, mantissa = np.arange(8) // 2, np.arange(8) % 2
    e2m1 = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    assert np.array_equal(FP4[:8], 2 * e2m1) and np.array_equal(FP4[8:], -FP4[:8])
