"""The content-adaptive convolution around every sublayer of a DFlash 2 drafter."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels import grouped_conv, grouped_conv_norm
from ..kernels.grouped_conv import grouped_conv_ops
from ..kernels.grouped_conv_norm import grouped_conv_norm_ops
from .args import DrafterArgs


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
        base, _ = self._sides()
        dynamic = self.kernel_projection(x).reshape(B, L, 2, base.shape[0], self.num_groups)
        # A kernel has no gradient.
        conv = grouped_conv_ops if self.training else grouped_conv
        return conv(x, base, dynamic[:, :, 0]), dynamic[:, :, 1]

    def finish(
        self, x: mx.array, dynamic: mx.array, residual: mx.array, norm: nn.RMSNorm
    ) -> tuple[mx.array, mx.array]:
        """Convolve the sublayer's output with the kernel from ``prepare`` and end the sublayer.

        Shapes:
          - x: [B, L, H]; residual: [B, L, H], what the sublayer adds to
        Returns:
          - total: [B, L, H], dtype of ``residual``; ``norm`` of it: [B, L, H], dtype of ``x``
        """
        conv = grouped_conv_norm_ops if self.training else grouped_conv_norm
        return conv(x, self._sides()[1], dynamic, residual, norm.weight, norm.eps)

    def _sides(self) -> tuple[mx.array, mx.array]:
        """The base kernels [K, H] of ``prepare`` and ``finish``, as views."""
        return tuple(side.squeeze(0) for side in mx.split(self.base_kernel, 2))
