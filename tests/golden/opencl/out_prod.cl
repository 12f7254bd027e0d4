// out_prod(f32, f32, f32), general, 32 lanes

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
void out_prod_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                     __global uchar *w_buffer, long w_offset, long w_stride_0, long w_stride_1, long w_stride_2, long w_stride_3,
                     __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                     long a_extent, long b_extent, long r_extent, long first_group,
                     long share_a, long share_b, long k, long m)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *w = w_buffer + w_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long r = group % r_extent;
    group /= r_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // for i in lanes(m):
    for (long i = lane; i < m; i += 32) {
        // total = f32(0)
        float total = 0.0f;
        // for j in range(k):
        for (long j = 0; j < k; j++) {
            // total = fma(x[a // share_a, b // share_b, j, i], w[a, b, j, r], total)
            total = fma(load_f32(x + (a / share_a) * x_stride_0 + (b / share_b) * x_stride_1 + j * x_stride_2 + i * 4), load_f32(w + a * w_stride_0 + b * w_stride_1 + j * w_stride_2 + r * 4), total);
        }
        // y[a, b, r, i] = total
        store_f32(y + a * y_stride_0 + b * y_stride_1 + r * y_stride_2 + i * 4, total);
    }
}
