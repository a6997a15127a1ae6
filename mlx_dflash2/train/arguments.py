"""The options of `mlx_dflash2.train`, in the spelling of mlx_lm.lora where it has them."""

import argparse
from pathlib import Path

from ..cli.start import add_blas_argument
from .config_file import parts, read_options
from .init import PARTS
from .losses import LOSSES

STAGES = ("data", "taps", "fit", "export", "eval")


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.train",
        description="Train a DFlash 2 drafter for a target. Stages: data (the target answers "
        "prompts), taps (what it computes on the way is cached), fit, export, eval. Each goes on "
        "where it stopped; without a stage all are run in turn.",
    )
    parser.add_argument(
        "stage", nargs="*", metavar="stage", help=f"Any of {', '.join(STAGES)} (default: all)"
    )
    parser.add_argument(
        "-c", "--config", type=str, help="A YAML configuration file with the training options"
    )
    parser.add_argument(
        "--model",
        type=str,
        help="The path to the local model directory or Hugging Face repo of the target (default: "
        "the embedded one)",
    )
    parser.add_argument(
        "--output-path",
        type=str,
        default="drafter",
        help="Directory for everything that is made; the drafter is in its export folder",
    )
    parser.add_argument("--seed", type=int, default=0, help="The PRNG seed")
    parser.add_argument(
        "--dequantize",
        "--dense",
        action="store_true",
        help="Compute with the target's weights unpacked to float32, which is faster on MLX's CPU "
        "backend and takes more memory (default: only for the embedded target, on that backend)",
    )
    add_blas_argument(parser)
    parser.add_argument(
        "--thinking",
        choices=("on", "off", "both"),
        help="For chat templates with enable_thinking, when prompts are answered (default: both "
        "for these)",
    )
    _add_data_arguments(parser)
    _add_shape_arguments(parser)
    _add_loss_arguments(parser)
    _add_fit_arguments(parser)
    _add_eval_arguments(parser)
    return parser


