// An unsigned number that grows with a float.
inline uint ordered_key(float x) {
    const uint bits = as_type<uint>(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
