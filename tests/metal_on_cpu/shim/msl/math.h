// Math for float, half and their vectors. bfloat comes from MLX's own bf16_math.h, which calls
// the __metal_ functions by name; half is computed in float and rounded once.
#pragma once
extern "C" {
float expf(float);
float exp2f(float);
float exp10f(float);
float logf(float);
float log2f(float);
float log10f(float);
float powf(float, float);
float sinf(float);
float cosf(float);
float tanf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float atan2f(float, float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float fmodf(float, float);
float rintf(float);
float roundf(float);
float ldexpf(float, int);
float frexpf(float, int*);
float nextafterf(float, float);
float fmaf(float, float, float);
}
METAL_FUNC float __msl_sinpi(float x) {
  return sinf(M_PI_F * (x - 2.0f * __builtin_floorf(0.5f * x)));
}
METAL_FUNC float __msl_cospi(float x) {
  return cosf(M_PI_F * (x - 2.0f * __builtin_floorf(0.5f * x)));
}
METAL_FUNC float __msl_fract(float x) {
  float r = x - __builtin_floorf(x);
  return r < 0x1.fffffep-1f ? r : 0x1.fffffep-1f;
}
METAL_FUNC float __msl_fdim(float x, float y) { return x <= y ? 0.0f : x - y; }

#define __MSL_UNARY(X)                                                                       \
  X(fabs, __builtin_fabsf(x)) X(acos, acosf(x)) X(acosh, acoshf(x)) X(asin, asinf(x))        \
  X(asinh, asinhf(x)) X(atan, atanf(x)) X(atanh, atanhf(x)) X(ceil, __builtin_ceilf(x))      \
  X(cos, cosf(x)) X(cosh, coshf(x)) X(cospi, __msl_cospi(x)) X(exp, expf(x))                 \
  X(exp10, exp10f(x)) X(exp2, exp2f(x)) X(floor, __builtin_floorf(x))                        \
  X(fract, __msl_fract(x)) X(log, logf(x)) X(log10, log10f(x)) X(log2, log2f(x))             \
  X(rint, rintf(x)) X(round, roundf(x)) X(rsqrt, 1.0f / __builtin_sqrtf(x)) X(sin, sinf(x))  \
  X(sinh, sinhf(x)) X(sinpi, __msl_sinpi(x)) X(sqrt, __builtin_sqrtf(x)) X(tan, tanf(x))     \
  X(tanh, tanhf(x)) X(tanpi, (__msl_sinpi(x) / __msl_cospi(x))) X(trunc, __builtin_truncf(x))
#define __MSL_BINARY(X)                                                                      \
  X(atan2, atan2f(x, y)) X(divide, (x / y)) X(fmax, __builtin_fmaxf(x, y))                   \
  X(fmin, __builtin_fminf(x, y)) X(fmod, fmodf(x, y)) X(pow, powf(x, y)) X(powr, powf(x, y)) \
  X(nextafter, nextafterf(x, y)) X(copysign, __builtin_copysignf(x, y))                      \
  X(fdim, __msl_fdim(x, y))

#define __MSL_INTRINSIC1(n, e) \
  METAL_FUNC float __metal_##n(float x, bool = false) { return e; }
#define __MSL_INTRINSIC2(n, e) \
  METAL_FUNC float __metal_##n(float x, float y, bool = false) { return e; }
__MSL_UNARY(__MSL_INTRINSIC1)
__MSL_BINARY(__MSL_INTRINSIC2)
METAL_FUNC float __metal_fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_FUNC float __metal_fmax3(float a, float b, float c, bool = false) {
  return __builtin_fmaxf(a, __builtin_fmaxf(b, c));
}
METAL_FUNC float __metal_fmin3(float a, float b, float c, bool = false) {
  return __builtin_fminf(a, __builtin_fminf(b, c));
}
METAL_FUNC float __metal_fmedian3(float a, float b, float c, bool = false) {
  return __builtin_fmaxf(__builtin_fminf(a, b), __builtin_fminf(__builtin_fmaxf(a, b), c));
}
METAL_FUNC float __metal_ldexp(float x, int k, bool = false) { return ldexpf(x, k); }
METAL_FUNC float __metal_frexp(float x, thread int* e, bool = false) { return frexpf(x, e); }
template <class I>
METAL_FUNC float __metal_frexp(float x, thread I& e, bool = false) {
  int k;
  float r = frexpf(x, &k);
  e = k;
  return r;
}
#define __METAL_MAYBE_FAST_MATH__ false
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }

