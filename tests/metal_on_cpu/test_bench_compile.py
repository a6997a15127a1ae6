"""What is refused before a kernel runs, and what must be accepted."""

# ruff: noqa: E501, one case a line reads best

import mlx.core as mx
import pytest

from .arrays import HostArray
from .compiler import MetalError, recursive_functions
from .running import run_source
from .source import KernelText, generate

W = "out[thread_position_in_grid.x] = "
REFUSED = {
    "device to threadgroup pointer": ("threadgroup float* q = out; q[0] = 1.0f;", ""),
    "threadgroup as device pointer": ("threadgroup float x[4]; f(x); out[0] = 1.0f;", "inline void f(device float* p) { p[0] = 1.0f; }\n"),
    "thread as device pointer": ("float x[4]; f(x); out[0] = x[0];", "inline void f(device float* p) { p[0] = 1.0f; }\n"),
    "constant as device pointer": ("f(t); out[0] = 1.0f;", "constant float t[2] = {1.0, 2.0};\ninline float f(const device float* p) { return p[0]; }\n"),
    "write through a const input": ("inp[0] = 1.0f; out[0] = 1.0f;", ""),
    "local pointer without a space": (f"float x[2] = {{0.0f, 1.0f}}; float* p = x; {W}p[1];", ""),
    "parameter without a space": (f"{W}f(inp[0]);", "inline float f(float x) { return x; }\ninline void g(float* p) { *p = 1.0f; }\n"),
    "vector parameter without a space": (f"{W}1.0f;", "inline float g(vec<float, 4>& x) { return x[0]; }\n"),
    "deduced pointer without a space": (f"float x[2] = {{0.0f, 1.0f}}; auto* p = x; {W}p[1];", ""),
    "threadgroup initializer": (f"threadgroup float x = 1.0f; {W}x;", ""),
    "threadgroup array initializer": (f"threadgroup float x[2] = {{0.0f, 1.0f}}; {W}x[0];", ""),
    "bfloat to half": (f"bfloat b = bfloat(inp[0]); half h = b; {W}h;", ""),
    "half4 to float4": (f"half4 h = half4(1.0h); float4 v = h; {W}v.x;", ""),
    "double": (f"double x = 1.0; {W}float(x);", ""),
    "new": (f"float x = *new float(1.0f); {W}x;", ""),
    "virtual": (f"{W}1.0f;", "struct A { virtual float f() { return 1.0f; } };\n"),
    "exceptions": (f"try {{ }} catch (...) {{ }} {W}1.0f;", ""),
    "goto": (f"if (inp[0] > 0.0f) goto end; {W}1.0f; end: ;", ""),
    "the C++ library": (f"{W}1.0f;", "#include <cmath>\n"),
    "variable length array": (f"int n = int(inp[0]); float x[n]; x[0] = 1.0f; {W}x[0];", ""),
    "mutable global": (f"{W}counter;", "float counter = 1.0f;\n"),
    "unknown function": (f"{W}simd_sums(inp[0]);", ""),
    "simd_sum on 64 bits": (f"{W}float(simd_sum(long(inp[0])));", ""),
    "max of float and half": (f"{W}max(inp[0], half(1.0h));", ""),
    "uninitialised scalar": (f"float a; {W}a;", ""),
    "sometimes uninitialised": (f"float a; if (inp[0] > 5.0f) a = 1.0f; {W}a;", ""),
    "lambda": (f"auto f = [&](float x) {{ return x * inp[1]; }}; {W}f(inp[0]);", ""),
    "function pointer": (f"float (*p)(float) = f; {W}p(inp[0]);", "inline float f(float x) { return x; }\n"),
    "mutable static": (f"static int n = 3; {W}float(n);", ""),
    "threadgroup variable in a helper": (f"{W}g(inp[0]);", "inline float g(float x) { threadgroup float y[2]; y[0] = x; return x; }\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(launch, name):
    source, header = REFUSED[name]
    with pytest.raises(MetalError) as caught:
        run_source(source, header=header)
    assert caught.value.kinds & {"compile", "lint"}


def test_float_to_bfloat_needs_a_cast(launch):
    with pytest.raises(MetalError, match="compile"):
        run_source(f"{W}inp[0] * 2.0f;", dtype=mx.bfloat16)
    run_source(f"{W}static_cast<bfloat16_t>(inp[0] * 2.0f);", dtype=mx.bfloat16)


ACCEPTED = {
    "shuffles of bool and int64 from MLX's headers": f"{W}float(simd_shuffle(inp[0] > 0.0f, ushort(0))) + float(simd_shuffle(long(3), ushort(0)));",
    "unsuffixed literals are float": f"{W}0.1 * inp[0];",
    "float to half is implicit": f"half h = inp[0]; {W}float(h);",
    "vectors, swizzles, if constexpr": "float4 a = vec<T, 4>(inp[0], inp[1], inp[2], inp[3]); a.xy = a.wz; float4 b = float4(a.xy, float2(1.0f)); if constexpr (is_same_v<T, float>) { b += 1.0f; } "
    + W
    + "select(b.x, as_type<float>(as_type<uint>(b.y)), inp[0] > 1.0f) + metal::precise::exp(a.z) + metal::fast::sqrt(b.w);",
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(launch, name):
    run_source(ACCEPTED[name], template=[("T", mx.float32)])


def test_recursion_is_found_in_the_call_graph(clang):
    header = "inline float f(float x, int n) { return n == 0 ? x : f(x, n - 1); }\n"
    text = KernelText("recursive", ("inp",), ("out",), "out[0] = f(inp[0], 3);", header)
    generated = generate(
        text,
        [HostArray.of(mx.zeros(9))],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )
    assert [name for name in recursive_functions(generated) if "f" in name]
