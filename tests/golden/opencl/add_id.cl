// add_id(f32, f32, i32, f32), general, 32 lanes

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

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void add_id_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2,
                   __global uchar *w_buffer, long w_offset, long w_stride_0, long w_stride_1,
                   __global uchar *ids_buffer, long ids_offset, long ids_stride_0, long ids_stride_1,
                   __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2,
                   long t_extent, long k_extent, long first_group,
                   long n, long m)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *w = w_buffer + w_offset;
    __global uchar *ids = ids_buffer + ids_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long k = group % k_extent;
    group /= k_extent;
    const long t = group;
    // row = minimum(maximum(index(ids[t, k]), 0), m - 1)
    const long row = min((long)max((long)(long)load_i32(ids + t * ids_stride_0 + k * 4), (long)0), (long)(m - 1));
    // for i in lanes(n):
    for (long i = lane; i < n; i += 32) {
        // y[t, k, i] = x[t, k, i] + w[row, i]
        store_f32(y + t * y_stride_0 + k * y_stride_1 + i * 4, load_f32(x + t * x_stride_0 + k * x_stride_1 + i * 4) + load_f32(w + row * w_stride_0 + i * 4));
    }
}
