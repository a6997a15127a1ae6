"""The content-adaptive convolution around every sublayer of a DFlash 2 drafter."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels import grouped_conv, grouped_conv_norm
from ..kernels.grouped_conv import grouped_conv_ops
from ..kernels.grouped_conv_norm import ConvInputs, grouped_conv_norm_ops
from .args import DrafterArgs


class GroupedDynamicConv(nn.Module):
    """A short convolution of a sublayer's input (``prepare``) and of its output (``finish``).

    Both convolve with a learned base plus a part projected from the sublayer's normed input.
    """

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        H, K = args.hidden_size, args.conv_kernel_size
        self.num_groups = H // args.conv_group_size
        identity = [mx.ones((2, 1, H)), mx.zeros((2, K - 1, H))]
        self.base_kernel = mx.concatenate(identity, axis=1)
        self.kernel_projection = nn.Linear(H, 2 * K * self.num_groups, bias=False)

    def prepare(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve the normed input [B, L, H]; also return the weights that ``finish`` needs."""
        B, L, _ = x.shape
        base, _ = self._sides()
        dynamic = self.kernel_projection(x).reshape(B, L, 2, base.shape[0], self.num_groups)
        # A Metal kernel has no gradient.
        conv = grouped_conv_ops if self.training else grouped_conv
        return conv(x, base, dynamic[:, :, 0]), dynamic[:, :, 1]

    def finish(
        self, x: mx.array, dynamic: mx.array, residual: mx.array, norm: nn.RMSNorm
    ) -> tuple[mx.array, mx.array]:
        """Convolve the sublayer's output with the weights from ``prepare``; end the sublayer.

        Args:
            x (mx.array): The output, [B, L, H].
            dynamic (mx.array): From ``prepare``.
            residual (mx.array): What the sublayer adds to, [B, L, H].
            norm (nn.RMSNorm): Of the next sublayer's input.

        Returns:
            tuple of mx.array: The sum [B, L, H], dtype of ``residual``, and its norm [B, L, H],
            dtype of ``x``.
        """
        conv = grouped_conv_norm_ops if self.training else grouped_conv_norm
        _, base = self._sides()
        return conv(ConvInputs(x, base, dynamic, residual, norm.weight), norm.eps)

    def _sides(self) -> tuple[mx.array, mx.array]:
        """Return the base kernels [K, H] of ``prepare`` and ``finish``, as views."""
        before, after = mx.split(self.base_kernel, 2)
        return before.squeeze(0), after.squeeze(0)
