"""Command-line arguments that several commands share, in mlx-lm's spellings."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..decode.defaults import (
    COPY_DRAFTS,
    COPY_DRAFTS_DEFAULT,
    CPU_PREFILL_STEP_SIZE,
    KV_GROUP_SIZE,
    PREFILL_STEP_SIZE,
    QUANTIZED_KV_START,
)
from .outputs import check_file
from .parser import UnsupportedAction


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target: what mlx-lm loads, and how."""
    group = parser.add_argument_group("target")
    group.add_argument(
        "--model",
        type=str,
        default=None,
        help="The path to the local model directory or Hugging Face repo of the target (default: "
        "the embedded pair)",
    )
    group.add_argument("--revision", default=None, help="Revision of the target's Hub repo")
    group.add_argument(
        "--adapter-path",
        type=str,
        help="Optional path for the trained adapter weights and config.",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Enable trusting remote code for the target and its tokenizer",
    )
    group.add_argument(
        "--quantize-activations",
        "-qa",
        action="store_true",
        help="Quantize activations using the same quantization config as the corresponding layer.",
    )
    group.add_argument(
        "--extra-eos-token",
        type=str,
        default=(),
        nargs="+",
        help="Add tokens to the list of EOS tokens that stop generation.",
    )
    group.add_argument(
        "--no-kernels",
        action="store_true",
        help="Use none of this package's Metal kernels, only MLX's own",
    )
    add_dense_argument(group)
    add_blas_argument(group)


def add_ranks_argument(parser: argparse.ArgumentParser, check: bool = True) -> None:
    """Let `mlx.launch` start the command in several processes that share one target."""
    parser.set_defaults(shardable=True)
    if check:
        parser.add_argument(
            "--check-ranks",
            action="store_true",
            help="Under mlx.launch, compare what the ranks decide in each round",
        )


def add_dense_argument(parser: argparse._ActionsContainer) -> None:
    """Add how the pair is stored on MLX's CPU backend."""
    parser.add_argument(
        "--dense",
        action="store_true",
        help="On MLX's CPU backend, compute with the quantized weights of target and drafter "
        "unpacked to float32, which is faster and takes more memory (default: only for the "
        "embedded pair)",
    )


def add_blas_argument(parser: argparse._ActionsContainer) -> None:
    """Add the flag that :func:`mlx_dflash2.cli.start.start` looks for."""
    parser.add_argument(
        "--no-fast-blas",
        action="store_true",
        help="On Linux, let MLX multiply with the BLAS of its own package, which is slow",
    )


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt and the chat template around it."""
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--prompt",
        "-p",
        default="hello",
        help="Message to be processed by the model ('-' reads from stdin)",
    )
    add_template_arguments(parser)
    group.add_argument(
        "--prefill-response",
        default=None,
        help="Prefill response to be used for the chat template",
    )
    group.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="Use the raw prompt without the tokenizer's chat template.",
    )


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the chat template puts around a message."""
    group = parser.add_argument_group("chat template")
    group.add_argument(
        "--system-prompt", default=None, help="System prompt to be used for the chat template"
    )
    group.add_argument(
        "--chat-template-config",
        type=json_object,
        default=None,
        help="Additional config for `apply_chat_template`. Should be a dictionary of string keys "
        "to values represented as a JSON decodable string.",
    )


def add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the drafter, and how much of its block is used."""
    group = parser.add_argument_group("drafter")
    add_draft_model_arguments(group)
    add_copy_argument(group)
    add_draft_vocab_argument(group)
    group.add_argument(
        "--block-size",
        type=int,
        default=None,
        help="Rows of the drafter's block, anchor included (default: as it was trained)",
    )
    group.add_argument(
        "--verify-width",
        type=int,
        default=None,
        help="Rows of the block that the target verifies; 1 does not draft (default: chosen each "
        "round)",
    )


def add_copy_argument(parser: argparse._ActionsContainer) -> None:
    """Add copies from the text so far, beside the drafter or instead of it."""
    parser.add_argument(
        "--copy-drafts",
        choices=COPY_DRAFTS,
        default=COPY_DRAFTS_DEFAULT,
        help="Also draft what followed where the text repeats itself; 'only' needs no drafter "
        "(default: %(default)s)",
    )


def add_draft_vocab_argument(parser: argparse._ActionsContainer) -> None:
    """Add which tokens the drafter drafts."""
    parser.add_argument(
        "--draft-vocab",
        default=None,
        metavar="N|FILE",
        help="Let the drafter draft only the N tokens that the tokenizer merges first, or the ids "
        "in a file; no token of the answer changes (default: all)",
    )


def add_draft_model_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the drafter, and how it is loaded."""
    add_draft_model_argument(parser)
    parser.add_argument(
        "--draft-bits",
        type=int,
        choices=(4, 8, 16),
        default=None,
        help="Quantize the drafter's large matrices when it is loaded; 16 leaves them as they are "
        "stored (default: 4 on a GPU, 16 on the CPU)",
    )


