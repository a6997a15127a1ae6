"""Conversations: the class, and the command."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .conversation import Conversation

__all__ = ["Conversation"]
__getattr__ = lazy_names(__name__, {"Conversation": ".conversation"})
