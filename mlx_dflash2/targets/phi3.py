"""Phi-3 and Phi-4: the plain dense shape."""

from .base import Target

__all__ = ["Target"]
