// log(f32, f32), general, 32 lanes

#pragma OPENCL FP_CONTRACT OFF
#define LANES 32

float load_f32(__global const uchar *p)
{
    return *(__global const float *)p;
}

void store_f32(__global uchar *p, float v)
{
    *(__global float *)p = v;
}

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
}

float log_of(float x)
{
    // tiny = x < 1.17549435e-38
    const bool tiny = x < 1.1754944e-38f;
    // scaled = where(tiny, x * 8388608.0, x)
    const float scaled = tiny ? (x * 8388608.0f) : x;
    // bits = as_i32(scaled)
    const int bits = as_int(scaled);
    // e = (bits - 0x3F3504F3) >> 23
    const int e = sub_i32(bits, 1060439283) >> 23;
    // m = as_f32(bits - (e << 23))
    const float m = as_float(sub_i32(bits, e << 23));
    // s = (m - 1.0) / (m + 1.0)
    const float s = (m - 1.0f) / (m + 1.0f);
    // z = s * s
    const float z = s * s;
    // p = fma(z, f32(0.2222222), f32(0.2857143))
    float p = fma(z, 0.2222222f, 0.2857143f);
    // p = fma(p, z, f32(0.4))
    p = fma(p, z, 0.4f);
    // p = fma(p, z, f32(0.6666666667))
    p = fma(p, z, 0.6666667f);
    // shift = where(tiny, f32(-23), f32(0))
    const float shift = tiny ? (-23.0f) : 0.0f;
    // y = fma(f32(e) + shift, f32(0.6931471805599453), fma(p * z, s, 2.0 * s))
    const float y = fma((float)e + shift, 0.6931472f, fma(p * z, s, 2.0f * s));
    return (x > 0.0f) ? ((x == INFINITY) ? x : y) : ((x == 0.0f) ? (-INFINITY) : NAN);
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void each_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                 __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                 long a_extent, long b_extent, long c_extent, long first_group,
                 long n)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long c = group % c_extent;
    group /= c_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // for i in lanes(n):
    for (long i = lane; i < n; i += 32) {
        // y[a, b, c, i] = f(x[a, b, c, i])
        const float v = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + i * 4);
        store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i * 4, log_of(v));
    }
}
