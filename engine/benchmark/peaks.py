"""Kernels that do one thing as fast as it can be done: read memory, multiply and add in registers, add up products of bytes."""

# mypy: ignore-errors
from engine.lang.words import LANES, as_i32, as_u32, dot4, f32, fma, group_sum, i32, lanes, private, span, static
from engine.op import op


@op("x[r, n] -> y[r, 1]", groups="r")
def read_rows(r, x, y, n):
    """Sums of the bits, as integers: an addition each, which never holds up the reads."""
    total = i32(0)
    for i in lanes(n):
        total = total + as_i32(x[r, i])
    y[r, 0] = f32(group_sum(total))


@op("x[r, n] -> y[r, n]", groups="r", loops=1)
def multiply_add(r, x, y, loops):
    """Twelve chains of FMA in registers."""
    with span(0, LANES) as l:
        a, b = x[r, 0], x[r, 1]
        total = private(12, f32(0))
        for _ in range(loops):
            for c in static(12):
                total[c] = fma(total[c], a, b)
        out = f32(0)
        for c in static(12):
            out = out + total[c]
        y[r, l] = out


@op("x[r, n] -> y[r, n]", groups="r", loops=1)
def dot_bytes(r, x, y, loops):
    """Eight chains of dot4 on codes of four bits, which change so that nothing can be computed once and for all."""
    with span(0, LANES) as l:
        bits = as_u32(x[r, l]) & 0x0F0F0F0F
        total = private(8, i32(0))
        for _ in range(loops):
            bits = (bits + 0x01010101) & 0x0F0F0F0F
            for c in static(8):
                total[c] = dot4(bits, as_u32(x[r, c]), total[c], 0, 15)
        out = i32(0)
        for c in static(8):
            out = out + total[c]
        y[r, l] = f32(out)
