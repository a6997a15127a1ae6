"""Conversations: the class, and the command."""

from .command import main, setup_arg_parser
from .conversation import Conversation

__all__ = ["Conversation", "main", "setup_arg_parser"]
