"""Conversations: the class, and the command."""

from .conversation import Conversation

__all__ = ["Conversation"]
