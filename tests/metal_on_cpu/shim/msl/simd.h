// Barriers, and simdgroup operations: lanes exchange values through the runtime. The __metal_
// functions are the ones MLX's headers call; those in namespace metal check the type first.
#pragma once
namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((int)a | (int)b);
}
METAL_FUNC void threadgroup_barrier(mem_flags flags, __MSL_SITE) {
  __msl_barrier(1, (unsigned)flags, __MSL_HERE);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, __MSL_SITE) {
  __msl_barrier(0, (unsigned)flags, __MSL_HERE);
}
}  // namespace metal

template <class T>
struct __MslValues {
  __MslLanes lanes;
  const char* op;
  const char* file;
  unsigned line, column;
  METAL_FUNC bool active(unsigned i) const { return i < 32 && ((lanes.mask >> i) & 1); }
  METAL_FUNC T get(unsigned i) const {
    T out;
    __builtin_memcpy(&out, lanes.slots + i * 64, sizeof(T));
    return out;
  }
  METAL_FUNC T checked(unsigned i) const {
    if (active(i)) return get(i);
    __msl_bad_lane(op, i, file, line, column);
    T out;
    __builtin_memset(&out, 0xff, sizeof(T));
    return out;
  }
};
template <class T>
METAL_FUNC __MslValues<T> __msl_exchange(const char* op, T v, unsigned uniform, __MSL_SITE) {
  static_assert(sizeof(T) <= 64, "payload");
  return {__msl_simd(op, &v, sizeof(T), uniform, __MSL_HERE), op, __MSL_HERE};
}

// Order 0 is a butterfly; any other is a permuted serial order. All lanes get the same result.
template <class T, class F>
METAL_FUNC T __msl_reduce(__MslValues<T> x, T identity, F f) {
  const unsigned order = x.lanes.order;
  if (order == 0) {
    T t[32];
    for (unsigned i = 0; i < 32; i++) t[i] = x.active(i) ? x.get(i) : identity;
    for (unsigned step = 16; step; step >>= 1)
      for (unsigned i = 0; i < step; i++) t[i] = f(t[i], t[i + step]);
    return t[0];
  }
  T r = identity;
  bool first = true;
  for (unsigned i = 0; i < 32; i++) {
    unsigned lane = (i * (2 * order + 1) + order) & 31;
    if (!x.active(lane)) continue;
    r = first ? x.get(lane) : f(r, x.get(lane));
    first = false;
  }
  return r;
}
#define __MSL_OPERATOR(name, e)            \
  struct name {                            \
    template <class T>                     \
    METAL_FUNC T operator()(T a, T b) const { \
      return e;                            \
    }                                      \
  };
