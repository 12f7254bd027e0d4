"""OUT_PROD: the sum of the outer products of rows, y[r, m] = sum over k of w[k, r] * x[k, m]."""

# mypy: ignore-errors
import numpy as np

from engine.lang.words import f32, fma, lanes
from engine.op import op


def divides(call):
    """Matrices of x are shared evenly by those of w."""
    for w, x in (("a", "xa"), ("b", "xb")):
        if call[x] == 0 and call[w] or call[x] and call[w] % call[x]:
            return f"{call[x]} matrices of x are not shared evenly by {call[w]} of w"
    return None


def sharing(w, x):
    """How many neighbours of w take the same matrix of x."""
    return lambda call: max(call[w] // max(call[x], 1), 1)


@op("x[xa, xb, k, m], w[a, b, k, r] -> y[a, b, r, m]", groups="a b r", check=divides,
    variant={"sizes": {"share_a": sharing("a", "xa"), "share_b": sharing("b", "xb")}},
    flop=lambda call: 2 * call["k"] * call.tensors["y"].n_elements)
def out_prod(a, b, r, x, w, y, share_a, share_b, k, m):
    for i in lanes(m):
        total = f32(0)
        for j in range(k):
            total = fma(x[a // share_a, b // share_b, j, i], w[a, b, j, r], total)
        y[a, b, r, i] = total


@out_prod.reference
def _(x, w):
    for axis in (0, 1):
        x = np.repeat(x, w.shape[axis] // max(x.shape[axis], 1), axis)
    return np.einsum("abkm,abkr->abrm", x, w)
