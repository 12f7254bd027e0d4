// argsort(f32, i32), general, 32 lanes

#pragma OPENCL FP_CONTRACT OFF
#define LANES 32

float load_f32(__global const uchar *p)
{
    return *(__global const float *)p;
}

int load_i32(__global const uchar *p)
{
    return *(__global const int *)p;
}

void store_i32(__global uchar *p, int v)
{
    *(__global int *)p = v;
}

int add_i32(int x, int y)
{
    return as_int(as_uint(x) + as_uint(y));
}

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void argsort_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                    __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                    long a_extent, long b_extent, long c_extent, long first_group,
                    long n, long n_bits, long descending)
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
        // y[a, b, c, i] = i32(i)
        store_i32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i * 4, (int)i);
    }
    // barrier()
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    // for merge in range(n_bits):
    for (long merge = 0; merge < n_bits; merge++) {
        // for step in range(merge + 1):
        const long stop = merge + 1;
        for (long step_ = 0; step_ < stop; step_++) {
            // bit = merge - step
            const long bit = merge - step_;
            // gap = 1 << bit
            const long gap = 1 << bit;
            // for p in lanes(1 << (n_bits - 1)):
            const long t = 1 << (n_bits - 1);
            for (long p = lane; p < t; p += 32) {
                // low = ((i32(p) >> bit) << (bit + 1)) + (i32(p) & (gap - 1))
                const int low = add_i32(((int)p >> (int)bit) << (int)(bit + 1), (int)p & (int)(gap - 1));
                // high = where(step == 0, low ^ (2 * gap - 1), low + gap)
                const int high = (step_ == 0) ? (low ^ (int)((2 * gap) - 1)) : add_i32(low, (int)gap);
                // with only(high < n):
                const bool t_2 = high < (int)n;
                if (t_2) {
                    // i, j = y[a, b, c, low], y[a, b, c, high]
                    const int t_3 = load_i32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + (long)low * 4);
                    const int t_4 = load_i32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + (long)high * 4);
                    const int i_2 = t_3;
                    const int j = t_4;
                    // u, v = key_of(x[a, b, c, i], descending), key_of(x[a, b, c, j], descending)
                    const float v = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (long)i_2 * 4);
                    // bits = as_i32(v + 0.0)
                    const int bits = as_int(v + 0.0f);
                    // key = bits ^ ((bits >> 31) & MOST)
                    int key = bits ^ ((bits >> 31) & 2147483647);
                    // key = where(descending == 1, -1 - key, key)
                    key = (descending == 1) ? sub_i32(-1, key) : key;
                    // u, v = key_of(x[a, b, c, i], descending), key_of(x[a, b, c, j], descending)
                    const int t_5 = (v != v) ? 2147483647 : key;
                    const float v_2 = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (long)j * 4);
                    // bits = as_i32(v + 0.0)
                    const int bits_2 = as_int(v_2 + 0.0f);
                    // key = bits ^ ((bits >> 31) & MOST)
                    int key_2 = bits_2 ^ ((bits_2 >> 31) & 2147483647);
                    // key = where(descending == 1, -1 - key, key)
                    key_2 = (descending == 1) ? sub_i32(-1, key_2) : key_2;
                    // u, v = key_of(x[a, b, c, i], descending), key_of(x[a, b, c, j], descending)
                    const int t_6 = (v_2 != v_2) ? 2147483647 : key_2;
                    const int u = t_5;
                    const int v_3 = t_6;
                    // wrong = (v < u) | ((v == u) & (j < i))
                    const bool wrong = (v_3 < u) | ((v_3 == u) & (j < i_2));
                    // y[a, b, c, low] = where(wrong, j, i)
                    store_i32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + (long)low * 4, wrong ? j : i_2);
                    // y[a, b, c, high] = where(wrong, i, j)
                    store_i32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + (long)high * 4, wrong ? i_2 : j);
                }
            }
            // barrier()
            barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
        }
    }
}
