"""Block decoders. A block is runs `s` of 32 elements, a run is 8 quads `t` of 4; value = scale * (code - ZERO) - offset.

`codes` gives quad t of run s as four bytes of a word, `scale` and `offset` what they stand for. GET_ROWS, CPY and MUL_MAT are all made of
these; `s` and `t` may be uniform or varying, the block plain or interleaved. Layouts: ggml's block structs.
"""

# ruff: noqa: F821
# mypy: ignore-errors
from engine.lang.words import decoder, f32, function, i32, where


@decoder("q4_0", "q4_1")
def q4_codes(block, s, t):
    return (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F


@decoder("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
def block_scale(block, s, t):
    return block.d


@decoder("q4_1", "q5_1")
def block_offset(block, s):
    return -block.m


@function
def fifth_bits(bits):
    """Four bits, the lowest first, each to bit 4 of its byte."""
    return ((bits * 0x00204081) & 0x01010101) << 4


@decoder("q5_0", "q5_1")
def q5_codes(block, s, t):
    low = (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F
    return low | fifth_bits((block.qh >> (4 * t)) & 15)


@decoder("q8_0")
def q8_codes(block, s, t):
    return block.qs[t]


@function
def six_bits(block, s, which):
    """The 6-bit scale (which = 0) or minimum (which = 1) of run s: four of each in the low bits, the rest split in two."""
    shift = 8 * (s % 4)
    low = block.scales[which] >> shift
    high = ((block.scales[2] >> (shift + 4 * which)) & 15) | (((low >> 6) & 3) << 4)
    return f32(i32(where(s < 4, low & 63, high)))


@decoder("q4_k")
def q4_k_codes(block, s, t):
    return (block.qs[8 * (s // 2) + t] >> (4 * (s % 2))) & 0x0F0F0F0F


@decoder("q5_k")
def q5_k_codes(block, s, t):
    low = (block.qs[8 * (s // 2) + t] >> (4 * (s % 2))) & 0x0F0F0F0F
    return low | (((block.qh[t] >> s) & 0x01010101) << 4)


@decoder("q4_k", "q5_k")
def k_scale(block, s, t):
    return block.d * six_bits(block, s, 0)


@decoder("q4_k", "q5_k")
def k_offset(block, s):
    return block.dmin * six_bits(block, s, 1)


@decoder("q6_k")
def q6_k_codes(block, s, t):
    """Halves of 128: word t + 8 (s & 1) of `ql` holds runs s and s + 2, word t of `qh` two bits of all four runs."""
    low = (block.ql[16 * (s // 4) + 8 * (s % 2) + t] >> (4 * ((s % 4) // 2))) & 0x0F0F0F0F
    high = (block.qh[8 * (s // 4) + t] >> (2 * (s % 4))) & 0x03030303
    return low | (high << 4)


@decoder("q6_k")
def q6_k_scale(block, s, t):
    return block.d * f32(block.scales[2 * s + t // 4])
