// gated_delta_verify: the recurrence of a verify pass with deferred replay. It replays the rows that
// the last pass kept, writes that state, then runs the new rows for their outputs only.
//
// inputs    q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; g, beta [B, T, Hv]; state [B, Hv, Dv, Dk]
//           past_k, past_v, past_g, past_beta: the last pass's rows, [B, P, ...]
//           kept [B], how many of them to replay, at most P
// outputs   y [B, T, Hv, Dv] O; new_state [B, Hv, Dv, Dk] S, after the replayed rows
// template  O, S, Hk, Hv, Dk, Dv, ROWS (divides Dv)
// launch    grid (32, Dv / ROWS, B * Hv), threadgroup (32, n): a simdgroup for ROWS rows of a state
    const uint lane = thread_index_in_simdgroup;
    const uint b = thread_position_in_grid.z / Hv;
    const uint hv = thread_position_in_grid.z % Hv;
    const uint hk = hv / (Hv / Hk);
    const uint first = thread_position_in_grid.y * ROWS;
    const uint T = v_shape[1];
    const uint P = past_v_shape[1];
    constexpr int PER = (Dk + 31) / 32;
    const size_t matrix = (size_t(thread_position_in_grid.z) * Dv + first) * Dk;

    float held[ROWS][PER];
    float key[PER];
    float value[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < PER; ++j) {
            const uint column = lane * PER + j;
            held[i][j] =
                column < uint(Dk) ? static_cast<float>(state[matrix + i * Dk + column]) : 0.0f;
        }
    }

    const uint replayed = min(uint(kept[b]), P);
    for (uint t = 0; t < replayed; ++t) {
        const uint at = b * P + t;
        for (int j = 0; j < PER; ++j) {
            const uint column = lane * PER + j;
            key[j] = column < uint(Dk)
                ? static_cast<float>(past_k[(size_t(at) * Hk + hk) * Dk + column])
                : 0.0f;
        }
        for (int i = 0; i < ROWS; ++i) {
            value[i] = static_cast<float>(past_v[(size_t(at) * Hv + hv) * Dv + first + i]);
        }
        delta_step<ROWS, PER>(
            held,
            key,
            value,
            static_cast<float>(past_g[at * Hv + hv]),
            static_cast<float>(past_beta[at * Hv + hv]));
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < PER; ++j) {
            const uint column = lane * PER + j;
            if (column < uint(Dk)) {
                new_state[matrix + i * Dk + column] = static_cast<S>(held[i][j]);
                held[i][j] = static_cast<float>(static_cast<S>(held[i][j]));
            }
        }
    }

    for (uint t = 0; t < T; ++t) {
        const uint at = b * T + t;
        for (int j = 0; j < PER; ++j) {
            const uint column = lane * PER + j;
            key[j] = column < uint(Dk)
                ? static_cast<float>(k[(size_t(at) * Hk + hk) * Dk + column])
                : 0.0f;
        }
        for (int i = 0; i < ROWS; ++i) {
            value[i] = static_cast<float>(v[(size_t(at) * Hv + hv) * Dv + first + i]);
        }
        delta_step<ROWS, PER>(
            held,
            key,
            value,
            static_cast<float>(g[at * Hv + hv]),
            static_cast<float>(beta[at * Hv + hv]));
        for (int i = 0; i < ROWS; ++i) {
            float out = 0.0f;
            for (int j = 0; j < PER; ++j) {
                const uint column = lane * PER + j;
                const float query = column < uint(Dk)
                    ? static_cast<float>(q[(size_t(at) * Hk + hk) * Dk + column])
                    : 0.0f;
                out += held[i][j] * query;
            }
            out = tree_sum(out);
            if (lane == 0) {
                y[(size_t(at) * Hv + hv) * Dv + first + i] = static_cast<O>(out);
            }
        }
    }
