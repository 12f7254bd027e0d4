"""Elementary functions in the lane language itself: no calls into a maths library, the same bits on every target."""

# mypy: ignore-errors
from engine.lang.function import Function
from engine.lang.words import INF, abs, as_f32, as_i32, f32, fma, maximum, minimum, rint, where

NAN = float("nan")


def whole(n):
    """An integral n, |n| < 2^22, as i32: its bits after adding 1.5 x 2^23. Anything for NaN."""
    return as_i32(n + 12582912.0) - 0x4B400000


whole = Function(whole)


def exp(x):
    """Cody-Waite reduction by ln 2, a polynomial of degree 6; 2^n in two factors, so that subnormals and n = 128 come out right."""
    n = rint(maximum(minimum(x * 1.44269504, 200.0), -200.0))
    r = fma(n, f32(-0.693145751953125), x)
    r = fma(n, f32(-1.42860682030941723212e-6), r)
    p = fma(f32(1.9875691500e-4), r, f32(1.3981999507e-3))
    p = fma(p, r, f32(8.3334519073e-3))
    p = fma(p, r, f32(4.1665795894e-2))
    p = fma(p, r, f32(1.6666665459e-1))
    p = fma(p, r, f32(5.0000001201e-1))
    p = fma(p, r * r, r) + 1.0
    k = whole(n)
    half = k >> 1
    y = p * as_f32((half + 127) << 23) * as_f32((k - half + 127) << 23)
    y = where(x > 88.7228394, f32(INF), y)
    return where(x != x, x, where(x < -103.97, f32(0), y))


def exp2(x):
    """x is split into its nearest integer and a rest, so that the argument of exp stays exact."""
    n = rint(maximum(minimum(x, 200.0), -200.0))
    r = (x - n) * 0.6931471805599453
    p = fma(f32(1.9875691500e-4), r, f32(1.3981999507e-3))
    p = fma(p, r, f32(8.3334519073e-3))
    p = fma(p, r, f32(4.1665795894e-2))
    p = fma(p, r, f32(1.6666665459e-1))
    p = fma(p, r, f32(5.0000001201e-1))
    p = fma(p, r * r, r) + 1.0
    k = whole(n)
    half = k >> 1
    y = p * as_f32((half + 127) << 23) * as_f32((k - half + 127) << 23)
    y = where(x >= 128.0, f32(INF), y)
    return where(x != x, x, where(x < -150.0, f32(0), y))


def log(x):
    """Mantissa in [sqrt(1/2), sqrt(2)), an odd series in (m - 1) / (m + 1); subnormals are scaled up first."""
    tiny = x < 1.17549435e-38
    scaled = where(tiny, x * 8388608.0, x)
    bits = as_i32(scaled)
    e = (bits - 0x3F3504F3) >> 23
    m = as_f32(bits - (e << 23))
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = fma(z, f32(0.2222222), f32(0.2857143))
    p = fma(p, z, f32(0.4))
    p = fma(p, z, f32(0.6666666667))
    shift = where(tiny, f32(-23), f32(0))
    y = fma(f32(e) + shift, f32(0.6931471805599453), fma(p * z, s, 2.0 * s))
    return where(x > 0.0, where(x == INF, x, y), where(x == 0.0, f32(-INF), f32(NAN)))


def log1p(x):
    u = x + 1.0
    return where((u == 1.0) | (u == INF), x, log(u) * (x / (u - 1.0)))


def tanh(x):
    """Below 0.625 an odd polynomial, where 1 - exp(-2x) would cancel; above it the exponential."""
    a = abs(x)
    z = x * x
    p = fma(f32(-5.70498872745e-3), z, f32(2.06390887954e-2))
    p = fma(p, z, f32(-5.37397155531e-2))
    p = fma(p, z, f32(1.33314422036e-1))
    p = fma(p, z, f32(-3.33332819422e-1))
    small = fma(p * z, x, x)
    e = exp(a * -2.0)
    y = (1.0 - e) / (1.0 + e)
    return where(a < 0.625, small, where(x < 0.0, -y, y))


def sin(x):
    """Three-part reduction by pi, an odd series; for |x| up to about 1e4."""
    n = rint(x * 0.3183098861837907)
    r = fma(n, f32(-3.140625), x)
    r = fma(n, f32(-0.0009670257568359375), r)
    r = fma(n, f32(-6.2771141529083252e-7), r)
    z = r * r
    p = fma(z, f32(2.6083159809786593e-6), f32(-0.0001981069071916863))
    p = fma(p, z, f32(0.008333078585565090))
    p = fma(p, z, f32(-0.1666665971279144))
    y = fma(p * z, r, r)
    return where((whole(n) & 1) == 1, -y, y)


def cos(x):
    return sin(x + 1.5707963267948966)


FUNCTIONS = {f.__name__: Function(f) for f in (exp, exp2, log, log1p, tanh, sin, cos)}
