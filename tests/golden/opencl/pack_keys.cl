// pack_keys(f32, f16), general, 32 lanes

#pragma OPENCL FP_CONTRACT OFF
#define LANES 32

float load_f32(__global const uchar *p)
{
    return *(__global const float *)p;
}

void store_f16(__global uchar *p, float v)
{
    vstore_half_rte(v, 0, (__global half *)p);
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void pack_keys_kernel(__global uchar *k_buffer, long k_offset, long k_stride_0, long k_stride_1, long k_stride_2,
                      __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                      long kv_extent, long block_extent, long first_group,
                      long t, long d)
{
    __global uchar *k = k_buffer + k_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long block = group % block_extent;
    group /= block_extent;
    const long kv = group;
    // for i in range(d):
    for (long i = 0; i < d; i++) {
        // with span(0, LANES) as key:
        const long key = lane;
        // x = k[minimum(place, t - 1), kv, i]
        const float x = load_f32(k + (long)min((int)(int)(key + (block * 32)), (int)(int)(t - 1)) * k_stride_0 + kv * k_stride_1 + i * 4);
        // y[kv, block, i, key + tile * LANES] = where(place < t, x, f32(0))
        store_f16(y + kv * y_stride_0 + block * y_stride_1 + i * y_stride_2 + key * 2, ((int)(key + (block * 32)) < (int)t) ? x : 0.0f);
    }
}
