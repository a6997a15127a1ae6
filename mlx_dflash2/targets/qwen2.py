"""Qwen2 and Qwen2.5: the plain dense shape."""

from .base import Target

__all__ = ["Target"]
