// top_k: the K best entries of each row, value descending and then id ascending, in one pass over
// shards of the row and one more over the shards' winners.
//
// inputs    x [rows, size] T
//           ids [rows, size] uint, the entries' ids if MERGE; else an entry's id is its place
//           multiplier, softcap: 0-d float, applied if LAST
// outputs   values [rows, shards, K] float; winners [rows, shards, K] uint, their ids
// template  T, K <= THREADS, THREADS, PER (most entries a thread looks at), MERGE, LAST, CAPPED
// launch    grid (THREADS * shards, rows), threadgroup THREADS
//
// Keys (value, id) are unique. A thread's best key is among the K best of all threads' bests, or
// none of its entries is a winner: so K threads hold all winners, at most K * PER entries.
// A thread or shard with too few entries is filled up with -infinity and ids that no entry has.
    const uint t = thread_index_in_threadgroup;
    const uint row = threadgroup_position_in_grid.y;
    const uint shard = threadgroup_position_in_grid.x;
    const uint size = x_shape[1];
    const uint first = shard * uint(PER * THREADS) + t;
    const uint end = min((shard + 1) * uint(PER * THREADS), size);
    const auto entries = x + size_t(row) * size;
    const auto names = ids + (MERGE ? size_t(row) * size : 0);

    threadgroup float best_value[THREADS];
    threadgroup uint best_id[THREADS];
    float value = -INFINITY;
    uint id = (MERGE ? 0xC0000000u : 0x80000000u) + t;
    for (uint i = first; i < end; i += THREADS) {
        const float v = as_number(static_cast<float>(entries[i]));
        const uint n = MERGE ? names[i] : i;
        if (ahead(v, n, value, id)) {
            value = v;
            id = n;
        }
    }
    best_value[t] = value;
    best_id[t] = id;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // The K-th best of the threads' bests is the least key that can win.
    threadgroup float least_value;
    threadgroup uint least_id;
    uint rank = 0;
    for (uint o = 0; o < uint(THREADS); ++o) {
        rank += ahead(best_value[o], best_id[o], value, id) ? 1 : 0;
    }
    if (rank == uint(K - 1)) {
        least_value = value;
        least_id = id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Each of the K threads counts its entries that can win, then lists them after the others'.
    threadgroup uint counts[K];
    threadgroup float list_value[K * PER];
    threadgroup uint list_id[K * PER];
    const bool holds = rank < uint(K);
    if (holds) {
        uint count = first < end ? 0 : 1;
        for (uint i = first; i < end; i += THREADS) {
            const float v = as_number(static_cast<float>(entries[i]));
            const uint n = MERGE ? names[i] : i;
            count += ahead(least_value, least_id, v, n) ? 0 : 1;
        }
        counts[rank] = count;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint listed = 0;
    uint place = 0;
    for (uint r = 0; r < uint(K); ++r) {
        place += r < rank ? counts[r] : 0;
        listed += counts[r];
    }
    if (holds && first >= end) {
        list_value[place] = value;
        list_id[place] = id;
    }
    if (holds) {
        for (uint i = first; i < end; i += THREADS) {
            const float v = as_number(static_cast<float>(entries[i]));
            const uint n = MERGE ? names[i] : i;
            if (!ahead(least_value, least_id, v, n)) {
                list_value[place] = v;
                list_id[place] = n;
                ++place;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const size_t base = (size_t(row) * threadgroups_per_grid.x + shard) * K;
    for (uint i = t; i < listed; i += THREADS) {
        uint behind = 0;
        for (uint o = 0; o < listed; ++o) {
            behind += ahead(list_value[o], list_id[o], list_value[i], list_id[i]) ? 1 : 0;
        }
        if (behind < uint(K)) {
            float v = list_value[i];
            if (LAST) {
                v *= multiplier;
                v = CAPPED ? softcap * precise::tanh(v / softcap) : v;
            }
            values[base + behind] = v;
            winners[base + behind] = list_id[i];
        }
    }
