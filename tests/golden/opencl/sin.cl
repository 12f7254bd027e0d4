// sin(f32, f32), general, 32 lanes

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

int i32_of(float x)
{
    return x != x ? 0 : convert_int_sat(x);
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
        // n = rint(v * 0.6366197723675814)
        const float n_2 = rint(v * 0.63661975f);
        // r = fma(n, f32(-1.57079637050628662109375), v)
        float r = fma(n_2, -1.5707963705062866f, v);
        // r = fma(n, f32(4.37113882867379e-8), r)
        r = fma(n_2, 4.371139e-08f, r);
        // r = fma(n, f32(1.71512451e-15), r)
        r = fma(n_2, 1.7151245e-15f, r);
        // z = r * r
        const float z = r * r;
        // s = fma(f32(2.7007388e-6), z, f32(-1.9837073e-4))
        float s = fma(2.7007388e-06f, z, -0.00019837073f);
        // s = fma(s, z, f32(8.3333207e-3))
        s = fma(s, z, 0.008333321f);
        // s = fma(s, z, f32(-1.6666667e-1))
        s = fma(s, z, -0.16666667f);
        // s = fma(s * z, r, r)
        s = fma(s * z, r, r);
        // c = fma(f32(-2.7040711e-7), z, f32(2.4796978e-5))
        float c_2 = fma(-2.704071e-07f, z, 2.4796978e-05f);
        // c = fma(c, z, f32(-1.3888872e-3))
        c_2 = fma(c_2, z, -0.0013888872f);
        // c = fma(c, z, f32(4.1666668e-2))
        c_2 = fma(c_2, z, 0.041666668f);
        // c = fma(c, z * z, fma(z, f32(-0.5), f32(1)))
        c_2 = fma(c_2, z * z, fma(z, -0.5f, 1.0f));
        // k = i32(n) + quarters
        const int k = i32_of(n_2);
        // y = where((k & 1) == 1, c, s)
        float y_2 = ((k & 1) == 1) ? c_2 : s;
        // y = where((k & 2) == 2, -y, y)
        y_2 = ((k & 2) == 2) ? (-y_2) : y_2;
        // y[a, b, c, i] = f(x[a, b, c, i])
        store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i * 4, (fabs(v) <= 4000000.0f) ? y_2 : NAN);
    }
}
