"""The inputs of a training run: target, prompts, texts and taps, made when they are needed."""

import argparse
from functools import lru_cache
from pathlib import Path

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import embedded
from ..checkpoint.target import TargetSource, find_target, read_target
from ..cli.dense import unpack
from ..evaluation.prompts import Chat
from ..targets import Target, bind
from . import prompts
from .corpus import Corpus
from .own_prompts import own_prompts
from .processes import note
from .taps import CachedTaps, ComputedTaps, TapSource


class Inputs:
    """The inputs of a run.

    Args:
        args (argparse.Namespace): From :func:`.options.parse`; read anew whenever asked.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, Path(args.output_path).expanduser()
        # For the latest name alone: a checkpoint's options may name another target.
        self._find, self._read = lru_cache(1)(find_target), lru_cache(1)(self._read_target)

    @property
    def name(self) -> str:
        """The target's name or path."""
        return self.args.model or str(embedded.target_path())

    @property
    def source(self) -> TargetSource:
        """The target's folder, config and shape, found when they are first needed."""
        return self._find(self.name)

    @property
    def loaded(self) -> tuple[nn.Module, TokenizerWrapper]:
        """The target and its tokenizer, read when they are first needed."""
        return self._read(self.name, self.args.dequantize)

    def _read_target(self, name: str, dequantize: bool) -> tuple[nn.Module, TokenizerWrapper]:
        model, tokenizer = read_target(self._find(name), lazy=dequantize)
        if dequantize:
            unpack(model, flag="--dequantize", say=note)
        model.freeze()
        return model, tokenizer

    @property
    def target(self) -> Target:
        """The target, bound."""
        return bind(self.loaded[0])

    @property
    def data_folder(self) -> Path:
        """The folder of the texts."""
        return Path(self.args.data).expanduser() if self.args.data else self.folder / "data"

    @property
    def taps_folder(self) -> Path:
        """The folder of cached taps."""
        return Path(self.args.taps).expanduser() if self.args.taps else self.folder / "taps"

    def chats(self, split: str) -> list[Chat]:
        """Read the prompts of ``train`` or ``held_out``."""
        args = self.args
        if split == "train":
            file, count, seed = args.prompts, args.num_prompts, args.seed
        else:
            # The same for all runs: figures of drafters from different seeds are compared.
            file, count, seed = args.eval_prompts, args.num_eval_prompts, 0
        return prompts.read(file) if file else prompts.built_in(split, seed, count)

    def own_chats(self) -> list[Chat]:
        """Let the target write prompts, if it is asked to."""
        count = self.args.own_prompts
        if not count:
            return []
        options = {"seed": self.args.seed, "batch_size": self.args.data_batch_size}
        folder = self.folder / "own_prompts"
        found = own_prompts(*self.loaded, folder, count, name=self.name, **options)
        note(f"data: {len(found)} of {count} prompts that the target wrote are usable.")
        return found

    def corpus(self) -> Corpus:
        """Read the texts to train on.

        Raises:
            FileNotFoundError: if there are none.
            ValueError: naming a shard that is not one, or if the texts are another model's.
        """
        corpus, ids = Corpus(self.data_folder), self.target.vocab_size
        highest = corpus.tokens.max(initial=0)
        if highest >= ids:
            raise ValueError(
                f"The texts of {self.data_folder} have an id {highest} but the target embeds "
                f"{ids}: they are another model's."
            )
        return corpus

    def tap_source(self, corpus: Corpus, ids: list[int]) -> TapSource:
        """Return the source of the texts' taps."""
        soft = self.args.labels == "soft"
        if self.args.no_cache:
            return ComputedTaps(self.target, corpus, ids, soft)
        known = {"layers": ids, "model": self.name, "dequantize": self.args.dequantize}
        return CachedTaps(self.taps_folder, corpus, soft, **known)
