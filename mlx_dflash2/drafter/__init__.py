"""The drafter: a small model that drafts a whole block of tokens in one pass."""

from .model import Drafter
from .proposal import Proposal, Proposer

__all__ = ["Drafter", "Proposal", "Proposer"]
