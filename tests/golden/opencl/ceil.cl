// ceil(f32, f32), general, 32 lanes

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
void each_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                 __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                 long a_extent, long b_extent, long c_extent, long first_group,
                 long n)
{
    __global uchar *x = x_buffer + x_offset;
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
        // y[a, b, c, i] = f(x[a, b, c, i])
        const float v = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + i * 4);
        const float v_2 = -v;
        // near = rint(v)
        const float near = rint(v_2);
        // y[a, b, c, i] = f(x[a, b, c, i])
        store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i * 4, -((near > v_2) ? (near - 1.0f) : near));
    }
}
