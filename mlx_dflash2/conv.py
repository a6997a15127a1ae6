"""The content-adaptive convolution around every sublayer of a DFlash 2 drafter."""

import mlx.core as mx
import mlx.nn as nn

from .drafter_args import DrafterArgs
from .kernels import grouped_conv


class GroupedDynamicConv(nn.Module):
    """A short convolution of a sublayer's input (``prepare``) and of its output (``finish``).

    Both kernels are a learned base plus a part projected from the sublayer's normed input.
    """

    def __init__(self, args: DrafterArgs):
        super().__init__()
        H, K = args.hidden_size, args.conv_kernel_size
        self.num_groups = H // args.conv_group_size
        identity = [mx.ones((2, 1, H)), mx.zeros((2, K - 1, H))]
        self.base_kernel = mx.concatenate(identity, axis=1)
        self.kernel_projection = nn.Linear(H, 2 * K * self.num_groups, bias=False)

    def prepare(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve the normed input [B, L, H]; also give the kernel that ``finish`` needs."""
        B, L, _ = x.shape
        K = self.base_kernel.shape[1]
        dynamic = self.kernel_projection(x).reshape(B, L, 2, K, self.num_groups)
        return grouped_conv(x, self.base_kernel[0], dynamic[:, :, 0]), dynamic[:, :, 1]

    def finish(self, x: mx.array, dynamic: mx.array) -> mx.array:
        """Convolve the sublayer's output [B, L, H] with the kernel from ``prepare``."""
        return grouped_conv(x, self.base_kernel[1], dynamic)
