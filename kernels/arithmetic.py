"""ADD, MUL, SCALE: element by element. The second operand is repeated in each dimension where it is shorter."""

# mypy: ignore-errors
import numpy as np

from engine.dtypes import F16, F32
from engine.lang.words import lanes
from engine.op import op


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


BROADCAST = {"types": {"x": (F32,), "w": (F32, F16)}, "check": divides, "inplace": "x", "flop": lambda call: call.tensors["y"].n_elements}
CONTRACT = "x[a, b, c, n], w[wa, wb, wc, wn] -> y[a, b, c, n]"


def same_row(call):
    return None if call["wn"] == call["n"] else f"rows of {call['wn']} are repeated to {call['n']}"


def one_number(call):
    return None if call["wn"] == 1 else f"w has {call['wn']} numbers a row"


@op(CONTRACT, groups="a b c", **BROADCAST)
def add(a, b, c, x, w, y, n, wa, wb, wc, wn):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] + w[a % wa, b % wb, c % wc, i % wn]


@add.variant("a b c", when=same_row)
def add_rows(a, b, c, x, w, y, n, wa, wb, wc):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] + w[a % wa, b % wb, c % wc, i]


@add.variant("a b c", when=one_number)
def add_number(a, b, c, x, w, y, n, wa, wb, wc):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] + w[a % wa, b % wb, c % wc, 0]


@add.reference
def _(x, w):
    return x + repeated(w, x)


@op(CONTRACT, groups="a b c", **BROADCAST)
def mul(a, b, c, x, w, y, n, wa, wb, wc, wn):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * w[a % wa, b % wb, c % wc, i % wn]


@mul.variant("a b c", when=same_row)
def mul_rows(a, b, c, x, w, y, n, wa, wb, wc):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * w[a % wa, b % wb, c % wc, i]


@mul.variant("a b c", when=one_number)
def mul_number(a, b, c, x, w, y, n, wa, wb, wc):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * w[a % wa, b % wb, c % wc, 0]


@mul.reference
def _(x, w):
    return x * repeated(w, x)


@op("x[a, b, c, n] -> y[a, b, c, n]", groups="a b c", inplace="x", name="scale", flop=lambda call: 2 * call.tensors["y"].n_elements,
    factor=1.0, bias=0.0)
def scaled(a, b, c, x, y, n, factor, bias):
    """SCALE: factor * x + bias."""
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i] * factor + bias


@scaled.reference
def _(x, factor, bias):
    return x * factor + bias
