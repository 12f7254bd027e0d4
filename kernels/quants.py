"""Block decoders. A block is runs `s` of 32 elements, a run is 8 quads `t` of 4; value = scale * (code - ZERO) - offset.

`codes` gives quad t of run s as four bytes of a word, `scale` and `offset` what they stand for. GET_ROWS, CPY and MUL_MAT are all made of
these; `s` and `t` may be uniform or varying, the block plain or interleaved. Layouts: ggml's block structs.

Four bytes of a word are worked on at once wherever no carry can leave a byte.
"""

# ruff: noqa: F821
# mypy: ignore-errors
import numpy as np

from engine import grids
from engine.lang.words import as_f32, as_i32, decoder, f32, function, i32, nibbles, table, u32, where


@decoder("q4_0", "q4_1")
def q4_codes(block, s, t):
    return (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F


@decoder("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "tq1_0", "tq2_0", "q1_0", "q2_0")
def block_scale(block, s, t):
    return block.d


@decoder("q4_1", "q5_1")
def block_offset(block, s, t):
    return -block.m


@function
def spread(bits):
    """Four bits, the lowest first, each to its byte: 0 or 1."""
    return (bits * 0x00204081) & 0x01010101


@decoder("q5_0", "q5_1")
def q5_codes(block, s, t):
    low = (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F
    return low | (spread((block.qh >> (4 * t)) & 15) << 4)


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
def k_offset(block, s, t):
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


@decoder("q2_k")
def q2_k_codes(block, s, t):
    """Halves of 128: word t of a half holds two bits of all four runs."""
    return (block.qs[8 * (s // 4) + t] >> (2 * (s % 4))) & 0x03030303


@decoder("q2_k")
def q2_k_scale(block, s, t):
    return block.d * f32(block.scales[2 * s + t // 4] & 15)


@decoder("q2_k")
def q2_k_offset(block, s, t):
    return block.dmin * f32(block.scales[2 * s + t // 4] >> 4)


@decoder("q3_k")
def q3_k_codes(block, s, t):
    low = (block.qs[8 * (s // 4) + t] >> (2 * (s % 4))) & 0x03030303
    return low | (((block.hmask[t] >> s) & 0x01010101) << 2)


@decoder("q3_k")
def q3_k_scale(block, s, t):
    """16 scales of 6 bits: four low bits in words 0 and 1, those of the last eight above those of the first; two high bits in word 2."""
    k = 2 * s + t // 4
    shift = 8 * (k % 4)
    low = (block.scales[(k // 4) % 2] >> (shift + 4 * (k // 8))) & 15
    high = (block.scales[2] >> (shift + 2 * (k // 4))) & 3
    return block.d * f32(i32(low | (high << 4)) - 32)


# -- codes that are looked up -----------------------------------------------------------------------------------

IQ4_NL_VALUES, FP4_VALUES = table("IQ4_NL", grids.IQ4_NL), table("FP4", grids.FP4)


@decoder("iq4_nl")
def iq4_nl_codes(block, s, t):
    return nibbles(IQ4_NL_VALUES, (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F)


@decoder("iq4_xs")
def iq4_xs_codes(block, s, t):
    return nibbles(IQ4_NL_VALUES, (block.qs[4 * s + t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F)


@decoder("iq4_xs")
def iq4_xs_scale(block, s, t):
    high = (block.scales_h >> (2 * s)) & 3
    return block.d * f32((i32((block.scales_l >> (4 * s)) & 15) | (high << 4)) - 32)


@decoder("mxfp4")
def mxfp4_codes(block, s, t):
    return nibbles(FP4_VALUES, (block.qs[t % 4] >> (4 * (t // 4))) & 0x0F0F0F0F)


@decoder("mxfp4")
def mxfp4_scale(block, s, t):
    """2^(e - 128), half of E8M0's value as codes are doubled; the two smallest are subnormal."""
    return as_f32(where(block.e < 2, (block.e + 1) << 21, (block.e - 1) << 23))


@decoder("nvfp4")
def nvfp4_codes(block, s, t):
    """Runs of 16: 8 bytes, the low nibbles first."""
    return nibbles(FP4_VALUES, (block.qs[4 * s + 2 * (t // 4) + t % 2] >> (4 * ((t % 4) // 2))) & 0x0F0F0F0F)


@decoder("nvfp4")
def nvfp4_scale(block, s, t):
    """UE4M3 without its sign bit, halved as codes are doubled; 0x7F is 0."""
    e = block.d[2 * s + t // 4]
    bits = e & 127
    value = where(bits < 8, f32(bits) * 0.0009765625, as_f32((bits << 20) + (119 << 23)))
    return where(e == 127, f32(0), value)


# -- ternary, binary --------------------------------------------------------------------------------------------


@function
def ternary(bytes, n):
    """Digit n of four bytes, each five digits of a number in base 3, scaled to 256: 0, 1 or 2."""
    power = where(n == 4, u32(81), (u32(0x1B090301) >> ((8 * n) & 31)) & 255)
    even, odd = bytes & 0x00FF00FF, (bytes >> 8) & 0x00FF00FF
    even, odd = (even * power) & 0x00FF00FF, (odd * power) & 0x00FF00FF
    return (((even * 3) >> 8) & 0x00FF00FF) | ((odd * 3) & 0xFF00FF00)


@decoder("tq1_0")
def tq1_0_codes(block, s, t):
    """Run s < 5 holds digit s of 32 bytes; then two digits of 16 bytes in a run; the last 16 elements are four digits of `qh`."""
    word = where(s < 5, t, 8 + t % 4)
    digit = where(s < 5, s, where(s * 8 + t < 60, 2 * s - 10 + t // 4, t - 4))
    is_last = s * 8 + t >= 60
    return ternary(where(is_last, block.qh, block.qs[word]), digit)


@decoder("tq2_0")
def tq2_0_codes(block, s, t):
    return (block.qs[8 * (s // 4) + t] >> (2 * (s % 4))) & 0x03030303


@decoder("q2_0")
def q2_0_codes(block, s, t):
    """A byte holds the four codes of a quad."""
    four = (block.qs[2 * s + t // 4] >> (8 * (t % 4))) & 255
    return (four | (four << 6) | (four << 12) | (four << 18)) & 0x03030303


@decoder("q1_0")
def q1_0_codes(block, s, t):
    """0 or 2: a code less 1 is the sign."""
    return spread((block.qs[s] >> (4 * t)) & 15) << 1


# -- grids: 4 or 8 elements are a point -------------------------------------------------------------------------


def levels(name):
    """Points of 8 elements in a word each, the lowest of three values as 0, the highest as 2: nibble 2 k is element k, 2 k + 1 is k + 4."""
    grid = np.searchsorted(np.unique(grids.GRIDS[name]), grids.GRIDS[name]).astype(np.uint8)
    return np.ascontiguousarray(grid[:, :4] | grid[:, 4:] << 4).view("<u4")[:, 0]


IQ1_S_GRID = table("IQ1_S", levels("iq1_s"))
IQ2_XXS_GRID, IQ2_XS_GRID, IQ2_S_GRID = (table(f"IQ2_{x}", levels(f"iq2_{x.lower()}")) for x in ("XXS", "XS", "S"))
IQ3_XXS_GRID, IQ3_S_GRID = (table(f"IQ3_{x}", grids.GRIDS[f"iq3_{x.lower()}"]) for x in ("XXS", "S"))


@function
def signed(quad, bits):
    """Bytes above 0, negative where their bit is set."""
    minus = spread(bits)
    return (quad ^ (minus * 255)) + minus


@function
def eight_signs(bits):
    """Seven signs and the eighth, which makes their number even; 0x6996 holds the parities of 4 bits."""
    return bits | (((u32(0x6996) >> ((bits ^ (bits >> 4)) & 15)) & 1) << 7)


@function
def magnitudes(point, t):
    """Levels 0, 1, 2 of half t % 2 of a point as 8, 25, 43."""
    level = (point >> (4 * (t % 2))) & 0x03030303
    return (level | (level << 4)) + ((level >> 1) & 0x01010101) + 0x08080808


@decoder("iq2_xxs")
def iq2_xxs_codes(block, s, t):
    """A run is four grid indices in a word, then four times 7 signs and the scale in another."""
    point = IQ2_XXS_GRID[(block.qs[2 * s] >> (8 * (t // 2))) & 255]
    signs = eight_signs((block.qs[2 * s + 1] >> (7 * (t // 2))) & 127)
    return signed(magnitudes(point, t), (signs >> (4 * (t % 2))) & 15)


@decoder("iq2_xxs")
def iq2_xxs_scale(block, s, t):
    return block.d * (f32(i32(block.qs[2 * s + 1] >> 28)) + 0.5) * 0.25


@decoder("iq2_xs")
def iq2_xs_codes(block, s, t):
    pair = u32(block.qs[4 * s + t // 2])
    signs = eight_signs(pair >> 9)
    return signed(magnitudes(IQ2_XS_GRID[pair & 511], t), (signs >> (4 * (t % 2))) & 15)


@decoder("iq2_xs", "iq2_s")
def iq2_scale(block, s, t):
    return block.d * (f32((block.scales[s] >> (4 * (t // 4))) & 15) + 0.5) * 0.25


@decoder("iq2_s")
def iq2_s_codes(block, s, t):
    high = (u32(block.qh[s]) >> (2 * (t // 2))) & 3
    point = IQ2_S_GRID[((block.qs[s] >> (8 * (t // 2))) & 255) | (high << 8)]
    return signed(magnitudes(point, t), (block.signs[s] >> (4 * t)) & 15)


@decoder("iq3_xxs")
def iq3_xxs_codes(block, s, t):
    signs = eight_signs((block.signs[s] >> (7 * (t // 2))) & 127)
    return signed(IQ3_XXS_GRID[(block.qs[2 * s + t // 4] >> (8 * (t % 4))) & 255], (signs >> (4 * (t % 2))) & 15)


@decoder("iq3_xxs")
def iq3_xxs_scale(block, s, t):
    return block.d * (f32(i32(block.signs[s] >> 28)) + 0.5) * 0.5


@decoder("iq3_s")
def iq3_s_codes(block, s, t):
    high = (u32(block.qh[s]) >> t) & 1
    return signed(IQ3_S_GRID[((block.qs[2 * s + t // 4] >> (8 * (t % 4))) & 255) | (high << 8)], (block.signs[s] >> (4 * t)) & 15)


@decoder("iq3_s")
def iq3_s_scale(block, s, t):
    return block.d * f32(1 + 2 * ((block.scales[s // 2] >> (4 * (s % 2))) & 15))


@function
def shifted(point, t, is_lower):
    """Levels 0, 1, 2 of half t % 2 of a point as 8 (level - 1) + 1, or - 1 where `is_lower`."""
    level = (point >> (4 * (t % 2))) & 0x03030303
    return (((level << 3) | 0x80808080) - where(is_lower, u32(0x09090909), u32(0x07070707))) ^ 0x80808080


@decoder("iq1_s")
def iq1_s_codes(block, s, t):
    high = (u32(block.qh[s]) >> (3 * (t // 2))) & 7
    return shifted(IQ1_S_GRID[((block.qs[s] >> (8 * (t // 2))) & 255) | (high << 8)], t, block.qh[s] >= 0x8000)


@decoder("iq1_s")
def iq1_s_scale(block, s, t):
    return block.d * f32(1 + 2 * ((block.qh[s] >> 12) & 7)) * 0.125


@decoder("iq1_m")
def iq1_m_codes(block, s, t):
    nibble = (u32(block.qh[s]) >> (4 * (t // 2))) & 15
    return shifted(IQ1_S_GRID[((block.qs[s] >> (8 * (t // 2))) & 255) | ((nibble & 7) << 8)], t, nibble >= 8)


@function
def half(bits):
    """The number whose bits as f16 these are."""
    exponent = bits & 0x7C00
    normal = as_f32(((bits & 0x7FFF) << 13) + where(exponent == 0x7C00, i32(224 << 23), i32(112 << 23)))
    magnitude = where(exponent == 0, f32(bits & 0x3FF) * 5.9604644775390625e-08, normal)
    return as_f32(as_i32(magnitude) | ((bits & 0x8000) << 16))


@decoder("iq1_m")
def iq1_m_scale(block, s, t):
    """The block's scale is an f16 in the highest nibbles of the four words of scales."""
    low = (block.scales[0] >> 12) | ((block.scales[1] >> 8) & 0xF0)
    d = half(low | ((block.scales[2] >> 4) & 0xF00) | (block.scales[3] & 0xF000))
    return d * f32(1 + 2 * ((block.scales[s // 2] >> (6 * (s % 2) + 3 * (t // 4))) & 7)) * 0.125
