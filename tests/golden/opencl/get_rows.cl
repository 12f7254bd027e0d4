// get_rows(q4_0, i32, f32), get_rows_blocks, 32 lanes

#pragma OPENCL FP_CONTRACT OFF
#define LANES 32

void store_f32(__global uchar *p, float v)
{
    *(__global float *)p = v;
}

int load_i32(__global const uchar *p)
{
    return *(__global const int *)p;
}

uint load_u32_by2(__global const uchar *p)
{
    __global const ushort *h = (__global const ushort *)p;
    return h[0] | (uint)h[1] << 16;
}

float load_f16(__global const uchar *p)
{
    return vload_half(0, (__global const half *)p);
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

int ubyte_of(uint q, int e)
{
    return as_int(q >> (8 * e) & 255u);
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void get_rows_blocks_kernel(__global uchar *w_buffer, long w_offset, long w_stride_0, long w_stride_1, long w_stride_2, long w_stride_3,
                            __global uchar *ids_buffer, long ids_offset, long ids_stride_0, long ids_stride_1, long ids_stride_2,
                            __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                            long a_extent, long b_extent, long r_extent, long first_group,
                            long n_blocks, long m, long wa, long wb)
{
    __global uchar *w = w_buffer + w_offset;
    __global uchar *ids = ids_buffer + ids_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long r = group % r_extent;
    group /= r_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // row = minimum(maximum(index(ids[a, b, r]), 0), m - 1)
    const long row = min((long)max((long)(long)load_i32(ids + a * ids_stride_0 + b * ids_stride_1 + r * 4), (long)0), (long)(m - 1));
    // for k, s, t in lanes(n_blocks, RUNS, 8):
    const long total = n_blocks * 8;
    for (long place = lane; place < total; place += 32) {
        const int rest = (int)place;
        const int t = rest % 8;
        const int rest_2 = rest / 8;
        const int s = rest_2 % 1;
        const int rest_3 = rest_2 / 1;
        // block = w[a % wa, b % wb, row, k]
        __global uchar *block = w + (a % wa) * w_stride_0 + (b % wb) * w_stride_1 + row * w_stride_2 + (long)rest_3 * 18;
        // quad, d, low = codes(block, s, t), scale(block, s, t), offset(block, s, t)
        const uint t_2 = (load_u32_by2(block + (long)(t % 4) * 4 + 2) >> (uint)mul_i32(4, t / 4)) & 0xf0f0f0fu;
        const float t_3 = load_f16(block);
        const uint quad_ = t_2;
        const float d = t_3;
        const float low = 0.0f;
        // code = byte(quad, e) if LOW < 0 else ubyte(quad, e)
        const int code = ubyte_of(quad_, 0);
        // y[a, b, r, (k * RUNS + s) * 32 + 4 * t + e] = fma(d, f32(code - ZERO), -low)
        store_f32(y + a * y_stride_0 + b * y_stride_1 + r * y_stride_2 + (long)add_i32(mul_i32(add_i32(rest_3, s), 32), mul_i32(4, t)) * 4, fma(d, (float)sub_i32(code, 8), -low));
        // code = byte(quad, e) if LOW < 0 else ubyte(quad, e)
        const int code_2 = ubyte_of(quad_, 1);
        // y[a, b, r, (k * RUNS + s) * 32 + 4 * t + e] = fma(d, f32(code - ZERO), -low)
        store_f32(y + a * y_stride_0 + b * y_stride_1 + r * y_stride_2 + (long)add_i32(add_i32(mul_i32(add_i32(rest_3, s), 32), mul_i32(4, t)), 1) * 4, fma(d, (float)sub_i32(code_2, 8), -low));
        // code = byte(quad, e) if LOW < 0 else ubyte(quad, e)
        const int code_3 = ubyte_of(quad_, 2);
        // y[a, b, r, (k * RUNS + s) * 32 + 4 * t + e] = fma(d, f32(code - ZERO), -low)
        store_f32(y + a * y_stride_0 + b * y_stride_1 + r * y_stride_2 + (long)add_i32(add_i32(mul_i32(add_i32(rest_3, s), 32), mul_i32(4, t)), 2) * 4, fma(d, (float)sub_i32(code_3, 8), -low));
        // code = byte(quad, e) if LOW < 0 else ubyte(quad, e)
        const int code_4 = ubyte_of(quad_, 3);
        // y[a, b, r, (k * RUNS + s) * 32 + 4 * t + e] = fma(d, f32(code - ZERO), -low)
        store_f32(y + a * y_stride_0 + b * y_stride_1 + r * y_stride_2 + (long)add_i32(add_i32(mul_i32(add_i32(rest_3, s), 32), mul_i32(4, t)), 3) * 4, fma(d, (float)sub_i32(code_4, 8), -low));
    }
}
