"""Runs Metal kernels on the CPU: MLX's generated text, clang, and one fiber for each GPU thread.

The kernel that is compiled is the text that MLX itself generates for a ``mx.fast.metal_kernel``;
it runs with threadgroups, threadgroup memory, barriers and simdgroups of 32, under a chosen
schedule, and every finding names the array, the thread and the line. It shows that a kernel is
right under Metal's rules as clang can tell them. It is not Apple's compiler and not a GPU: it says
nothing about speed, registers, rounding of ``exp`` or the order of a ``simd_sum``.
"""

from .bench import BenchKernel, Launch, launch_with
from .compiler import MetalError, missing_tools
from .runtime import Schedule

__all__ = ["BenchKernel", "Launch", "MetalError", "Schedule", "launch_with", "missing_tools"]