def add_draft_model_argument(parser: argparse._ActionsContainer) -> None:
    """Add the drafter alone."""
    parser.add_argument(
        "--draft-model",
        type=str,
        default=None,
        help="The path to the local directory or Hugging Face repo of the DFlash drafter "
        "(default: the known drafter of the target)",
    )


def add_max_tokens_argument(parser: argparse.ArgumentParser, default: int) -> None:
    """Add the length of an answer."""
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=default,
        help="Maximum number of tokens to generate, -1 for no limit (default: %(default)s)",
    )


def add_stop_argument(parser: argparse.ArgumentParser) -> None:
    """Add what ends an answer beside an EOS token."""
    parser.add_argument(
        "--stop",
        nargs="+",
        default=None,
        help="Texts that end the answer; they are not printed",
    )


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the answer has to follow."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema",
        metavar="FILE",
        type=existing_file,
        help="A JSON schema that the answer has to follow",
    )
    group.add_argument("--regex", help="A regular expression that the answer has to match")
    group.add_argument(
        "--grammar",
        metavar="FILE",
        type=existing_file,
        help="A grammar in Lark's form that the answer has to follow",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are drawn: mlx-lm's settings, and its logits processors."""
    group = parser.add_argument_group("sampling")
    settings = (
        ("--temp", float, 0.0, "Sampling temperature"),
        ("--top-p", float, 1.0, "Sampling top-p"),
        ("--min-p", float, 0.0, "Sampling min-p"),
        ("--top-k", int, 0, "Sampling top-k"),
        ("--xtc-probability", float, 0.0, "Probability of XTC sampling to happen each next token"),
        ("--xtc-threshold", float, 0.1, "Probability that XTC's token candidates need to reach"),
        ("--min-tokens-to-keep", int, 1, "Minimum tokens to keep for min-p sampling."),
        ("--seed", int, None, "PRNG seed"),
        ("--repetition-penalty", float, None, "Factor on the logits of repeated tokens"),
        ("--repetition-context-size", int, 20, "Tokens that the repetition penalty looks back"),
        ("--presence-penalty", float, None, "Subtracted from the logit of a token that occurred"),
        ("--presence-context-size", int, 20, "Tokens that the presence penalty looks back"),
        ("--frequency-penalty", float, None, "Subtracted from a logit for each occurrence"),
        ("--frequency-context-size", int, 20, "Tokens that the frequency penalty looks back"),
    )
    for name, kind, default, text in settings:
        group.add_argument(name, type=kind, default=default, help=f"{text} (default: {default})")
    group.add_argument(
        "--logit-bias",
        type=logit_bias,
        default=None,
        help="Numbers to add to logits, as a JSON object of token ids and numbers",
    )


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target's key-value cache, and how the prompt is processed."""
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--max-kv-size", type=int, default=None, help="Set the maximum key-value cache size"
    )
    group.add_argument(
        "--prefill-step-size",
        type=int,
        default=None,
        help="Number of prompt tokens to process at a time. Smaller values lower peak memory "
        f"during prefill (default: {PREFILL_STEP_SIZE}, {CPU_PREFILL_STEP_SIZE} on the CPU)",
    )
    group.add_argument(
        "--kv-bits",
        type=int,
        default=None,
        help="Number of bits for KV cache quantization. Defaults to no quantization.",
    )
    group.add_argument(
        "--kv-group-size",
        type=int,
        default=KV_GROUP_SIZE,
        help="Group size for KV cache quantization.",
    )
    group.add_argument(
        "--quantized-kv-start",
        type=int,
        default=QUANTIZED_KV_START,
        help="When --kv-bits is set, start quantizing the KV cache from this step onwards.",
    )


def add_unsupported_arguments(parser: argparse.ArgumentParser, reasons: dict[str, str]) -> None:
    """Add flags of mlx-lm's command that are not supported, each with the reason."""
    for name, reason in reasons.items():
        parser.add_argument(name, action=UnsupportedAction, nargs="*", help=reason)


def boolean(text: str) -> bool:
    """Parse an argument as mlx_lm.generate's ``--verbose`` does."""
    return text.lower() not in ("false", "f")


def logit_bias(text: str) -> dict[int, float]:
    """Parse an argument that maps token ids to numbers."""
    try:
        return {int(token): float(bias) for token, bias in json_object(text).items()}
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"token ids and numbers are needed: {error}") from error


def safetensors_file(text: str) -> str:
    """Parse an argument that names a file to write, and check now that it can be written."""
    path = Path(text).expanduser()
    if path.suffix != ".safetensors":
        raise argparse.ArgumentTypeError(f"{text} has to end in .safetensors")
    try:
        check_file(path, "the new file", replaced=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return str(path)


def existing_file(text: str) -> Path:
    """Parse an argument that names a file to read."""
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path


def json_object(text: str) -> dict[str, Any]:
    """Parse an argument that holds a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, not {text}")
    return value
