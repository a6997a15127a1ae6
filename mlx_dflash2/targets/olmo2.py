"""OLMo 2: the plain dense shape."""

from .base import Target

__all__ = ["Target"]
