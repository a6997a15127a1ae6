"""Settings that make oMLX run DFlash 2: built, checked, written, applied and undone."""

from .file import disable_settings, merge_settings
from .settings import model_settings

__all__ = ["disable_settings", "merge_settings", "model_settings"]
