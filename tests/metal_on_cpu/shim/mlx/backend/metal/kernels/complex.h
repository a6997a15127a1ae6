// Takes the place of MLX's complex.h, whose member functions carry address spaces, which plain C++
// has not. No kernel on the bench computes with complex numbers.
#pragma once
#include <metal_stdlib>

#include "mlx/backend/metal/kernels/bf16.h"
using namespace metal;

template <typename T>
struct complex_t {
  T real;
  T imag;
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  constexpr complex_t() : real(0), imag(0) {}
};
using complex64_t = complex_t<float>;
constexpr bool operator==(complex64_t a, complex64_t b) {
  return a.real == b.real && a.imag == b.imag;
}
constexpr complex64_t operator*(float s, complex64_t a) { return {s * a.real, s * a.imag}; }
