// qmm_rows: y = x w^T for a few rows of x and weights in MLX's affine layout. Each weight is read and
// unpacked once for all rows.
//
// inputs    x [..., K] T, M rows; w [N, K * BITS / 32] uint; scales, biases [N, K / GS] T; offset [N] T
// output    y [..., N] T, plus offset [N] where BIASED
// template  T, M, BITS (4 or 8), GS (32, 64 or 128, divides K), ROWS (weight rows a lane), S
//           (simdgroups that share K), BIASED
// launch    grid (32 * S * ceil(N / (4 * ROWS)), 1, 1), threadgroup 32 * S
    constexpr uint KL = 8;              // lanes along K
    constexpr uint TILE = 32 / KL * ROWS;  // weight rows a threadgroup
    constexpr uint EACH = 32 / BITS;    // weights a word
    constexpr uint PER = 4 * EACH;      // weights a lane reads at once
    const uint lane = thread_index_in_simdgroup;
    const uint group = simdgroup_index_in_threadgroup;
    const uint k_lane = lane % KL;
    const uint K = w_shape[1] * EACH;
    const uint N = w_shape[0];
    const uint tile = threadgroup_position_in_grid.x * TILE;
    const uint first = lane / KL * ROWS;

    float acc[ROWS][M];
    for (int r = 0; r < ROWS; ++r) {
        for (int m = 0; m < M; ++m) {
            acc[r][m] = 0.0f;
        }
    }
    for (uint k = (group * KL + k_lane) * PER; k < K; k += S * KL * PER) {
        uint4 packed[ROWS];
        // For a weight that stays where it is in its word, so that none has to be shifted.
        float scale[ROWS][EACH];
        float bias[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            const size_t row = min(tile + first + r, N - 1);
            packed[r] = *(const device uint4*)(w + row * (K / EACH) + k / EACH);
            scale[r][0] = static_cast<float>(scales[row * (K / GS) + k / GS]);
            for (uint j = 1; j < EACH; ++j) {
                scale[r][j] = scale[r][j - 1] * (1.0f / (1 << BITS));
            }
            bias[r] = static_cast<float>(biases[row * (K / GS) + k / GS]);
        }
        for (uint word = 0; word < 4; ++word) {
            float weight[ROWS][EACH];
            for (int r = 0; r < ROWS; ++r) {
                for (uint j = 0; j < EACH; ++j) {
                    const uint q = packed[r][word] & (((1u << BITS) - 1) << (BITS * j));
                    weight[r][j] = fma(static_cast<float>(q), scale[r][j], bias[r]);
                }
            }
            for (int m = 0; m < M; ++m) {
                const auto from =
                    (const device vec<T, 4>*)(x + size_t(m) * K + k + EACH * word);
                for (uint part = 0; part < EACH / 4; ++part) {
                    const vec<T, 4> values = from[part];
                    for (uint j = 0; j < 4; ++j) {
                        const float value = static_cast<float>(values[j]);
                        for (int r = 0; r < ROWS; ++r) {
                            acc[r][m] = fma(weight[r][4 * part + j], value, acc[r][m]);
                        }
                    }
                }
            }
        }
    }

    threadgroup float sums[S * TILE * M];
    for (int r = 0; r < ROWS; ++r) {
        for (int m = 0; m < M; ++m) {
            for (ushort step = 1; step < KL; step <<= 1) {
                acc[r][m] += simd_shuffle_xor(acc[r][m], step);
            }
        }
    }
    if (k_lane == 0) {
        for (int r = 0; r < ROWS; ++r) {
            for (int m = 0; m < M; ++m) {
                sums[(group * TILE + first + r) * M + m] = acc[r][m];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = group * 32 + lane; i < TILE * M; i += 32 * S) {
        const uint m = i / TILE;
        const uint n = tile + i % TILE;
        float sum = 0.0f;
        for (uint s = 0; s < S; ++s) {
            sum += sums[(s * TILE + i % TILE) * M + m];
        }
        if (n < N) {
            if (BIASED) {
                sum += static_cast<float>(offset[n]);
            }
            y[size_t(m) * N + n] = static_cast<T>(sum);
        }
    }
