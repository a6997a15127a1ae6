"""Keep a conversation between turns: the target's caches and the drafter's context."""

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import common_prefix_len

from ..copies import without_copies
from ..drafter.model import Drafter, Proposer
from ..targets import Target
from .cache_file import CacheFile, read_cache_file, write_cache_file
from .checks import check_draft_model
from .rollback import Checkpoint, check_caches, drops_rows, num_cached

MAX_CHECKPOINTS = 4
# Settings of modules that no array shows.
_SETTINGS = ("bits", "group_size", "mode", "scale")
# Numbers of each array that tell a target's weights from others.
_SAMPLES = 16
IN_USE = (
    "The prompt cache is in use by a generator that is still open: close it, or run it to its end, "
    "before the cache is used again."
)


class LentCache:
    """Stands in a caller's list for a cache that an open generator works on.

    Whatever uses it fails at once: rows of rejected drafts may be in the cache behind it.
    """

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(IN_USE)


class Session:
    """The target's caches of one sequence; a conversation keeps more beside them.

    Args:
        caches (list): The target's caches, one a layer.
        kept (bool): Whether somebody goes on with them afterwards.

    Attributes:
        caches (list): The same list; while a generator is open it holds :class:`LentCache`.
        working (list): The caches themselves.
    """

    keeps_tokens = False

    def __init__(self, caches: list[Any], kept: bool):
        self.caches, self.working, self.kept = caches, caches, kept

    def __len__(self) -> int:
        return num_cached(self.working)

    @property
    def is_lent(self) -> bool:
        """Whether a generator is working on the caches."""
        return any(isinstance(cache, LentCache) for cache in self.caches)

    def lend(self) -> None:
        """Take the caches out of the caller's list until :meth:`give_back`."""
        self.working = list(self.caches)
        self.caches[:] = [LentCache() for _ in self.working]

    def give_back(self) -> None:
        """Put the caches back, unless the caller has put others into the list."""
        if self.is_lent:
            self.caches[:] = self.working
        self.working = self.caches

    def context_for(self, draft_model: Proposer) -> Any:
        """The drafter's context to go on with: a fresh one."""
        return draft_model.make_context()

    def append(self, tokens: Sequence[int]) -> None:
        """Note tokens that were added to the caches."""

    def checkpoint(self) -> None:
        """Remember this place."""


