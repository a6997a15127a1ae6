// top_p: nucleus sampling's filter. Of each row of log probabilities those stay above which lies less
// than p of the row's sum of probabilities; the others become -infinity. Nothing is sorted: the
// least value that stays is found four bits at a time.
//
// inputs    x [R, V] T; p [1] float
// output    y [R, V] T
// template  T, THREADS (a multiple of 32 from 512 to 1024)
// launch    grid (THREADS, R, 1), threadgroup (THREADS, 1, 1)
    constexpr uint GROUPS = THREADS / 32;
    threadgroup float partial[16 * GROUPS];
    threadgroup float mass[16];
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint t = thread_index_in_threadgroup;
    const uint V = x_shape[1];
    const size_t row = size_t(threadgroup_position_in_grid.y) * V;

    // The key of the least value that stays is `low` or more than it, by less than 16 << shift.
    uint low = 0;
    float limit = 0.0f;
    for (int shift = 28; shift >= 0; shift -= 4) {
        // Above the keys of each digit, and in the last place of all keys.
        float sum[16];
        for (uint d = 0; d < 16; ++d) {
            sum[d] = 0.0f;
        }
        for (uint i = t; i < V; i += THREADS) {
            const float value = static_cast<float>(x[row + i]);
            const uint key = ordered_key(value);
            const float weight = precise::exp(value);
            for (uint d = 0; d < 15; ++d) {
                sum[d] += key >= low + ((d + 1) << shift) ? weight : 0.0f;
            }
            sum[15] += weight;
        }
        for (uint d = 0; d < 16; ++d) {
            const float both = simd_sum(sum[d]);
            if (lane == 0) {
                partial[d * GROUPS + group] = both;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (group < 16) {
            const float part = lane < GROUPS ? partial[group * GROUPS + lane] : 0.0f;
            const float all = simd_sum(part);
            if (lane == 0) {
                mass[group] = all;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        limit = p[0] * mass[15];
        uint digit = 15;
        for (uint d = 15; d > 0; --d) {
            digit = mass[d - 1] < limit ? d - 1 : digit;
        }
        low += digit << shift;
    }
    for (uint i = t; i < V; i += THREADS) {
        const bool stays = ordered_key(static_cast<float>(x[row + i])) >= low;
        y[row + i] = stays ? x[row + i] : static_cast<T>(-INFINITY);
    }
