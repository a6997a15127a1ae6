"""Qwen2 mixture of experts: the plain dense shape."""

from .base import Target

__all__ = ["Target"]