class DFlashPromptCache(Session):
    """Target caches and drafter context of one conversation, and the tokens that they cover.

    Give it as ``prompt_cache``; before each turn, :meth:`reuse` tells which tokens of the prompt
    are new. Caches that cannot be trimmed are remembered at the end of each prompt and each
    answer, and go back to the latest of those places that a new prompt shares. Each such place
    holds a copy of every recurrent state and every ring.

    Args:
        model (nn.Module): The target.
        draft_model (Proposer): The drafter.
        max_kv_size (int, optional): As in mlx-lm: it has no effect where the model makes its own
            caches.

    Attributes:
        caches (list): The target's caches; plain mlx-lm can go on with them.
        tokens (list of int): The tokens that they cover, as far as known.
        context: The drafter's context.
        max_kv_size (int, optional): In effect.
    """

    keeps_tokens = True

    def __init__(self, model: nn.Module, draft_model: Proposer, max_kv_size: int | None = None):
        check_draft_model(draft_model)
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` is {model!r} but has to be a model, from load.")
        if max_kv_size is not None and hasattr(model, "make_cache"):
            warn_no_effect("the model makes its own caches")
            max_kv_size = None
        self.model, self.draft_model, self.max_kv_size = model, draft_model, max_kv_size
        super().__init__(make_prompt_cache(model, max_kv_size), kept=True)
        check_caches(self.caches, self.caches)
        self.context = draft_model.make_context()
        self.tokens: list[int] = []
        self.checkpoints = [Checkpoint(self.caches)]

    def reuse(self, prompt: Sequence[int]) -> mx.array:
        """Go back to the longest prefix that the cache shares with a prompt.

        Args:
            prompt (sequence of int): All tokens from the beginning of the conversation.

        Returns:
            mx.array: The tokens that are left to be processed, at least one.

        Raises:
            ValueError: if the prompt is empty.
        """
        self._refuse_lent()
        prompt = list(prompt)
        if not prompt:
            raise ValueError("`prompt` is empty.")
        shared = min(common_prefix_len(self.tokens, prompt), len(prompt) - 1)
        if shared < len(self) or not self.caches:
            self._go_back(shared)
        return mx.array(prompt[len(self) :], dtype=mx.uint32)

    def _refuse_lent(self) -> None:
        if self.is_lent:
            raise ValueError(IN_USE)

    def _go_back(self, length: int) -> None:
        """Go back to at most ``length`` tokens, to as many as the caches allow."""
        usable = [c for c in self.checkpoints if c.length <= length and c.fits(self.caches)]
        if self.caches and all(cache.is_trimmable() for cache in self.caches):
            for cache in self.caches:
                cache.trim(len(self) - length)
        elif usable:
            usable[-1].restore(self.caches)
        else:
            self.caches[:] = make_prompt_cache(self.model, self.max_kv_size)
        self.checkpoints = [c for c in self.checkpoints if c.length <= len(self)]
        self.tokens = self.tokens[: len(self)]
        self.context = self._trimmed_context(len(self))

    def _trimmed_context(self, length: int) -> Any:
        # A context that cannot be cut starts cold, which costs speed and nothing else.
        if hasattr(self.context, "trim_to"):
            self.context.trim_to(length)
            return self.context
        return self.draft_model.make_context()

    def context_for(self, draft_model: Proposer) -> Any:
        """Return the context, or a cold one if another drafter is to go on."""
        if draft_model is not self.draft_model:
            self.draft_model, self.context = draft_model, draft_model.make_context()
        if hasattr(self.context, "read"):
            self.context.read(self.tokens, 0)
        return self.context

    def append(self, tokens: Sequence[int]) -> None:
        """Note tokens that were added to the caches."""
        if len(self.tokens) + len(tokens) == len(self):
            self.tokens += tokens

    def checkpoint(self) -> None:
        """Remember this place, if a cache cannot always be trimmed back to it."""
        if not all(drops_rows(cache) for cache in self.working):
            self.checkpoints = [c for c in self.checkpoints if c.length < len(self)]
            first, *later = [*self.checkpoints, Checkpoint(self.working)]
            self.checkpoints = [first, *later[-MAX_CHECKPOINTS:]]

    def save(self, file: str | Path, metadata: dict[str, str] | None = None) -> None:
        """Write everything to a safetensors file, which mlx-lm can read too.

        Args:
            file (str or Path): A ``.safetensors`` file.
            metadata (dict, optional): mlx_lm.generate expects ``model`` and ``tokenizer_config``.
        """
        self._refuse_lent()
        content = CacheFile(
            self.caches,
            metadata or {},
            self.tokens,
            target_fingerprint(self.model),
            fingerprint(self.draft_model),
            getattr(self.context, "offset", 0),
            _context_arrays(self.context),
        )
        write_cache_file(file, content)

    @classmethod
    def load(
        cls, file: str | Path, model: nn.Module, draft_model: Proposer
    ) -> tuple[Self, dict[str, str]]:
        """Read a file of :meth:`save`, or one that mlx-lm wrote, where the drafter starts cold.

        Returns:
            tuple: The cache, and the file's metadata.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a prompt cache, or of another model.
        """
        content = read_cache_file(file)
        return cls.restore(content, model, draft_model), content.metadata

    @classmethod
    def restore(cls, content: CacheFile, model: nn.Module, draft_model: Proposer) -> Self:
        """Go on from a file that has been read.

        Args:
            content (CacheFile): From :func:`read_cache_file`.
            model (nn.Module): The target.
            draft_model (Proposer): The drafter; another one than the file's starts cold.

        Raises:
            ValueError: if the caches are of another model.
        """
        if content.model is None:
            warnings.warn(
                "The prompt cache does not say which weights it was made with: with others, or "
                "with another adapter, the answer is wrong.",
                stacklevel=3,
            )
        elif content.model != target_fingerprint(model):
            raise ValueError(
                "The prompt cache was made with another model, or with another adapter, "
                "quantization or dtype of this one."
            )
        self = cls(model, draft_model)
        check_caches(content.caches, self.caches)
        self.caches[:] = content.caches
        if getattr(self.caches[0], "keep", 0) > 0:
            self.max_kv_size = self.caches[0].max_size
        self.tokens = content.tokens
        self.checkpoints = [Checkpoint(self.caches)]
        layers = getattr(self.context, "layers", [])
        known = content.drafter == fingerprint(draft_model)
        if known and len(content.context) == 2 * len(layers):
            arrays = iter(content.context)
            for layer, keys, values in zip(layers, arrays, arrays, strict=True):
                layer.append(keys, values)
            self.context.offset = content.offset
        # Nothing is left lazy: another thread may go on.
        mx.eval([cache.state for cache in self.caches], getattr(self.context, "state", []))
        return self


def open_session(
    model: nn.Module,
    target: Target,
    prompt_cache: list[Any] | Session | None,
    max_kv_size: int | None = None,
) -> Session:
    """Make a session of whatever the caller gave as ``prompt_cache``.

    Args:
        model (nn.Module): The target, from mlx-lm.
        target (Target): The same, bound.
        prompt_cache (list or Session, optional): Caches to go on from. Default: ``None``, fresh
            ones.
        max_kv_size (int, optional): As in mlx-lm, where no ``prompt_cache`` is given.

    Raises:
        ValueError: if the caches are not the target's, cannot be rolled back, or are in use.
    """
    fresh = target.make_cache(max_kv_size)
    if isinstance(prompt_cache, Session):
        session = prompt_cache
        if isinstance(session, DFlashPromptCache) and session.model is not model:
            raise ValueError("The prompt cache was made for another model object.")
    else:
        kept = prompt_cache is not None
        if kept and not isinstance(prompt_cache, list):
            raise TypeError(
                f"`prompt_cache` is a {type(prompt_cache).__name__} but has to be a list of "
                "caches or a DFlashPromptCache."
            )
        session = Session(fresh if prompt_cache is None else prompt_cache, kept)
    if max_kv_size is not None and session.kept:
        warn_no_effect("a prompt cache is given")
    elif max_kv_size is not None and hasattr(model, "make_cache"):
        warn_no_effect("the model makes its own caches")
    if session.is_lent:
        raise ValueError(IN_USE)
    check_caches(session.caches, fresh)
    return session


def target_fingerprint(model: nn.Module) -> str:
    """Identify a target by its modules' settings, and by a few numbers of every array."""
    digest, samples = hashlib.sha256(), []
    for path, module in model.named_modules():
        settings = [getattr(module, name, None) for name in _SETTINGS]
        known = [value for value in settings if isinstance(value, int | float | str)]
        digest.update(repr((path, type(module).__name__, known)).encode())
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for path, value in arrays.items():
        digest.update(repr((path, value.shape, str(value.dtype))).encode())
        # One axis of an array has at most this length.
        while value.size >= 2**31:
            value = value[0]
        numbers = value.reshape(-1)[:: max(1, value.size // _SAMPLES)]
        samples.append(numbers[:_SAMPLES].astype(mx.float32))
    digest.update(np.array(mx.concatenate(samples)).tobytes())
    return digest.hexdigest()


def fingerprint(draft_model: Proposer) -> str:
    """Identify a drafter by its config and one norm: contexts of others cannot be used."""
    drafter = without_copies(draft_model)
    if not isinstance(drafter, Drafter):
        return repr(type(drafter))
    weights = np.array(drafter.hidden_norm.weight.astype(mx.float32)).tobytes()
    return hashlib.sha256(repr(drafter.args).encode() + weights).hexdigest()


def warn_no_effect(reason: str) -> None:
    """Warn that ``max_kv_size`` has no effect here; mlx-lm ignores it without a word."""
    warnings.warn(f"`max_kv_size` has no effect, as in mlx-lm: {reason}.", stacklevel=4)


def _context_arrays(context: Any) -> list[mx.array]:
    """List keys, then values, of each layer; nothing if the drafter is cold."""
    layers = [layer for layer in getattr(context, "layers", []) if len(layer)]
    return [array for layer in layers for array in layer.keys_and_values()]