__MSL_OPERATOR(__MslAdd, a + b)
__MSL_OPERATOR(__MslMultiply, a* b)
__MSL_OPERATOR(__MslMax, metal::max(a, b))
__MSL_OPERATOR(__MslMin, metal::min(a, b))
__MSL_OPERATOR(__MslAnd, a& b)
__MSL_OPERATOR(__MslOr, a | b)
// MLX's headers name simd_xor of a bfloat, which goes through float; nobody calls it.
struct __MslXor {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return a ^ b;
  }
  METAL_FUNC float operator()(float a, float b) const {
    return as_type<float>(as_type<uint>(a) ^ as_type<uint>(b));
  }
};
#define __MSL_ELEMENT typename metal::__vector<T>::element
#define __MSL_REDUCE(name, F, identity)                                                   \
  template <class T>                                                                      \
  METAL_FUNC T __metal_simd_##name(T v, __MSL_SITE) {                                     \
    return __msl_reduce(__msl_exchange("simd_" #name, v, 0, __MSL_HERE), (T)(identity), F()); \
  }
__MSL_REDUCE(sum, __MslAdd, (__MSL_ELEMENT)0)
__MSL_REDUCE(product, __MslMultiply, (__MSL_ELEMENT)1)
__MSL_REDUCE(and, __MslAnd, ~(__MSL_ELEMENT)0)
__MSL_REDUCE(or, __MslOr, (__MSL_ELEMENT)0)
__MSL_REDUCE(xor, __MslXor, (__MSL_ELEMENT)0)
#define __MSL_LIMITS_OF metal::numeric_limits<__MSL_ELEMENT>
#define __MSL_BOUND(integer, sign) \
  (__MSL_LIMITS_OF::is_integer ? __MSL_LIMITS_OF::integer() : sign __MSL_LIMITS_OF::infinity())
__MSL_REDUCE(max, __MslMax, __MSL_BOUND(lowest, -))
__MSL_REDUCE(min, __MslMin, __MSL_BOUND(max, +))
#define __MSL_SCAN(name, F, identity, inclusive)                                \
  template <class T>                                                            \
  METAL_FUNC T __metal_simd_prefix_##name(T v, __MSL_SITE) {                    \
    auto x = __msl_exchange("simd_prefix_" #name, v, 0, __MSL_HERE);            \
    T r = (T)(__MSL_ELEMENT)identity;                                           \
    for (unsigned i = 0; i < x.lanes.lane + inclusive; i++)                     \
      if (x.active(i)) r = F()(r, x.get(i));                                    \
    return r;                                                                   \
  }
__MSL_SCAN(inclusive_sum, __MslAdd, 0, 1)
__MSL_SCAN(exclusive_sum, __MslAdd, 0, 0)
__MSL_SCAN(inclusive_product, __MslMultiply, 1, 1)
__MSL_SCAN(exclusive_product, __MslMultiply, 1, 0)
// `from` picks the source lane out of `x`, the caller's lane `lane` and the argument `k`.
#define __MSL_SHUFFLE(name, uniform, from)                                      \
  template <class T>                                                            \
  METAL_FUNC T __metal_simd_##name(T v, ushort k, __MSL_SITE) {                 \
    auto x = __msl_exchange("simd_" #name, v, uniform, __MSL_HERE);             \
    const unsigned lane = x.lanes.lane;                                         \
    (void)lane;                                                                 \
    return from;                                                                \
  }
__MSL_SHUFFLE(shuffle, 0, x.checked(k))
__MSL_SHUFFLE(broadcast, 1 + k, x.checked(k))
__MSL_SHUFFLE(shuffle_xor, 1 + k, x.checked(lane ^ k))
__MSL_SHUFFLE(shuffle_down, 1 + k, lane + k < 32 ? x.checked(lane + k) : v)
__MSL_SHUFFLE(shuffle_up, 1 + k, lane >= k ? x.checked(lane - k) : v)
__MSL_SHUFFLE(shuffle_rotate_down, 1 + k, x.checked((lane + k) & 31))
__MSL_SHUFFLE(shuffle_rotate_up, 1 + k, x.checked((lane - k) & 31))
template <class T>
METAL_FUNC T __metal_simd_broadcast_first(T v, __MSL_SITE) {
  auto x = __msl_exchange("simd_broadcast_first", v, 0, __MSL_HERE);
  return x.get(__builtin_ctz(x.lanes.mask));
}
#define __MSL_FILL(name, inside, source, fill_source)                                       \
  template <class T>                                                                        \
  METAL_FUNC T __metal_simd_shuffle_and_fill_##name(T v, T fill, ushort k, ushort m, __MSL_SITE) { \
    auto x = __msl_exchange("simd_shuffle_and_fill_" #name, v, 1 + k, __MSL_HERE);          \
    auto y = __msl_exchange("simd_shuffle_and_fill_" #name, fill, 1 + k, __MSL_HERE);       \
    unsigned base = x.lanes.lane / m * m, i = x.lanes.lane - base;                          \
    return (inside) ? x.checked(base + source) : y.checked(base + fill_source);             \
  }
__MSL_FILL(down, i + k < m, i + k, i + k - m)
__MSL_FILL(up, i >= k, i - k, m - k + i)

namespace metal {
// As in Apple's library: half, float, integers up to 32 bits and their vectors only.
template <class E>
constexpr bool __exchangeable =
    is_same_v<E, float> || is_same_v<E, half> ||
    (is_integral_v<E> && !is_same_v<E, bool> && sizeof(E) <= 4);
#define __MSL_CHECKED class = enable_if_t<__exchangeable<typename __vector<T>::element>>
#define __MSL_OP0(n)                        \
  template <class T, __MSL_CHECKED>         \
  METAL_FUNC T simd_##n(T v, __MSL_SITE) {  \
    return __metal_simd_##n(v, __MSL_HERE); \
  }
#define __MSL_OP1(n)                                  \
  template <class T, __MSL_CHECKED>                   \
  METAL_FUNC T simd_##n(T v, ushort k, __MSL_SITE) {  \
    return __metal_simd_##n(v, k, __MSL_HERE);        \
  }
#define __MSL_OP2(n)                                                           \
  template <class T, __MSL_CHECKED>                                            \
  METAL_FUNC T simd_##n(T v, T fill, ushort k, ushort m = 32, __MSL_SITE) {    \
    return __metal_simd_##n(v, fill, k, m, __MSL_HERE);                        \
  }
