"""ADD, SUB, MUL, DIV, ADD1, ADD_ID, SCALE: element by element. The second operand is repeated in each dimension where it is shorter.

The result has the type of x; arithmetic is in f32, rounded once when it is stored.
"""

# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32, FLOATS, I32
from engine.lang.words import function, index, lanes, maximum, minimum
from engine.op import op

ROWS = "x[a, b, c, n] -> y[a, b, c, n]"
REPEATED = "x[a, b, c, n], w[wa, wb, wc, wn] -> y[a, b, c, n]"


def divides(call):
    """Each extent of w divides that of x."""
    for x, w in (("a", "wa"), ("b", "wb"), ("c", "wc"), ("n", "wn")):
        if call[w] == 0 and call[x] == 0:
            continue
        if call[w] == 0 or call[x] % call[w]:
            return f"operand w of shape {[call[d] for d in ('wa', 'wb', 'wc', 'wn')]} cannot be repeated to {[call[d] for d in 'abcn']}"
    return None


def repeated(w, x):
    return np.tile(w, [n // m if m else 1 for n, m in zip(x.shape, w.shape, strict=True)])


def same_or_f32(types):
    """w has the type of x, or is F32; norm weights in F16 meet activations in F32."""
    return types["w"] in (F32, types["x"]) or (types["x"], types["w"]) == (F32, F16)


def same_row(call):
    return None if call["wn"] == call["n"] else f"rows of {call['wn']} are repeated to {call['n']}"


def one_number(call):
    return None if call["wn"] == 1 else f"w has {call['wn']} numbers a row"


def numbers_of_result(call):
    return call.tensors["y"].n_elements


def binary(name, f, reference):
    """The op y = f(x, w), with rows for the two ways a row of w is mostly used: as it is, and as one number."""

    @op(REPEATED, groups="a b c", name=name, types={"x": FLOATS, "w": FLOATS}, result="x", keys=same_or_f32, check=divides, inplace="x",
        flop=numbers_of_result)
    def pair(a, b, c, x, w, y, n, wa, wb, wc, wn):
        for i in lanes(n):
            y[a, b, c, i] = f(x[a, b, c, i], w[a % wa, b % wb, c % wc, i % wn])

    @pair.variant("a b c", name=f"{name}_rows", when=same_row)
    def rows(a, b, c, x, w, y, n, wa, wb, wc):
        for i in lanes(n):
            y[a, b, c, i] = f(x[a, b, c, i], w[a % wa, b % wb, c % wc, i])

    @pair.variant("a b c", name=f"{name}_number", when=one_number)
    def number(a, b, c, x, w, y, n, wa, wb, wc):
        for i in lanes(n):
            y[a, b, c, i] = f(x[a, b, c, i], w[a % wa, b % wb, c % wc, 0])

    pair.reference(lambda x, w: reference(x, repeated(w, x)))
    return pair


@function
def plus(x, w):
    return x + w


@function
def minus(x, w):
    return x - w


@function
def times(x, w):
    return x * w


@function
def over(x, w):
    return x / w


add = binary("add", plus, np.add)
sub = binary("sub", minus, np.subtract)
mul = binary("mul", times, np.multiply)
div = binary("div", over, np.divide)


@op("x[a, b, c, n], w[1] -> y[a, b, c, n]", groups="a b c", inplace="x", flop=numbers_of_result)
def add1(a, b, c, x, w, y, n):
    """ADD1: the one number of w is added to every element."""
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] + w[0]


@add1.reference
def _(x, w):
    return x + w


def has_rows(call):
    """Ids are clamped to a row that exists."""
    if call["t"] * call["k"] and not call["m"]:
        return f"operand w of shape {[call['m'], call['n']]} has no row that ids could name"
    return None


@op("x[t, k, n], w[m, n], ids[t, k] -> y[t, k, n]", groups="t k", types={"ids": (I32,)}, check=has_rows, inplace="x",
    flop=numbers_of_result)
def add_id(t, k, x, w, ids, y, n, m):
    """ADD_ID: to each row the row of w that its id names, the bias of an expert; an id outside w is clamped to it."""
    row = minimum(maximum(index(ids[t, k]), 0), m - 1)
    for i in lanes(n):
        y[t, k, i] = x[t, k, i] + w[row, i]


@add_id.reference
def _(x, w, ids):
    return x + w[np.clip(ids, 0, max(w.shape[0] - 1, 0)).astype(np.int64)]


@op(ROWS, groups="a b c", types={"x": FLOATS}, result="x", inplace="x", name="scale",
    flop=lambda call: 2 * call.tensors["y"].n_elements, factor=1.0, bias=0.0)
def scaled(a, b, c, x, y, n, factor, bias):
    """SCALE: factor * x + bias."""
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * factor + bias


@scaled.reference
def _(x, factor, bias):
    return x * factor + bias
