"""The package's array ops, one a file: ``op_ops`` is the plain MLX form, ``op`` the one to call."""

from .grouped_conv import grouped_conv
from .pair_score import pair_score
from .path_walk import path_walk
from .top_k import top_k

__all__ = ["grouped_conv", "pair_score", "path_walk", "top_k"]
