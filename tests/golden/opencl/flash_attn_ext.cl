// flash_attn_ext(f32, f16, f16, f16, f32, f32), general, 32 lanes

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

float load_f16(__global const uchar *p)
{
    return vload_half(0, (__global const half *)p);
}

int add_i32(int x, int y)
{
    return as_int(as_uint(x) + as_uint(y));
}

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
}

float group_sum_f32(__local const float *lanes)
{
    float x[LANES];
    for (int k = 0; k < LANES; k++)
        x[k] = lanes[k];
    for (int n = LANES / 2; n > 0; n /= 2)  // the upper half onto the lower half
        for (int k = 0; k < n; k++)
            x[k] = x[k] + x[k + n];
    return x[0];
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
void flash_attn_ext_kernel(__global uchar *q_buffer, long q_offset, long q_stride_0, long q_stride_1, long q_stride_2, long q_stride_3,
                           __global uchar *k_buffer, long k_offset, long k_stride_0, long k_stride_1, long k_stride_2, long k_stride_3,
                           __global uchar *v_buffer, long v_offset, long v_stride_0, long v_stride_1, long v_stride_2,
                           __global uchar *mask_buffer, long mask_offset, long mask_stride_0, long mask_stride_1, long mask_stride_2, long mask_stride_3,
                           __global uchar *part_buffer, long part_offset, long part_stride_0, long part_stride_1, long part_stride_2, long part_stride_3,
                           long row_extent, long strip_extent, long piece_extent, long first_group,
                           long t, long m, long blocks, long ms, long mh, long shared, long own, long n2, float factor, float cap, float max_bias)
{
    __local float scratch_f32_0[LANES];
    __local float weight_0_of[LANES];
    __local float weight_1_of[LANES];
    __local float scratch_f32_1[LANES];
    __global uchar *q = q_buffer + q_offset;
    __global uchar *k = k_buffer + k_offset;
    __global uchar *v = v_buffer + v_offset;
    __global uchar *mask = mask_buffer + mask_offset;
    __global uchar *part = part_buffer + part_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long piece = group % piece_extent;
    group /= piece_extent;
    const long strip = group % strip_extent;
    group /= strip_extent;
    const long row = group;
    // head = strip * COLUMNS
    const long head = strip * 2;
    // stream = row // t if STREAMS else 0
    const long stream = row / t;
    // token = row % t if STREAMS else row
    const long token = row % t;
    // kv = stream * own + head // shared if STREAMS else head // shared
    const long kv = (stream * own) + (head / shared);
    // masks = stream % ms if STREAMS else 0
    const long masks = stream % ms;
    // peak, total, shrink = private(COLUMNS, f32(-INF)), private(COLUMNS, f32(0)), private(COLUMNS, f32(0))
    float peak_0 = -INFINITY;
    float peak_1 = -INFINITY;
    float total_0 = 0.0f;
    float total_1 = 0.0f;
    float shrink_0 = 0.0f;
    float shrink_1 = 0.0f;
    // out = private(COLUMNS * TILES, f32(0))
    float out_0 = 0.0f;
    float out_1 = 0.0f;
    // for block in range(piece * PIECE, minimum(blocks, piece * PIECE + PIECE)):
    const long stop = min((long)blocks, (long)((piece * 8) + 8));
    for (long block = piece * 8; block < stop; block++) {
        // visible = f32(0)
        float visible = 0.0f;
        // with span(0, LANES) as lane_of_tile:
        const long lane_of_tile = lane;
        // seen = f32(-INF)
        float seen = -INFINITY;
        // at = minimum(cell, m - 1) if RAGGED else cell
        const int at = min((int)(int)(lane_of_tile + (block * 32)), (int)(int)(m - 1));
        // seen = maximum(seen, mask[masks, (head + c) % mh if HEAD_MASKS else 0, token, at])
        seen = fmax(seen, load_f16(mask + masks * mask_stride_0 + (head % mh) * mask_stride_1 + token * mask_stride_2 + (long)at * 2));
        seen = fmax(seen, load_f16(mask + masks * mask_stride_0 + ((head + 1) % mh) * mask_stride_1 + token * mask_stride_2 + (long)at * 2));
        // visible = group_max(seen)
        scratch_f32_0[lane] = seen;
        barrier(CLK_LOCAL_MEM_FENCE);
        const float group_max = group_max_f32(scratch_f32_0);
        visible = group_max;
        // if visible > -INF:
        if (visible > (-INFINITY)) {
            // score, weight = private(COLUMNS * KEY_TILES, f32(0)), private(COLUMNS * KEY_TILES, f32(0))
            float score_0 = 0.0f;
            float score_1 = 0.0f;
            float weight_0 = 0.0f;
            weight_0_of[lane] = weight_0;
            float weight_1 = 0.0f;
            weight_1_of[lane] = weight_1;
            // with span(0, LANES) as key:
            const long key = lane;
            // for i in range(WIDTH):
            for (long i = 0; i < 2; i++) {
                // ki = k[kv, block, i, key + j * LANES]
                const float ki = load_f16(k + kv * k_stride_0 + block * k_stride_1 + i * k_stride_2 + key * 2);
                // score[c * KEY_TILES + j] = fma(ki, q[stream, token, head + c, i], score[c * KEY_TILES + j])
                score_0 = fma(ki, load_f32(q + stream * q_stride_0 + token * q_stride_1 + head * q_stride_2 + i * 4), score_0);
                score_1 = fma(ki, load_f32(q + stream * q_stride_0 + token * q_stride_1 + (head + 1) * q_stride_2 + i * 4), score_1);
            }
            // high = f32(-INF)
            float high = -INFINITY;
            // within = minimum(place, m - 1) if RAGGED else place
            const int within = min((int)(int)(key + (block * 32)), (int)(int)(m - 1));
            // s = score[c * KEY_TILES + j] * factor
            float s = score_0 * factor;
            // s = s + mask[masks, (head + c) % mh if HEAD_MASKS else 0, token, within]
            s = s + load_f16(mask + masks * mask_stride_0 + (head % mh) * mask_stride_1 + token * mask_stride_2 + (long)within * 2);
            // s = where(place < m, s, -INF)
            s = ((int)(key + (block * 32)) < (int)m) ? s : (-INFINITY);
            // score[c * KEY_TILES + j] = s
            score_0 = s;
            // high = maximum(high, s)
            high = fmax(high, s);
            // best = maximum(peak[c], group_max(high))
            scratch_f32_1[lane] = high;
            barrier(CLK_LOCAL_MEM_FENCE);
            const float group_max_2 = group_max_f32(scratch_f32_1);
            const float best = fmax(peak_0, group_max_2);
            // shrink[c] = where(peak[c] == -INF, f32(0), exp(peak[c] - best))
            shrink_0 = (peak_0 == (-INFINITY)) ? 0.0f : exp_of(peak_0 - best);
            // whole = f32(0)
            float whole = 0.0f;
            // s = score[c * KEY_TILES + j]
            const float s_2 = score_0;
            // e = where(s == -INF, f32(0), exp(s - best))
            const float e = (s_2 == (-INFINITY)) ? 0.0f : exp_of(s_2 - best);
            // weight[c * KEY_TILES + j] = e
            weight_0 = e;
            weight_0_of[lane] = weight_0;
            // whole = whole + e
            whole = whole + e;
            // total[c] = total[c] * shrink[c] + group_sum(whole)
            scratch_f32_0[lane] = whole;
            barrier(CLK_LOCAL_MEM_FENCE);
            const float group_sum = group_sum_f32(scratch_f32_0);
            total_0 = (total_0 * shrink_0) + group_sum;
            // peak[c] = best
            peak_0 = best;
            // high = f32(-INF)
            float high_2 = -INFINITY;
            // within = minimum(place, m - 1) if RAGGED else place
            const int within_2 = min((int)(int)(key + (block * 32)), (int)(int)(m - 1));
            // s = score[c * KEY_TILES + j] * factor
            float s_3 = score_1 * factor;
            // s = s + mask[masks, (head + c) % mh if HEAD_MASKS else 0, token, within]
            s_3 = s_3 + load_f16(mask + masks * mask_stride_0 + ((head + 1) % mh) * mask_stride_1 + token * mask_stride_2 + (long)within_2 * 2);
            // s = where(place < m, s, -INF)
            s_3 = ((int)(key + (block * 32)) < (int)m) ? s_3 : (-INFINITY);
            // score[c * KEY_TILES + j] = s
            score_1 = s_3;
            // high = maximum(high, s)
            high_2 = fmax(high_2, s_3);
            // best = maximum(peak[c], group_max(high))
            scratch_f32_1[lane] = high_2;
            barrier(CLK_LOCAL_MEM_FENCE);
            const float group_max_3 = group_max_f32(scratch_f32_1);
            const float best_2 = fmax(peak_1, group_max_3);
            // shrink[c] = where(peak[c] == -INF, f32(0), exp(peak[c] - best))
            shrink_1 = (peak_1 == (-INFINITY)) ? 0.0f : exp_of(peak_1 - best_2);
            // whole = f32(0)
            float whole_2 = 0.0f;
            // s = score[c * KEY_TILES + j]
            const float s_4 = score_1;
            // e = where(s == -INF, f32(0), exp(s - best))
            const float e_2 = (s_4 == (-INFINITY)) ? 0.0f : exp_of(s_4 - best_2);
            // weight[c * KEY_TILES + j] = e
            weight_1 = e_2;
            weight_1_of[lane] = weight_1;
            // whole = whole + e
            whole_2 = whole_2 + e_2;
            // total[c] = total[c] * shrink[c] + group_sum(whole)
            scratch_f32_0[lane] = whole_2;
            barrier(CLK_LOCAL_MEM_FENCE);
            const float group_sum_2 = group_sum_f32(scratch_f32_0);
            total_1 = (total_1 * shrink_1) + group_sum_2;
            // peak[c] = best
            peak_1 = best_2;
            // with span((chunk * STEP + u) * LANES, EXTENT) as x:
            const long x = lane;
            const bool inside_x = x < 2;
            if (inside_x) {
                // out[c * TILES + chunk * STEP + u] = out[c * TILES + chunk * STEP + u] * shrink[c]
                out_0 = out_0 * shrink_0;
                out_1 = out_1 * shrink_1;
            }
            // n_keys = minimum(LANES, m - block * 32 - j * LANES) if RAGGED else LANES
            const long n_keys = min((long)32, (long)(m - (block * 32)));
            // for l in range(n_keys):
            for (long l = 0; l < n_keys; l++) {
                // ws = tuple(lane(weight[c * KEY_TILES + j], l) for c in static(COLUMNS))
                const float of_lane = weight_0_of[l];
                const float c_0 = of_lane;
                const float of_lane_2 = weight_1_of[l];
                const float c_1 = of_lane_2;
                // with span((chunk * STEP + u) * LANES, EXTENT) as x:
                const long x_2 = lane;
                const bool inside_x_2 = x_2 < 2;
                if (inside_x_2) {
                    // vx = v[kv, block * 32 + j * LANES + l, x]
                    const float vx = load_f16(v + kv * v_stride_0 + ((block * 32) + l) * v_stride_1 + x_2 * 2);
                    // out[c * TILES + chunk * STEP + u] = fma(vx, ws[c], out[c * TILES + chunk * STEP + u])
                    out_0 = fma(vx, c_0, out_0);
                    out_1 = fma(vx, c_1, out_1);
                }
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    // with span(u * LANES, EXTENT) as x:
    const long x_3 = lane;
    const bool inside_x_3 = x_3 < 2;
    if (inside_x_3) {
        // part[row, head + c, piece, x] = out[c * TILES + u]
        store_f32(part + row * part_stride_0 + head * part_stride_1 + piece * part_stride_2 + x_3 * 4, out_0);
        store_f32(part + row * part_stride_0 + (head + 1) * part_stride_1 + piece * part_stride_2 + x_3 * 4, out_1);
    }
    // part[row, head + c, piece, EXTENT] = peak[c]
    if (lane == 0) {
        store_f32(part + row * part_stride_0 + head * part_stride_1 + piece * part_stride_2 + 8, peak_0);
    }
    // part[row, head + c, piece, EXTENT + 1] = total[c]
    if (lane == 0) {
        store_f32(part + row * part_stride_0 + head * part_stride_1 + piece * part_stride_2 + 12, total_0);
    }
    // part[row, head + c, piece, EXTENT] = peak[c]
    if (lane == 0) {
        store_f32(part + row * part_stride_0 + (head + 1) * part_stride_1 + piece * part_stride_2 + 8, peak_1);
    }
    // part[row, head + c, piece, EXTENT + 1] = total[c]
    if (lane == 0) {
        store_f32(part + row * part_stride_0 + (head + 1) * part_stride_1 + piece * part_stride_2 + 12, total_1);
    }
}

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

int sub_i32(int x, int y)
{
    return as_int(as_uint(x) - as_uint(y));
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
void merge_pieces_kernel(__global uchar *part_buffer, long part_offset, long part_stride_0, long part_stride_1, long part_stride_2, long part_stride_3,
                         __global uchar *sinks_buffer, long sinks_offset, long sinks_stride_0,
                         __global uchar *y_buffer, long y_offset, long y_stride_0, long y_stride_1, long y_stride_2, long y_stride_3,
                         long row_extent, long h_extent, long first_group,
                         long t, long e, long pieces)
{
    __global uchar *part = part_buffer + part_offset;
    __global uchar *sinks = sinks_buffer + sinks_offset;
    __global uchar *y = y_buffer + y_offset;
    const int lane = get_local_id(0);
    long group = first_group + get_group_id(0);
    const long h = group % h_extent;
    group /= h_extent;
    const long row = group;
    // stream = row // t if STREAMS else 0
    const long stream = row / t;
    // token = row % t if STREAMS else row
    const long token = row % t;
    // top = sinks[h] if SINKS else f32(-INF)
    float top = load_f32(sinks + h * 4);
    // for p in range(pieces):
    for (long p = 0; p < pieces; p++) {
        // top = maximum(top, part[row, h, p, e])
        top = fmax(top, load_f32(part + row * part_stride_0 + h * part_stride_1 + p * part_stride_2 + e * 4));
    }
    // total = f32(0)
    float total = 0.0f;
    // total = total + where(sinks[h] == -INF, f32(0), exp(sinks[h] - top))
    total = total + ((load_f32(sinks + h * 4) == (-INFINITY)) ? 0.0f : exp_of(load_f32(sinks + h * 4) - top));
    // for p in range(pieces):
    for (long p_2 = 0; p_2 < pieces; p_2++) {
        // peak = part[row, h, p, e]
        const float peak = load_f32(part + row * part_stride_0 + h * part_stride_1 + p_2 * part_stride_2 + e * 4);
        // total = total + part[row, h, p, e + 1] * where(peak == -INF, f32(0), exp(peak - top))
        total = total + (load_f32(part + row * part_stride_0 + h * part_stride_1 + p_2 * part_stride_2 + (e + 1) * 4) * ((peak == (-INFINITY)) ? 0.0f : exp_of(peak - top)));
    }
    // for i in lanes(e):
    for (long i = lane; i < e; i += 32) {
        // out = f32(0)
        float out = 0.0f;
        // for p in range(pieces):
        for (long p_3 = 0; p_3 < pieces; p_3++) {
            // peak = part[row, h, p, e]
            const float peak_2 = load_f32(part + row * part_stride_0 + h * part_stride_1 + p_3 * part_stride_2 + e * 4);
            // out = fma(part[row, h, p, i], where(peak == -INF, f32(0), exp(peak - top)), out)
            out = fma(load_f32(part + row * part_stride_0 + h * part_stride_1 + p_3 * part_stride_2 + i * 4), (peak_2 == (-INFINITY)) ? 0.0f : exp_of(peak_2 - top), out);
        }
        // y[stream, token, h, i] = where(total == 0.0, f32(0), out / total)
        store_f32(y + stream * y_stride_0 + token * y_stride_1 + h * y_stride_2 + i * 4, (total == 0.0f) ? 0.0f : (out / total));
    }
}
