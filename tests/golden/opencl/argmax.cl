// argmax(f32, i32), general, 32 lanes

#pragma OPENCL FP_CONTRACT OFF
#define LANES 32

float load_f32(__global const uchar *p)
{
    return *(__global const float *)p;
}

void store_i32(__global uchar *p, int v)
{
    *(__global int *)p = v;
}

float group_max_f32(__local const float *lanes)
{
    float x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = fmax(x[k], x[k + n]);
    return x[0];
}

int group_min_i32(__local const int *lanes)
{
    int x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = min(x[k], x[k + n]);
    return x[0];
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void argmax_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1,
                   __global uchar *y_buffer, long y_offset, long y_stride_0,
                   long r_extent, long first_group,
                   long n)
{
    __local float scratch_f32_0[LANES];
    __local int scratch_i32_0[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long r = group;
    // best = f32(-INF)
    float best = -INFINITY;
    // at = i32(0)
    int at = 0;
    // for i in lanes(n):
    for (long i = lane; i < n; i += 32) {
        // v = x[r, i]
        const float v = load_f32(x + r * x_stride_0 + i * 4);
        // better = v > best
        const bool better = v > best;
        // best = where(better, v, best)
        best = better ? v : best;
        // at = where(better, i32(i), at)
        at = better ? (int)i : at;
    }
    // top = group_max(best)
    scratch_f32_0[lane] = best;
    barrier(CLK_LOCAL_MEM_FENCE);
    const float group_max = group_max_f32(scratch_f32_0);
    const float top = group_max;
    // y[r] = group_min(where(best == top, at, i32(n)))
    scratch_i32_0[lane] = (best == top) ? at : (int)n;
    barrier(CLK_LOCAL_MEM_FENCE);
    const int group_min = group_min_i32(scratch_i32_0);
    if (lane == 0) {
        store_i32(y + r * 4, group_min);
    }
}
