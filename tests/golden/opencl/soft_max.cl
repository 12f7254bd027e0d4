// soft_max(f32, f32, f32, f32), general, 32 lanes

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
void soft_max_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                     __global uchar *mask_buffer, long mask_offset, long mask_stride_0, long mask_stride_1, long mask_stride_2, long mask_stride_3,
                     __global uchar *sinks_buffer, long sinks_offset, long sinks_stride_0,
                     __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                     long a_extent, long h_extent, long r_extent, long first_group,
                     long n, long ma, long mh, long n2, float factor, float max_bias)
{
    __local float scratch_f32_0[LANES];
    __local float scratch_f32_1[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *mask = mask_buffer + mask_offset;
    __global uchar *sinks = sinks_buffer + sinks_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long r = group % r_extent;
    group /= r_extent;
    const long h = group % h_extent;
    group /= h_extent;
    const long a = group;
    // peak = f32(-INF)
    float peak = -INFINITY;
    // for i in lanes(n):
    for (long i = lane; i < n; i += 32) {
        // v = x[a, h, r, i] * factor
        float v = load_f32(x + a * x_stride_0 + h * x_stride_1 + r * x_stride_2 + i * 4) * factor;
        // v = v + (slope * mask[a % ma, h % mh, r, i] if ALIBI else mask[a % ma, h % mh, r, i])
        v = v + load_f32(mask + (a % ma) * mask_stride_0 + (h % mh) * mask_stride_1 + r * mask_stride_2 + i * 4);
        // peak = maximum(peak, where(inside(i), v, -INF))
        peak = fmax(peak, v);
    }
    // top = maximum(group_max(peak), sinks[h]) if SINKS else group_max(peak)
    scratch_f32_0[lane] = peak;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_max = group_max_f32(scratch_f32_0);
    const float top = fmax(group_max, load_f32(sinks + h * 4));
    // total = f32(0)
    float total = 0.0f;
    // for i in lanes(n):
    for (long i_2 = lane; i_2 < n; i_2 += 32) {
        // v = x[a, h, r, i] * factor
        float v_2 = load_f32(x + a * x_stride_0 + h * x_stride_1 + r * x_stride_2 + i_2 * 4) * factor;
        // v = v + (slope * mask[a % ma, h % mh, r, i] if ALIBI else mask[a % ma, h % mh, r, i])
        v_2 = v_2 + load_f32(mask + (a % ma) * mask_stride_0 + (h % mh) * mask_stride_1 + r * mask_stride_2 + i_2 * 4);
        // e = where(v == -INF, f32(0), exp(v - top))
        const float e = (v_2 == (-INFINITY)) ? 0.0f : exp_of(v_2 - top);
        // y[a, h, r, i] = e
        store_f32(y + a * y_stride_0 + h * y_stride_1 + r * y_stride_2 + i_2 * 4, e);
        // total = total + e
        total = total + e;
    }
    // whole = group_sum(total)
    scratch_f32_1[lane] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_sum = group_sum_f32(scratch_f32_1);
    float whole = group_sum;
    // whole = whole + where(sinks[h] == -INF, f32(0), exp(sinks[h] - top))
    whole = whole + ((load_f32(sinks + h * 4) == (-INFINITY)) ? 0.0f : exp_of(load_f32(sinks + h * 4) - top));
    // for i in lanes(n):
    for (long i_3 = lane; i_3 < n; i_3 += 32) {
        // y[a, h, r, i] = where(whole == 0.0, f32(0), y[a, h, r, i] / whole)
        store_f32(y + a * y_stride_0 + h * y_stride_1 + r * y_stride_2 + i_3 * 4, (whole == 0.0f) ? 0.0f : (load_f32(y + a * y_stride_0 + h * y_stride_1 + r * y_stride_2 + i_3 * 4) / whole));
    }
}
