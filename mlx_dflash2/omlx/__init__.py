"""Settings that make oMLX run DFlash 2: built, checked, written, applied and undone."""

from .arguments import setup_arg_parser
from .cli import main
from .merge import disable_settings, merge_settings
from .settings import model_settings

__all__ = ["disable_settings", "main", "merge_settings", "model_settings", "setup_arg_parser"]
