"""What the stages of a run work with: options, target, texts, drafter, checkpoints."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import embedded
from ..checkpoint.files import CONFIG_FILES, read_config, resolve
from ..checkpoint.load import load, load_drafter, read_drafter_args
from ..cli.console import note
from ..cli.dense import unpack
from ..drafter.args import DrafterArgs
from ..drafter.fit import check_fit
from ..drafter.model import Drafter
from ..targets import Target, bind
from . import checkpoints, prompts
from .batches import Batches
from .corpus import Corpus
from .extend import extended_args
from .from_target import from_target_layers
from .init import factor_codebooks, freeze_but, from_drafter, new_drafter
from .own_prompts import own_prompts
from .recipe import objective_of, schedule_of, vocabulary_of
from .settings import as_trained, deciding
from .shape import Shape, new_args
from .taps import CachedTaps, ComputedTaps, TapSource
from .trainer import Trainer


class Setup:
    """A run's options and its folder, and what follows from them, made when it is asked for.

    Args:
        args (argparse.Namespace): From :func:`.arguments.parse`.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.output_path).expanduser()
        self.group = mx.distributed.init()
        self.main = self.group.rank() == 0
        self._loaded: tuple[nn.Module, TokenizerWrapper] | None = None

    def note(self, text: str):
        """A line on stderr, from one of the processes."""
        if self.main:
            note(text)

    @property
    def name(self) -> str:
        """The target's, as it was given."""
        return self.args.model or str(embedded.target_path())

    @property
    def loaded(self) -> tuple[nn.Module, TokenizerWrapper]:
        """The target and its tokenizer, read when first asked for."""
        if self._loaded is None:
            model, tokenizer = load(self.name, lazy=self.args.dequantize)
            if self.args.dequantize:
                unpack(model)
            model.freeze()
            self._loaded = model, tokenizer
        return self._loaded

    @property
    def target(self) -> Target:
        """The target, bound."""
        return bind(self.loaded[0])

    @property
    def data_folder(self) -> Path:
        """Where the texts are."""
        return Path(self.args.data) if self.args.data else self.folder / "data"

    def corpus(self) -> Corpus:
        """The texts to train on.

        Raises:
            FileNotFoundError: if there are none.
            ValueError: naming a shard that is none, or if the texts are not this target's.
        """
        corpus, ids = Corpus(self.data_folder), self.target.vocab_size
        highest = corpus.tokens.max(initial=0)
        if highest >= ids:
            raise ValueError(
                f"The texts of {self.data_folder} have an id {highest} but the target embeds "
                f"{ids}: they are another model's."
            )
        return corpus

    def rows(self, split: str) -> list[prompts.PromptRow]:
        """The prompts of ``train`` or ``held_out``."""
        args = self.args
        if split == "train":
            file, count, seed = args.prompts, args.num_prompts, args.seed
        else:
            # The same for all runs: figures of drafters from different seeds are compared.
            file, count, seed = args.eval_prompts, args.num_eval_prompts, 0
        return prompts.read(file) if file else prompts.built_in(split, seed, count)

    def own_rows(self) -> list[prompts.PromptRow]:
        """The prompts that the target writes itself, if it is to."""
        count = self.args.own_prompts
        if not count:
            return []
        options = {"seed": self.args.seed, "batch_size": self.args.data_batch_size}
        folder = self.folder / "own_prompts"
        found = own_prompts(*self.loaded, folder, count, name=self.name, **options)
        self.note(f"data: {len(found)} of {count} prompts that the target wrote are usable.")
        return found

    @property
    def taps_folder(self) -> Path:
        """Where cached taps are."""
        return Path(self.args.taps) if self.args.taps else self.folder / "taps"

    @property
    def _final(self) -> bool:
        return self.args.labels == "soft"

    def tap_source(self, corpus: Corpus, ids: list[int]) -> TapSource:
        """Where the taps of the texts come from."""
        if self.args.no_cache:
            return ComputedTaps(self.target, corpus, ids, self._final)
        known = {"layers": ids, "model": self.name, "dequantize": self.args.dequantize}
        return CachedTaps(self.taps_folder, corpus, self._final, **known)

    def drafter_args(self) -> DrafterArgs:
        """What kind of drafter is trained.

        Raises:
            ValueError: if the options make no drafter, or it does not fit the target.
        """
        args = self.args
        chosen = {f.name: getattr(args, f.name, None) for f in fields(Shape)}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        if args.draft_model is None:
            config = read_config(resolve(self.name, None, CONFIG_FILES))
            return new_args(Shape(**chosen), self.target, config)
        old = read_drafter_args(args.draft_model)
        if args.factored and old.has_selector and args.only and "selector" not in args.only:
            raise ValueError(
                f"`factored` changes the selector of {args.draft_model} but `only` is "
                f"{','.join(args.only)}; name selector too, or leave `factored` out."
            )
        return extended_args(old, chosen)

    def drafter(self, tell: bool = False) -> Drafter:
        """The drafter as it begins.

        Args:
            tell (bool): Whether to note what of it is lost. Default: ``False``.
        """
        args, wanted, key = self.args, self.drafter_args(), mx.random.key(self.args.seed)
        check_fit(wanted, self.target.shape)
        if args.draft_model is None:
            drafter, known = new_drafter(wanted, key), False
            if args.init == "target":
                left_out = from_target_layers(drafter, self.target)
                if left_out and tell:
                    names = ", ".join(left_out)
                    self.note(f"fit: a drafter has no {names}; the target's are left out.")
        else:
            old = load_drafter(args.draft_model, dtype=mx.float32)
            drafter, known = from_drafter(old, wanted, key), old.args.has_selector
        if args.factored and wanted.has_selector:
            kept = factor_codebooks(drafter.candidate_selector, self.target.embed, known)
            if known and tell:
                self.note(f"fit: the factored codebooks keep {kept:.0%} of the trained ones' norm.")
        mx.eval(drafter.parameters())
        if args.only:
            freeze_but(drafter, args.only)
        return drafter

    def trainer(self) -> Trainer:
        """Everything that fit needs, before its first step."""
        args, target, corpus = self.args, self.target, self.corpus()
        drafter = self.drafter(tell=True)
        batches = Batches(
            corpus,
            self.tap_source(corpus, drafter.target_layer_ids),
            range(len(corpus)),
            batch_size=args.batch_size,
            anchors=args.anchors,
            max_seq_length=args.max_seq_length,
            seed=args.seed,
        )
        vocabulary = vocabulary_of(args, target, drafter.args, corpus)
        objective = objective_of(args, drafter.block_size)
        return Trainer(drafter, target, vocabulary, batches, objective, schedule_of(args))

    def settings(self, trainer: Trainer) -> dict[str, Any]:
        """What decides what a trainer computes, as JSON keeps it."""
        dtype = mx.bfloat16
        if self.args.no_cache:
            dtype = self.target.embed(mx.array([0])).dtype
        return deciding(self.args) | {
            "processes": self.group.size(),
            "corpus": self.corpus().digest,
            "frozen": trainer.frozen,
            "tap_dtype": str(dtype).rpartition(".")[2],
        }

    @property
    def checkpoint(self) -> Path | None:
        """The latest one's file, if there is one."""
        found = checkpoints.files(self.folder / "checkpoints")
        return found[-1] if found else None

    def saved(self) -> checkpoints.Saved:
        """The latest checkpoint; what it was made with becomes this run's options.

        Raises:
            FileNotFoundError: if nothing was trained.
            ValueError: if an option that was given is another one than the checkpoint's.
        """
        file = self.checkpoint
        if file is None:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint; run the fit stage first.")
        saved = checkpoints.load(file)
        args = as_trained(self.args, saved.settings, file)
        if (args.model, args.dequantize) != (self.args.model, self.args.dequantize):
            self._loaded = None
        self.args = args
        return saved
