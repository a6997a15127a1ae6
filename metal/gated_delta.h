// One step of the gated delta rule for ROWS rows of a head's state. A simdgroup holds the rows, and
// a lane PER consecutive columns of each.

// The sum over a simdgroup in a fixed order, so that a step gives the same bits wherever it runs.
inline float tree_sum(float x) {
    for (ushort step = 1; step < 32; step <<= 1) {
        x += simd_shuffle_xor(x, step);
    }
    return x;
}

template <int ROWS, int PER>
inline void delta_step(
    thread float (&state)[ROWS][PER],
    const thread float (&key)[PER],
    const thread float (&value)[ROWS],
    float decay,
    float beta) {
    for (int i = 0; i < ROWS; ++i) {
        float recalled = 0.0f;
        for (int j = 0; j < PER; ++j) {
            state[i][j] = state[i][j] * decay;
            recalled += state[i][j] * key[j];
        }
        const float delta = (value[i] - tree_sum(recalled)) * beta;
        for (int j = 0; j < PER; ++j) {
            state[i][j] = state[i][j] + key[j] * delta;
        }
    }
}
