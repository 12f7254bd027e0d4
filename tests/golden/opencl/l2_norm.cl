// l2_norm(f32, f32), general, 32 lanes

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
void l2_norm_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                    __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                    long a_extent, long b_extent, long c_extent, long first_group,
                    long n, float eps)
{
    __local float scratch_f32_0[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long c = group % c_extent;
    group /= c_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // squares = f32(0)
    float squares = 0.0f;
    // for i in lanes(n):
    for (long i = lane; i < n; i += 32) {
        // v = x[a, b, c, i]
        const float v = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + i * 4);
        // squares = fma(v, v, squares)
        squares = fma(v, v, squares);
    }
    // r = 1.0 / maximum(sqrt(group_sum(squares)), eps)
    scratch_f32_0[lane] = squares;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_sum = group_sum_f32(scratch_f32_0);
    const float r = 1.0f / fmax(sqrt(group_sum), eps);
    // for i in lanes(n):
    for (long i_2 = lane; i_2 < n; i_2 += 32) {
        // y[a, b, c, i] = x[a, b, c, i] * r
        store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i_2 * 4, load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + i_2 * 4) * r);
    }
}
