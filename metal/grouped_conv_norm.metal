// grouped_conv_norm: adds the grouped_conv of a sublayer's output to the residual, and writes the
// RMSNorm of that sum, which the next sublayer reads.
//
// inputs    x [B, L, H]; base [K, H]; dynamic [B, L, K, G]; residual [B, L, H]; weight [H]; any
//           strides; eps 0-d float
// outputs   total [B, L, H] S, the new residual; normed [B, L, H] O
// template  S, O, K, G, H, THREADS
// launch    grid (THREADS, L, B), threadgroup THREADS: one position each
    const uint t = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint l = threadgroup_position_in_grid.y;
    const uint b = threadgroup_position_in_grid.z;
    const size_t row = (size_t(b) * threadgroups_per_grid.y + l) * H;
    const auto before = residual + b * residual_strides[0] + l * residual_strides[1];
    float squares = 0.0f;
    for (uint c = t; c < uint(H); c += THREADS) {
        float sum = static_cast<float>(before[c * residual_strides[2]]);
        for (uint tap = 0; tap < uint(K) && tap <= l; ++tap) {
            float coefficient = static_cast<float>(base[tap * base_strides[0] + c * base_strides[1]]);
            coefficient += static_cast<float>(
                dynamic[b * dynamic_strides[0] + l * dynamic_strides[1] +
                        tap * dynamic_strides[2] + c / (H / G) * dynamic_strides[3]]);
            sum += coefficient *
                static_cast<float>(
                    x[b * x_strides[0] + (l - tap) * x_strides[1] + c * x_strides[2]]);
        }
        const S rounded = static_cast<S>(sum);
        total[row + c] = rounded;
        squares += static_cast<float>(rounded) * static_cast<float>(rounded);
    }

    threadgroup float partial[THREADS / 32];
    squares = simd_sum(squares);
    if (lane == 0) {
        partial[simdgroup_index_in_threadgroup] = squares;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    squares = simd_sum(lane < uint(THREADS / 32) ? partial[lane] : 0.0f);
    const float scale = precise::rsqrt(squares / H + eps);
    for (uint c = t; c < uint(H); c += THREADS) {
        const float value = static_cast<float>(total[row + c]);
        normed[row + c] =
            static_cast<O>(value * scale * static_cast<float>(weight[c * weight_strides[0]]));
    }
