// geglu_quantize(f32, f32, q8_x), general, 32 lanes

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

void store_i16(__global uchar *p, int v)
{
    *(__global short *)p = (short)v;
}

void store_i8(__global uchar *p, int v)
{
    *(__global char *)p = (char)v;
}

int add_i32(int x, int y)
{
    return as_int(as_uint(x) + as_uint(y));
}

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
}

int mul_i32(int x, int y)
{
    return as_int(as_uint(x) * as_uint(y));
}

int group_sum_i32(__local const int *lanes)
{
    int x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = add_i32(x[k], x[k + n]);
    return x[0];
}

int group_max_i32(__local const int *lanes)
{
    int x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = max(x[k], x[k + n]);
    return x[0];
}

float exp_of(float x)
{
    // n = rint(maximum(minimum(x * 1.44269504, 200.0), -200.0))
    const float n = rint(fmax(fmin(x * 1.442695f, 200.0f), -200.0f));
    // r = fma(n, f32(-0.693145751953125), x)
    float r = fma(n, -0.693145751953125f, x);
    // r = fma(n, f32(-1.42860682030941723212e-6), r)
    r = fma(n, -1.4286068e-06f, r);
    // p = fma(f32(1.9875691500e-4), r, f32(1.3981999507e-3))
    float p = fma(0.00019875691f, r, 0.0013981999f);
    // p = fma(p, r, f32(8.3334519073e-3))
    p = fma(p, r, 0.008333452f);
    // p = fma(p, r, f32(4.1665795894e-2))
    p = fma(p, r, 0.041665796f);
    // p = fma(p, r, f32(1.6666665459e-1))
    p = fma(p, r, 0.16666666f);
    // p = fma(p, r, f32(5.0000001201e-1))
    p = fma(p, r, 0.5f);
    // p = fma(p, r * r, r) + 1.0
    p = fma(p, r * r, r) + 1.0f;
    // k = whole(n)
    const int k = sub_i32(as_int(n + 12582912.0f), 1262485504);
    // half = k >> 1
    const int half_ = k >> 1;
    // y = p * as_f32((half + 127) << 23) * as_f32((k - half + 127) << 23)
    float y = (p * as_float(add_i32(half_, 127) << 23)) * as_float(add_i32(sub_i32(k, half_), 127) << 23);
    // y = where(x > 88.7228394, f32(INF), y)
    y = (x > 88.72284f) ? INFINITY : y;
    return (x != x) ? x : ((x < (-103.97f)) ? 0.0f : y);
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void gated_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                  __global uchar *u_buffer, long u_offset, long u_stride_0, long u_stride_1, long u_stride_2, long u_stride_3,
                  __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                  long a_extent, long b_extent, long c_extent, long first_group,
                  long n_blocks, long n_strips)
{
    __local int scratch_i32_0[LANES];
    __local int scratch_i32_1[LANES];
    __global uchar *x = x_buffer + x_offset;
    __global uchar *u = u_buffer + u_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long c = group % c_extent;
    group /= c_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // for strip in range(n_strips):
    for (long strip = 0; strip < n_strips; strip++) {
        // blocks = tuple(y[a, b, c, minimum(strip * WIDE + k, n_blocks - 1)] for k in static(WIDE))
        __global uchar *k_0 = y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + min((long)(strip * 4), (long)(n_blocks - 1)) * 80;
        __global uchar *k_1 = y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + min((long)((strip * 4) + 1), (long)(n_blocks - 1)) * 80;
        __global uchar *k_2 = y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + min((long)((strip * 4) + 2), (long)(n_blocks - 1)) * 80;
        __global uchar *k_3 = y + a * y_stride_0 + b * y_stride_1 + c * y_stride_2 + min((long)((strip * 4) + 3), (long)(n_blocks - 1)) * 80;
        // with span(0, TILE) as i:
        const long i = lane;
        // _ = quantize_blocks(blocks, i, tuple(
        const float v = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (i + (min((long)(strip * 4), (long)(n_blocks - 1)) * 32)) * 4);
        // z = C1 * (v * (1.0 + C2 * v * v))
        const float z = 0.7978846f * (v * (1.0f + ((0.044715f * v) * v)));
        // _ = quantize_blocks(blocks, i, tuple(
        const float e_0 = (v / (1.0f + exp_of((-2.0f) * z))) * load_f32(u + a * u_stride_0 + b * u_stride_1 + c * u_stride_2 + (i + (min((long)(strip * 4), (long)(n_blocks - 1)) * 32)) * 4);
        const float v_2 = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (i + (min((long)((strip * 4) + 1), (long)(n_blocks - 1)) * 32)) * 4);
        // z = C1 * (v * (1.0 + C2 * v * v))
        const float z_2 = 0.7978846f * (v_2 * (1.0f + ((0.044715f * v_2) * v_2)));
        // _ = quantize_blocks(blocks, i, tuple(
        const float e_1 = (v_2 / (1.0f + exp_of((-2.0f) * z_2))) * load_f32(u + a * u_stride_0 + b * u_stride_1 + c * u_stride_2 + (i + (min((long)((strip * 4) + 1), (long)(n_blocks - 1)) * 32)) * 4);
        const float v_3 = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (i + (min((long)((strip * 4) + 2), (long)(n_blocks - 1)) * 32)) * 4);
        // z = C1 * (v * (1.0 + C2 * v * v))
        const float z_3 = 0.7978846f * (v_3 * (1.0f + ((0.044715f * v_3) * v_3)));
        // _ = quantize_blocks(blocks, i, tuple(
        const float e_2 = (v_3 / (1.0f + exp_of((-2.0f) * z_3))) * load_f32(u + a * u_stride_0 + b * u_stride_1 + c * u_stride_2 + (i + (min((long)((strip * 4) + 2), (long)(n_blocks - 1)) * 32)) * 4);
        const float v_4 = load_f32(x + a * x_stride_0 + b * x_stride_1 + c * x_stride_2 + (i + (min((long)((strip * 4) + 3), (long)(n_blocks - 1)) * 32)) * 4);
        // z = C1 * (v * (1.0 + C2 * v * v))
        const float z_4 = 0.7978846f * (v_4 * (1.0f + ((0.044715f * v_4) * v_4)));
        // _ = quantize_blocks(blocks, i, tuple(
        const float e_3 = (v_4 / (1.0f + exp_of((-2.0f) * z_4))) * load_f32(u + a * u_stride_0 + b * u_stride_1 + c * u_stride_2 + (i + (min((long)((strip * 4) + 3), (long)(n_blocks - 1)) * 32)) * 4);
        // big, d, inverse = private(WIDE, i32(0)), private(WIDE, f32(0)), private(WIDE, f32(0))
        int big_0 = 0;
        int big_1 = 0;
        int big_2 = 0;
        int big_3 = 0;
        float d_0 = 0.0f;
        float d_1 = 0.0f;
        float d_2 = 0.0f;
        float d_3 = 0.0f;
        float inverse_0 = 0.0f;
        float inverse_1 = 0.0f;
        float inverse_2 = 0.0f;
        float inverse_3 = 0.0f;
        // high_sums, low_sums = private(WIDE, i32(0)), private(WIDE, i32(0))
        int high_sums_0 = 0;
        int high_sums_1 = 0;
        int high_sums_2 = 0;
        int high_sums_3 = 0;
        int low_sums_0 = 0;
        int low_sums_1 = 0;
        int low_sums_2 = 0;
        int low_sums_3 = 0;
        // big[k] = maximum(big[k], as_i32(abs(values[k * TILES + t])))  # the bits of magnitudes are in order, NaN above infinity
        big_0 = max((int)big_0, (int)as_int(fabs(e_0)));
        big_1 = max((int)big_1, (int)as_int(fabs(e_1)));
        big_2 = max((int)big_2, (int)as_int(fabs(e_2)));
        big_3 = max((int)big_3, (int)as_int(fabs(e_3)));
        // top = as_f32(group_max(big[k]))
        scratch_i32_0[lane] = big_0;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_max = group_max_i32(scratch_i32_0);
        const float top = as_float(group_max);
        // d[k] = top / LARGEST
        d_0 = top / 32384.0f;
        // inverse[k] = where(top > 0.0, minimum(LARGEST / top, 3.0e38), f32(0))
        inverse_0 = (top > 0.0f) ? fmin(32384.0f / top, 3e+38f) : 0.0f;
        // top = as_f32(group_max(big[k]))
        scratch_i32_1[lane] = big_1;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_max_2 = group_max_i32(scratch_i32_1);
        const float top_2 = as_float(group_max_2);
        // d[k] = top / LARGEST
        d_1 = top_2 / 32384.0f;
        // inverse[k] = where(top > 0.0, minimum(LARGEST / top, 3.0e38), f32(0))
        inverse_1 = (top_2 > 0.0f) ? fmin(32384.0f / top_2, 3e+38f) : 0.0f;
        // top = as_f32(group_max(big[k]))
        scratch_i32_0[lane] = big_2;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_max_3 = group_max_i32(scratch_i32_0);
        const float top_3 = as_float(group_max_3);
        // d[k] = top / LARGEST
        d_2 = top_3 / 32384.0f;
        // inverse[k] = where(top > 0.0, minimum(LARGEST / top, 3.0e38), f32(0))
        inverse_2 = (top_3 > 0.0f) ? fmin(32384.0f / top_3, 3e+38f) : 0.0f;
        // top = as_f32(group_max(big[k]))
        scratch_i32_1[lane] = big_3;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_max_4 = group_max_i32(scratch_i32_1);
        const float top_4 = as_float(group_max_4);
        // d[k] = top / LARGEST
        d_3 = top_4 / 32384.0f;
        // inverse[k] = where(top > 0.0, minimum(LARGEST / top, 3.0e38), f32(0))
        inverse_3 = (top_4 > 0.0f) ? fmin(32384.0f / top_4, 3e+38f) : 0.0f;
        // code = values[k * TILES + t] * inverse[k]
        const float code = e_0 * inverse_0;
        // whole = where(code == code, code, f32(0)) + MAGIC
        const float whole = ((code == code) ? code : 0.0f) + 12582912.0f;
        // high = (whole - MAGIC) * STEP + MAGIC
        const float high = ((whole - 12582912.0f) * 0.003937008f) + 12582912.0f;
        // low = fma(high - MAGIC, -RADIX, whole)
        const float low = fma(high - 12582912.0f, -254.0f, whole);
        // blocks[k].q[i + t * TILE] = as_i32(high)
        store_i8(k_0 + i + 16, as_int(high));
        // blocks[k].q[i + (t * TILE + 32)] = as_i32(low)
        store_i8(k_0 + (i + 32) + 16, as_int(low));
        // high_sums[k] = high_sums[k] + where(i + t * TILE < 16, as_i32(high), as_i32(high) << 16)
        high_sums_0 = add_i32(high_sums_0, ((int)i < 16) ? as_int(high) : (as_int(high) << 16));
        // low_sums[k] = low_sums[k] + where(i + t * TILE < 16, as_i32(low), as_i32(low) << 16)
        low_sums_0 = add_i32(low_sums_0, ((int)i < 16) ? as_int(low) : (as_int(low) << 16));
        // code = values[k * TILES + t] * inverse[k]
        const float code_2 = e_1 * inverse_1;
        // whole = where(code == code, code, f32(0)) + MAGIC
        const float whole_2 = ((code_2 == code_2) ? code_2 : 0.0f) + 12582912.0f;
        // high = (whole - MAGIC) * STEP + MAGIC
        const float high_2 = ((whole_2 - 12582912.0f) * 0.003937008f) + 12582912.0f;
        // low = fma(high - MAGIC, -RADIX, whole)
        const float low_2 = fma(high_2 - 12582912.0f, -254.0f, whole_2);
        // blocks[k].q[i + t * TILE] = as_i32(high)
        store_i8(k_1 + i + 16, as_int(high_2));
        // blocks[k].q[i + (t * TILE + 32)] = as_i32(low)
        store_i8(k_1 + (i + 32) + 16, as_int(low_2));
        // high_sums[k] = high_sums[k] + where(i + t * TILE < 16, as_i32(high), as_i32(high) << 16)
        high_sums_1 = add_i32(high_sums_1, ((int)i < 16) ? as_int(high_2) : (as_int(high_2) << 16));
        // low_sums[k] = low_sums[k] + where(i + t * TILE < 16, as_i32(low), as_i32(low) << 16)
        low_sums_1 = add_i32(low_sums_1, ((int)i < 16) ? as_int(low_2) : (as_int(low_2) << 16));
        // code = values[k * TILES + t] * inverse[k]
        const float code_3 = e_2 * inverse_2;
        // whole = where(code == code, code, f32(0)) + MAGIC
        const float whole_3 = ((code_3 == code_3) ? code_3 : 0.0f) + 12582912.0f;
        // high = (whole - MAGIC) * STEP + MAGIC
        const float high_3 = ((whole_3 - 12582912.0f) * 0.003937008f) + 12582912.0f;
        // low = fma(high - MAGIC, -RADIX, whole)
        const float low_3 = fma(high_3 - 12582912.0f, -254.0f, whole_3);
        // blocks[k].q[i + t * TILE] = as_i32(high)
        store_i8(k_2 + i + 16, as_int(high_3));
        // blocks[k].q[i + (t * TILE + 32)] = as_i32(low)
        store_i8(k_2 + (i + 32) + 16, as_int(low_3));
        // high_sums[k] = high_sums[k] + where(i + t * TILE < 16, as_i32(high), as_i32(high) << 16)
        high_sums_2 = add_i32(high_sums_2, ((int)i < 16) ? as_int(high_3) : (as_int(high_3) << 16));
        // low_sums[k] = low_sums[k] + where(i + t * TILE < 16, as_i32(low), as_i32(low) << 16)
        low_sums_2 = add_i32(low_sums_2, ((int)i < 16) ? as_int(low_3) : (as_int(low_3) << 16));
        // code = values[k * TILES + t] * inverse[k]
        const float code_4 = e_3 * inverse_3;
        // whole = where(code == code, code, f32(0)) + MAGIC
        const float whole_4 = ((code_4 == code_4) ? code_4 : 0.0f) + 12582912.0f;
        // high = (whole - MAGIC) * STEP + MAGIC
        const float high_4 = ((whole_4 - 12582912.0f) * 0.003937008f) + 12582912.0f;
        // low = fma(high - MAGIC, -RADIX, whole)
        const float low_4 = fma(high_4 - 12582912.0f, -254.0f, whole_4);
        // blocks[k].q[i + t * TILE] = as_i32(high)
        store_i8(k_3 + i + 16, as_int(high_4));
        // blocks[k].q[i + (t * TILE + 32)] = as_i32(low)
        store_i8(k_3 + (i + 32) + 16, as_int(low_4));
        // high_sums[k] = high_sums[k] + where(i + t * TILE < 16, as_i32(high), as_i32(high) << 16)
        high_sums_3 = add_i32(high_sums_3, ((int)i < 16) ? as_int(high_4) : (as_int(high_4) << 16));
        // low_sums[k] = low_sums[k] + where(i + t * TILE < 16, as_i32(low), as_i32(low) << 16)
        low_sums_3 = add_i32(low_sums_3, ((int)i < 16) ? as_int(low_4) : (as_int(low_4) << 16));
        // total = f32(0)
        float total = 0.0f;
        // both_high, both_low = group_sum(high_sums[k]) - SIXTEEN, group_sum(low_sums[k]) - SIXTEEN  # two sums in a word
        scratch_i32_0[lane] = high_sums_0;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum = group_sum_i32(scratch_i32_0);
        const int t = sub_i32(group_sum, -1275068416);
        scratch_i32_1[lane] = low_sums_0;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_2 = group_sum_i32(scratch_i32_1);
        const int t_2 = sub_i32(group_sum_2, -1275068416);
        const int both_high = t;
        const int both_low = t_2;
        // first_high, first_low = (both_high << 16) >> 16, (both_low << 16) >> 16
        const int t_3 = (both_high << 16) >> 16;
        const int t_4 = (both_low << 16) >> 16;
        const int first_high = t_3;
        const int first_low = t_4;
        // second_high, second_low = (both_high - first_high) >> 16, (both_low - first_low) >> 16
        const int t_5 = sub_i32(both_high, first_high) >> 16;
        const int t_6 = sub_i32(both_low, first_low) >> 16;
        const int second_high = t_5;
        const int second_low = t_6;
        // blocks[k].d = d[k]
        if (lane == 0) {
            store_f32(k_0, d_0);
        }
        // blocks[k].s = d[k] * f32(RADIX * (first_high + second_high) + (first_low + second_low))
        if (lane == 0) {
            store_f32(k_0 + 4, d_0 * (float)add_i32(mul_i32(254, add_i32(first_high, second_high)), add_i32(first_low, second_low)));
        }
        // blocks[k].sums[0] = first_high
        if (lane == 0) {
            store_i16(k_0 + 8, first_high);
        }
        // blocks[k].sums[1] = second_high
        if (lane == 0) {
            store_i16(k_0 + 10, second_high);
        }
        // blocks[k].sums[2] = first_low
        if (lane == 0) {
            store_i16(k_0 + 12, first_low);
        }
        // blocks[k].sums[3] = second_low
        if (lane == 0) {
            store_i16(k_0 + 14, second_low);
        }
        // total = total + d[k]
        total = total + d_0;
        // both_high, both_low = group_sum(high_sums[k]) - SIXTEEN, group_sum(low_sums[k]) - SIXTEEN  # two sums in a word
        scratch_i32_0[lane] = high_sums_1;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_3 = group_sum_i32(scratch_i32_0);
        const int t_7 = sub_i32(group_sum_3, -1275068416);
        scratch_i32_1[lane] = low_sums_1;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_4 = group_sum_i32(scratch_i32_1);
        const int t_8 = sub_i32(group_sum_4, -1275068416);
        const int both_high_2 = t_7;
        const int both_low_2 = t_8;
        // first_high, first_low = (both_high << 16) >> 16, (both_low << 16) >> 16
        const int t_9 = (both_high_2 << 16) >> 16;
        const int t_10 = (both_low_2 << 16) >> 16;
        const int first_high_2 = t_9;
        const int first_low_2 = t_10;
        // second_high, second_low = (both_high - first_high) >> 16, (both_low - first_low) >> 16
        const int t_11 = sub_i32(both_high_2, first_high_2) >> 16;
        const int t_12 = sub_i32(both_low_2, first_low_2) >> 16;
        const int second_high_2 = t_11;
        const int second_low_2 = t_12;
        // blocks[k].d = d[k]
        if (lane == 0) {
            store_f32(k_1, d_1);
        }
        // blocks[k].s = d[k] * f32(RADIX * (first_high + second_high) + (first_low + second_low))
        if (lane == 0) {
            store_f32(k_1 + 4, d_1 * (float)add_i32(mul_i32(254, add_i32(first_high_2, second_high_2)), add_i32(first_low_2, second_low_2)));
        }
        // blocks[k].sums[0] = first_high
        if (lane == 0) {
            store_i16(k_1 + 8, first_high_2);
        }
        // blocks[k].sums[1] = second_high
        if (lane == 0) {
            store_i16(k_1 + 10, second_high_2);
        }
        // blocks[k].sums[2] = first_low
        if (lane == 0) {
            store_i16(k_1 + 12, first_low_2);
        }
        // blocks[k].sums[3] = second_low
        if (lane == 0) {
            store_i16(k_1 + 14, second_low_2);
        }
        // total = total + d[k]
        total = total + d_1;
        // both_high, both_low = group_sum(high_sums[k]) - SIXTEEN, group_sum(low_sums[k]) - SIXTEEN  # two sums in a word
        scratch_i32_0[lane] = high_sums_2;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_5 = group_sum_i32(scratch_i32_0);
        const int t_13 = sub_i32(group_sum_5, -1275068416);
        scratch_i32_1[lane] = low_sums_2;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_6 = group_sum_i32(scratch_i32_1);
        const int t_14 = sub_i32(group_sum_6, -1275068416);
        const int both_high_3 = t_13;
        const int both_low_3 = t_14;
        // first_high, first_low = (both_high << 16) >> 16, (both_low << 16) >> 16
        const int t_15 = (both_high_3 << 16) >> 16;
        const int t_16 = (both_low_3 << 16) >> 16;
        const int first_high_3 = t_15;
        const int first_low_3 = t_16;
        // second_high, second_low = (both_high - first_high) >> 16, (both_low - first_low) >> 16
        const int t_17 = sub_i32(both_high_3, first_high_3) >> 16;
        const int t_18 = sub_i32(both_low_3, first_low_3) >> 16;
        const int second_high_3 = t_17;
        const int second_low_3 = t_18;
        // blocks[k].d = d[k]
        if (lane == 0) {
            store_f32(k_2, d_2);
        }
        // blocks[k].s = d[k] * f32(RADIX * (first_high + second_high) + (first_low + second_low))
        if (lane == 0) {
            store_f32(k_2 + 4, d_2 * (float)add_i32(mul_i32(254, add_i32(first_high_3, second_high_3)), add_i32(first_low_3, second_low_3)));
        }
        // blocks[k].sums[0] = first_high
        if (lane == 0) {
            store_i16(k_2 + 8, first_high_3);
        }
        // blocks[k].sums[1] = second_high
        if (lane == 0) {
            store_i16(k_2 + 10, second_high_3);
        }
        // blocks[k].sums[2] = first_low
        if (lane == 0) {
            store_i16(k_2 + 12, first_low_3);
        }
        // blocks[k].sums[3] = second_low
        if (lane == 0) {
            store_i16(k_2 + 14, second_low_3);
        }
        // total = total + d[k]
        total = total + d_2;
        // both_high, both_low = group_sum(high_sums[k]) - SIXTEEN, group_sum(low_sums[k]) - SIXTEEN  # two sums in a word
        scratch_i32_0[lane] = high_sums_3;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_7 = group_sum_i32(scratch_i32_0);
        const int t_19 = sub_i32(group_sum_7, -1275068416);
        scratch_i32_1[lane] = low_sums_3;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int group_sum_8 = group_sum_i32(scratch_i32_1);
        const int t_20 = sub_i32(group_sum_8, -1275068416);
        const int both_high_4 = t_19;
        const int both_low_4 = t_20;
        // first_high, first_low = (both_high << 16) >> 16, (both_low << 16) >> 16
        const int t_21 = (both_high_4 << 16) >> 16;
        const int t_22 = (both_low_4 << 16) >> 16;
        const int first_high_4 = t_21;
        const int first_low_4 = t_22;
        // second_high, second_low = (both_high - first_high) >> 16, (both_low - first_low) >> 16
        const int t_23 = sub_i32(both_high_4, first_high_4) >> 16;
        const int t_24 = sub_i32(both_low_4, first_low_4) >> 16;
        const int second_high_4 = t_23;
        const int second_low_4 = t_24;
        // blocks[k].d = d[k]
        if (lane == 0) {
            store_f32(k_3, d_3);
        }
        // blocks[k].s = d[k] * f32(RADIX * (first_high + second_high) + (first_low + second_low))
        if (lane == 0) {
            store_f32(k_3 + 4, d_3 * (float)add_i32(mul_i32(254, add_i32(first_high_4, second_high_4)), add_i32(first_low_4, second_low_4)));
        }
        // blocks[k].sums[0] = first_high
        if (lane == 0) {
            store_i16(k_3 + 8, first_high_4);
        }
        // blocks[k].sums[1] = second_high
        if (lane == 0) {
            store_i16(k_3 + 10, second_high_4);
        }
        // blocks[k].sums[2] = first_low
        if (lane == 0) {
            store_i16(k_3 + 12, first_low_4);
        }
        // blocks[k].sums[3] = second_low
        if (lane == 0) {
            store_i16(k_3 + 14, second_low_4);
        }
        // total = total + d[k]
        total = total + d_3;
        // _ = quantize_blocks(blocks, i, tuple(
        const float _ = total;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
