// grouped_conv: a causal convolution over the positions of a block. Its kernel is a base plus a
// part for each position, tap and group of channels.
//
// inputs    x [B, L, H]; base [K, H]; dynamic [B, L, K, G]; any strides
// output    out [B, L, H] O
// template  O, K, G
// launch    grid (H, L, B)
    const uint3 at = thread_position_in_grid;
    const uint H = threads_per_grid.x;
    const uint L = threads_per_grid.y;
    const uint group = at.x / (H / G);
    float sum = 0.0f;
    for (uint tap = 0; tap < uint(K) && tap <= at.y; ++tap) {
        float weight = static_cast<float>(base[tap * base_strides[0] + at.x * base_strides[1]]);
        weight += static_cast<float>(
            dynamic[at.z * dynamic_strides[0] + at.y * dynamic_strides[1] +
                    tap * dynamic_strides[2] + group * dynamic_strides[3]]);
        sum += weight *
            static_cast<float>(
                x[at.z * x_strides[0] + (at.y - tap) * x_strides[1] + at.x * x_strides[2]]);
    }
    out[(size_t(at.z) * L + at.y) * H + at.x] = static_cast<O>(sum);
