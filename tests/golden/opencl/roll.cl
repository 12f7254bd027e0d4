// roll(f32, f32), general, 32 lanes

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

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void roll_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                 __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                 long i_extent, long j_extent, long k_extent, long first_group,
                 long a, long b, long c, long n, long turn0, long turn1, long turn2, long turn3)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long k = group % k_extent;
    group /= k_extent;
    const long j = group % j_extent;
    group /= j_extent;
    const long i = group;
    // for l in lanes(n - turn0):
    const long t = n - turn0;
    for (long l = lane; l < t; l += 32) {
        // y[i, j, k, l] = x[(i + turn3) % a, (j + turn2) % b, (k + turn1) % c, turn0 + l]
        store_f32(y + i * y_stride_0 + j * y_stride_1 + k * y_stride_2 + l * 4, load_f32(x + ((i + turn3) % a) * x_stride_0 + ((j + turn2) % b) * x_stride_1 + ((k + turn1) % c) * x_stride_2 + (l + turn0) * 4));
    }
    // for l in lanes(turn0):
    for (long l_2 = lane; l_2 < turn0; l_2 += 32) {
        // y[i, j, k, n - turn0 + l] = x[(i + turn3) % a, (j + turn2) % b, (k + turn1) % c, l]
        store_f32(y + i * y_stride_0 + j * y_stride_1 + k * y_stride_2 + (l_2 + (n - turn0)) * 4, load_f32(x + ((i + turn3) % a) * x_stride_0 + ((j + turn2) % b) * x_stride_1 + ((k + turn1) % c) * x_stride_2 + l_2 * 4));
    }
}
