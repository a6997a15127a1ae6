"""The stages of a training run, each from what the ones before it left on disk."""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model

from .. import embedded
from ..benchmark.data import encode
from ..checkpoint import CONFIG_FILES, read_config, resolve
from ..console import note
from ..convert.quantisation import Quantisation
from ..convert.report import describe_scheme
from ..drafter import Drafter
from ..drafter_args import DrafterArgs
from ..export import config_of, save_drafter
from ..load import load, load_drafter, read_drafter_args
from ..pair import check_fit
from ..targets import Target, bind
from . import checkpoints, plots, prompts
from .arguments import parse
from .batches import Batches
from .card import make_card, results_table
from .codebooks import unfactored
from .corpus import Corpus
from .data import generate
from .evaluate import evaluate
from .init import (
    Shape,
    factor_codebooks,
    freeze_but,
    from_drafter,
    from_target_layers,
    new_args,
    new_drafter,
)
from .objective import Objective
from .taps import CachedTaps, ComputedTaps, TapSource, bytes_needed, write_taps
from .trainer import Schedule, Trainer, count_parameters, fit
from .vocabulary import FullVocabulary, SampledVocabulary, most_frequent

# Settings that may differ when a run goes on: they do not change what is computed.
_FREE = {
    "stage", "config", "output_path", "time_limit", "save_every", "steps_per_report", "no_cache",
    "eval_prompts", "num_eval_prompts", "eval_max_tokens", "eval_temp", "eval_stride", "bits",
    "data_batch_size", "grad_checkpoint",
}  # fmt: skip


