// path_walk: follows pair scores from the anchor, one candidate a position.
// Used where pair_score has written the scores already; drafting runs pair_walk.
//
// inputs    scores [B, L, K, K] float; candidates [B, L, K] ids
//           temperature 0-d float and uniforms [B, L] float in [0, 1), read if SAMPLED
// outputs   tokens [B, L], type of candidates; choices [B, L] uint; q [B, L, K] float
// template  K <= 64, SAMPLED
// launch    grid (32, B), threadgroup 32: one simdgroup walks one block
    const uint lane = thread_index_in_simdgroup;
    const uint b = threadgroup_position_in_grid.y;
    const uint L = scores_shape[1];
    constexpr int SLOTS = (K + 31) / 32;
    uint choice = 0;
    for (uint l = 0; l < L; ++l) {
        const uint block = b * L + l;
        const auto row = scores + (size_t(block) * K + choice) * K;
        float score[SLOTS];
        float probability[SLOTS];
        for (uint j = 0; j < uint(SLOTS); ++j) {
            const uint k = 32 * j + lane;
            score[j] = k < uint(K) ? as_number(row[k]) : -INFINITY;
        }
        if (SAMPLED) {
            choice = choose_sampled<K, SLOTS>(score, probability, lane, temperature, uniforms[block]);
        } else {
            choice = choose_best<K, SLOTS>(score, probability, lane);
        }
        for (uint j = 0; j < uint(SLOTS); ++j) {
            const uint k = 32 * j + lane;
            if (k < uint(K)) {
                q[block * K + k] = probability[j];
            }
        }
        if (lane == 0) {
            tokens[block] = candidates[block * K + choice];
            choices[block] = choice;
        }
    }
