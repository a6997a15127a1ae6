// Relaxed atomics. Threads of the bench switch only at checked accesses, so plain code is atomic.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T __value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
template <class T>
struct __as_is {
  typedef T type;
};
#define __MSL_VALUE typename __as_is<T>::type
#define __MSL_UNCHECKED __attribute__((no_sanitize("thread"))) inline
enum __MslKind { __MSL_READ, __MSL_WRITE, __MSL_UPDATE };
template <class T>
__MSL_UNCHECKED volatile T* __msl_open(const volatile void* p, __MslKind kind) {
  __msl_atomic_access((const void*)p, sizeof(T), kind);
  return (volatile T*)p;
}
#define __MSL_FETCH(SPACE, name, e)                                                       \
  template <class T>                                                                      \
  __MSL_UNCHECKED T atomic_fetch_##name##_explicit(volatile SPACE atomic<T>* p, __MSL_VALUE v, \
                                                   memory_order) {                        \
    volatile T* q = __msl_open<T>((const volatile void*)p, __MSL_UPDATE);                 \
    T old = *q;                                                                           \
    *q = (T)(e);                                                                          \
    return old;                                                                           \
  }
#define __MSL_ATOMICS(SPACE)                                                              \
  template <class T>                                                                      \
  __MSL_UNCHECKED T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order) { \
    return *__msl_open<T>((const volatile void*)p, __MSL_READ);                           \
  }                                                                                       \
  template <class T>                                                                      \
  __MSL_UNCHECKED void atomic_store_explicit(volatile SPACE atomic<T>* p, __MSL_VALUE v,  \
                                             memory_order) {                              \
    *__msl_open<T>((const volatile void*)p, __MSL_WRITE) = v;                             \
  }                                                                                       \
  template <class T>                                                                      \
  __MSL_UNCHECKED bool atomic_compare_exchange_weak_explicit(                             \
      volatile SPACE atomic<T>* p, thread T* expected, __MSL_VALUE v, memory_order,       \
      memory_order) {                                                                     \
    volatile T* q = __msl_open<T>((const volatile void*)p, __MSL_UPDATE);                 \
    T old = *q;                                                                           \
    bool equal = old == *expected;                                                        \
    if (equal)                                                                            \
      *q = v;                                                                             \
    else                                                                                  \
      *expected = old;                                                                    \
    return equal;                                                                         \
  }                                                                                       \
  __MSL_FETCH(SPACE, add, old + v)                                                        \
  __MSL_FETCH(SPACE, sub, old - v)                                                        \
  __MSL_FETCH(SPACE, max, (old < v ? v : old))                                            \
  __MSL_FETCH(SPACE, min, (v < old ? v : old))                                            \
  __MSL_FETCH(SPACE, and, old& v)                                                         \
  __MSL_FETCH(SPACE, or, old | v)                                                         \
  __MSL_FETCH(SPACE, xor, old ^ v)                                                        \
  template <class T>                                                                      \
  __MSL_UNCHECKED T atomic_exchange_explicit(volatile SPACE atomic<T>* p, __MSL_VALUE v,  \
                                             memory_order) {                              \
    volatile T* q = __msl_open<T>((const volatile void*)p, __MSL_UPDATE);                 \
    T old = *q;                                                                           \
    *q = v;                                                                               \
    return old;                                                                           \
  }
__MSL_ATOMICS(device)
__MSL_ATOMICS(threadgroup)
}  // namespace metal