namespace metal {
#define __MSL_FUNCTION1(n, e)                                      \
  METAL_FUNC float n(float x) { return e; }                        \
  METAL_FUNC half n(half h) {                                      \
    float x = h;                                                   \
    return (half)(e);                                              \
  }                                                                \
  template <class T, int N>                                        \
  METAL_FUNC vec<T, N> n(vec<T, N> v) {                            \
    vec<T, N> r;                                                   \
    for (int i = 0; i < N; i++) r[i] = n((T)v[i]);                 \
    return r;                                                      \
  }
#define __MSL_FUNCTION2(n, e)                                      \
  METAL_FUNC float n(float x, float y) { return e; }               \
  METAL_FUNC half n(half a, half b) {                              \
    float x = a, y = b;                                            \
    return (half)(e);                                              \
  }                                                                \
  template <class T, int N>                                        \
  METAL_FUNC vec<T, N> n(vec<T, N> a, vec<T, N> b) {               \
    vec<T, N> r;                                                   \
    for (int i = 0; i < N; i++) r[i] = n((T)a[i], (T)b[i]);        \
    return r;                                                      \
  }
__MSL_UNARY(__MSL_FUNCTION1)
__MSL_BINARY(__MSL_FUNCTION2)
METAL_FUNC float fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) {
  return (half)fmaf((float)a, (float)b, (float)c);
}
METAL_FUNC float ldexp(float x, int k) { return ldexpf(x, k); }
METAL_FUNC float abs(float x) { return __builtin_fabsf(x); }
METAL_FUNC half abs(half x) { return (half)__builtin_fabsf((float)x); }
template <class T, class = enable_if_t<is_integral_v<T>>>
METAL_FUNC T abs(T x) {
  return x < 0 ? -x : x;
}

#define __MSL_NOT_BFLOAT class = enable_if_t<!is_same_v<typename __vector<T>::element, bfloat>>
// A number wins over a NaN, as IEEE 754 and Metal have it.
template <class T>
METAL_FUNC T __larger(T a, T b) {
  if constexpr (is_floating_point_v<T>)
    if (b != b || a != a) return b != b ? a : b;
  return a < b ? b : a;
}
template <class T>
METAL_FUNC T __smaller(T a, T b) {
  if constexpr (is_floating_point_v<T>)
    if (b != b || a != a) return b != b ? a : b;
  return b < a ? b : a;
}
#define __MSL_EXTREME(name, pick)                                    \
  template <class T, __MSL_NOT_BFLOAT>                               \
  METAL_FUNC T name(T a, T b) {                                      \
    typedef typename __vector<T>::element E;                         \
    if constexpr (__vector<T>::size == 1) {                          \
      return pick(a, b);                                             \
    } else {                                                         \
      T r;                                                           \
      for (int i = 0; i < __vector<T>::size; i++) r[i] = pick((E)a[i], (E)b[i]); \
      return r;                                                      \
    }                                                                \
  }
__MSL_EXTREME(max, __larger)
__MSL_EXTREME(min, __smaller)
template <class T, __MSL_NOT_BFLOAT>
METAL_FUNC T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T, __MSL_NOT_BFLOAT>
METAL_FUNC T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T, __MSL_NOT_BFLOAT>
METAL_FUNC T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <class T>
METAL_FUNC T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <class T>
METAL_FUNC T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
METAL_FUNC float saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
METAL_FUNC float sign(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f); }
METAL_FUNC float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T>
METAL_FUNC bool isnan(T x) {
  return x != x;
}
template <class T>
METAL_FUNC bool isinf(T x) {
  return __builtin_isinf((float)x);
}
template <class T>
METAL_FUNC bool isfinite(T x) {
  return __builtin_isfinite((float)x);
}
template <class T>
METAL_FUNC ulong __bits(T x) {
  return (ulong)x & (~0ul >> (64 - 8 * sizeof(T)));
}
template <class T>
METAL_FUNC T popcount(T x) {
  return (T)__builtin_popcountll(__bits(x));
}
template <class T>
METAL_FUNC T clz(T x) {
  constexpr int width = 8 * sizeof(T);
  return x == 0 ? (T)width : (T)(__builtin_clzll(__bits(x)) - (64 - width));
}
template <class T>
METAL_FUNC T ctz(T x) {
  return x == 0 ? (T)(8 * sizeof(T)) : (T)__builtin_ctzll((ulong)x);
}
METAL_FUNC uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }

#define __MSL_FLAVOUR(name)      \
  namespace name {               \
  __MSL_UNARY(__MSL_FUNCTION1)   \
  __MSL_BINARY(__MSL_FUNCTION2)  \
  using metal::abs;              \
  using metal::clamp;            \
  using metal::fma;              \
  using metal::ldexp;            \
  using metal::max;              \
  using metal::min;              \
  using metal::saturate;         \
  }
__MSL_FLAVOUR(precise)
__MSL_FLAVOUR(fast)
}  // namespace metal
