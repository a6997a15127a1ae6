// How one simdgroup picks among up to 32 * SLOTS candidates. Slot j of a lane holds the score of
// candidate 32 * j + lane, and -infinity where there is none. All lanes return the same index.

// The best candidate, lowest index first among equals. q becomes one-hot.
template <int K, int SLOTS>
inline uint choose_best(const thread float (&score)[SLOTS], thread float (&q)[SLOTS], uint lane) {
    float best = score[0];
    uint index = lane < uint(K) ? lane : uint(K);
    for (uint j = 1; j < uint(SLOTS); ++j) {
        if (score[j] > best) {
            best = score[j];
            index = 32 * j + lane;
        }
    }
    const float top = simd_max(best);
    const uint choice = simd_min(best == top ? index : uint(K));
    for (uint j = 0; j < uint(SLOTS); ++j) {
        q[j] = 32 * j + lane == choice ? 1.0f : 0.0f;
    }
    return choice;
}

// A draw from softmax(score / temperature) by inverse CDF: the number of cumulative sums that u has
// reached.
template <int K, int SLOTS>
inline uint choose_sampled(
    const thread float (&score)[SLOTS],
    thread float (&q)[SLOTS],
    uint lane,
    float temperature,
    float u) {
    float best = score[0];
    for (uint j = 1; j < uint(SLOTS); ++j) {
        best = max(best, score[j]);
    }
    const float top = simd_max(best) / temperature;
    float sum = 0.0f;
    for (uint j = 0; j < uint(SLOTS); ++j) {
        q[j] = 32 * j + lane < uint(K) ? precise::exp(score[j] / temperature - top) : 0.0f;
        sum += q[j];
    }
    sum = simd_sum(sum);
    float below = 0.0f;
    uint reached = 0;
    for (uint j = 0; j < uint(SLOTS); ++j) {
        q[j] = q[j] / sum;
        const float upto = below + simd_prefix_inclusive_sum(q[j]);
        reached += 32 * j + lane < uint(K) && u >= upto ? 1 : 0;
        below += simd_sum(q[j]);
    }
    return min(simd_sum(reached), uint(K - 1));
}
