"""The options of `mlx_dflash2.train`, in the spelling of mlx_lm.lora where it has them."""

import argparse
import math
from pathlib import Path
from typing import Any

import yaml

from .losses import LOSSES
from .start import PARTS

STAGES = ("data", "taps", "fit", "export", "eval")
_NOT_GIVEN = object()
# Lowest value, whether it is excluded, a limit above all values, and the options.
_RANGES = (
    (0, False, math.inf, "seed own_prompts temp selector_weight vocab_sample "
     "min_learning_rate weight_decay eval_temp"),
    (1, False, math.inf, "num_prompts max_tokens data_batch_size negatives batch_size anchors "
     "iters grad_accumulation_steps steps_per_report save_every num_eval_prompts eval_max_tokens "
     "eval_stride"),
    (2, False, math.inf, "max_seq_length block_size train_block_size"),
    (0, True, math.inf, "gamma learning_rate clip time_limit"),
    (1, True, math.inf, "rope_theta"),
    (0, False, 1, "warmup average"),
)  # fmt: skip


def setup_arg_parser(**kwargs: Any) -> argparse.ArgumentParser:
    """Set up and return the argument parser; ``kwargs`` are :class:`ArgumentParser`'s."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.train",
        description="Train a DFlash 2 drafter for a target. Stages: data (the target answers "
        "prompts), taps (its hidden states on these texts are cached), fit, export, eval. Each "
        "resumes where it stopped; without a stage all are run in turn.",
        **kwargs,
    )
    add = parser.add_argument
    add("stage", nargs="*", metavar="stage", help=f"Any of {', '.join(STAGES)} (default: all)")
    add("-c", "--config", help="A YAML configuration file with the training options")
    add(
        "--model",
        help="The path to the local model directory or Hugging Face repo of the target (default: "
        "the embedded one)",
    )
    add(
        "--output-path",
        default="drafter",
        help="Directory for everything that is made; the drafter is in its export folder",
    )
    add("--seed", type=int, default=0, help="The PRNG seed")
    add(
        "--dequantize",
        action="store_true",
        help="Dequantize the target's weights to float32: many times faster on the CPU backend, "
        "but up to eight times larger",
    )
    add(
        "--thinking",
        choices=("on", "off", "both"),
        help="Thinking in the answers, for chat templates with enable_thinking (default: both for "
        "these)",
    )
    _add_data_arguments(parser)
    _add_drafter_arguments(parser)
    _add_loss_arguments(parser)
    _add_fit_arguments(parser)
    _add_eval_arguments(parser)
    return parser


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data and taps").add_argument
    add(
        "--data",
        help="A directory of *.npz shards of the target's answers, in place of the data stage's",
    )
    add("--prompts", help="A JSONL or text file of prompts (default: a built-in generator)")
    add("--num-prompts", type=int, default=2000, help="Prompts from the built-in generator")
    add("--own-prompts", type=int, default=0, help="Prompts that the target writes, in addition")
    add("--max-tokens", type=int, default=256, help="Tokens per answer")
    add("--temp", type=float, default=0.0, help="Sampling temperature of answers")
    add("--top-p", type=float, default=1.0, help="Sampling top-p of answers")
    add("--data-batch-size", type=int, default=32, help="Answers to generate at a time")
    add("--taps", help="The directory of cached taps (default: in the output path)")
    add("--no-cache", action="store_true", help="Compute taps for each batch; do not cache them")
    add("--max-seq-length", type=int, default=2048, help="The longest text to train on, in tokens")


def _add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("drafter").add_argument
    add(
        "--draft-model",
        help="A DFlash 1 or DFlash 2 drafter to start from; missing parts are added",
    )
    add(
        "--init",
        choices=("random", "target"),
        default="target",
        help="Without --draft-model: start from random weights or the target's last layers",
    )
    add("--num-layers", type=int, help="Number of layers (default: 5)")
    add("--block-size", type=int, help="Rows of a block (default: 16)")
    add("--target-layer-ids", type=int, nargs="+", help="Layers of the target to tap")
    add("--mask-token-id", type=int, help="Token id of the rows to draft")
    add("--sliding-window", type=int, help="Window of the drafter's attention")
    add("--intermediate-size", type=int, help="Width of the MLPs")
    add("--rope-theta", type=float, help="Base of the rotary embedding (default: the target's)")
    add("--causal", action="store_true", help="Rows of a block do not see later rows")
    add("--conv-kernel-size", type=int, help="Taps of the convolution, 0 for none (default: 2)")
    add("--selector-rank", type=int, help="Rank of the pair scores, 0 for none (default: 256)")
    add("--selector-top-k", type=int, help="Candidates per row (default: 16)")
    add(
        "--factored",
        action="store_true",
        help="Train the codebooks as products of the target's embedding and a small matrix",
    )
    add(
        "--only",
        type=_parts,
        help=f"Train only these parts, separated by commas: {', '.join(PARTS)}",
    )


def _add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("loss").add_argument
    add("--loss", choices=LOSSES, default="ce", help="Loss of a row")
    add(
        "--labels",
        choices=("hard", "soft"),
        default="hard",
        help="Learn the text's tokens or the target's distribution",
    )
    add("--gamma", type=float, help="Decay of the row weights (default: half of the block)")
    add(
        "--train-block-size",
        type=int,
        help="Rows of a block in training; fewer make steps faster, and the last rows matter least "
        "(default: --block-size)",
    )
    add(
        "--d-pace",
        action="store_true",
        help="Weight each row by the expected acceptance that depends on it (D-PACE)",
    )
    add("--selector-weight", type=float, default=1.0, help="Weight of the selector's loss")
    add(
        "--detach-selector",
        action="store_true",
        help="Train only the selector by the selector's loss",
    )
    add(
        "--vocab-sample",
        type=int,
        default=0,
        help="Score only the most frequent ids and a sample of the others (default: all ids)",
    )
    add("--negatives", type=int, default=512, help="Ids in that sample, drawn anew each step")


def _add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("fit").add_argument
    add("--batch-size", type=int, default=4, help="Texts per minibatch")
    add("--anchors", type=int, default=64, help="Blocks per text and minibatch")
    add(
        "--iters",
        type=int,
        default=1000,
        help="Updates to train for, each of --grad-accumulation-steps minibatches",
    )
    add("--learning-rate", type=float, default=6e-4, help="AdamW learning rate")
    add("--min-learning-rate", type=float, default=0.0, help="Learning rate at the end")
    add("--warmup", type=float, default=0.04, help="Share of iterations to warm up")
    add("--weight-decay", type=float, default=0.01, help="AdamW weight decay")
    add("--clip", type=float, default=1.0, help="Largest norm of the gradients")
    add("--average", type=float, default=0.0, help="Decay of a running average of the weights")
    add(
        "--grad-accumulation-steps",
        type=int,
        default=1,
        help="Number of minibatches to accumulate before each optimizer update",
    )
    add(
        "--grad-checkpoint",
        action="store_true",
        help="Use gradient checkpointing to reduce memory use",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="Dtype to compute in; weights stay in float32",
    )
    add("--steps-per-report", type=int, default=10, help="Training steps between loss reports")
    add("--save-every", type=int, default=100, help="Training steps between saves")
    add(
        "--time-limit",
        type=float,
        help="Minutes after which fit saves and stops; the same command resumes it",
    )


def _add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("eval and export").add_argument
    add("--eval-prompts", help="A file of prompts (default: built in, held out)")
    add("--num-eval-prompts", type=int, default=33, help="Prompts from the built-in generator")
    add("--eval-max-tokens", type=int, default=96, help="Tokens per answer")
    add("--eval-temp", type=float, nargs="+", default=[0.0], help="Temperatures to decode at")
    add("--eval-stride", type=int, default=1, help="Tokens from one anchor to the next")
    add("--bits", type=int, choices=(4, 8), help="Quantize the exported drafter (default: bf16)")


def _parts(text: str) -> list[str]:
    return text.split(",")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line over a config file over the defaults.

    Returns:
        Namespace: All options, and in ``given`` the names of options set explicitly, even if to
        their default.

    Raises:
        FileNotFoundError: if there is no such config file.
        ValueError: naming the stage, or the field of the file, that is not allowed.
    """
    defaults = vars(setup_arg_parser().parse_args([]))
    command = _given(_without_defaults(defaults).parse_args(argv))
    given = _read_config(Path(command["config"]), defaults) if "config" in command else {}
    given |= command
    args = argparse.Namespace(**defaults | given, given=frozenset(given) - {"stage"})
    for stage in args.stage:
        if stage not in STAGES:
            raise ValueError(f"`stage` is {stage!r} but has to be one of {', '.join(STAGES)}.")
    args.stage = [stage for stage in STAGES if stage in args.stage or not args.stage]
    return args


