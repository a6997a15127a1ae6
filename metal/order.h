// A total order of (value, id): value descending, then id ascending. NaN counts as -infinity.
inline float as_number(float x) {
    return isnan(x) ? -INFINITY : x;
}

inline bool ahead(float a, uint a_id, float b, uint b_id) {
    return a > b || (a == b && a_id < b_id);
}
