// quantize_rows(f32, q8_x), general, 32 lanes

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

void store_i16(__global uchar *p, int v)
{
    *(__global short *)p = (short)v;
}

void store_i8(__global uchar *p, int v)
{
    *(__global char *)p = (char)v;
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

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void quantize_rows_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                          __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                          long a_extent, long b_extent, long n_extent, long first_group,
                          long n_blocks)
{
    __local int scratch_i32_0[LANES];
    __local int scratch_i32_1[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long n = group % n_extent;
    group /= n_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // for j in range(n_blocks):
    for (long j = 0; j < n_blocks; j++) {
        // big = i32(0)
        int big = 0;
        // for i in lanes(32):
        for (long i = lane; i < 32; i += 32) {
            // big = maximum(big, as_i32(abs(x[a, b, n, j * 32 + i])))  # the bits of magnitudes are in order, NaN above infinity
            big = max((int)big, (int)as_int(fabs(load_f32(x + a * x_stride_0 + b * x_stride_1 + n * x_stride_2 + (i + (j * 32)) * 4))));
        }
        // top = as_f32(group_max(big))
        scratch_i32_0[lane] = big;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_max = group_max_i32(scratch_i32_0);
        const float top = as_float(group_max);
        // d = top / LARGEST
        const float d = top / 32384.0f;
        // inverse = where(top > 0.0, minimum(LARGEST / top, 3.0e38), f32(0))
        const float inverse = (top > 0.0f) ? fmin(32384.0f / top, 3e+38f) : 0.0f;
        // block = y[a, b, n, j]
        __global uchar *block = y + a * y_stride_0 + b * y_stride_1 + n * y_stride_2 + j * 80;
        // high_sums, low_sums = i32(0), i32(0)
        int high_sums = 0;
        int low_sums = 0;
        // for i in lanes(32):
        for (long i_2 = lane; i_2 < 32; i_2 += 32) {
            // q = i32(rint(x[a, b, n, j * 32 + i] * inverse))
            const int q = i32_of(rint(load_f32(x + a * x_stride_0 + b * x_stride_1 + n * x_stride_2 + (i_2 + (j * 32)) * 4) * inverse));
            // high = i32(rint(f32(q) * STEP))
            const int high = i32_of(rint((float)q * 0.003937008f));
            // low = q - RADIX * high
            const int low = sub_i32(q, mul_i32(254, high));
            // block.q[i] = high
            store_i8(block + i_2 + 16, high);
            // block.q[i + 32] = low
            store_i8(block + (i_2 + 32) + 16, low);
            // high_sums = high_sums + where(i < 16, high, high << 16)
            high_sums = add_i32(high_sums, ((int)i_2 < 16) ? high : (high << 16));
            // low_sums = low_sums + where(i < 16, low, low << 16)
            low_sums = add_i32(low_sums, ((int)i_2 < 16) ? low : (low << 16));
        }
        // whole_high, whole_low = group_sum(high_sums), group_sum(low_sums)  # two sums in a word: 16 bytes stay within 16 bits
        scratch_i32_1[lane] = high_sums;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum = group_sum_i32(scratch_i32_1);
        const int t = group_sum;
        scratch_i32_0[lane] = low_sums;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_2 = group_sum_i32(scratch_i32_0);
        const int t_2 = group_sum_2;
        const int whole_high = t;
        const int whole_low = t_2;
        // first_high, first_low = (whole_high << 16) >> 16, (whole_low << 16) >> 16
        const int t_3 = (whole_high << 16) >> 16;
        const int t_4 = (whole_low << 16) >> 16;
        const int first_high = t_3;
        const int first_low = t_4;
        // second_high, second_low = (whole_high - first_high) >> 16, (whole_low - first_low) >> 16
        const int t_5 = sub_i32(whole_high, first_high) >> 16;
        const int t_6 = sub_i32(whole_low, first_low) >> 16;
        const int second_high = t_5;
        const int second_low = t_6;
        // block.d = d
        if (lane == 0) {
            store_f32(block, d);
        }
        // block.s = d * f32(RADIX * (first_high + second_high) + (first_low + second_low))
        if (lane == 0) {
            store_f32(block + 4, d * (float)add_i32(mul_i32(254, add_i32(first_high, second_high)), add_i32(first_low, second_low)));
        }
        // block.sums[0] = first_high
        if (lane == 0) {
            store_i16(block + 8, first_high);
        }
        // block.sums[1] = second_high
        if (lane == 0) {
            store_i16(block + 10, second_high);
        }
        // block.sums[2] = first_low
        if (lane == 0) {
            store_i16(block + 12, first_low);
        }
        // block.sums[3] = second_low
        if (lane == 0) {
            store_i16(block + 14, second_low);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