class Run:
    """A training run: its options, its folder, and the target once it is needed.

    Args:
        args (argparse.Namespace): From :func:`.arguments.parse`.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.output_path).expanduser()
        self.name = args.model or str(embedded.target_path())
        self.group = mx.distributed.init()
        self._loaded: tuple[nn.Module, TokenizerWrapper] | None = None

    @property
    def loaded(self) -> tuple[nn.Module, TokenizerWrapper]:
        """The target and its tokenizer, read when first asked for."""
        if self._loaded is None:
            model, tokenizer = load(self.name)
            if self.args.dequantize:
                model = dequantize_model(model)
            model.freeze()
            self._loaded = model, tokenizer
        return self._loaded

    @property
    def target(self) -> Target:
        return bind(self.loaded[0])

    def corpus(self) -> Corpus:
        """The texts to train on."""
        return Corpus(self.args.data or self.folder / "data")

    def data(self):
        """Have the target answer prompts."""
        args = self.args
        if args.data:
            note(f"data: the texts of {args.data} are used.")
            return
        if args.prompts:
            rows = prompts.read(args.prompts)
        else:
            rows = prompts.built_in("train", args.seed, args.num_prompts)
        generate(
            *self.loaded,
            rows,
            self.folder / "data",
            name=self.name,
            max_tokens=args.max_tokens,
            max_seq_length=args.max_seq_length,
            temp=args.temp,
            top_p=args.top_p,
            seed=args.seed,
            batch_size=args.data_batch_size,
        )

    def taps(self):
        """Cache what the drafter sees of the texts."""
        if self.args.no_cache:
            return
        corpus, ids, target = self.corpus(), self.drafter_args().target_layer_ids, self.target
        size = bytes_needed(corpus, target.shape.hidden_size * (len(ids) + self._final))
        note(f"taps: {len(corpus.tokens)} tokens take {size / 1e9:.2f} GB in {self.folder}.")
        write_taps(
            target,
            corpus,
            ids,
            self.folder / "taps",
            final=self._final,
            model=self.name,
            share=(self.group.rank(), self.group.size()),
        )

    @property
    def _final(self) -> bool:
        return self.args.labels == "soft"

    def tap_source(self, corpus: Corpus, ids: list[int]) -> TapSource:
        """Where the taps of the texts come from."""
        if self.args.no_cache:
            return ComputedTaps(self.target, corpus, ids, self._final)
        return CachedTaps(self.folder / "taps", corpus, self._final, ids)

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
        return extended_args(read_drafter_args(args.draft_model), chosen)

    def drafter(self) -> Drafter:
        """The drafter as it begins."""
        args, wanted, key = self.args, self.drafter_args(), mx.random.key(self.args.seed)
        check_fit(wanted, self.target.shape)
        if args.draft_model is None:
            drafter, known = new_drafter(wanted, key), False
            if args.init == "target":
                from_target_layers(drafter, self.target)
        else:
            old = load_drafter(args.draft_model, dtype=mx.float32)
            drafter, known = from_drafter(old, wanted, key), old.args.has_selector
        if args.factored and wanted.has_selector:
            factor_codebooks(drafter.candidate_selector, self.target.embed, known)
        mx.eval(drafter.parameters())
        if args.only:
            freeze_but(drafter, args.only)
        return drafter

    def trainer(self) -> Trainer:
        """Everything that fit needs, before its first step."""
        args, target, drafter, corpus = self.args, self.target, self.drafter(), self.corpus()
        batches = Batches(
            corpus,
            self.tap_source(corpus, drafter.target_layer_ids),
            range(len(corpus)),
            batch_size=args.batch_size,
            anchors=args.anchors,
            max_seq_length=args.max_seq_length,
            seed=args.seed,
        )
        gamma = args.gamma or drafter.block_size / 2
        objective = Objective(
            loss=args.loss,
            gamma=None if args.d_pace else gamma,
            selector_weight=args.selector_weight,
            detach_selector=args.detach_selector,
            checkpoint=args.grad_checkpoint,
        )
        vocabulary = FullVocabulary(target, drafter.args)
        if args.vocab_sample:
            frequent = most_frequent(corpus.tokens, args.vocab_sample, vocabulary.vocab_size)
            vocabulary = SampledVocabulary(target, drafter.args, frequent, args.negatives)
        schedule = Schedule(
            iters=args.iters,
            learning_rate=args.learning_rate,
            min_learning_rate=args.min_learning_rate,
            warmup=args.warmup,
            weight_decay=args.weight_decay,
            clip=args.clip,
            accumulate=args.grad_accumulation_steps,
            dtype=args.dtype,
            average=args.average,
            seed=args.seed,
        )
        return Trainer(drafter, target, vocabulary, batches, objective, schedule)

    def restored(self) -> Trainer:
        """A trainer that goes on behind the latest checkpoint, if there is one.

        Raises:
            ValueError: if that was made with other settings.
        """
        trainer, found = self.trainer(), checkpoints.files(self.folder / "checkpoints")
        if found:
            saved = checkpoints.load(found[-1])
            settings = self.settings()
            for name, value in saved.settings.items():
                if settings.get(name) != value:
                    raise ValueError(
                        f"{found[-1]} was made with `{name}` {value!r}, not "
                        f"{settings.get(name)!r}; give another --output-path or the first value."
                    )
            trainer.restore(saved)
        return trainer

    def settings(self) -> dict[str, Any]:
        """The options that decide what is computed, as JSON keeps them."""
        chosen = {k: v for k, v in vars(self.args).items() if k not in _FREE}
        return json.loads(json.dumps(chosen | {"processes": self.group.size()}))

    def fit(self):
        """Train."""
        trainer = self.restored()
        if self.group.rank() == 0:
            count = count_parameters(trainer.drafter)
            note(f"fit: {count / 1e6:.2f} M parameters, from step {trainer.done}.")
        limit = self.args.time_limit
        fit(
            trainer,
            self.folder,
            self.settings(),
            steps_per_report=self.args.steps_per_report,
            save_every=self.args.save_every,
            stop_after=None if limit is None else 60 * limit,
        )

    def trained(self) -> tuple[Drafter, Corpus, int]:
        """The drafter of the latest checkpoint with ordinary codebooks, its texts, its steps.

        Raises:
            FileNotFoundError: if nothing was trained.
        """
        found = checkpoints.files(self.folder / "checkpoints")
        if not found:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint; run the fit stage first.")
        saved, drafter = checkpoints.load(found[-1]), self.drafter()
        drafter.unfreeze()
        drafter.update(saved.trees.get("average", saved.trees["weights"]))
        if drafter.args.has_selector:
            unfactored(drafter.candidate_selector, drafter.args.vocab_size)
        drafter.eval()
        return drafter, self.corpus(), saved.step

    def eval(self):
        """Decode held-out prompts."""
        args = self.args
        if args.eval_prompts:
            rows = prompts.read(args.eval_prompts)
        else:
            rows = prompts.built_in("held_out", args.seed, args.num_eval_prompts)
        exported = self.folder / "export"
        if exported.exists():
            # What is shipped, quantised as it is, is what is measured.
            drafter = load_drafter(exported, dtype=_cpu_dtype())
        else:
            drafter, *_ = self.trained()
        model, tokenizer = self.loaded
        found = evaluate(
            model,
            tokenizer,
            drafter,
            encode([{"suite": row.kind, "messages": row.messages} for row in rows], tokenizer),
            max_tokens=args.eval_max_tokens,
            temps=args.eval_temp,
            stride=args.eval_stride,
            seed=args.seed,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "eval.json").write_text(json.dumps(found, indent=1) + "\n")
        print(results_table(found))
        self._plot(found)

    def _plot(self, found: dict[str, Any]):
        log = self.folder / "log.jsonl"
        try:
            files = [plots.save_evaluation(found, self.folder)]
            if log.is_file():
                lines = [json.loads(line) for line in log.read_text().splitlines()]
                files.append(plots.save_log(lines, self.folder))
        except ImportError as error:
            note(f"warning: {error}")
            return
        note("Plots: " + ", ".join(map(str, files)))

    def export(self):
        """Write the trained drafter as a published one is."""
        drafter, corpus, steps = self.trained()
        cast_to(drafter, mx.bfloat16)
        if self.args.bits is not None:
            Quantisation(self.args.bits).apply(drafter)
        found = self.folder / "eval.json"
        numbers = {"texts": len(corpus), "tokens": corpus.num_answer_tokens, "steps": steps}
        numbers["blocks"] = steps * self.args.batch_size * self.args.anchors
        numbers["blocks"] *= self.args.grad_accumulation_steps * self.group.size()
        defaults = vars(parse([]))
        options = {k: v for k, v in self.settings().items() if k in defaults and v != defaults[k]}
        for name in ("model", "data", "prompts", "draft_model"):
            options.pop(name, None)
        found = json.loads(found.read_text()) if found.is_file() else None
        card = make_card(drafter, Path(self.name).name, numbers, options, found)
        save_drafter(drafter, self.folder / "export", config_of(drafter.args), card)
        note(f"export: {self.folder / 'export'}, {describe_scheme(drafter)}.")


def _cpu_dtype() -> mx.Dtype | None:
    # Bfloat16 is emulated on MLX's CPU backend, several times slower than float32.
    return mx.float32 if mx.default_device() == mx.cpu else None


def cast_to(drafter: Drafter, dtype: mx.Dtype):
    """Round all of a drafter's floating-point tensors, in place."""
    drafter.update(tree_map(lambda x: x.astype(dtype), drafter.parameters()))
    mx.eval(drafter.parameters())


