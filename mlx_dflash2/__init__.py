"""Lossless DFlash 2 speculative decoding for mlx-lm."""

from ._version import __version__

__all__ = ["__version__"]
