"""CPY: the same elements in another type or layout. `cpy` makes a tensor, `cpy_to` writes one that is there; `cont` and `dup` are `cpy`.

Floats become floats of another size, I32, or blocks; blocks become F32; integers and blocks are copied as they are.
"""

# mypy: ignore-errors
import numpy as np

import kernels.quants  # noqa: F401
from engine.dtypes import DTYPES, F32, FLOATS, I8, I16, I32, I64, WEIGHT_BLOCKS
from engine.lang.words import byte, codes, f32, fma, i32, lanes, offset, scale, static, ubyte
from engine.op import op
from kernels.encode import ENCODERS

SHORT = (I8, I16, I32)
ANY = (*FLOATS, *SHORT, I64, *WEIGHT_BLOCKS)
WRITTEN = tuple(DTYPES[name] for name in ENCODERS)
NEW, THERE = "x[a, b, c, n] -> y[a, b, c, n]", "x[a, b, c, n], y[a, b, c, n] -> y"


def converts(types):
    """Pairs of types that are copied into each other."""
    x, y = types["x"], types["y"]
    if x in FLOATS and y in FLOATS or x is y:
        return True
    return x is F32 and (y is I32 or y in WRITTEN) or y is F32 and (x is I32 or x in WEIGHT_BLOCKS)


def copied(a, b, c, x, y, n):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i]


FACTS = {"types": {"x": ANY, "y": ANY}, "variant": {"types": {"x": FLOATS, "y": FLOATS}}, "keys": converts, "groups": "a b c"}
cpy = op(NEW, name="cpy", dtype="f32", result=lambda params: DTYPES[params["dtype"]], **FACTS)(copied)
cpy.__doc__ = "CPY to a new tensor, of the type that is named."
cpy_to = op(THERE, name="cpy_to", **FACTS)(copied)
cpy_to.__doc__ = "CPY to a tensor that is there, in any layout. See `copy_to` for other shapes."


def copied_ints(a, b, c, x, y, n):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i]


def copied_long(a, b, c, x, y, n):
    for i in range(n):
        y[a, b, c, i] = x[a, b, c, i]


def to_i32(a, b, c, x, y, n):
    """Truncates and saturates; NaN gives 0."""
    for i in lanes(n):
        y[a, b, c, i] = i32(x[a, b, c, i])


def from_i32(a, b, c, x, y, n):
    for i in lanes(n):
        y[a, b, c, i] = f32(x[a, b, c, i])


def copied_blocks(a, b, c, x, y, n_blocks):
    """Bytes: what they stand for is not looked at."""
    for k in range(n_blocks):
        block, to = x[a, b, c, k], y[a, b, c, k]
        for j in lanes(NBYTES):
            to.bytes[j] = block.bytes[j]


def from_blocks(a, b, c, x, y, n_blocks):
    """Lanes are quads of four codes."""
    for k, s, t in lanes(n_blocks, RUNS, 8):
        block = x[a, b, c, k]
        quad, d, low = codes(block, s, t), scale(block, s, t), offset(block, s, t)
        for e in static(4):
            code = byte(quad, e) if LOW < 0 else ubyte(quad, e)
            y[a, b, c, (k * RUNS + s) * 32 + 4 * t + e] = fma(d, f32(code - ZERO), -low)


def to_blocks(encode):
    """Lanes are blocks."""

    def encoded(a, b, c, x, y, n_blocks):
        for k in lanes(n_blocks):
            block = y[a, b, c, k]
            block.d = encode(block, tuple(x[a, b, c, 32 * k + j] for j in static(32)))

    return encoded


def blocks_of(operand):
    """Blocks in a row of an operand."""
    return {"n_blocks": lambda call: call["n"] // call.tensors[operand].dtype.block_size}


for each in (cpy, cpy_to):
    each.variant("a b c", types={"x": SHORT, "y": SHORT})(copied_ints)
    each.variant("a b c", types={"x": (I64,), "y": (I64,)})(copied_long)
    each.variant("a b c", types={"x": (F32,), "y": (I32,)})(to_i32)
    each.variant("a b c", types={"x": (I32,), "y": (F32,)})(from_i32)
    each.variant("a b c", types={"x": WEIGHT_BLOCKS, "y": WEIGHT_BLOCKS}, sizes=blocks_of("x"),
                 constants={"NBYTES": lambda call: call.tensors["x"].dtype.nbytes})(copied_blocks)
    each.variant("a b c", types={"x": WEIGHT_BLOCKS, "y": (F32,)}, sizes=blocks_of("x"))(from_blocks)
    for name, encode in ENCODERS.items():
        each.variant("a b c", name=f"to_{name}", types={"x": (F32,), "y": (DTYPES[name],)}, sizes=blocks_of("y"))(to_blocks(encode))


def truncated(x):
    """To int32: towards zero, saturating, NaN to 0."""
    return np.clip(np.nan_to_num(np.trunc(x), nan=0.0), -(2**31), 2**31 - 1)


@cpy.reference
def _(x, dtype):
    return truncated(x) if dtype == "i32" else x


@cpy_to.reference
def _(x, y):
    return truncated(x) if np.issubdtype(y.dtype, np.integer) else x


def cont(x, name="", shape=None):
    """CONT: the same elements, dense; in another shape if one is given."""
    dense = cpy(x, dtype=x.dtype.name, name=name)
    return dense if shape is None else dense.reshape(*shape)


def dup(x, name=""):
    """DUP: a copy of x."""
    return cont(x, name)


def copy_to(x, y, name=""):
    """CPY into y: as many elements, which keep their order where shapes differ. The result is y, written.

    Raises:
        ShapeError: y has another number of elements, or rows that do not fit its blocks.
    """
    if x.shape == y.shape:
        return cpy_to(x, y, name=name)
    if y.is_contiguous and not x.is_contiguous and x.shape[-1] % y.dtype.block_size == 0:
        return cpy_to(x, y.reshape(*x.shape), name=name).reshape(*y.shape)
    return cpy_to((x if x.is_contiguous else cont(x)).reshape(*y.shape), y, name=name)
