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


@op("x[xa, xb, k, m], w[a, b, k, r] -> y[a, b, r, m]", groups="a b r", check=divides,
    flop=lambda call: 2 * call["k"] * call.tensors["y"].n_elements)
def out_prod(a, b, r, x, w, y, xa, xb, k, m):
    for i in lanes(m):
        total = f32(0)
        for j in range(k):
            total = fma(x[a % xa, b % xb, j, i], w[a, b, j, r], total)
        y[a, b, r, i] = total


@out_prod.reference
def _(x, w):
    shared = [n // m if m else 1 for n, m in zip(w.shape[:2], x.shape[:2], strict=True)]
    return np.einsum("abkm,abkr->abrm", np.tile(x, [*shared, 1, 1]), w)