__MSL_OP0(sum) __MSL_OP0(product) __MSL_OP0(max) __MSL_OP0(min) __MSL_OP0(and) __MSL_OP0(or)
__MSL_OP0(xor) __MSL_OP0(prefix_inclusive_sum) __MSL_OP0(prefix_exclusive_sum)
__MSL_OP0(prefix_inclusive_product) __MSL_OP0(prefix_exclusive_product) __MSL_OP0(broadcast_first)
__MSL_OP1(shuffle) __MSL_OP1(broadcast) __MSL_OP1(shuffle_xor) __MSL_OP1(shuffle_down)
__MSL_OP1(shuffle_up) __MSL_OP1(shuffle_rotate_down) __MSL_OP1(shuffle_rotate_up)
__MSL_OP2(shuffle_and_fill_down) __MSL_OP2(shuffle_and_fill_up)

class simd_vote {
 public:
  typedef uint64_t vote_t;
  explicit constexpr simd_vote(vote_t votes, uint active) : votes_(votes), active_(active) {}
  explicit constexpr operator vote_t() const { return votes_; }
  bool all() const { return votes_ == active_; }
  bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
  uint active_;
};
METAL_FUNC simd_vote __msl_vote(const char* op, bool p, __MSL_SITE) {
  auto x = __msl_exchange(op, (uint)p, 0, __MSL_HERE);
  uint votes = 0;
  for (uint i = 0; i < 32; i++)
    if (x.active(i) && x.get(i)) votes |= 1u << i;
  return simd_vote(votes, x.lanes.mask);
}
METAL_FUNC simd_vote simd_ballot(bool p, __MSL_SITE) {
  return __msl_vote("simd_ballot", p, __MSL_HERE);
}
METAL_FUNC simd_vote simd_active_threads_mask(__MSL_SITE) {
  return __msl_vote("simd_active_threads_mask", true, __MSL_HERE);
}
METAL_FUNC bool simd_any(bool p, __MSL_SITE) {
  return __msl_vote("simd_any", p, __MSL_HERE).any();
}
METAL_FUNC bool simd_all(bool p, __MSL_SITE) {
  return __msl_vote("simd_all", p, __MSL_HERE).all();
}
METAL_FUNC bool simd_is_first(__MSL_SITE) {
  auto x = __msl_exchange("simd_is_first", 1u, 0, __MSL_HERE);
  return x.lanes.lane == (unsigned)__builtin_ctz(x.lanes.mask);
}
}  // namespace metal