def extended_args(args: DrafterArgs, chosen: dict[str, Any]) -> DrafterArgs:
    """A drafter's args with layers or parts added.

    Raises:
        ValueError: for a change that its weights do not allow.
    """
    layers = chosen.pop("num_layers", args.num_hidden_layers)
    if layers < args.num_hidden_layers:
        raise ValueError(
            f"`num_layers` is {layers} but the drafter to begin from has {args.num_hidden_layers}."
        )
    added = {}
    defaults = Shape()
    for part, names in (
        ("has_conv", ("conv_kernel_size", "conv_group_size")),
        ("has_selector", ("selector_rank", "selector_top_k")),
    ):
        for name in names:
            value = chosen.pop(name, None)
            if not getattr(args, part):
                added[name] = getattr(defaults, name) if value is None else value
            elif value is not None and value != getattr(args, name):
                raise ValueError(
                    f"`{name}` is {value} but the drafter to begin from has {getattr(args, name)}."
                )
    for name, value in chosen.items():
        if name == "rope_theta" or (name == "causal" and not value):
            continue
        found = set(args.causal) if name == "causal" else getattr(args, name)
        if found != value and found != {value}:
            raise ValueError(f"`{name}` is {value} but the drafter to begin from has {found}.")
    more = layers - args.num_hidden_layers
    return replace(
        args,
        num_hidden_layers=layers,
        layer_types=args.layer_types + args.layer_types[-1:] * more,
        causal=args.causal + args.causal[-1:] * more,
        rope_parameters=args.rope_parameters + args.rope_parameters[-1:] * more,
        generation=2,
        quantization=None,
        **added,
    )
