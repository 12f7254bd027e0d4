// silu(f32, f32), general, 32 lanes

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

int add_i32(int x, int y)
{
    return as_int(as_uint(x) + as_uint(y));
}

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
}

float exp_of(float x)
{
    // n = rint(maximum(minimum(x * 1.44269504, 200.0), -200.0))
    const float n = rint(fmax(fmin(x * 1.442695f, 200.0f), -200.0f));
    // r = fma(n, f32(-0.693145751953125), x)
    float r = fma(n, -0.693145751953125f, x);
    // r = fma(n, f32(-1.42860682030941723212e-6), r)
    r = fma(n, -1.4286068e-06f, r);
    // p = fma(f32(1.9875691500e-4), r, f32(1.3981999507e-3))
    float p = fma(0.00019875691f, r, 0.0013981999f);
    // p = fma(p, r, f32(8.3334519073e-3))
    p = fma(p, r, 0.008333452f);
    // p = fma(p, r, f32(4.1665795894e-2))
    p = fma(p, r, 0.041665796f);
    // p = fma(p, r, f32(1.6666665459e-1))
    p = fma(p, r, 0.16666666f);
    // p = fma(p, r, f32(5.0000001201e-1))
    p = fma(p, r, 0.5f);
    // p = fma(p, r * r, r) + 1.0
    p = fma(p, r * r, r) + 1.0f;
    // k = whole(n)
    const int k = sub_i32(as_int(n + 12582912.0f), 1262485504);
    // half = k >> 1
    const int half_ = k >> 1;
    // y = p * as_f32((half + 127) << 23) * as_f32((k - half + 127) << 23)
    float y = (p * as_float(add_i32(half_, 127) << 23)) * as_float(add_i32(sub_i32(k, half_), 127) << 23);
    // y = where(x > 88.7228394, f32(INF), y)
    y = (x > 88.72284f) ? INFINITY : y;
    return (x != x) ? x : ((x < (-103.97f)) ? 0.0f : y);
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
        store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i * 4, v / (1.0f + exp_of(-v)));
    }
}