def _add_data_arguments(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("data and taps")
    group.add_argument(
        "--data",
        type=str,
        help="A directory of *.npz shards of text that the target wrote, in place of the data "
        "stage's",
    )
    group.add_argument(
        "--prompts",
        type=str,
        help="A JSONL or text file of prompts (default: a built-in generator)",
    )
    group.add_argument(
        "--num-prompts", type=int, default=2000, help="Prompts of the built-in generator"
    )
    group.add_argument(
        "--own-prompts",
        type=int,
        default=0,
        help="Prompts that the target is to write itself, beside the others",
    )
    group.add_argument("--max-tokens", type=int, default=256, help="Tokens of an answer")
    group.add_argument("--temp", type=float, default=0.0, help="Sampling temperature of answers")
    group.add_argument("--top-p", type=float, default=1.0, help="Sampling top-p of answers")
    group.add_argument(
        "--data-batch-size", type=int, default=32, help="Answers that are generated at a time"
    )
    group.add_argument(
        "--taps", type=str, help="The directory of cached taps (default: in the output path)"
    )
    group.add_argument(
        "--no-cache",
        action="store_true",
        help="Compute the taps of each batch when it is trained on, instead of caching them",
    )
    group.add_argument(
        "--max-seq-length", type=int, default=2048, help="Tokens of a text that are used"
    )


def _add_shape_arguments(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--draft-model",
        type=str,
        help="A drafter to begin from, DFlash 1 or 2; parts that it lacks are added",
    )
    group.add_argument(
        "--init",
        choices=("random", "target"),
        default="target",
        help="Without --draft-model: random weights, or the target's last layers",
    )
    group.add_argument("--num-layers", type=int, help="Number of layers (default: 5)")
    group.add_argument("--block-size", type=int, help="Rows of a block (default: 16)")
    group.add_argument(
        "--target-layer-ids", type=int, nargs="+", help="Layers of the target to tap"
    )
    group.add_argument("--mask-token-id", type=int, help="Id of the rows to be filled")
    group.add_argument("--sliding-window", type=int, help="Window of the drafter's attention")
    group.add_argument("--intermediate-size", type=int, help="Width of its MLPs")
    group.add_argument(
        "--rope-theta", type=float, help="Base of its rotations (default: the target's)"
    )
    group.add_argument(
        "--causal",
        action="store_true",
        help="Rows of a block do not see later rows",
    )
    group.add_argument(
        "--conv-kernel-size", type=int, help="Taps of the convolution, 0 for none (default: 2)"
    )
    group.add_argument(
        "--selector-rank", type=int, help="Rank of the pair scores, 0 for none (default: 256)"
    )
    group.add_argument("--selector-top-k", type=int, help="Candidates a row (default: 16)")
    group.add_argument(
        "--factored",
        action="store_true",
        help="Train the codebooks as products of the target's embedding and a small matrix",
    )
    group.add_argument(
        "--only",
        type=parts,
        help=f"Train only these parts, separated by commas: {', '.join(PARTS)}",
    )


def _add_loss_arguments(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("loss")
    group.add_argument("--loss", choices=LOSSES, default="ce", help="Loss of a row")
    group.add_argument(
        "--labels",
        choices=("hard", "soft"),
        default="hard",
        help="The text's own tokens, or the target's distribution",
    )
    group.add_argument(
        "--gamma", type=float, help="Decay of the rows' weights (default: half of the block)"
    )
    group.add_argument(
        "--train-block-size",
        type=int,
        help="Rows of a block in training; later rows cost as much as the first ones and count "
        "for less, so a first run may leave them out (default: those of --block-size)",
    )
    group.add_argument(
        "--d-pace", action="store_true", help="Weigh rows by what hangs on them instead"
    )
    group.add_argument(
        "--selector-weight", type=float, default=1.0, help="Weight of the selector's loss"
    )
    group.add_argument(
        "--detach-selector",
        action="store_true",
        help="The selector's loss trains the selector alone",
    )
    group.add_argument(
        "--vocab-sample",
        type=int,
        default=0,
        help="Score only the most frequent ids and a sample of the others (default: all ids)",
    )
    group.add_argument(
        "--negatives", type=int, default=512, help="Ids in that sample, drawn anew each step"
    )


def _add_fit_arguments(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("fit")
    group.add_argument("--batch-size", type=int, default=4, help="Texts of a minibatch")
    group.add_argument("--anchors", type=int, default=64, help="Blocks a text and minibatch")
    group.add_argument(
        "--iters",
        type=int,
        default=1000,
        help="Updates to train for, each of --grad-accumulation-steps minibatches",
    )
    group.add_argument("--learning-rate", type=float, default=6e-4, help="AdamW learning rate")
    group.add_argument(
        "--min-learning-rate", type=float, default=0.0, help="Learning rate at the end"
    )
    group.add_argument("--warmup", type=float, default=0.04, help="Share of iterations to warm up")
    group.add_argument("--weight-decay", type=float, default=0.01, help="AdamW weight decay")
    group.add_argument("--clip", type=float, default=1.0, help="Largest norm of the gradients")
    group.add_argument(
        "--average", type=float, default=0.0, help="Decay of a running average of the weights"
    )
    group.add_argument(
        "--grad-accumulation-steps",
        type=int,
        default=1,
        help="Number of minibatches to accumulate before each optimizer update",
    )
    group.add_argument(
        "--grad-checkpoint",
        action="store_true",
        help="Use gradient checkpointing to reduce memory use",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="What the drafter computes in; its weights are kept in float32",
    )
    group.add_argument(
        "--steps-per-report", type=int, default=10, help="Training steps between loss reports"
    )
    group.add_argument("--save-every", type=int, default=100, help="Training steps between saves")
    group.add_argument(
        "--time-limit",
        type=float,
        help="Minutes after which fit saves and stops; the same command goes on",
    )


def _add_eval_arguments(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("eval and export")
    group.add_argument(
        "--eval-prompts", type=str, help="A file of prompts (default: built in, held out)"
    )
    group.add_argument(
        "--num-eval-prompts", type=int, default=33, help="Prompts of the built-in ones"
    )
    group.add_argument("--eval-max-tokens", type=int, default=96, help="Tokens of an answer")
    group.add_argument(
        "--eval-temp", type=float, nargs="+", default=[0.0], help="Temperatures to decode at"
    )
    group.add_argument("--eval-stride", type=int, default=1, help="Tokens between two anchors")
    group.add_argument(
        "--bits", type=int, choices=(4, 8), help="Quantise the exported drafter (default: bf16)"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line over those of a config file over the defaults.

    Returns:
        Namespace: All options, and in ``given`` the names of those that are no defaults' but were
        given, be it with the default's value.

    Raises:
        FileNotFoundError: if there is no such config file.
        ValueError: naming the field of it, or the stage, that is not known.
    """
    parser = setup_arg_parser()
    args, found = parser.parse_args(argv), {}
    if args.config is not None:
        options = {action.dest: action for action in parser._actions if action.dest in args}
        found = read_options(Path(args.config), options)
        parser.set_defaults(**found)
        args = parser.parse_args(argv)
    # Defaults are only filled in where there is nothing.
    unset = object()
    marks = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), unset)))
    named = {name for name, value in vars(marks).items() if value is not unset}
    named |= {name for name, value in found.items() if value is not None}
    args.given = frozenset(named - {"stage"})
    unknown = [stage for stage in args.stage if stage not in STAGES]
    if unknown:
        raise ValueError(f"`stage` is {unknown[0]!r} but has to be one of {', '.join(STAGES)}.")
    args.stage = [stage for stage in STAGES if stage in args.stage or not args.stage]
    return args
