// ssm_scan(f32, f32, f32, f32, f32, f32, i32, f32), general, 32 lanes

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

int load_i32(__global const uchar *p)
{
    return *(__global const int *)p;
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

float log1p_of(float x)
{
    // u = x + 1.0
    const float u = x + 1.0f;
    return ((u == 1.0f) | (u == INFINITY)) ? x : (log_of(u) * (x / (u - 1.0f)));
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void ssm_scan_kernel(__global uchar *state_buffer, long state_offset, long state_stride_0, long state_stride_1, long state_stride_2, long state_stride_3,
                     __global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                     __global uchar *dt_buffer, long dt_offset, long dt_stride_0, long dt_stride_1, long dt_stride_2,
                     __global uchar *a_buffer, long a_offset, long a_stride_0, long a_stride_1,
                     __global uchar *b_buffer, long b_offset, long b_stride_0, long b_stride_1, long b_stride_2, long b_stride_3,
                     __global uchar *c_buffer, long c_offset, long c_stride_0, long c_stride_1, long c_stride_2, long c_stride_3,
                     __global uchar *ids_buffer, long ids_offset, long ids_stride_0,
                     __global uchar *y_buffer, long y_offset, long y_stride_0,
                     long s_extent, long h_extent, long p_extent, long first_group,
                     long t, long n, long r, long heads, long width, long sequences, long shared, long snapshots)
{
    __local float scratch_f32_0[LANES];
    __global uchar *state = state_buffer + state_offset;
    __global uchar *x = x_buffer + x_offset;
    __global uchar *dt = dt_buffer + dt_offset;
    __global uchar *a = a_buffer + a_offset;
    __global uchar *b = b_buffer + b_offset;
    __global uchar *c = c_buffer + c_offset;
    __global uchar *ids = ids_buffer + ids_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long p = group % p_extent;
    group /= p_extent;
    const long h = group % h_extent;
    group /= h_extent;
    const long s = group;
    // row = minimum(maximum(index(ids[s]), 0), r - 1)
    const long row = min((long)max((long)(long)load_i32(ids + s * 4), (long)0), (long)(r - 1));
    // place = sequences * t * heads * width + ((s * heads + h) * width + p) * n
    const long place = (((sequences * t) * heads) * width) + (((((s * heads) + h) * width) + p) * n);
    // apart = sequences * heads * width * n
    const long apart = ((sequences * heads) * width) * n;
    // for i in lanes(n):
    for (long i = lane; i < n; i += 32) {
        // y[place + minimum(t, snapshots - 1) * apart + i] = state[row, h, p, i]
        store_f32(y + (i + (place + (min((long)t, (long)(snapshots - 1)) * apart))) * 4, load_f32(state + row * state_stride_0 + h * state_stride_1 + p * state_stride_2 + i * 4));
    }
    // for token in range(t):
    for (long token = 0; token < t; token++) {
        // d = dt[s, token, h]
        const float d = load_f32(dt + s * dt_stride_0 + token * dt_stride_1 + h * 4);
        // step = where(d > 20.0, d, log1p(exp(d)))
        const float step_ = (d > 20.0f) ? d : log1p_of(exp_of(d));
        // size = x[s, token, h, p] * step
        const float size = load_f32(x + s * x_stride_0 + token * x_stride_1 + h * x_stride_2 + p * 4) * step_;
        // old = place + minimum(t - token, snapshots - 1) * apart
        const long old = place + (min((long)(t - token), (long)(snapshots - 1)) * apart);
        // new = place + minimum(t - token - 1, snapshots - 1) * apart
        const long new = place + (min((long)((t - token) - 1), (long)(snapshots - 1)) * apart);
        // total = f32(0)
        float total = 0.0f;
        // for i in lanes(n):
        for (long i_2 = lane; i_2 < n; i_2 += 32) {
            // kept = exp(step * (a[h, i] if OWN else a[h, 0]))
            const float kept = exp_of(step_ * load_f32(a + h * a_stride_0 + i_2 * 4));
            // now = fma(y[old + i], kept, size * b[s, token, h // shared, i])
            const float now = fma(load_f32(y + (i_2 + old) * 4), kept, size * load_f32(b + s * b_stride_0 + token * b_stride_1 + (h / shared) * b_stride_2 + i_2 * 4));
            // y[new + i] = now
            store_f32(y + (i_2 + new) * 4, now);
            // total = fma(now, c[s, token, h // shared, i], total)
            total = fma(now, load_f32(c + s * c_stride_0 + token * c_stride_1 + (h / shared) * c_stride_2 + i_2 * 4), total);
        }
        // y[((s * t + token) * heads + h) * width + p] = group_sum(total)
        scratch_f32_0[lane] = total;
        barrier(CLK_LOCAL_MEM_FENCE);
        const float group_sum = group_sum_f32(scratch_f32_0);
        if (lane == 0) {
            store_f32(y + ((((((s * t) + token) * heads) + h) * width) + p) * 4, group_sum);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
