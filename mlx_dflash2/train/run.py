"""The stages of a training run, each from what the ones before it left on disk."""

import argparse
from pathlib import Path

import mlx.core as mx

from ..checkpoint.load import UNQUANTIZED, device_dtype, load_drafter
from ..checkpoint.save import config_of
from ..cli.outputs import check_folder
from ..drafter.fit import check_fit
from ..evaluation.prompts import encode
from . import export
from .card import results_table
from .data import missing_texts, write_answers
from .evaluate import evaluate, save_plots
from .inputs import Inputs
from .options import check_ranges
from .own_prompts import opening
from .processes import note, wait
from .records import write_record
from .taps import write_taps
from .trainer import count_parameters, fit
from .training import Training
from .vocabulary import refuse_sample

# Stages that all processes take part in. The result of one process is enough for the others.
_SHARED = ("taps", "fit")


class Run:
    """A training run.

    Args:
        args (argparse.Namespace): From :func:`.options.parse`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, Path(args.output_path).expanduser()
        self.group = mx.distributed.init()
        self.inputs = Inputs(args)
        self.training = Training(args, self.inputs)

    def run(self) -> None:
        """Run the stages asked for, up to one that is not finished.

        Raises:
            ValueError: before the first one, for options that cannot work.
        """
        self.check()
        for stage in self.args.stage:
            done = True
            if self.group.rank() == 0 or stage in _SHARED:
                done = getattr(self, stage)() is not False
            wait(self.group)
            if not done:
                return

    def check(self) -> None:
        """Refuse what a later stage would refuse, before the first one takes its time.

        Raises:
            ValueError: naming the option.
            FileNotFoundError: if a file of prompts or the checkpoint is missing.
        """
        stages = set(self.args.stage)
        if not stages & {"data", "taps", "fit"}:
            # The checkpoint has the options, which need not be given again.
            self.training.saved()
        args = self.args
        check_ranges(args)
        check_folder(self.folder, "`output_path`")
        if "taps" in stages and not args.no_cache:
            check_folder(self.inputs.taps_folder, "`taps`")
        if args.data and args.own_prompts:
            raise ValueError(
                f"`own_prompts` is {args.own_prompts} but `data` names the texts; leave one out."
            )
        writes = "data" in stages and not args.data
        if writes:
            self.inputs.chats("train")
            if args.own_prompts:
                opening(self.inputs.loaded[1])
        if "eval" in stages:
            self.inputs.chats("held_out")
        if args.thinking is not None and (writes or "eval" in stages):
            encode([], self.inputs.loaded[1], args.thinking)
        if stages != {"data"}:
            self._check_drafter(stages)

    def _check_drafter(self, stages: set[str]) -> None:
        wanted, args = self.training.drafter_args(), self.args
        check_fit(wanted, self.inputs.source.shape)
        if "export" in stages:
            config_of(wanted)
        self.training.objective(wanted.block_size)
        if "fit" in stages:
            self.training.drafter()
            if args.vocab_sample:
                refuse_sample(self.inputs.target, wanted, args.vocab_sample, args.negatives)

    def data(self) -> None:
        """Let the target answer prompts."""
        args = self.args
        if args.data:
            note(f"data: the texts of {args.data} are used.")
            return
        model, tokenizer = self.inputs.loaded
        write_answers(
            model,
            tokenizer,
            encode(self.inputs.chats("train") + self.inputs.own_chats(), tokenizer, args.thinking),
            self.inputs.data_folder,
            name=self.inputs.name,
            max_tokens=args.max_tokens,
            max_seq_length=args.max_seq_length,
            temp=args.temp,
            top_p=args.top_p,
            seed=args.seed,
            batch_size=args.data_batch_size,
        )

    def taps(self) -> None:
        """Cache the target's hidden states on the texts."""
        args, soft = self.args, self.args.labels == "soft"
        if args.no_cache:
            return
        corpus, ids, target = (
            self.inputs.corpus(),
            self.training.drafter_args().target_layer_ids,
            self.inputs.target,
        )
        # Two bytes a number, in bfloat16.
        size = 2 * len(corpus.tokens) * target.shape.hidden_size * (len(ids) + soft)
        place = self.inputs.taps_folder
        note(f"taps: {len(corpus.tokens)} tokens take {size / 1e9:.2f} GB in {place}.")
        check_folder(place, "`taps`", size - sum(f.stat().st_size for f in place.glob("taps-*")))
        known = {"model": self.inputs.name, "dequantize": args.dequantize}
        share = self.group.rank(), self.group.size()
        write_taps(target, corpus, ids, place, final=soft, share=share, **known)

    def fit(self) -> bool:
        """Train; return whether the schedule's end is reached."""
        args, missing = self.args, missing_texts(self.inputs.data_folder)
        if missing:
            note(f"fit: {missing} texts of {self.inputs.data_folder} are still to be written.")
        trainer = self.training.restored()
        count = count_parameters(trainer.drafter)
        note(f"fit: {count / 1e6:.2f} M parameters, from step {trainer.done}.")
        done = fit(
            trainer,
            self.folder,
            self.training.settings(trainer),
            steps_per_report=args.steps_per_report,
            save_every=args.save_every,
            stop_after=None if args.time_limit is None else 60 * args.time_limit,
        )
        if not done:
            note(f"fit: stopped at step {trainer.done} of {args.iters}; the same command resumes.")
        return done

    def export(self) -> None:
        """Write the trained drafter in the published format."""
        made = {"step": self.training.saved().step, "bits": self.args.bits}
        if export.is_exported(self.folder, made):
            note(f"export: {self.folder / 'export'} is of step {made['step']} already.")
            return
        drafter, corpus, saved = self.training.trained()
        scheme = export.export_drafter(drafter, corpus, saved, made, self.folder, self.inputs.name)
        note(f"export: {self.folder / 'export'}, {scheme}.")

    def eval(self) -> None:
        """Decode held-out prompts."""
        step, args = self.training.saved().step, self.args
        exported = export.exported_step(self.folder) == step
        if exported:
            # Measure what is exported, quantized as it is.
            drafter = load_drafter(self.folder / "export", bits=UNQUANTIZED, dtype=device_dtype())
        else:
            drafter, *_ = self.training.trained()
        measured = "export" if exported else "checkpoint"
        note(f"eval: the {measured} of step {step} is measured.")
        model, tokenizer = self.inputs.loaded
        found = evaluate(
            model,
            tokenizer,
            drafter,
            encode(self.inputs.chats("held_out"), tokenizer, args.thinking),
            max_tokens=args.eval_max_tokens,
            temps=args.eval_temp,
            stride=args.eval_stride,
            seed=args.seed,
        )
        write_record(self.folder / "eval.json", {"measured": measured, "step": step} | found)
        print(results_table(found))
        if exported:
            export.add_results(self.folder, found)
        try:
            note("Plots: " + ", ".join(map(str, save_plots(found, self.folder))))
        except ImportError as error:
            note(f"warning: {error}")
