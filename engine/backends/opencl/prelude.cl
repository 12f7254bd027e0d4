// What printed texts stand on: loads and stores of every element type, arithmetic that wraps, bytes in words, folds over the lanes.
// A program takes the functions it calls, and those they call. Blank lines separate functions.

float load_f32(__global const uchar *p)
{
    return *(__global const float *)p;
}

void store_f32(__global uchar *p, float v)
{
    *(__global float *)p = v;
}

int load_i32(__global const uchar *p)
{
    return *(__global const int *)p;
}

void store_i32(__global uchar *p, int v)
{
    *(__global int *)p = v;
}

uint load_u32(__global const uchar *p)
{
    return *(__global const uint *)p;
}

void store_u32(__global uchar *p, uint v)
{
    *(__global uint *)p = v;
}

long load_i64(__global const uchar *p)
{
    return *(__global const long *)p;
}

void store_i64(__global uchar *p, long v)
{
    *(__global long *)p = v;
}

int load_u16(__global const uchar *p)
{
    return *(__global const ushort *)p;
}

void store_u16(__global uchar *p, int v)
{
    *(__global ushort *)p = (ushort)v;
}

int load_i16(__global const uchar *p)
{
    return *(__global const short *)p;
}

void store_i16(__global uchar *p, int v)
{
    *(__global short *)p = (short)v;
}

int load_u8(__global const uchar *p)
{
    return *(__global const uchar *)p;
}

void store_u8(__global uchar *p, int v)
{
    *(__global uchar *)p = (uchar)v;
}

int load_i8(__global const uchar *p)
{
    return *(__global const char *)p;
}

void store_i8(__global uchar *p, int v)
{
    *(__global char *)p = (char)v;
}

uint load_u32_by2(__global const uchar *p)
{
    __global const ushort *h = (__global const ushort *)p;
    return h[0] | (uint)h[1] << 16;
}

uint load_u32_by1(__global const uchar *p)
{
    return p[0] | (uint)p[1] << 8 | (uint)p[2] << 16 | (uint)p[3] << 24;
}

float load_f32_by2(__global const uchar *p)
{
    return as_float(load_u32_by2(p));
}

float load_f32_by1(__global const uchar *p)
{
    return as_float(load_u32_by1(p));
}

int load_i32_by2(__global const uchar *p)
{
    return as_int(load_u32_by2(p));
}

int load_u16_by1(__global const uchar *p)
{
    return p[0] | p[1] << 8;
}

int load_i16_by1(__global const uchar *p)
{
    return as_short((ushort)(p[0] | p[1] << 8));
}

void store_u32_by2(__global uchar *p, uint v)
{
    __global ushort *h = (__global ushort *)p;
    h[0] = (ushort)v;
    h[1] = (ushort)(v >> 16);
}

void store_u32_by1(__global uchar *p, uint v)
{
    p[0] = (uchar)v;
    p[1] = (uchar)(v >> 8);
    p[2] = (uchar)(v >> 16);
    p[3] = (uchar)(v >> 24);
}

void store_u16_by1(__global uchar *p, int v)
{
    p[0] = (uchar)v;
    p[1] = (uchar)(v >> 8);
}

float load_f16(__global const uchar *p)
{
    return vload_half(0, (__global const half *)p);
}

void store_f16(__global uchar *p, float v)
{
    vstore_half_rte(v, 0, (__global half *)p);
}

float load_f16_by1(__global const uchar *p)
{
    const ushort u = (ushort)(p[0] | p[1] << 8);
    return vload_half(0, (const half *)&u);
}

float load_bf16(__global const uchar *p)
{
    return as_float((uint)*(__global const ushort *)p << 16);
}

void store_bf16(__global uchar *p, float v)
{
    const uint u = as_uint(v);  // to nearest even; a NaN stays one
    const uint kept = v != v ? u | 0x400000u : u + (0x7fffu + ((u >> 16) & 1u));
    *(__global ushort *)p = (ushort)(kept >> 16);
}

int add_i32(int x, int y)
{
    return as_int(as_uint(x) + as_uint(y));
}

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
}

int mul_i32(int x, int y)
{
    return as_int(as_uint(x) * as_uint(y));
}

int i32_of(float x)
{
    return x != x ? 0 : convert_int_sat(x);
}

uint u32_of(float x)
{
    return x != x ? 0u : convert_uint_sat(x);
}

int byte_of(uint q, int e)
{
    return as_int(q << (24 - 8 * e)) >> 24;
}

int ubyte_of(uint q, int e)
{
    return as_int(q >> (8 * e) & 255u);
}

uint pack(int a, int b, int c, int d)
{
    return (uint)(a & 255) | (uint)(b & 255) << 8 | (uint)(c & 255) << 16 | (uint)(d & 255) << 24;
}

int dot4_signed(uint x, uint y, int acc)
{
    const int low = byte_of(x, 0) * byte_of(y, 0) + byte_of(x, 1) * byte_of(y, 1);
    const int high = byte_of(x, 2) * byte_of(y, 2) + byte_of(x, 3) * byte_of(y, 3);
    return add_i32(acc, low + high);
}

int dot4_unsigned(uint x, uint y, int acc)
{
    const int low = ubyte_of(x, 0) * byte_of(y, 0) + ubyte_of(x, 1) * byte_of(y, 1);
    const int high = ubyte_of(x, 2) * byte_of(y, 2) + ubyte_of(x, 3) * byte_of(y, 3);
    return add_i32(acc, low + high);
}

uint bytes_of(__constant uint *table, uint quad)
{
    uint out = 0;
    for (int e = 0; e < 4; e++) {
        const uint k = quad >> (8 * e) & 15u;
        out |= (table[k / 4] >> (8 * (k % 4)) & 255u) << (8 * e);
    }
    return out;
}

float divide(float x, float y)
{
    // The device's own quotient may be off by 2.5 ulp: two steps with exact remainders bring it to the nearest float (Markstein 1990).
    const float guess = 1.0f / y;
    const float inverse = fma(fma(-y, guess, 1.0f), guess, guess);
    float q = x / y;
    if (!isfinite(q) || q == 0.0f || !isfinite(inverse))
        return q;
    q = fma(fma(-q, y, x), inverse, q);
    return fma(fma(-q, y, x), inverse, q);
}

float root(float x)
{
    const float s = sqrt(x);
    const float better = fma(fma(-s, s, x), 0.5f / s, s);
    return x > 0.0f && isfinite(x) ? better : s;
}

float inverse_root(float x)
{
    return 1.0f / sqrt(x);
}

float inverse_root_exact(float x)
{
    return divide(1.0f, root(x));
}

float group_sum_f32(__local const float *lanes)
{
    float x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = x[k] + x[k + n];
    return x[0];
}

float group_max_f32(__local const float *lanes)
{
    float x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = fmax(x[k], x[k + n]);
    return x[0];
}

float group_min_f32(__local const float *lanes)
{
    float x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = fmin(x[k], x[k + n]);
    return x[0];
}

int group_sum_i32(__local const int *lanes)
{
    int x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = add_i32(x[k], x[k + n]);
    return x[0];
}

int group_max_i32(__local const int *lanes)
{
    int x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = max(x[k], x[k + n]);
    return x[0];
}

int group_min_i32(__local const int *lanes)
{
    int x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = min(x[k], x[k + n]);
    return x[0];
}
