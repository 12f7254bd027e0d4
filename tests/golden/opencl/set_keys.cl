// set_keys(f32, i32, f32), general, 32 lanes

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
void set_keys_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2,
                     __global uchar *ids_buffer, long ids_offset, long ids_stride_0,
                     __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                     long r_extent, long h_extent, long first_group,
                     long d, long blocks)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *ids = ids_buffer + ids_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long h = group % h_extent;
    group /= h_extent;
    const long r = group;
    // cell = minimum(maximum(index(ids[r]), 0), blocks * 32 - 1)
    const long cell = min((long)max((long)(long)load_i32(ids + r * 4), (long)0), (long)((blocks * 32) - 1));
    // for i in lanes(d):
    for (long i = lane; i < d; i += 32) {
        // y[h, cell // 32, i, cell % 32] = x[r, h, i]
        store_f32(y + h * y_stride_0 + (cell / 32) * y_stride_1 + i * y_stride_2 + (cell % 32) * 4, load_f32(x + r * x_stride_0 + h * x_stride_1 + i * 4));
    }
}
