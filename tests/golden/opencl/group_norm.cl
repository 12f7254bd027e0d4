// group_norm(f32, f32), general, 32 lanes

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

float inverse_root(float x)
{
    return 1.0f / sqrt(x);
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
void group_norm_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                       __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                       long a_extent, long g_extent, long first_group,
                       long c, long h, long n, long per, float eps)
{
    __local float scratch_f32_0[LANES];
    __local float scratch_f32_1[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long g = group % g_extent;
    group /= g_extent;
    const long a = group;
    // start = g * per
    const long start = g * per;
    // stop = minimum(start + per, c)
    const long stop = min((long)(start + per), (long)c);
    // total = f32(0)
    float total = 0.0f;
    // for k in range(start, stop):
    for (long k = start; k < stop; k++) {
        // for r in range(h):
        for (long r = 0; r < h; r++) {
            // for i in lanes(n):
            for (long i = lane; i < n; i += 32) {
                // total = total + x[a, k, r, i]
                total = total + load_f32(x + a * x_stride_0 + k * x_stride_1 + r * x_stride_2 + i * 4);
            }
        }
    }
    // count = f32((stop - start) * h * n)
    const float count = (float)(((stop - start) * h) * n);
    // mean = group_sum(total) / count
    scratch_f32_0[lane] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_sum = group_sum_f32(scratch_f32_0);
    const float mean = group_sum / count;
    // squares = f32(0)
    float squares = 0.0f;
    // for k in range(start, stop):
    for (long k_2 = start; k_2 < stop; k_2++) {
        // for r in range(h):
        for (long r_2 = 0; r_2 < h; r_2++) {
            // for i in lanes(n):
            for (long i_2 = lane; i_2 < n; i_2 += 32) {
                // d = x[a, k, r, i] - mean
                const float d = load_f32(x + a * x_stride_0 + k_2 * x_stride_1 + r_2 * x_stride_2 + i_2 * 4) - mean;
                // squares = fma(d, d, squares)
                squares = fma(d, d, squares);
            }
        }
    }
    // inverse = rsqrt(group_sum(squares) / count + eps)
    scratch_f32_1[lane] = squares;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_sum_2 = group_sum_f32(scratch_f32_1);
    const float inverse = inverse_root((group_sum_2 / count) + eps);
    // for k in range(start, stop):
    for (long k_3 = start; k_3 < stop; k_3++) {
        // for r in range(h):
        for (long r_3 = 0; r_3 < h; r_3++) {
            // for i in lanes(n):
            for (long i_3 = lane; i_3 < n; i_3 += 32) {
                // y[a, k, r, i] = (x[a, k, r, i] - mean) * inverse
                store_f32(y + a * y_stride_0 + k_3 * y_stride_1 + r_3 * y_stride_2 + i_3 * 4, (load_f32(x + a * x_stride_0 + k_3 * x_stride_1 + r_3 * x_stride_2 + i_3 * 4) - mean) * inverse);
            }
        }
    }
}
