"""Block encoders: 32 values of a lane become its block, by ggml's plain rules. SET_ROWS and CPY are made of these.

An encoder takes a block of the target and a tuple of 32 values, writes codes (and minimum), and returns the scale, the field `d`. Codes
come from the scale before it is rounded to f16. A NaN or an infinity makes the scale NaN or infinite, so that it shows when the block is
read.
"""

# mypy: ignore-errors
import numpy as np

from engine import grids
from engine.lang.words import abs, as_i32, f32, function, i32, maximum, minimum, pack, round_away, static, table, u32, where

TINY = 2.0**-126  # below it a scale has no reciprocal, and is 0 as f16
SMALLEST = 1e-15  # iq4_nl takes a block below it for zero
LEVELS = table("IQ4_NL_LEVELS", grids.IQ4_NL.astype(np.int32))
DOUBLED_MIDDLES = table("IQ4_NL_DOUBLED_MIDDLES", np.append(grids.IQ4_NL[1:].astype(np.int32) + grids.IQ4_NL[:-1], 255))


@function
def extreme(v):
    """The value of largest magnitude, the first of equals; NaN above infinity, as magnitudes' bits are in order."""
    found, big = v[0], as_i32(abs(v[0]))
    for j in static(31):
        bits = as_i32(abs(v[j + 1]))
        found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
    return found


@function
def reciprocal(d):
    return where(abs(d) >= TINY, 1.0 / d, f32(0))


@function
def below(code, top):
    """A code 0 .. top."""
    return minimum(maximum(code, 0), top)


@function
def nibbles_of(code, t):
    """Word t of a block's nibbles: elements 4 t .. 4 t + 3, and those 16 further in the high halves."""
    low, high = pack(*(code[4 * t + e] & 15 for e in static(4))), pack(*(code[4 * t + e + 16] & 15 for e in static(4)))
    return low | (high << 4)


@function
def fifth_bits(code):
    bits = u32(0)
    for j in static(32):
        bits = bits | (u32(code[j] >> 4) << j)
    return bits


@function
def q4_0_of(block, v):
    d = extreme(v) / -8.0
    inverse = reciprocal(d)
    code = tuple(below(i32(v[j] * inverse + 8.5), 15) for j in static(32))
    for t in static(4):
        block.qs[t] = nibbles_of(code, t)
    return d


@function
def q5_0_of(block, v):
    d = extreme(v) / -16.0
    inverse = reciprocal(d)
    code = tuple(below(i32(v[j] * inverse + 16.5), 31) for j in static(32))
    block.qh = fifth_bits(code)
    for t in static(4):
        block.qs[t] = nibbles_of(code, t)
    return d


@function
def least(v):
    """The first of equals, as everywhere: it says what sign a zero has."""
    found = v[0]
    for j in static(31):
        found = where(v[j + 1] < found, v[j + 1], found)
    return found


@function
def range_of(v, low):
    """The largest value less `low`, the least one."""
    found = v[0]
    for j in static(31):
        found = where(v[j + 1] > found, v[j + 1], found)
    off = extreme(v)
    return found - low + (off - off)  # of NaN and infinities that is NaN, else 0


@function
def q4_1_of(block, v):
    low = least(v)
    d = range_of(v, low) / 15.0
    inverse = reciprocal(d)
    code = tuple(below(i32((v[j] - low) * inverse + 0.5), 15) for j in static(32))
    block.m = low
    for t in static(4):
        block.qs[t] = nibbles_of(code, t)
    return d


@function
def q5_1_of(block, v):
    low = least(v)
    d = range_of(v, low) / 31.0
    inverse = reciprocal(d)
    code = tuple(below(i32((v[j] - low) * inverse + 0.5), 31) for j in static(32))
    block.m = low
    block.qh = fifth_bits(code)
    for t in static(4):
        block.qs[t] = nibbles_of(code, t)
    return d


@function
def q8_0_of(block, v):
    d = abs(extreme(v)) / 127.0
    inverse = reciprocal(d)
    for t in static(8):
        block.qs[t] = pack(*(minimum(maximum(i32(round_away(v[4 * t + e] * inverse)), -127), 127) for e in static(4)))
    return d


@function
def nearest_level(u):
    """The code of the nearest level of iq4_nl; halfway it is the upper one."""
    code = i32(0)
    for k in static(15):
        code = code + where(u >= f32(i32(DOUBLED_MIDDLES[k])) * 0.5, i32(1), i32(0))
    return code


@function
def iq4_nl_of(block, v):
    """The value of largest magnitude is taken for the level -127; then the scale is fitted to the levels, with weights v squared."""
    top = extreme(v)
    guess = top / -127.0
    inverse = reciprocal(guess)
    code = tuple(nearest_level(v[j] * inverse) for j in static(32))
    products, squares = f32(0), f32(0)
    for j in static(32):
        level = f32(i32(LEVELS[code[j]]))
        weighted = v[j] * v[j] * level
        products, squares = products + weighted * v[j], squares + weighted * level
    fitted = where(squares > 0.0, products / squares, guess)
    is_zero = abs(top) < SMALLEST
    d = where(is_zero, f32(0), fitted)
    kept = tuple(where(is_zero, i32(0), code[j]) for j in static(32))
    for t in static(4):
        block.qs[t] = nibbles_of(kept, t)
    return d


ENCODERS = {"q8_0": q8_0_of, "q4_0": q4_0_of, "q4_1": q4_1_of, "q5_0": q5_0_of, "q5_1": q5_1_of, "iq4_nl": iq4_nl_of}
