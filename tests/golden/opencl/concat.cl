// concat(f32, f32, f32), general, 32 lanes

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
void concat_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                   __global uchar *w_buffer, long w_offset, long w_stride_0, long w_stride_1, long w_stride_2, long w_stride_3,
                   __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                   long i_extent, long j_extent, long k_extent, long first_group,
                   long a, long b, long c, long n, long wn, long start0, long start1, long start2, long start3)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *w = w_buffer + w_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long k = group % k_extent;
    group /= k_extent;
    const long j = group % j_extent;
    group /= j_extent;
    const long i = group;
    // if (i < a) & (j < b) & (k < c):
    if (((i < a) & (j < b)) & (k < c)) {
        // for l in lanes(n):
        for (long l = lane; l < n; l += 32) {
            // y[i, j, k, l] = x[i, j, k, l]
            store_f32(y + i * y_stride_0 + j * y_stride_1 + k * y_stride_2 + l * 4, load_f32(x + i * x_stride_0 + j * x_stride_1 + k * x_stride_2 + l * 4));
        }
    }
    // if (i >= start3) & (j >= start2) & (k >= start1):
    if (((i >= start3) & (j >= start2)) & (k >= start1)) {
        // for l in lanes(wn):
        for (long l_2 = lane; l_2 < wn; l_2 += 32) {
            // y[i, j, k, start0 + l] = w[i - start3, j - start2, k - start1, l]
            store_f32(y + i * y_stride_0 + j * y_stride_1 + k * y_stride_2 + (l_2 + start0) * 4, load_f32(w + (i - start3) * w_stride_0 + (j - start2) * w_stride_1 + (k - start1) * w_stride_2 + l_2 * 4));
        }
    }
}