def _without_defaults(defaults: dict[str, Any], **kwargs: Any) -> argparse.ArgumentParser:
    """A parser for :func:`_given`."""
    parser = setup_arg_parser(**kwargs)
    parser.set_defaults(**dict.fromkeys(defaults, _NOT_GIVEN))
    return parser


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if value is not _NOT_GIVEN}


def _read_config(path: Path, defaults: dict[str, Any]) -> dict[str, Any]:
    """Read the options that a config file gives, parsed as on the command line."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no config file {path}.")
    try:
        # This loader keeps every value as the text that it is in the file.
        found = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML: {reason}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold options by name.")
    parser = _without_defaults(defaults, exit_on_error=False)
    given: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in defaults or name == "config":
            raise ValueError(f"`{name}` in {path} is not an option of mlx_dflash2.train.")
        try:
            given |= _parse_one(parser, name, value, defaults[name])
        except (ValueError, argparse.ArgumentError) as error:
            reason = error.message if isinstance(error, argparse.ArgumentError) else error
            raise ValueError(f"`{name}` in {path} is {value!r}: {reason}.") from error
    return given


def _parse_one(
    parser: argparse.ArgumentParser, name: str, value: Any, default: Any
) -> dict[str, Any]:
    """Parse one option of a config file; an empty one without a default is not given."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("it has to be a value or a list of values")
    flag, first = f"--{name.replace('_', '-')}", texts[0].lower()
    if first in ("", "~", "null"):
        if default is None:
            return {}
        raise ValueError("it has to have a value")
    if isinstance(default, bool):
        if first not in ("true", "false"):
            raise ValueError("it has to be true or false")
        return {name: first == "true"}
    if name == "stage":
        argv = texts
    elif name == "only":
        argv = [f"{flag}={','.join(texts)}"]
    else:
        argv = [flag, *texts] if len(texts) > 1 else [f"{flag}={texts[0]}"]
    args, rest = parser.parse_known_args(argv)
    found = _given(args)
    # More values than an option takes are taken for stages.
    if rest or found.keys() != {name}:
        raise ValueError("it has to be one value")
    return found


def check_ranges(args: argparse.Namespace) -> None:
    """Check that numbers are within their ranges.

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """
    for low, open_, limit, names in _RANGES:
        allowed = f"above {low}" if open_ else f"{low} or more"
        allowed += "" if limit == math.inf else f" and below {limit}"
        for name in names.split():
            value = getattr(args, name)
            for number in value if isinstance(value, list) else [value]:
                # Written so that NaN is in no range.
                inside = number is None or (low < number if open_ else low <= number < limit)
                if not inside:
                    raise ValueError(f"`{name}` is {number} but has to be {allowed}.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"`top_p` is {args.top_p} but has to be above 0 and at most 1.")
