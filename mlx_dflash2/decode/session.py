"""What a conversation keeps between turns: the target's caches and the drafter's context."""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import common_prefix_len

from ..drafter.model import Drafter, Proposer
from ..targets import Target
from .rollback import Checkpoint, check_caches, drops_rows, num_cached

MAX_CHECKPOINTS = 4
_METADATA = "mlx_dflash2"


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

    Give it as ``prompt_cache``; before each turn, :meth:`reuse` tells what of the prompt is new.
    Caches that cannot be trimmed are remembered at the end of each prompt and each answer, and
    go back to the latest of those places that a new prompt shares. Each such place holds a copy
    of every recurrent state and every ring.

    Args:
        model (nn.Module): The target.
        draft_model (Proposer): The drafter.
        max_kv_size (int, optional): As in mlx-lm.

    Attributes:
        caches (list): The target's caches; plain mlx-lm can go on with them.
        tokens (list of int): The tokens that they cover, as far as known.
        context: The drafter's context.
    """

    keeps_tokens = True

    def __init__(self, model: nn.Module, draft_model: Proposer, max_kv_size: int | None = None):
        self.model, self.draft_model, self.max_kv_size = model, draft_model, max_kv_size
        if max_kv_size is not None and hasattr(model, "make_cache"):
            warn_no_effect("the model makes its own caches")
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

    def _go_back(self, length: int):
        """Cover at most the first ``length`` tokens: as many as the caches allow."""
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
        # A drafter's context that cannot be cut starts cold: slower, never wrong.
        if hasattr(self.context, "trim_to"):
            self.context.trim_to(length)
            return self.context
        return self.draft_model.make_context()

    def context_for(self, draft_model: Proposer) -> Any:
        """The context, or a cold one if another drafter is to go on."""
        if draft_model is not self.draft_model:
            self.draft_model, self.context = draft_model, draft_model.make_context()
        return self.context

    def append(self, tokens: Sequence[int]) -> None:
        """Note tokens that were added to the caches."""
        if len(self.tokens) + len(tokens) == len(self):
            self.tokens += tokens

    def checkpoint(self) -> None:
        """Remember this place, if there are caches that cannot always be trimmed back to it."""
        if not all(drops_rows(cache) for cache in self.working):
            self.checkpoints = [c for c in self.checkpoints if c.length < len(self)]
            first, *later = [*self.checkpoints, Checkpoint(self.working)]
            self.checkpoints = [first, *later[-MAX_CHECKPOINTS:]]

    def save(self, file: str | Path, metadata: dict[str, str] | None = None):
        """Write everything to a safetensors file, which mlx-lm can read too.

        Args:
            file (str or Path): A ``.safetensors`` file.
            metadata (dict, optional): mlx_lm.generate expects ``model`` and ``tokenizer_config``.
        """
        self._refuse_lent()
        own = {
            "tokens": self.tokens,
            "offset": getattr(self.context, "offset", 0),
            "drafter": fingerprint(self.draft_model),
        }
        metadata = (metadata or {}) | {_METADATA: json.dumps(own)}
        file = Path(file)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            target, whole = (str(Path(folder) / f"{name}.safetensors") for name in "tw")
            save_prompt_cache(target, self.caches, metadata)
            # The context goes behind the caches: mlx-lm reads as many entries as it has classes.
            arrays, metadata = mx.load(target, return_metadata=True)
            context = enumerate(_context_arrays(self.context))
            arrays |= {f"{len(self.caches)}.{i}": array for i, array in context}
            mx.save_safetensors(whole, arrays, metadata)
            # Whoever reads the file meets the old one or the new one.
            os.replace(whole, file)

    @classmethod
    def load(
        cls, file: str | Path, model: nn.Module, draft_model: Proposer
    ) -> tuple["DFlashPromptCache", dict[str, str]]:
        """Read a file of :meth:`save`, or one that mlx-lm wrote, where the drafter starts cold.

        Returns:
            tuple: The cache, and the file's metadata.

        Raises:
            FileNotFoundError: if the file is not there.
            ValueError: if it is no prompt cache, or of another model.
        """
        saved_metadata(file)
        caches, metadata = load_prompt_cache(str(file), return_metadata=True)
        own = json.loads(metadata.pop(_METADATA, "{}"))
        self = cls(model, draft_model)
        check_caches(caches, self.caches)
        self.caches[:] = caches
        if getattr(caches[0], "keep", 0) > 0:
            self.max_kv_size = caches[0].max_size
        self.tokens = own.get("tokens", [])
        self.checkpoints = [Checkpoint(self.caches)]
        if own.get("drafter") == fingerprint(draft_model):
            self._load_context(mx.load(str(file)), own["offset"])
        # Nothing is left lazy: another thread may go on.
        mx.eval([cache.state for cache in self.caches], getattr(self.context, "state", []))
        return self, metadata

    def _load_context(self, arrays: dict[str, mx.array], offset: int):
        prefix = f"{len(self.caches)}."
        rows = {
            name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)
        }
        if len(rows) == 2 * len(getattr(self.context, "layers", [])):
            for i, layer in enumerate(self.context.layers):
                layer.append(rows[str(2 * i)], rows[str(2 * i + 1)])
            self.context.offset = offset


def open_session(
    model: nn.Module,
    target: Target,
    prompt_cache: list[Any] | Session | None,
    max_kv_size: int | None = None,
) -> Session:
    """Make whatever the caller gave as ``prompt_cache`` a session.

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
    if prompt_cache is None:
        session = Session(fresh, kept=False)
        if max_kv_size is not None and hasattr(model, "make_cache"):
            warn_no_effect("the model makes its own caches")
    else:
        given = isinstance(prompt_cache, Session)
        session = prompt_cache if given else Session(prompt_cache, kept=True)
        if isinstance(session, DFlashPromptCache) and session.model is not model:
            raise ValueError("The prompt cache was made for another model object.")
        if max_kv_size is not None:
            warn_no_effect("a prompt cache is given")
    if session.is_lent:
        raise ValueError(IN_USE)
    check_caches(session.caches, fresh)
    return session


def saved_metadata(file: str | Path) -> dict[str, str]:
    """The metadata of a saved prompt cache: ``model``, ``tokenizer_config`` and what else.

    Raises:
        FileNotFoundError: if the file is not there.
        ValueError: if it is no prompt cache.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no prompt cache {file}.")
    try:
        _, metadata = mx.load(str(file), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{file} is no prompt cache: {error}") from error
    # mlx-lm stores the caller's metadata as the first of three entries, the classes as the second.
    if not any(key.startswith("1.") for key in metadata):
        raise ValueError(f"{file} is no prompt cache.")
    return {key[2:]: value for key, value in metadata.items() if key.startswith("0.")}


def fingerprint(draft_model: Proposer) -> str:
    """Tells drafters apart whose contexts are not interchangeable: by config and one norm."""
    if not isinstance(draft_model, Drafter):
        return repr(type(draft_model))
    weights = np.array(draft_model.hidden_norm.weight.astype(mx.float32)).tobytes()
    return hashlib.sha256(repr(draft_model.args).encode() + weights).hexdigest()


def warn_no_effect(reason: str):
    """Say that ``max_kv_size`` does nothing here; mlx-lm drops it in silence."""
    warnings.warn(f"`max_kv_size` has no effect, as in mlx-lm: {reason}.", stacklevel=4)


def _context_arrays(context: Any) -> list[mx.array]:
    """Keys and values of each layer in turn; none where the drafter is cold."""
    layers = [layer for layer in getattr(context, "layers", []) if len(layer)]
    return [array for layer in layers for array in layer.keys_and_values()]
