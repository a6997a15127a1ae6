"""The package's array ops, one a file.

``op_ops`` is the plain MLX form, ``op_kernel`` the Metal kernel, and ``op`` the one to call: it
takes the kernel where a launch has shown that it runs.
"""

from ._common import PlainFormWarning, active_kernels, first_time, switch_off
from .gated_delta_verify import gated_delta_verify
from .grouped_conv import grouped_conv
from .grouped_conv_norm import grouped_conv_norm
from .pair_score import pair_score
from .pair_walk import pair_walk
from .path_walk import path_walk
from .qmm_rows import qmm_rows
from .top_k import top_k
from .top_p import top_p

__all__ = [
    "PlainFormWarning",
    "active_kernels",
    "first_time",
    "gated_delta_verify",
    "grouped_conv",
    "grouped_conv_norm",
    "pair_score",
    "pair_walk",
    "path_walk",
    "qmm_rows",
    "switch_off",
    "top_k",
    "top_p",
]
