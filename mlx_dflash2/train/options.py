"""The options of `mlx_dflash2.train`, in the spelling of mlx_lm.lora where it has them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..cli import options as cli_options
from ..cli.arguments import add_blas_argument
from ..cli.options import Option, Range, add_options, flag
from ..cli.parser import Parser

LOSSES = ("ce", "kl", "tv", "lk")
PARTS = ("backbone", "conv", "selector")
STAGES = ("data", "taps", "fit", "export", "eval")
_NOT_GIVEN = object()
_ANY, _COUNT, _ABOVE, _SHARE = Range(0), Range(1), Range(0, open=True), Range(0, below=1)


def _parts(text: str) -> list[str]:
    return text.split(",")


# fmt: off
_OPTIONS: dict[str, tuple[Option, ...]] = {
    "all stages": (
        Option("model", str, None, None,
            "The path to the local model directory or Hugging Face repo of the target (default: "
            "the embedded one)"),
        Option("output_path", str, "drafter", None,
            "Directory for everything that is made; the drafter is in its export folder"),
        Option("seed", int, 0, _ANY, "The PRNG seed"),
        Option("dequantize", bool, False, None,
            "Dequantize the target's weights to float32: many times faster on the CPU backend, but "
            "up to eight times larger"),
        Option("thinking", ("on", "off", "both"), None, None,
            "Thinking in the answers, for chat templates with enable_thinking (default: both for "
            "these)"),
    ),
    "data and taps": (
        Option("data", str, None, None,
            "A directory of *.npz shards of the target's answers, in place of the data stage's"),
        Option("prompts", str, None, None,
            "A JSONL or text file of prompts (default: a built-in generator)"),
        Option("num_prompts", int, 2000, _COUNT, "Prompts from the built-in generator"),
        Option("own_prompts", int, 0, _ANY, "Prompts that the target writes, in addition"),
        Option("max_tokens", int, 256, _COUNT, "Tokens per answer"),
        Option("temp", float, 0.0, _ANY, "Sampling temperature of answers"),
        Option("top_p", float, 1.0, None, "Sampling top-p of answers"),
        Option("data_batch_size", int, 32, _COUNT, "Answers to generate at a time"),
        Option("taps", str, None, None,
            "The directory of cached taps (default: in the output path)"),
        Option("no_cache", bool, False, None, "Compute taps for each batch; do not cache them"),
        Option("max_seq_length", int, 2048, Range(2), "The longest text to train on, in tokens"),
    ),
    "drafter": (
        Option("draft_model", str, None, None,
            "A DFlash 1 or DFlash 2 drafter to start from; missing parts are added"),
        Option("init", ("random", "target"), "target", None,
            "Without --draft-model: start from random weights or the target's last layers"),
        Option("num_layers", int, None, None, "Number of layers (default: 5)"),
        Option("block_size", int, None, Range(2), "Rows of a block (default: 16)"),
        Option("target_layer_ids", [int], None, None, "Layers of the target to tap"),
        Option("mask_token_id", int, None, None, "Token id of the rows to draft"),
        Option("sliding_window", int, None, None, "Window of the drafter's attention"),
        Option("intermediate_size", int, None, None, "Width of the MLPs"),
        Option("rope_theta", float, None, Range(1, open=True),
            "Base of the rotary embedding (default: the target's)"),
        Option("causal", bool, False, None, "Rows of a block do not see later rows"),
        Option("conv_kernel_size", int, None, None,
            "Taps of the convolution, 0 for none (default: 2)"),
        Option("selector_rank", int, None, None,
            "Rank of the pair scores, 0 for none (default: 256)"),
        Option("selector_top_k", int, None, None, "Candidates per row (default: 16)"),
        Option("factored", bool, False, None,
            "Train the codebooks as products of the target's embedding and a small matrix"),
        Option("only", _parts, None, None,
            f"Train only these parts, separated by commas: {', '.join(PARTS)}"),
    ),
    "loss": (
        Option("loss", LOSSES, "ce", None, "Loss of a row"),
        Option("labels", ("hard", "soft"), "hard", None,
            "Learn the text's tokens or the target's distribution"),
        Option("gamma", float, None, _ABOVE,
            "Decay of the row weights (default: half of the block)"),
        Option("train_block_size", int, None, Range(2),
            "Rows of a block in training; fewer make steps faster, and the last rows matter least "
            "(default: --block-size)"),
        Option("d_pace", bool, False, None,
            "Weight each row by the expected acceptance that depends on it (D-PACE)"),
        Option("selector_weight", float, 1.0, _ANY, "Weight of the selector's loss"),
        Option("detach_selector", bool, False, None,
            "Train only the selector by the selector's loss"),
        Option("vocab_sample", int, 0, _ANY,
            "Score only the most frequent ids and a sample of the others (default: all ids)"),
        Option("negatives", int, 512, _COUNT, "Ids in that sample, drawn anew each step"),
    ),
    "fit": (
        Option("batch_size", int, 4, _COUNT, "Texts per minibatch"),
        Option("anchors", int, 64, _COUNT, "Blocks per text and minibatch"),
        Option("iters", int, 1000, _COUNT,
            "Updates to train for, each of --grad-accumulation-steps minibatches"),
        Option("learning_rate", float, 6e-4, _ABOVE, "AdamW learning rate"),
        Option("min_learning_rate", float, 0.0, _ANY, "Learning rate at the end"),
        Option("warmup", float, 0.04, _SHARE, "Share of iterations to warm up"),
        Option("weight_decay", float, 0.01, _ANY, "AdamW weight decay"),
        Option("clip", float, 1.0, _ABOVE, "Largest norm of the gradients"),
        Option("average", float, 0.0, _SHARE, "Decay of a running average of the weights"),
        Option("grad_accumulation_steps", int, 1, _COUNT,
            "Number of minibatches to accumulate before each optimizer update"),
        Option("grad_checkpoint", bool, False, None,
            "Use gradient checkpointing to reduce memory use"),
        Option("dtype", ("float32", "bfloat16"), "float32", None,
            "Dtype to compute in; weights stay in float32"),
        Option("steps_per_report", int, 10, _COUNT, "Training steps between loss reports"),
        Option("save_every", int, 100, _COUNT, "Training steps between saves"),
        Option("time_limit", float, None, _ABOVE,
            "Minutes after which fit saves and stops; the same command resumes it"),
    ),
    "eval and export": (
        Option("eval_prompts", str, None, None, "A file of prompts (default: built in, held out)"),
        Option("num_eval_prompts", int, 33, _COUNT, "Prompts from the built-in generator"),
        Option("eval_max_tokens", int, 96, _COUNT, "Tokens per answer"),
        Option("eval_temp", [float], [0.0], _ANY, "Temperatures to decode at"),
        Option("eval_stride", int, 1, _COUNT, "Tokens from one anchor to the next"),
        Option("bits", (4, 8), None, None, "Quantize the exported drafter (default: bf16)"),
    ),
}
# fmt: on


def setup_arg_parser(**kwargs: Any) -> argparse.ArgumentParser:
    """Set up and return the argument parser; ``kwargs`` are :class:`ArgumentParser`'s."""
    parser = Parser(
        "mlx_dflash2.train",
        "Train a DFlash 2 drafter for a target. Stages: data (the target answers "
        "prompts), taps (its hidden states on these texts are cached), fit, export, eval. Each "
        "resumes where it stopped; without a stage all are run in turn.",
        usage="%(prog)s [stage ...] [options]",
        **kwargs,
    )
    add = parser.add_argument
    add("stage", nargs="*", metavar="stage", help=f"Any of {', '.join(STAGES)} (default: all)")
    add("-c", "--config", help="A YAML configuration file with the training options")
    for title, options in _OPTIONS.items():
        add_options(parser.add_argument_group(title), options)
    add_blas_argument(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
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
    given = (
        _read_config(Path(command["config"]).expanduser(), defaults) if "config" in command else {}
    )
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
            reason = getattr(error, "message", str(error))
            raise ValueError(f"`{name}` in {path} is {value!r}: {reason}.") from error
    return given


def _parse_one(
    parser: argparse.ArgumentParser, name: str, value: Any, default: Any
) -> dict[str, Any]:
    """Parse one option of a config file; an empty one without a default is not given."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("it has to be a value or a list of values")
    first = texts[0].lower()
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
        argv = [f"{flag(name)}={','.join(texts)}"]
    else:
        argv = [flag(name), *texts] if len(texts) > 1 else [f"{flag(name)}={texts[0]}"]
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
    options = (option for group in _OPTIONS.values() for option in group)
    cli_options.check_ranges(args, options, lambda name: f"`{name}`")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"`top_p` is {args.top_p} but has to be above 0 and at most 1.")
