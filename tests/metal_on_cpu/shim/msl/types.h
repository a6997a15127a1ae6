// Scalars, address spaces, type traits and the functions of the runtime.
//
// Address spaces are clang's language-level OpenCL spaces: mixing device, threadgroup, constant
// and thread pointers is a compile error, yet on a CPU they all lower to the one address space
// that the sanitizer passes instrument.
#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL_VERSION__ 310
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_huge_valf())
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f

#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define constant const __attribute__((opencl_constant))
#define thread
#define kernel
// A threadgroup variable is one static in its own section, behind a zone no kernel may touch.
#define __MSL_THREADGROUP_VARIABLE(n)                                             \
  static __attribute__((section("msltg"), used)) char __msl_pad_##n[64];          \
  static __attribute__((section("msltg"), used)) threadgroup

// See runtime/hooks.cpp.
struct __MslLanes {
  const unsigned char* slots;
  unsigned mask, lane, order;
};
extern "C" {
__attribute__((convergent)) __MslLanes __msl_simd(const char* op, const void* payload,
                                                  unsigned bytes, unsigned uniform,
                                                  const char* file, unsigned line,
                                                  unsigned column);
__attribute__((convergent)) void __msl_barrier(int whole_group, unsigned flags, const char* file,
                                               unsigned line, unsigned column);
void __msl_bad_lane(const char* op, unsigned lane, const char* file, unsigned line,
                    unsigned column);
void __msl_atomic_access(const void* p, unsigned bytes, int kind);
void __msl_loop_push();
void __msl_loop_pop();
bool __msl_tick();
}
struct __MslLoop {
  METAL_FUNC __MslLoop() { __msl_loop_push(); }
  METAL_FUNC ~__MslLoop() { __msl_loop_pop(); }
};
#define __MSL_SITE                                                              \
  const char *__file = __builtin_FILE(), unsigned __line = __builtin_LINE(),    \
  unsigned __column = __builtin_COLUMN()
#define __MSL_HERE __file, __line, __column

namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class T, class U>
constexpr bool is_same_v = __is_same(T, U);
template <class T, class U>
struct is_same : bool_constant<__is_same(T, U)> {};
template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
constexpr bool is_floating_point_v =
    is_same_v<remove_cv_t<T>, half> || is_same_v<remove_cv_t<T>, float> ||
    is_same_v<remove_cv_t<T>, bfloat>;
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T>
constexpr bool is_signed_v = is_floating_point_v<T> || __is_signed(T);
template <class T>
constexpr bool is_unsigned_v = __is_unsigned(T);
template <class F, class T>
constexpr bool is_convertible_v = __is_convertible(F, T);
template <class F, class T>
struct is_convertible : bool_constant<__is_convertible(F, T)> {};
template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class U>
struct conditional {
  typedef T type;
};
template <class T, class U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool b, class T, class U>
using conditional_t = typename conditional<b, T, U>::type;
template <class...>
using void_t = void;

template <class T>
struct numeric_limits;
#define __MSL_LIMITS(T, LOW, MIN, MAX, INTEGER)                                      \
  template <>                                                                        \
  struct numeric_limits<T> {                                                         \
    static constexpr bool is_specialized = true, is_integer = INTEGER;               \
    static constexpr T min() { return MIN; }                                         \
    static constexpr T max() { return MAX; }                                         \
    static constexpr T lowest() { return LOW; }                                      \
    static constexpr T infinity() { return (T)(INTEGER ? 0.0f : INFINITY); }         \
    static constexpr T quiet_NaN() { return (T)(INTEGER ? 0.0f : NAN); }             \
  };
#define __MSL_INT_LIMITS(T, MIN, MAX) __MSL_LIMITS(T, MIN, MIN, MAX, true)
__MSL_INT_LIMITS(bool, false, true)
__MSL_INT_LIMITS(char, -128, 127)
__MSL_INT_LIMITS(int8_t, -128, 127)
__MSL_INT_LIMITS(uint8_t, 0, 255)
__MSL_INT_LIMITS(int16_t, -32768, 32767)
__MSL_INT_LIMITS(uint16_t, 0, 65535)
__MSL_INT_LIMITS(int32_t, INT_MIN, INT_MAX)
__MSL_INT_LIMITS(uint32_t, 0, UINT_MAX)
__MSL_INT_LIMITS(int64_t, -9223372036854775807L - 1, 9223372036854775807L)
__MSL_INT_LIMITS(uint64_t, 0, 18446744073709551615UL)
__MSL_LIMITS(float, -FLT_MAX, FLT_MIN, FLT_MAX, false)
__MSL_LIMITS(half, (half)-65504.0f, (half)6.103515625e-05f, (half)65504.0f, false)
__MSL_LIMITS(bfloat, (bfloat)-3.3895313892515355e38f, (bfloat)FLT_MIN,
             (bfloat)3.3895313892515355e38f, false)
}  // namespace metal

template <class T, class U>
METAL_FUNC T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  return __builtin_bit_cast(T, x);
}
