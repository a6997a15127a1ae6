// float4 and its kin: clang's ext_vector_type gives the swizzles and the operators, and
// __msl_make the constructors. The names are macros where they construct, types elsewhere.
#pragma once
namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T>
struct __vector {
  typedef T element;
  static constexpr int size = 1;
};
template <class T, int N>
struct __vector<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr int size = N;
};
template <class... A>
struct __count {
  static constexpr int value = 0;
};
template <class H, class... A>
struct __count<H, A...> {
  static constexpr int value = __vector<H>::size + __count<A...>::value;
};

template <class T, class V>
METAL_FUNC void __append(T* to, int& n, V v) {
  if constexpr (__vector<V>::size == 1)
    to[n++] = static_cast<T>(v);
  else
    for (int k = 0; k < __vector<V>::size; k++) to[n++] = static_cast<T>(v[k]);
}
template <class T, int N, class... A>
METAL_FUNC vec<T, N> __msl_make(A... a) {
  constexpr int given = __count<A...>::value;
  static_assert(given == 0 || given == N || (given == 1 && sizeof...(A) == 1),
                "vector constructor: wrong number of components");
  T parts[N + 1] = {};
  int n = 0;
  int unused[] = {0, (__append(parts, n, a), 0)...};
  (void)unused;
  vec<T, N> out;
  for (int k = 0; k < N; k++) out[k] = parts[given == 1 ? 0 : k];
  return out;
}
#define __MSL_EACH_SCALAR(X) \
  X(half) X(float) X(bfloat) X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong) \
  X(bool)
#define __MSL_VECTOR(T, N)                                 \
  typedef vec<T, N> T##N;                                  \
  template <class... A>                                    \
  METAL_FUNC vec<T, N> __msl_make_##T##N(A... a) {         \
    return __msl_make<T, N>(a...);                         \
  }
#define __MSL_VECTORS(T) __MSL_VECTOR(T, 2) __MSL_VECTOR(T, 3) __MSL_VECTOR(T, 4)
__MSL_EACH_SCALAR(__MSL_VECTORS)
}  // namespace metal
using metal::__msl_make;
using metal::vec;
#define __MSL_EXPORT(T)      \
  using metal::T##2;         \
  using metal::T##3;         \
  using metal::T##4;         \
  using metal::__msl_make_##T##2; \
  using metal::__msl_make_##T##3; \
  using metal::__msl_make_##T##4;
__MSL_EACH_SCALAR(__MSL_EXPORT)
#define half2(...) __msl_make_half2(__VA_ARGS__)
#define half3(...) __msl_make_half3(__VA_ARGS__)
#define half4(...) __msl_make_half4(__VA_ARGS__)
#define float2(...) __msl_make_float2(__VA_ARGS__)
#define float3(...) __msl_make_float3(__VA_ARGS__)
#define float4(...) __msl_make_float4(__VA_ARGS__)
#define bfloat2(...) __msl_make_bfloat2(__VA_ARGS__)
#define bfloat4(...) __msl_make_bfloat4(__VA_ARGS__)
#define int2(...) __msl_make_int2(__VA_ARGS__)
#define int3(...) __msl_make_int3(__VA_ARGS__)
#define int4(...) __msl_make_int4(__VA_ARGS__)
#define uint2(...) __msl_make_uint2(__VA_ARGS__)
#define uint3(...) __msl_make_uint3(__VA_ARGS__)
#define uint4(...) __msl_make_uint4(__VA_ARGS__)
#define bool2(...) __msl_make_bool2(__VA_ARGS__)
#define bool3(...) __msl_make_bool3(__VA_ARGS__)
#define bool4(...) __msl_make_bool4(__VA_ARGS__)
#define ushort2(...) __msl_make_ushort2(__VA_ARGS__)
#define ushort4(...) __msl_make_ushort4(__VA_ARGS__)
