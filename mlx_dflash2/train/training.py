"""From a run's options to its drafter, its trainer and its checkpoints."""

import argparse
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint.load import DrafterSource, find_drafter, read_drafter
from ..drafter.args import DrafterArgs
from ..drafter.fit import check_fit
from ..drafter.model import Drafter
from . import checkpoints
from .batches import Batches
from .codebooks import factor_codebooks, unfactored
from .corpus import Corpus
from .inputs import Inputs
from .objective import Objective
from .processes import digest, note
from .records import refuse_difference
from .shape import Shape, extended_args, new_args
from .start import (
    freeze_but,
    from_drafter,
    from_target_layers,
    frozen_parameters,
    new_drafter,
)
from .trainer import Schedule, Trainer
from .vocabulary import FullVocabulary, SampledVocabulary, Vocabulary, most_frequent


class Training:
    """What a run trains, and from where it resumes.

    Args:
        args (argparse.Namespace): From :func:`.options.parse`. The options of a checkpoint are
            written into it.
        inputs (Inputs): The run's.
    """

    def __init__(self, args: argparse.Namespace, inputs: Inputs) -> None:
        self.args, self.inputs, self.folder = args, inputs, inputs.folder
        self._find = lru_cache(1)(find_drafter)

    @property
    def source(self) -> DrafterSource:
        """Folder and config of the drafter to start from, found when they are first needed."""
        return self._find(str(self.args.draft_model))

    def drafter_args(self) -> DrafterArgs:
        """Return the args of the drafter to train.

        Raises:
            ValueError: if the options do not make a drafter, or contradict each other.
        """
        args = self.args
        chosen = {f.name: getattr(args, f.name, None) for f in fields(Shape)}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        if args.draft_model is None:
            shape: dict[str, Any] = chosen
            return new_args(Shape(**shape), self.inputs.target, self.inputs.source.config)
        old = self.source.args
        if args.factored and old.has_selector and args.only and "selector" not in args.only:
            raise ValueError(
                f"`factored` changes the selector of {args.draft_model} but `only` is "
                f"{','.join(args.only)}; name selector too, or leave `factored` out."
            )
        return extended_args(old, chosen)

    def drafter(self, tell: bool = False) -> Drafter:
        """Make the drafter as its training starts, lazily.

        Args:
            tell (bool): Whether to print what of its source is lost. Default: ``False``.
        """
        args, wanted, target = self.args, self.drafter_args(), self.inputs.target
        key, known = mx.random.key(args.seed), False
        check_fit(wanted, target.shape)
        if args.draft_model is not None:
            old = read_drafter(self.source, dtype=mx.float32)
            drafter, known = from_drafter(old, wanted, key), old.args.has_selector
        else:
            drafter = new_drafter(wanted, key)
            left_out = from_target_layers(drafter, target) if args.init == "target" else []
            if left_out and tell:
                names = ", ".join(left_out)
                note(f"fit: a drafter has no {names}; the target's are left out.")
        if args.factored and wanted.has_selector:
            kept = factor_codebooks(drafter.candidate_selector, target.embed, known)
            if known and tell:
                note(f"fit: the factored codebooks keep {kept.item():.0%} of the tables' norm.")
        if args.only:
            freeze_but(drafter, args.only)
        return drafter

    def objective(self, block_size: int) -> Objective:
        """Return the loss for a drafter of blocks of ``block_size`` rows.

        Raises:
            ValueError: if blocks are longer in training than when drafting.
        """
        args = self.args
        if args.train_block_size is not None and args.train_block_size > block_size:
            raise ValueError(
                f"`train_block_size` is {args.train_block_size} but the drafter's blocks have "
                f"{block_size} rows."
            )
        gamma = block_size / 2 if args.gamma is None else args.gamma
        return Objective(
            loss=args.loss,
            gamma=None if args.d_pace else gamma,
            selector_weight=args.selector_weight,
            detach_selector=args.detach_selector,
            checkpoint=args.grad_checkpoint,
            block_size=args.train_block_size,
        )

    def trainer(self) -> Trainer:
        """Make all that fit needs, before its first step."""
        args, target, corpus = self.args, self.inputs.target, self.inputs.corpus()
        drafter = self.drafter(tell=True)
        mx.eval(drafter.parameters())
        batches = Batches(
            corpus,
            self.inputs.tap_source(corpus, drafter.target_layer_ids),
            range(len(corpus)),
            batch_size=args.batch_size,
            anchors=args.anchors,
            max_seq_length=args.max_seq_length,
            seed=args.seed,
        )
        vocabulary: Vocabulary = FullVocabulary(target, drafter.args)
        if args.vocab_sample:
            frequent = most_frequent(corpus.tokens, args.vocab_sample, vocabulary.vocab_size)
            vocabulary = SampledVocabulary(target, drafter.args, frequent, args.negatives)
        schedule = Schedule(**{f.name: getattr(args, f.name) for f in fields(Schedule)})
        objective = self.objective(drafter.block_size)
        return Trainer(drafter, target, vocabulary, batches, objective, schedule)

    def settings(self, trainer: Trainer) -> dict[str, Any]:
        """Return whatever decides what a trainer computes, as JSON keeps it."""
        dtype = mx.bfloat16
        if self.args.no_cache:
            dtype = self.inputs.target.embed(mx.array([0])).dtype
        return checkpoints.deciding(self.args) | {
            "processes": mx.distributed.init().size(),
            "corpus": self.inputs.corpus().digest,
            "frozen": trainer.frozen,
            "tap_dtype": str(dtype).rpartition(".")[2],
        }

    @property
    def checkpoint(self) -> Path | None:
        """The latest checkpoint's file, if there is one."""
        found = checkpoints.files(self.folder / "checkpoints")
        return found[-1] if found else None

    def saved(self) -> checkpoints.Saved:
        """Read the latest checkpoint, and take this run's options from it.

        Raises:
            FileNotFoundError: if nothing was trained.
            ValueError: if a given option differs from the checkpoint's.
        """
        file = self.checkpoint
        if file is None:
            raise FileNotFoundError(
                f"{self.folder} does not hold a checkpoint; run the fit stage first."
            )
        saved = checkpoints.load(file)
        trained = checkpoints.as_trained(self.args, saved.settings, file)
        vars(self.args).update(vars(trained))
        return saved

    def restored(self) -> Trainer:
        """Make a trainer that resumes from the latest checkpoint, if there is one.

        Raises:
            ValueError: if the checkpoint was made with other settings.
        """
        trainer, file = self.trainer(), self.checkpoint
        if file is not None:
            saved, settings = checkpoints.load(file), self.settings(trainer)
            checkpoints.refuse_missing(self.args, saved.settings, file)
            checkpoints.refuse_frozen(saved, trainer.frozen)
            wanted = {name: settings.get(name) for name in saved.settings}
            refuse_difference(file, saved.settings, wanted, checkpoints.ADVICE)
            trainer.restore(saved)
        return trainer

    def trained(self) -> tuple[Drafter, Corpus, checkpoints.Saved]:
        """Return the latest checkpoint's drafter with ordinary codebooks, its texts, and that.

        Raises:
            FileNotFoundError: if nothing was trained.
            ValueError: if the checkpoint is of another drafter.
        """
        saved, drafter = self.saved(), self.drafter()
        checkpoints.refuse_shapes(saved, drafter.trainable_parameters())
        checkpoints.refuse_frozen(saved, digest(frozen_parameters(drafter)))
        drafter.unfreeze()
        drafter.update(saved.trees.get("average", saved.trees["weights"]))
        if drafter.args.has_selector:
            unfactored(drafter.candidate_selector, drafter.args.vocab_size)
        drafter.eval()
        return drafter, self.inputs.corpus(), saved
