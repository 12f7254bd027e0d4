// cumsum(f32, f32), general, 32 lanes

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

int add_i32(int x, int y)
{
    return as_int(as_uint(x) + as_uint(y));
}

int mul_i32(int x, int y)
{
    return as_int(as_uint(x) * as_uint(y));
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void cumsum_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                   __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                   long a_extent, long b_extent, long c_extent, long first_group,
                   long n)
{
    __local float own_of[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long c = group % c_extent;
    group /= c_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // stretch = (n + LANES - 1) // LANES
    const long stretch = ((n + 32) - 1) / 32;
    // with span(0, LANES) as l:
    const long l = lane;
    // start = i32(l) * stretch
    const int start = mul_i32((int)l, (int)stretch);
    // own = f32(0)
    float own = 0.0f;
    own_of[lane] = own;
    // for k in range(stretch):
    barrier(CLK_LOCAL_MEM_FENCE);
    for (long k = 0; k < stretch; k++) {
        // with only(start + k < n):
        const bool t = add_i32(start, (int)k) < (int)n;
        const bool active = t;
        // own = own + x[a, b, c, start + k]
        own = active ? (own + (active ? load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (active ? (long)add_i32(start, (int)k) : 0) * 4) : 0.0f)) : own;
        own_of[lane] = own;
    }
    // total = f32(0)
    float total = 0.0f;
    // for j in range(LANES):
    barrier(CLK_LOCAL_MEM_FENCE);
    for (long j = 0; j < 32; j++) {
        // total = total + where(i32(l) > j, lane(own, j), 0.0)
        const float of_lane = own_of[j];
        total = total + (((int)l > (int)j) ? of_lane : 0.0f);
    }
    // for k in range(stretch):
    for (long k_2 = 0; k_2 < stretch; k_2++) {
        // with only(start + k < n):
        const bool t_2 = add_i32(start, (int)k_2) < (int)n;
        if (t_2) {
            // total = total + x[a, b, c, start + k]
            total = total + load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (long)add_i32(start, (int)k_2) * 4);
            // y[a, b, c, start + k] = total
            store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + (long)add_i32(start, (int)k_2) * 4, total);
        }
    }
}
