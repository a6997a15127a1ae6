// pair_walk: pair_score and path_walk in one launch; only the pairs that the walk meets are scored.
// Used for drafting, where nobody reads the scores.
//
// inputs    those of pair_score, then temperature and uniforms, those of path_walk
// outputs   those of path_walk
// template  K <= 64, R, THREADS, SAMPLED
// launch    grid (THREADS, B), threadgroup THREADS: one block each
//
// Simdgroups share the candidates of a position; then each of them makes the same choice. The
// scores alternate between two rows, so that one barrier a position is enough.
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint b = threadgroup_position_in_grid.y;
    const uint L = candidates_shape[1];
    const uint last_id = predecessor_shape[0] - 1;
    constexpr int SLOTS = (K + 31) / 32;
    threadgroup float rows[2 * K];
    uint before = uint(anchor[b]);
    for (uint l = 0; l < L; ++l) {
        const uint block = b * L + l;
        const uint row = (l & 1) * K;
        const auto from = predecessor + size_t(min(before, last_id)) * R;
        for (uint k = group; k < uint(K); k += THREADS / 32) {
            const uint here = uint(candidates[block * K + k]);
            const auto to = successor + size_t(min(here, last_id)) * R;
            float sum = 0.0f;
            for (uint r = lane; r < uint(R); r += 32) {
                const float gated =
                    static_cast<float>(from[r]) * static_cast<float>(gate[block * R + r]);
                sum += gated * static_cast<float>(to[r]);
            }
            sum = simd_sum(sum);
            if (lane == 0) {
                rows[row + k] = sum + unary[block * K + k];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        float score[SLOTS];
        float probability[SLOTS];
        for (uint j = 0; j < uint(SLOTS); ++j) {
            const uint k = 32 * j + lane;
            score[j] = k < uint(K) ? as_number(rows[row + k]) : -INFINITY;
        }
        uint choice = 0;
        if (SAMPLED) {
            choice = choose_sampled<K, SLOTS>(score, probability, lane, temperature, uniforms[block]);
        } else {
            choice = choose_best<K, SLOTS>(score, probability, lane);
        }
        before = uint(candidates[block * K + choice]);
        for (uint j = 0; j < uint(SLOTS); ++j) {
            const uint k = 32 * j + lane;
            if (group == 0 && k < uint(K)) {
                q[block * K + k] = probability[j];
            }
        }
        if (group == 0 && lane == 0) {
            tokens[block] = candidates[block * K + choice];
            choices[block] = choice;
        }
    }
