"""Hunyuan V1: the plain dense shape."""

from .base import Target

__all__ = ["Target"]
