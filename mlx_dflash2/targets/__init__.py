"""Targets: mlx-lm models made ready for verification and taps, without changing them."""

from importlib import import_module
from pkgutil import iter_modules

import mlx.nn as nn

from .base import Forward, Target, language_model
from .shape import TargetHead, TargetShape

__all__ = ["Forward", "Target", "TargetHead", "TargetShape", "bind", "supported_targets"]

_SHARED = ("base", "gated_delta", "shape")


def supported_targets() -> list[str]:
    """Names of the mlx-lm model files that have a target of the same name here."""
    return sorted(m.name for m in iter_modules(__path__) if m.name not in _SHARED)


def bind(model: nn.Module) -> Target:
    """Make a loaded mlx-lm model a target.

    Args:
        model (nn.Module): From :func:`mlx_lm.load`; it is neither changed nor copied.

    Raises:
        ValueError: if there is no target for the model's file in mlx-lm.
    """
    text_model = language_model(model)
    package, _, name = type(text_model).__module__.rpartition(".")
    if package != "mlx_lm.models" or name not in supported_targets():
        found = getattr(model, "model_type", type(model).__name__)
        raise ValueError(
            f"No target for model type {found!r} ({type(text_model).__module__}); supported are "
            f"the mlx-lm models {', '.join(supported_targets())} and models that wrap one."
        )
    return import_module(f".{name}", __package__).Target(model)
