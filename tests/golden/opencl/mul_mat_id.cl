// mul_mat_id(q4_0, q8_x, i32, f32), mul_mat_id_along_k, 32 lanes

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

uint load_u32(__global const uchar *p)
{
    return *(__global const uint *)p;
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

int byte_of(uint q, int e)
{
    return as_int(q << (24 - 8 * e)) >> 24;
}

int ubyte_of(uint q, int e)
{
    return as_int(q >> (8 * e) & 255u);
}

int dot4_unsigned(uint x, uint y, int acc)
{
    const int low = ubyte_of(x, 0) * byte_of(y, 0) + ubyte_of(x, 1) * byte_of(y, 1);
    const int high = ubyte_of(x, 2) * byte_of(y, 2) + ubyte_of(x, 3) * byte_of(y, 3);
    return add_i32(acc, low + high);
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

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void mul_mat_id_along_k_kernel(__global uchar *w_buffer, long w_offset, long w_stride_0, long w_stride_1, long w_stride_2,
                               __global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2,
                               __global uchar *ids_buffer, long ids_offset, long ids_stride_0, long ids_stride_1,
                               __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2,
                               long row_extent, long t_extent, long u_extent, long first_group,
                               long e, long n_blocks)
{
    __local float scratch_f32_0[LANES];
    __global uchar *w = w_buffer + w_offset;
    __global uchar *x = x_buffer + x_offset;
    __global uchar *ids = ids_buffer + ids_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long u = group % u_extent;
    group /= u_extent;
    const long t = group % t_extent;
    group /= t_extent;
    const long row = group;
    // expert = minimum(maximum(index(ids[t, u]), 0), e - 1)
    const long expert = min((long)max((long)(long)load_i32(ids + t * ids_stride_0 + u * 4), (long)0), (long)(e - 1));
    // own = u if OWN else 0
    const long own = u;
    // total = f32(0)
    float total = 0.0f;
    // for j, s, quad in lanes(n_blocks, RUNS, 8):
    const long total_2 = n_blocks * 8;
    for (long place = lane; place < total_2; place += 32) {
        const int rest = (int)place;
        const int quad_ = rest % 8;
        const int rest_2 = rest / 8;
        const int s = rest_2 % 1;
        const int rest_3 = rest_2 / 1;
        // block, xs = w[expert, row, j], x[t, own, j * RUNS + s]
        __global uchar *t_2 = w + expert * w_stride_0 + row * w_stride_1 + (long)rest_3 * 18;
        __global uchar *t_3 = x + t * x_stride_0 + own * x_stride_1 + (long)add_i32(rest_3, s) * 80;
        // four, ones = codes(block, s, quad), u32(0x01010101)
        const uint t_4 = (load_u32_by2(t_2 + (long)(quad_ % 4) * 4 + 2) >> (uint)mul_i32(4, quad_ / 4)) & 0xf0f0f0fu;
        const uint four = t_4;
        const uint ones = 0x1010101u;
        // part = RADIX * dot4(four, xs.qs[quad], i32(0), LOW, HIGH) + dot4(four, xs.qs[8 + quad], i32(0), LOW, HIGH)
        int part = add_i32(mul_i32(254, dot4_unsigned(four, load_u32(t_3 + (long)quad_ * 4 + 16), 0)), dot4_unsigned(four, load_u32(t_3 + (long)add_i32(8, quad_) * 4 + 16), 0));
        // part = part - ZERO * (RADIX * dot4(ones, xs.qs[quad], i32(0), 1, 1) + dot4(ones, xs.qs[8 + quad], i32(0), 1, 1))
        part = sub_i32(part, mul_i32(8, add_i32(mul_i32(254, dot4_unsigned(ones, load_u32(t_3 + (long)quad_ * 4 + 16), 0)), dot4_unsigned(ones, load_u32(t_3 + (long)add_i32(8, quad_) * 4 + 16), 0))));
        // value = f32(part) * scale(block, s, quad) * xs.d
        const float value = ((float)part * load_f16(t_2)) * load_f32(t_3);
        // total = total + value
        total = total + value;
    }
    // y[t, u, row] = group_sum(total)
    scratch_f32_0[lane] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_sum = group_sum_f32(scratch_f32_0);
    if (lane == 0) {
        store_f32(y + t * y_stride_0 + u * y_stride_1 + row * 4, group_sum);
    }
}
