"""Prompt caches over requests: the target's caches and the drafter's context, by tokens."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ..copies import CopyContext
from ..decode.session import Session
from ..drafter.model import Proposer
from .spill import PromptFolder


class ContextCache:
    """The drafter's context as one more cache of an entry.

    Args:
        context: The context.
        length (int): Tokens that the entry's other caches cover.
    """

    def __init__(self, context: Any, length: int):
        self.context, self.length = context, length

    @property
    def nbytes(self) -> int:
        return getattr(self.context, "nbytes", 0)

    @property
    def is_whole(self) -> bool:
        """Whether the drafter has all that it would have after reading the tokens itself.

        What a window has forgotten does not come back when its newest rows are cut off.
        """
        layers = getattr(self.context, "layers", [])
        return getattr(self.context, "offset", 0) == self.length and all(
            len(layer) >= min(self.length, layer.size or self.length) for layer in layers
        )

    def is_trimmable(self) -> bool:
        """A context that cannot be cut is dropped: a cold drafter is slower, never wrong."""
        return True

    def trim(self, n: int) -> int:
        self.length -= n
        if hasattr(self.context, "trim_to"):
            self.context.trim_to(self.length)
        else:
            self.context = None
        return n


class StoredSession(Session):
    """The caches of an entry, which an answer goes on with and nobody else uses.

    Args:
        caches (list): The target's caches.
        tokens (list of int): What they cover.
        context: The drafter's context, if there is one.
    """

    def __init__(self, caches: list[Any], tokens: list[int], context: Any = None):
        super().__init__(caches, kept=False)
        self.tokens, self.context = tokens, context

    def context_for(self, draft_model: Proposer) -> Any:
        """The context that came with the caches, or a cold one."""
        fresh = draft_model.make_context()
        if isinstance(fresh, CopyContext):
            # What may be copied follows from the tokens.
            fresh.inner = fresh.inner if self.context is None else self.context
            fresh.read(self.tokens, 0)
            return fresh
        return fresh if self.context is None else self.context


class PromptStore:
    """Entries of an :class:`LRUPromptCache` that go on as sessions.

    Args:
        lru (LRUPromptCache): Holds the entries; only one thread may use it at a time.
        model_key: Names the pair.
        folder (PromptFolder, optional): Keeps the entries on disk, too.
    """

    def __init__(self, lru: LRUPromptCache, model_key: Any, folder: PromptFolder | None = None):
        self.lru, self.model_key, self.folder = lru, model_key, folder

    def fetch(self, tokens: Sequence[int], whole: bool = False) -> tuple[StoredSession | None, int]:
        """Find the longest stored prefix of a prompt that leaves at least one token of it.

        Args:
            tokens (sequence of int): The prompt.
            whole (bool): Only take it with a context as from reading the prompt: drafts, and so
                the draws of a seed, depend on it. Default: ``False``.

        Returns:
            tuple: A session of its own, or ``None``, and the number of tokens that it covers.
        """
        entry, count = self._fetch_entry(list(tokens))
        if self.folder is not None:
            cache = self.folder.find(tokens, more_than=count)
            if cache is not None:
                count = len(cache)
                inner = getattr(cache.context, "inner", cache.context)
                entry = [*cache.caches, ContextCache(inner, count)]
        if entry is None or (whole and not entry[-1].is_whole):
            return None, 0
        *caches, context = entry
        return StoredSession(caches, list(tokens[:count]), context.context), count

    def _fetch_entry(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        entry, rest = self.lru.fetch_nearest_cache(self.model_key, tokens)
        if entry is not None and not rest:
            if can_trim_prompt_cache(entry):
                trim_prompt_cache(entry, 1)
                rest = tokens[-1:]
            elif len(tokens) > 1:
                # An entry of the whole prompt that cannot be cut is of no use: look for a shorter.
                entry, rest = self.lru.fetch_nearest_cache(self.model_key, tokens[:-1])
                rest = [*rest, tokens[-1]]
            else:
                entry = None
        return entry, 0 if entry is None else len(tokens) - len(rest)

    def keep(
        self, tokens: Sequence[int], caches: list[Any], context: Any, kind: str, own: bool
    ) -> None:
        """Add an entry.

        Args:
            tokens (sequence of int): What the caches cover.
            caches (list): The target's caches.
            context: The drafter's context.
            kind (str): ``system``, ``user`` or ``assistant``: the order in which they go.
            own (bool): Whether nobody else goes on with them; else they are copied.
        """
        entry = [*caches, ContextCache(context, len(tokens))]
        if not own:
            entry = copy.deepcopy(entry)
        mx.eval([cache.state for cache in entry[:-1]], getattr(entry[-1].context, "state", []))
        self.lru.insert_cache(self.model_key, list(tokens), entry, cache_type=kind)
        if self.folder is not None:
            self.folder.write(list(tokens), entry[:-1], entry[-1].context)

    def make_room(self, nbytes: int) -> None:
        """Drop entries until they take at most so many bytes."""
        self.lru.trim_to(n_bytes=nbytes)
