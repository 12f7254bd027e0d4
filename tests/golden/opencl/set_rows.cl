// set_rows(f32, i32, q8_0), to_q8_0, 32 lanes

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

void store_u32_by2(__global uchar *p, uint v)
{
    __global ushort *h = (__global ushort *)p;
    h[0] = (ushort)v;
    h[1] = (ushort)(v >> 16);
}

void store_f16(__global uchar *p, float v)
{
    vstore_half_rte(v, 0, (__global half *)p);
}

int add_i32(int x, int y)
{
    return as_int(as_uint(x) + as_uint(y));
}

int mul_i32(int x, int y)
{
    return as_int(as_uint(x) * as_uint(y));
}

int i32_of(float x)
{
    return x != x ? 0 : convert_int_sat(x);
}

uint pack(int a, int b, int c, int d)
{
    return (uint)(a & 255) | (uint)(b & 255) << 8 | (uint)(c & 255) << 16 | (uint)(d & 255) << 24;
}

__kernel __attribute__((reqd_work_group_size(32, 1, 1)))
void set_rows_blocks_kernel(__global uchar *x_buffer, long x_offset, long x_stride_0, long x_stride_1, long x_stride_2, long x_stride_3,
                            __global uchar *ids_buffer, long ids_offset, long ids_stride_0, long ids_stride_1, long ids_stride_2,
                            __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                            long a_extent, long b_extent, long r_extent, long first_group,
                            long m, long ia, long ib, long n_blocks)
{
    __global uchar *x = x_buffer + x_offset;
    __global uchar *ids = ids_buffer + ids_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long r = group % r_extent;
    group /= r_extent;
    const long b = group % b_extent;
    group /= b_extent;
    const long a = group;
    // row = minimum(maximum(index(ids[a % ia, b % ib, r]), 0), m - 1)
    const long row = min((long)max((long)(long)load_i32(ids + (a % ia) * ids_stride_0 + (b % ib) * ids_stride_1 + r * 4), (long)0), (long)(m - 1));
    // for k in lanes(n_blocks):
    for (long k = lane; k < n_blocks; k += 32) {
        // block = y[a, b, row, k]
        __global uchar *block = y + a * y_stride_0 + b * y_stride_1 + row * y_stride_2 + k * 34;
        // block.d = encode(block, tuple(x[a, b, r, 32 * k + j] for j in static(32)))
        const float j_0 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)mul_i32(32, (int)k) * 4);
        const float j_1 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 1) * 4);
        const float j_2 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 2) * 4);
        const float j_3 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 3) * 4);
        const float j_4 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 4) * 4);
        const float j_5 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 5) * 4);
        const float j_6 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 6) * 4);
        const float j_7 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 7) * 4);
        const float j_8 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 8) * 4);
        const float j_9 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 9) * 4);
        const float j_10 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 10) * 4);
        const float j_11 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 11) * 4);
        const float j_12 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 12) * 4);
        const float j_13 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 13) * 4);
        const float j_14 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 14) * 4);
        const float j_15 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 15) * 4);
        const float j_16 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 16) * 4);
        const float j_17 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 17) * 4);
        const float j_18 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 18) * 4);
        const float j_19 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 19) * 4);
        const float j_20 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 20) * 4);
        const float j_21 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 21) * 4);
        const float j_22 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 22) * 4);
        const float j_23 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 23) * 4);
        const float j_24 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 24) * 4);
        const float j_25 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 25) * 4);
        const float j_26 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 26) * 4);
        const float j_27 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 27) * 4);
        const float j_28 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 28) * 4);
        const float j_29 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 29) * 4);
        const float j_30 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 30) * 4);
        const float j_31 = load_f32(x + a * x_stride_0 + b * x_stride_1 + r * x_stride_2 + (long)add_i32(mul_i32(32, (int)k), 31) * 4);
        // found, big = v[0], as_i32(abs(v[0]))
        const int t = as_int(fabs(j_0));
        float found = j_0;
        int big = t;
        // bits = as_i32(abs(v[j + 1]))
        const int bits = as_int(fabs(j_1));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_2 = (bits > big) ? j_1 : found;
        const int t_3 = max((int)bits, (int)big);
        found = t_2;
        big = t_3;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_2 = as_int(fabs(j_2));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_4 = (bits_2 > big) ? j_2 : found;
        const int t_5 = max((int)bits_2, (int)big);
        found = t_4;
        big = t_5;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_3 = as_int(fabs(j_3));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_6 = (bits_3 > big) ? j_3 : found;
        const int t_7 = max((int)bits_3, (int)big);
        found = t_6;
        big = t_7;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_4 = as_int(fabs(j_4));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_8 = (bits_4 > big) ? j_4 : found;
        const int t_9 = max((int)bits_4, (int)big);
        found = t_8;
        big = t_9;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_5 = as_int(fabs(j_5));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_10 = (bits_5 > big) ? j_5 : found;
        const int t_11 = max((int)bits_5, (int)big);
        found = t_10;
        big = t_11;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_6 = as_int(fabs(j_6));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_12 = (bits_6 > big) ? j_6 : found;
        const int t_13 = max((int)bits_6, (int)big);
        found = t_12;
        big = t_13;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_7 = as_int(fabs(j_7));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_14 = (bits_7 > big) ? j_7 : found;
        const int t_15 = max((int)bits_7, (int)big);
        found = t_14;
        big = t_15;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_8 = as_int(fabs(j_8));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_16 = (bits_8 > big) ? j_8 : found;
        const int t_17 = max((int)bits_8, (int)big);
        found = t_16;
        big = t_17;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_9 = as_int(fabs(j_9));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_18 = (bits_9 > big) ? j_9 : found;
        const int t_19 = max((int)bits_9, (int)big);
        found = t_18;
        big = t_19;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_10 = as_int(fabs(j_10));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_20 = (bits_10 > big) ? j_10 : found;
        const int t_21 = max((int)bits_10, (int)big);
        found = t_20;
        big = t_21;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_11 = as_int(fabs(j_11));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_22 = (bits_11 > big) ? j_11 : found;
        const int t_23 = max((int)bits_11, (int)big);
        found = t_22;
        big = t_23;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_12 = as_int(fabs(j_12));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_24 = (bits_12 > big) ? j_12 : found;
        const int t_25 = max((int)bits_12, (int)big);
        found = t_24;
        big = t_25;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_13 = as_int(fabs(j_13));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_26 = (bits_13 > big) ? j_13 : found;
        const int t_27 = max((int)bits_13, (int)big);
        found = t_26;
        big = t_27;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_14 = as_int(fabs(j_14));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_28 = (bits_14 > big) ? j_14 : found;
        const int t_29 = max((int)bits_14, (int)big);
        found = t_28;
        big = t_29;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_15 = as_int(fabs(j_15));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_30 = (bits_15 > big) ? j_15 : found;
        const int t_31 = max((int)bits_15, (int)big);
        found = t_30;
        big = t_31;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_16 = as_int(fabs(j_16));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_32 = (bits_16 > big) ? j_16 : found;
        const int t_33 = max((int)bits_16, (int)big);
        found = t_32;
        big = t_33;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_17 = as_int(fabs(j_17));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_34 = (bits_17 > big) ? j_17 : found;
        const int t_35 = max((int)bits_17, (int)big);
        found = t_34;
        big = t_35;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_18 = as_int(fabs(j_18));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_36 = (bits_18 > big) ? j_18 : found;
        const int t_37 = max((int)bits_18, (int)big);
        found = t_36;
        big = t_37;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_19 = as_int(fabs(j_19));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_38 = (bits_19 > big) ? j_19 : found;
        const int t_39 = max((int)bits_19, (int)big);
        found = t_38;
        big = t_39;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_20 = as_int(fabs(j_20));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_40 = (bits_20 > big) ? j_20 : found;
        const int t_41 = max((int)bits_20, (int)big);
        found = t_40;
        big = t_41;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_21 = as_int(fabs(j_21));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_42 = (bits_21 > big) ? j_21 : found;
        const int t_43 = max((int)bits_21, (int)big);
        found = t_42;
        big = t_43;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_22 = as_int(fabs(j_22));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_44 = (bits_22 > big) ? j_22 : found;
        const int t_45 = max((int)bits_22, (int)big);
        found = t_44;
        big = t_45;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_23 = as_int(fabs(j_23));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_46 = (bits_23 > big) ? j_23 : found;
        const int t_47 = max((int)bits_23, (int)big);
        found = t_46;
        big = t_47;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_24 = as_int(fabs(j_24));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_48 = (bits_24 > big) ? j_24 : found;
        const int t_49 = max((int)bits_24, (int)big);
        found = t_48;
        big = t_49;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_25 = as_int(fabs(j_25));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_50 = (bits_25 > big) ? j_25 : found;
        const int t_51 = max((int)bits_25, (int)big);
        found = t_50;
        big = t_51;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_26 = as_int(fabs(j_26));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_52 = (bits_26 > big) ? j_26 : found;
        const int t_53 = max((int)bits_26, (int)big);
        found = t_52;
        big = t_53;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_27 = as_int(fabs(j_27));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_54 = (bits_27 > big) ? j_27 : found;
        const int t_55 = max((int)bits_27, (int)big);
        found = t_54;
        big = t_55;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_28 = as_int(fabs(j_28));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_56 = (bits_28 > big) ? j_28 : found;
        const int t_57 = max((int)bits_28, (int)big);
        found = t_56;
        big = t_57;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_29 = as_int(fabs(j_29));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_58 = (bits_29 > big) ? j_29 : found;
        const int t_59 = max((int)bits_29, (int)big);
        found = t_58;
        big = t_59;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_30 = as_int(fabs(j_30));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_60 = (bits_30 > big) ? j_30 : found;
        const int t_61 = max((int)bits_30, (int)big);
        found = t_60;
        big = t_61;
        // bits = as_i32(abs(v[j + 1]))
        const int bits_31 = as_int(fabs(j_31));
        // found, big = where(bits > big, v[j + 1], found), maximum(bits, big)
        const float t_62 = (bits_31 > big) ? j_31 : found;
        const int t_63 = max((int)bits_31, (int)big);
        found = t_62;
        big = t_63;
        // d = abs(extreme(v)) / 127.0
        const float d = fabs(found) / 127.0f;
        // inverse = reciprocal(d)
        const float inverse = (fabs(d) >= 1.1754943508222875e-38f) ? (1.0f / d) : 0.0f;
        // block.qs[t] = pack(*(minimum(maximum(i32(round_away(v[4 * t + e] * inverse)), -127), 127) for e in static(4)))
        const int e_0 = min((int)max((int)i32_of(round(j_0 * inverse)), (int)(-127)), (int)127);
        const int e_1 = min((int)max((int)i32_of(round(j_1 * inverse)), (int)(-127)), (int)127);
        const int e_2 = min((int)max((int)i32_of(round(j_2 * inverse)), (int)(-127)), (int)127);
        const int e_3 = min((int)max((int)i32_of(round(j_3 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 2, pack(e_0, e_1, e_2, e_3));
        const int e_0_2 = min((int)max((int)i32_of(round(j_4 * inverse)), (int)(-127)), (int)127);
        const int e_1_2 = min((int)max((int)i32_of(round(j_5 * inverse)), (int)(-127)), (int)127);
        const int e_2_2 = min((int)max((int)i32_of(round(j_6 * inverse)), (int)(-127)), (int)127);
        const int e_3_2 = min((int)max((int)i32_of(round(j_7 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 6, pack(e_0_2, e_1_2, e_2_2, e_3_2));
        const int e_0_3 = min((int)max((int)i32_of(round(j_8 * inverse)), (int)(-127)), (int)127);
        const int e_1_3 = min((int)max((int)i32_of(round(j_9 * inverse)), (int)(-127)), (int)127);
        const int e_2_3 = min((int)max((int)i32_of(round(j_10 * inverse)), (int)(-127)), (int)127);
        const int e_3_3 = min((int)max((int)i32_of(round(j_11 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 10, pack(e_0_3, e_1_3, e_2_3, e_3_3));
        const int e_0_4 = min((int)max((int)i32_of(round(j_12 * inverse)), (int)(-127)), (int)127);
        const int e_1_4 = min((int)max((int)i32_of(round(j_13 * inverse)), (int)(-127)), (int)127);
        const int e_2_4 = min((int)max((int)i32_of(round(j_14 * inverse)), (int)(-127)), (int)127);
        const int e_3_4 = min((int)max((int)i32_of(round(j_15 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 14, pack(e_0_4, e_1_4, e_2_4, e_3_4));
        const int e_0_5 = min((int)max((int)i32_of(round(j_16 * inverse)), (int)(-127)), (int)127);
        const int e_1_5 = min((int)max((int)i32_of(round(j_17 * inverse)), (int)(-127)), (int)127);
        const int e_2_5 = min((int)max((int)i32_of(round(j_18 * inverse)), (int)(-127)), (int)127);
        const int e_3_5 = min((int)max((int)i32_of(round(j_19 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 18, pack(e_0_5, e_1_5, e_2_5, e_3_5));
        const int e_0_6 = min((int)max((int)i32_of(round(j_20 * inverse)), (int)(-127)), (int)127);
        const int e_1_6 = min((int)max((int)i32_of(round(j_21 * inverse)), (int)(-127)), (int)127);
        const int e_2_6 = min((int)max((int)i32_of(round(j_22 * inverse)), (int)(-127)), (int)127);
        const int e_3_6 = min((int)max((int)i32_of(round(j_23 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 22, pack(e_0_6, e_1_6, e_2_6, e_3_6));
        const int e_0_7 = min((int)max((int)i32_of(round(j_24 * inverse)), (int)(-127)), (int)127);
        const int e_1_7 = min((int)max((int)i32_of(round(j_25 * inverse)), (int)(-127)), (int)127);
        const int e_2_7 = min((int)max((int)i32_of(round(j_26 * inverse)), (int)(-127)), (int)127);
        const int e_3_7 = min((int)max((int)i32_of(round(j_27 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 26, pack(e_0_7, e_1_7, e_2_7, e_3_7));
        const int e_0_8 = min((int)max((int)i32_of(round(j_28 * inverse)), (int)(-127)), (int)127);
        const int e_1_8 = min((int)max((int)i32_of(round(j_29 * inverse)), (int)(-127)), (int)127);
        const int e_2_8 = min((int)max((int)i32_of(round(j_30 * inverse)), (int)(-127)), (int)127);
        const int e_3_8 = min((int)max((int)i32_of(round(j_31 * inverse)), (int)(-127)), (int)127);
        store_u32_by2(block + 30, pack(e_0_8, e_1_8, e_2_8, e_3_8));
        // block.d = encode(block, tuple(x[a, b, r, 32 * k + j] for j in static(32)))
        store_f16(block, d);
    }
}
