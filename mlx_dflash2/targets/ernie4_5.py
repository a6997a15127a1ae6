"""ERNIE 4.5: the plain dense shape."""

from .base import Target

__all__ = ["Target"]
