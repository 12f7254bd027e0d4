"""CPY: another type or layout of the same elements; CONT is CPY to a contiguous tensor of the same type."""

# mypy: ignore-errors
from engine.dtypes import DTYPES, FLOATS
from engine.lang.words import lanes
from engine.op import op


@op("x[a, b, c, n] -> y[a, b, c, n]", groups="a b c", types={"x": FLOATS, "y": FLOATS}, dtype="f32",
    result=lambda params: DTYPES[params["dtype"]])
def cpy(a, b, c, x, y, n):
    for i in lanes(n):
        y[a, b, c, i] = x[a, b, c, i]


@cpy.reference
def _(x, dtype):
    return x


def cont(x, name=""):
    """CONT: the same elements, dense."""
    return cpy(x, dtype=x.dtype.name, name=name)
