"""The stages of a training run, each from what the ones before it left on disk."""

import mlx.core as mx

from ..checkpoint.load import device_dtype, load_drafter
from ..checkpoint.save import config_of
from ..cli.console import note
from ..drafter.args import DrafterArgs
from ..drafter.fit import check_fit
from ..drafter.model import Drafter
from ..evaluation.prompts import encode
from . import checkpoints, plots, shipping
from .card import results_table
from .checks import check_ranges
from .codebooks import unfactored
from .corpus import Corpus
from .data import generate, missing_texts
from .evaluate import evaluate
from .from_target import from_target_layers
from .init import freeze_but, frozen_parameters, new_drafter
from .own_prompts import opening
from .processes import digest, wait
from .recipe import objective_of
from .records import refuse_difference, write_record
from .settings import ADVICE, refuse_missing
from .setup import Setup
from .taps import bytes_needed, write_taps
from .trainer import Trainer, count_parameters, fit
from .vocabulary import refuse_sample

# Stages that all processes take part in; of the others one result is enough.
_SHARED = ("taps", "fit")


class Run(Setup):
    """A training run: what its options ask for, stage by stage."""

    def run(self):
        """Run the stages asked for, up to one that is not done yet.

        Raises:
            ValueError: before the first one, for options that cannot work.
        """
        self.check()
        for stage in self.args.stage:
            done = True
            if self.main or stage in _SHARED:
                done = getattr(self, stage)() is not False
            wait(self.group)
            if not done:
                return

    def check(self):
        """Refuse what a later stage would, before the first one takes its time.

        Raises:
            ValueError: naming the option.
            FileNotFoundError: if there is no such file of prompts, or no checkpoint.
        """
        stages = set(self.args.stage)
        if not stages & {"data", "taps", "fit"}:
            # The options are those of the checkpoint, which need not be given again.
            self.saved()
        args = self.args
        check_ranges(args)
        if args.data and args.own_prompts:
            raise ValueError(
                f"`own_prompts` is {args.own_prompts} but `data` names the texts; leave one out."
            )
        writes = "data" in stages and not args.data
        if writes:
            self.rows("train")
            if args.own_prompts:
                opening(self.loaded[1])
        if "eval" in stages:
            self.rows("held_out")
        if args.thinking is not None and (writes or "eval" in stages):
            encode([], self.loaded[1], args.thinking)
        if stages == {"data"}:
            return
        wanted = self.drafter_args()
        check_fit(wanted, self.target.shape)
        if "export" in stages:
            config_of(wanted)
        objective_of(args, wanted.block_size)
        if "fit" in stages:
            self._check_fit(wanted)

    def _check_fit(self, wanted: DrafterArgs):
        args, empty = self.args, new_drafter(wanted, mx.random.key(0))
        if args.init == "target" and args.draft_model is None:
            from_target_layers(empty, self.target)
        if args.only:
            freeze_but(empty, args.only)
        if args.vocab_sample:
            refuse_sample(self.target, wanted, args.vocab_sample, args.negatives)

    def data(self):
        """Have the target answer prompts."""
        args = self.args
        if args.data:
            self.note(f"data: the texts of {args.data} are used.")
            return
        generate(
            *self.loaded,
            self.rows("train") + self.own_rows(),
            self.data_folder,
            name=self.name,
            max_tokens=args.max_tokens,
            max_seq_length=args.max_seq_length,
            temp=args.temp,
            top_p=args.top_p,
            seed=args.seed,
            batch_size=args.data_batch_size,
            thinking=args.thinking,
        )

    def taps(self):
        """Cache what the drafter sees of the texts."""
        if self.args.no_cache:
            return
        corpus, ids, target = self.corpus(), self.drafter_args().target_layer_ids, self.target
        size = bytes_needed(corpus, target.shape.hidden_size * (len(ids) + self._final))
        place = self.taps_folder
        self.note(f"taps: {len(corpus.tokens)} tokens take {size / 1e9:.2f} GB in {place}.")
        write_taps(
            target,
            corpus,
            ids,
            place,
            final=self._final,
            model=self.name,
            dequantize=self.args.dequantize,
            share=(self.group.rank(), self.group.size()),
        )

    def restored(self) -> Trainer:
        """A trainer that goes on behind the latest checkpoint, if there is one.

        Raises:
            ValueError: if that was made with other settings.
        """
        trainer, file = self.trainer(), self.checkpoint
        if file is not None:
            saved, settings = checkpoints.load(file), self.settings(trainer)
            refuse_missing(self.args, saved.settings, file)
            checkpoints.refuse_frozen(saved, trainer.frozen)
            wanted = {name: settings.get(name) for name in saved.settings}
            refuse_difference(file, saved.settings, wanted, ADVICE)
            trainer.restore(saved)
        return trainer

    def fit(self) -> bool:
        """Train; tells whether the schedule's end is reached."""
        args, missing = self.args, missing_texts(self.data_folder)
        if missing:
            self.note(f"fit: {missing} texts of {self.data_folder} are still to be written.")
        trainer = self.restored()
        count = count_parameters(trainer.drafter)
        self.note(f"fit: {count / 1e6:.2f} M parameters, from step {trainer.done}.")
        done = fit(
            trainer,
            self.folder,
            self.settings(trainer),
            steps_per_report=args.steps_per_report,
            save_every=args.save_every,
            stop_after=None if args.time_limit is None else 60 * args.time_limit,
        )
        if not done:
            self.note(
                f"fit: stopped at step {trainer.done} of {args.iters}; the same command goes on."
            )
        return done

    def trained(self) -> tuple[Drafter, Corpus, checkpoints.Saved]:
        """The drafter of the latest checkpoint with ordinary codebooks, its texts, and that.

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
        return drafter, self.corpus(), saved

    def export(self):
        """Write the trained drafter as a published one is."""
        made = {"step": self.saved().step, "bits": self.args.bits}
        if shipping.is_there(self.folder, made):
            self.note(f"export: {self.folder / 'export'} is of step {made['step']} already.")
            return
        drafter, corpus, saved = self.trained()
        scheme = shipping.ship(drafter, corpus, saved, made, self.folder, self.name)
        self.note(f"export: {self.folder / 'export'}, {scheme}.")

    def eval(self):
        """Decode held-out prompts."""
        step, args = self.saved().step, self.args
        exported = shipping.step_of(self.folder) == step
        if exported:
            # What is shipped, quantised as it is, is what is measured.
            drafter = load_drafter(self.folder / "export", dtype=device_dtype())
        else:
            drafter, *_ = self.trained()
        measured = "export" if exported else "checkpoint"
        self.note(f"eval: the {measured} of step {step} is measured.")
        model, tokenizer = self.loaded
        rows = [{"suite": row.kind, "messages": row.messages} for row in self.rows("held_out")]
        found = evaluate(
            model,
            tokenizer,
            drafter,
            encode(rows, tokenizer, args.thinking),
            max_tokens=args.eval_max_tokens,
            temps=args.eval_temp,
            stride=args.eval_stride,
            seed=args.seed,
        )
        record = {"measured": measured, "step": step}
        write_record(self.folder / "eval.json", record | found)
        print(results_table(found))
        if exported:
            shipping.add_results(self.folder, found)
        try:
            note("Plots: " + ", ".join(map(str, plots.save_all(found, self.folder))))
        except ImportError as error:
            note(f"warning: {error}")
