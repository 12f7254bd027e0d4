// rope(f32, i32, f32, i32, f32), general, 32 lanes

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

int mul_i32(int x, int y)
{
    return as_int(as_uint(x) * as_uint(y));
}

float sin_of(float x)
{
    // n = rint(x * 0.3183098861837907)
    const float n = rint(x * 0.31830987f);
    // r = fma(n, f32(-3.140625), x)
    float r = fma(n, -3.140625f, x);
    // r = fma(n, f32(-0.0009670257568359375), r)
    r = fma(n, -0.0009670257568359375f, r);
    // r = fma(n, f32(-6.2771141529083252e-7), r)
    r = fma(n, -6.277114152908325e-07f, r);
    // z = r * r
    const float z = r * r;
    // p = fma(z, f32(2.6083159809786593e-6), f32(-0.0001981069071916863))
    float p = fma(z, 2.6083159809786594e-06f, -0.0001981069f);
    // p = fma(p, z, f32(0.008333078585565090))
    p = fma(p, z, 0.00833307858556509f);
    // p = fma(p, z, f32(-0.1666665971279144))
    p = fma(p, z, -0.1666666f);
    // y = fma(p * z, r, r)
    const float y = fma(p * z, r, r);
    return ((sub_i32(as_int(n + 12582912.0f), 1262485504) & 1) == 1) ? (-y) : y;
}

float cos_of(float x)
{
    return sin_of(x + 1.5707964f);
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void rope_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                 __global uchar *pos_buffer, long pos_offset, long pos_stride_0, long pos_stride_1,
                 __global uchar *freqs_buffer, long freqs_offset, long freqs_stride_0, long freqs_stride_1,
                 __global uchar *axes_buffer, long axes_offset, long axes_stride_0,
                 __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                 long a_extent, long t_extent, long first_group,
                 long h, long n, long half_, long p, float magnitude)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *pos = pos_buffer + pos_offset;
    __global uchar *freqs = freqs_buffer + freqs_offset;
    __global uchar *axes = axes_buffer + axes_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long t = group % t_extent;
    group /= t_extent;
    const long a = group;
    // one = f32(pos[0, t])
    const float one = (float)load_i32(pos + t * 4);
    // for i in lanes(half):
    for (long i = lane; i < half_; i += 32) {
        // position = f32(pos[minimum(maximum(axes[i], 0), p - 1), t]) if AXES else one
        const float position = (float)load_i32(pos + (long)min((int)max((int)load_i32(axes + i * 4), (int)0), (int)(int)(p - 1)) * pos_stride_0 + t * 4);
        // turns = position * freqs[0, i]
        const float turns = position * load_f32(freqs + i * 4);
        // rest = fma(position, freqs[0, i], -turns) + position * freqs[1, i]
        const float rest = fma(position, load_f32(freqs + i * 4), -turns) + (position * load_f32(freqs + 1 * freqs_stride_0 + i * 4));
        // angle = ((turns - rint(turns)) + rest) * 6.283185307179586
        const float angle = ((turns - rint(turns)) + rest) * 6.2831855f;
        // co = cos(angle) * magnitude if SCALED else cos(angle)
        const float co = cos_of(angle);
        // si = sin(angle) * magnitude if SCALED else sin(angle)
        const float si = sin_of(angle);
        // for head in range(h):
        for (long head = 0; head < h; head++) {
            // u, v = x[a, t, head, 2 * i], x[a, t, head, 2 * i + 1]
            const float t_2 = load_f32(x + a * x_stride_0 + t * x_stride_1 + head * x_stride_2 + (long)mul_i32(2, (int)i) * 4);
            const float t_3 = load_f32(x + a * x_stride_0 + t * x_stride_1 + head * x_stride_2 + (long)add_i32(mul_i32(2, (int)i), 1) * 4);
            const float u = t_2;
            const float v = t_3;
            // y[a, t, head, 2 * i] = u * co - v * si
            store_f32(y + a * y_stride_0 + t * y_stride_1 + head * y_stride_2 + (long)mul_i32(2, (int)i) * 4, (u * co) - (v * si));
            // y[a, t, head, 2 * i + 1] = u * si + v * co
            store_f32(y + a * y_stride_0 + t * y_stride_1 + head * y_stride_2 + (long)add_i32(mul_i32(2, (int)i), 1) * 4, (u * si) + (v * co));
        }
    }
    // for i in lanes(n - 2 * half):
    const long t_4 = n - (2 * half_);
    for (long i_2 = lane; i_2 < t_4; i_2 += 32) {
        // for head in range(h):
        for (long head_2 = 0; head_2 < h; head_2++) {
            // y[a, t, head, i + 2 * half] = x[a, t, head, i + 2 * half]
            store_f32(y + a * y_stride_0 + t * y_stride_1 + head_2 * y_stride_2 + (i_2 + (2 * half_)) * 4, load_f32(x + a * x_stride_0 + t * x_stride_1 + head_2 * x_stride_2 + (i_2 + (2 * half_)) * 4));
        }
    }
}
