// ssm_conv(f32, f32, f32), general, 32 lanes

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
void ssm_conv_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2,
                     __global uchar *c_buffer, long c_offset, long c_stride_0, long c_stride_1,
                     __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2,
                     long s_extent, long t_extent, long first_group,
                     long i, long w)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *c = c_buffer + c_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long t = group % t_extent;
    group /= t_extent;
    const long s = group;
    // for channel in lanes(i):
    for (long channel = lane; channel < i; channel += 32) {
        // total = f32(0)
        float total = 0.0f;
        // for j in range(w):
        for (long j = 0; j < w; j++) {
            // total = fma(x[s, channel, t + j], c[channel, j], total)
            total = fma(load_f32(x + s * x_stride_0 + channel * x_stride_1 + (t + j) * 4), load_f32(c + channel * c_stride_0 + j * 4), total);
        }
        // y[s, t, channel] = total
        store_f32(y + s * y_stride_0 + t * y_stride_1 + channel * 4, total);
    }
}
