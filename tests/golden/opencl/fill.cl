// fill(f32, f32), general, 32 lanes

#pragma OPENCL FP_CONTRACT OFF
#define LANES 32

void store_f32(__global uchar *p, float v)
{
    *(__global float *)p = v;
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void fill_kernel(__global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                 long a_extent, long b_extent, long c_extent, long first_group,
                 long n, float value)
{
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long c = group % c_extent;
    group /= c_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // for i in lanes(n):
    for (long i = lane; i < n; i += 32) {
        // y[a, b, c, i] = value
        store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i * 4, value);
    }
}
