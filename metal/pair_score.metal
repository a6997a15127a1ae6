// pair_score: S_t(a, b) = U_t(b) + <A(a) * g_t, B(b)> for all pairs of adjacent candidates.
// Used where every score is wanted, as when drafts are compared with a known text; drafting runs
// pair_walk, which scores only the pairs on its path.
//
// inputs    anchor [B], candidates [B, L, K] ids; unary [B, L, K] float; gate [B, L, R];
//           predecessor, successor [V, R] codebooks; ids from V on read the last row
// output    scores [B, L, K, K] float
// template  K, R, CHUNK (columns staged at a time), THREADS
// launch    grid (THREADS, L, B), threadgroup THREADS: one position each
//
// At the first position every predecessor is the anchor.
    const uint t = thread_index_in_threadgroup;
    const uint l = threadgroup_position_in_grid.y;
    const uint b = threadgroup_position_in_grid.z;
    const uint block = b * threadgroups_per_grid.y + l;
    const uint last_id = predecessor_shape[0] - 1;

    constexpr int PAIRS = (K * K + THREADS - 1) / THREADS;
    constexpr int PITCH = CHUNK + 1; // no two rows start in the same bank
    threadgroup float left[K * PITCH];
    threadgroup float right[K * PITCH];
    float sums[PAIRS];
    for (int j = 0; j < PAIRS; ++j) {
        sums[j] = 0.0f;
    }
    for (uint start = 0; start < uint(R); start += CHUNK) {
        for (uint i = t; i < uint(K * CHUNK); i += THREADS) {
            const uint k = i / CHUNK;
            const uint r = start + i % CHUNK;
            float from = 0.0f;
            float to = 0.0f;
            if (r < uint(R)) {
                const uint before = l == 0 ? uint(anchor[b]) : uint(candidates[(block - 1) * K + k]);
                const uint here = uint(candidates[block * K + k]);
                from = static_cast<float>(predecessor[size_t(min(before, last_id)) * R + r]);
                from *= static_cast<float>(gate[block * R + r]);
                to = static_cast<float>(successor[size_t(min(here, last_id)) * R + r]);
            }
            left[k * PITCH + i % CHUNK] = from;
            right[k * PITCH + i % CHUNK] = to;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int j = 0; j < PAIRS; ++j) {
            const uint pair = min(t + j * THREADS, uint(K * K - 1));
            const threadgroup float* from = left + pair / K * PITCH;
            const threadgroup float* to = right + pair % K * PITCH;
            for (int r = 0; r < CHUNK; ++r) {
                sums[j] += from[r] * to[r];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int j = 0; j < PAIRS; ++j) {
        const uint pair = t + j * THREADS;
        if (pair < uint(K * K)) {
            scores[block * K * K + pair] = sums[j] + unary[block * K + pair % K];
        }
    }
