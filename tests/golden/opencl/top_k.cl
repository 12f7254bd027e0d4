// top_k(f32, i32), general, 32 lanes

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

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
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
void top_k_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                  __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                  long a_extent, long b_extent, long c_extent, long first_group,
                  long n, long m)
{
    __local int scratch_i32_0[LANES];
    __local int scratch_i32_1[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long c = group % c_extent;
    group /= c_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // last, at = i32(LEAST), i32(-1)
    int last = -2147483647 - 1;
    int at = -1;
    // for t in range(m):
    for (long t = 0; t < m; t++) {
        // best, place = i32(MOST), i32(n)
        const int t_2 = (int)n;
        int best = 2147483647;
        int place = t_2;
        // for i in lanes(n):
        for (long i = lane; i < n; i += 32) {
            // key = key_of(x[a, b, c, i], 1)
            const float v = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + i * 4);
            // bits = as_i32(v + 0.0)
            const int bits = as_int(v + 0.0f);
            // key = bits ^ ((bits >> 31) & MOST)
            int key = bits ^ ((bits >> 31) & 2147483647);
            // key = where(descending == 1, -1 - key, key)
            key = sub_i32(-1, key);
            // key = key_of(x[a, b, c, i], 1)
            const int key_2 = (v != v) ? 2147483647 : key;
            // behind = (key > last) | ((key == last) & (i32(i) > at))
            const bool behind = (key_2 > last) | ((key_2 == last) & ((int)i > at));
            // better = behind & ((key < best) | (place == n))
            const bool better = behind & ((key_2 < best) | (place == (int)n));
            // best = where(better, key, best)
            best = better ? key_2 : best;
            // place = where(better, i32(i), place)
            place = better ? (int)i : place;
        }
        // last = group_min(best)
        scratch_i32_0[lane] = best;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_min = group_min_i32(scratch_i32_0);
        last = group_min;
        // at = group_min(where(best == last, place, i32(n)))
        scratch_i32_1[lane] = (best == last) ? place : (int)n;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_min_2 = group_min_i32(scratch_i32_1);
        at = group_min_2;
        // y[a, b, c, t] = at
        if (lane == 0) {
            store_i32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + t * 4, at);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
