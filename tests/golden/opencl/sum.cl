// sum(f32, f32), general, 32 lanes

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
void sum_all_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                    __global uchar *parts_buffer, long parts_offset, long parts_stride_0,
                    long i_extent, long j_extent, long k_extent, long first_group,
                    long b, long c, long n)
{
    __local float scratch_f32_0[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *parts = parts_buffer + parts_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long k = group % k_extent;
    group /= k_extent;
    const long j = group % j_extent;
    group /= j_extent;
    const long i = group;
    // total = f32(0)
    float total = 0.0f;
    // for l in lanes(n):
    for (long l = lane; l < n; l += 32) {
        // total = total + x[i, j, k, l]
        total = total + load_f32(x + i * x_stride_0 + j * x_stride_1 + k * x_stride_2 + l * 4);
    }
    // parts[(i * b + j) * c + k] = group_sum(total)
    scratch_f32_0[lane] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_sum = group_sum_f32(scratch_f32_0);
    if (lane == 0) {
        store_f32(parts + ((((i * b) + j) * c) + k) * 4, group_sum);
    }
}

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
void sum_parts_kernel(__global uchar *parts_buffer, long parts_offset, long parts_stride_0,
                      __global uchar *y_buffer, long y_offset, long y_stride_0,
                      long one_extent, long first_group,
                      long rows)
{
    __local float scratch_f32_0[LANES];
    __global uchar *parts = parts_buffer + parts_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long one = group;
    // total = f32(0)
    float total = 0.0f;
    // for i in lanes(rows):
    for (long i = lane; i < rows; i += 32) {
        // total = total + parts[i]
        total = total + load_f32(parts + i * 4);
    }
    // y[0] = group_sum(total)
    scratch_f32_0[lane] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_sum = group_sum_f32(scratch_f32_0);
    if (lane == 0) {
        store_f32(y, group_sum);
    }
}
