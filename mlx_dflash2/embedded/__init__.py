"""The embedded pair: SmolLM2-135M-Instruct, and a drafter for it."""

from .target import drafter_path, is_target, target_path

__all__ = ["drafter_path", "is_target", "target_path"]
