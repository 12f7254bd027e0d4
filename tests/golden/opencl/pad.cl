// pad(f32, f32), general, 32 lanes

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
void pad_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                long a_extent, long b_extent, long c_extent, long first_group,
                long xa, long xb, long xc, long xn, long n, long lp0, long rp0, long lp1, long lp2, long lp3)
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
    // if (a >= lp3) & (a < lp3 + xa) & (b >= lp2) & (b < lp2 + xb) & (c >= lp1) & (c < lp1 + xc):
    if ((((((a >= lp3) & (a < (lp3 + xa))) & (b >= lp2)) & (b < (lp2 + xb))) & (c >= lp1)) & (c < (lp1 + xc))) {
        // for i in lanes(lp0):
        for (long i = lane; i < lp0; i += 32) {
            // y[a, b, c, i] = f32(0)
            store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + i * 4, 0.0f);
        }
        // for i in lanes(xn):
        for (long i_2 = lane; i_2 < xn; i_2 += 32) {
            // y[a, b, c, lp0 + i] = x[a - lp3, b - lp2, c - lp1, i]
            store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + (i_2 + lp0) * 4, load_f32(x + (a - lp3) * x_stride_0 + (b - lp2) * x_stride_1 + (c - lp1) * x_stride_2 + i_2 * 4));
        }
        // for i in lanes(rp0):
        for (long i_3 = lane; i_3 < rp0; i_3 += 32) {
            // y[a, b, c, lp0 + xn + i] = f32(0)
            store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + (i_3 + (lp0 + xn)) * 4, 0.0f);
        }
    } else {
        // for j in lanes(n):
        for (long j = lane; j < n; j += 32) {
            // y[a, b, c, j] = f32(0)
            store_f32(y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + j * 4, 0.0f);
        }
    }
}
