"""ARGSORT and TOP_K: places of a row's elements in order.

The order is total: equals (-0 and 0 too) by their place, so that sorting is stable, and NaN behind all numbers, ascending or descending.
"""

# mypy: ignore-errors
import numpy as np

from engine.dtypes import I32
from engine.lang.words import as_i32, barrier, function, group_min, i32, lanes, only, where
from engine.op import op

FEW = 256  # up to here counting what comes before each element is faster than sorting
LEAST, MOST = -0x80000000, 0x7FFFFFFF


@function
def key_of(v, descending):
    """An i32 in the order of v: a float's bits, the negative ones reversed. Adding zero makes -0 one with 0."""
    bits = as_i32(v + 0.0)
    key = bits ^ ((bits >> 31) & MOST)
    key = where(descending == 1, -1 - key, key)
    return where(v != v, i32(MOST), key)


@op("x[a, b, c, n] -> y[a, b, c, n]", groups="a b c", types={"y": (I32,)}, descending=0,
    variant={"sizes": {"n_bits": lambda call: max(1, (call["n"] - 1).bit_length())}})
def argsort(a, b, c, x, y, n, n_bits, descending):
    """ARGSORT: the permutation that sorts each row, as I32.

    A bitonic merge sort of the places, in the result (Batcher 1968). The first step of each merge is mirrored, so that any n will do:
    a pair whose partner is past n is left out.
    """
    for i in lanes(n):
        y[a, b, c, i] = i32(i)
    barrier()
    for merge in range(n_bits):
        for step in range(merge + 1):
            bit = merge - step
            gap = 1 << bit
            for p in lanes(1 << (n_bits - 1)):
                low = ((i32(p) >> bit) << (bit + 1)) + (i32(p) & (gap - 1))
                high = where(step == 0, low ^ (2 * gap - 1), low + gap)
                with only(high < n):
                    i, j = y[a, b, c, low], y[a, b, c, high]
                    u, v = key_of(x[a, b, c, i], descending), key_of(x[a, b, c, j], descending)
                    wrong = (v < u) | ((v == u) & (j < i))
                    y[a, b, c, low] = where(wrong, j, i)
                    y[a, b, c, high] = where(wrong, i, j)
            barrier()


@argsort.variant("a b c", name="argsort_few", when=lambda call: None if call["n"] <= FEW else f"rows of {call['n']} are more than {FEW}")
def ranks(a, b, c, x, y, n, descending):
    """An element's place is the number of those before it."""
    for i in lanes(n):
        own = key_of(x[a, b, c, i], descending)
        rank = i32(0)
        for j in range(n):
            other = key_of(x[a, b, c, j], descending)
            rank = rank + where((other < own) | ((other == own) & (i32(j) < i32(i))), i32(1), i32(0))
        y[a, b, c, rank] = i32(i)


@argsort.reference
def _(x, descending):
    return np.argsort(-x if descending else x, axis=-1, kind="stable")


def enough(call):
    k = call.params["k"]
    return None if 0 <= k <= call["n"] else f"k is {k}; 0 .. {call['n']}, the numbers of a row, is expected"


@op("x[a, b, c, n] -> y[a, b, c, m]", groups="a b c", types={"y": (I32,)}, infer=lambda dims, params: {"m": params["k"]}, check=enough, k=1)
def top_k(a, b, c, x, y, n, m):
    """TOP_K: the places of each row's k largest numbers, as I32, the largest first (ggml leaves their order open).

    Each pass finds the next in order behind the last one: k passes over the row.
    """
    last, at = i32(LEAST), i32(-1)
    for t in range(m):
        best, place = i32(MOST), i32(n)
        for i in lanes(n):
            key = key_of(x[a, b, c, i], 1)
            behind = (key > last) | ((key == last) & (i32(i) > at))
            better = behind & ((key < best) | (place == n))
            best = where(better, key, best)
            place = where(better, i32(i), place)
        last = group_min(best)
        at = group_min(where(best == last, place, i32(n)))
        y[a, b, c, t] = at


@top_k.reference
def _(x, k):
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]
