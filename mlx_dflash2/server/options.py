"""The options of `mlx_dflash2.server`: those of mlx_lm.server, and its own."""

import argparse
import json
from collections.abc import Sequence

from ..cli.arguments import (
    add_drafting_arguments,
    add_model_arguments,
    add_unsupported_arguments,
)
from ..cli.options import Option, Range, add_options, check_ranges
from ..cli.parser import Parser
from ..decode.defaults import (
    COMPLETION_BATCH_SIZE,
    CPU_PREFILL_STEP_SIZE,
    KV_GROUP_SIZE,
    PREFILL_STEP_SIZE,
    QUANTIZED_KV_START,
)

UNSUPPORTED = {"--pipeline": "distributed decoding does not draft; use mlx_lm.server"}
UNLIMITED = 1 << 63
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FROM_0, _FROM_1 = Range(0), Range(1)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def size(text: str) -> int:
    """Parse a number of bytes, with K, M, G or T behind it, and perhaps B."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number = text.strip().upper().removesuffix("B")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        count = float(number.removesuffix(unit)) * units[unit]
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 8GB") from error
    if not 0 <= count < UNLIMITED:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return int(count)


TEMPLATE = (
    Option("chat_template", str, "", None, "A chat template for the tokenizer"),
    Option(
        "use_default_chat_template",
        bool,
        False,
        None,
        "Use the default chat template if the tokenizer has none",
    ),
    Option(
        "chat_template_args",
        json.loads,
        "{}",
        None,
        """Arguments for the chat template as a JSON object, e.g. '{"enable_thinking":false}'""",
    ),
)
NETWORK = (
    Option("host", str, "127.0.0.1", None, "Where to listen"),
    Option("port", int, 8080, Range(0, below=2**16), "The port, 0 for a free one"),
    Option(
        "allowed_origins",
        _names,
        (),
        None,
        "Origins of web pages that may use the server, separated by commas, or * for all "
        "(default: none)",
    ),
    Option(
        "allowed_hosts",
        _names,
        (),
        None,
        "More names that clients may call this server by, separated by commas, or * for all "
        "(default: this machine's name and addresses)",
    ),
    Option(
        "api_key",
        str,
        None,
        None,
        "A key that requests have to bring as `Authorization: Bearer KEY`",
    ),
    Option(
        "max_queue", int, 64, _FROM_0, "Requests that may wait; more are refused with status 429"
    ),
    Option("log_level", LEVELS, "INFO", None, "What to log; only DEBUG logs prompts and answers"),
)
REQUESTS = (
    Option("temp", float, 0.0, None, "Sampling temperature of requests that do not say it"),
    Option("top_p", float, 1.0, None, "Their nucleus sampling top-p"),
    Option("top_k", int, 0, None, "Their top-k sampling, 0 for all tokens"),
    Option("min_p", float, 0.0, None, "Their min-p sampling"),
    Option("max_tokens", int, 512, _FROM_1, "Their maximum number of tokens to generate"),
)
WORK = (
    Option(
        "num_draft_tokens",
        int,
        None,
        _FROM_0,
        "Drafts to verify in a round: another way to say --verify-width, which is one more; 0 "
        "does not draft unless a request asks for it (default: what is fastest in each round)",
    ),
    Option(
        "decode_concurrency",
        int,
        COMPLETION_BATCH_SIZE,
        _FROM_1,
        "Requests to decode at a time",
    ),
    Option(
        "prompt_concurrency",
        int,
        8,
        _FROM_1,
        "Prompts to finish between two rounds of the others",
    ),
    Option(
        "prefill_step_size",
        int,
        None,
        _FROM_1,
        "Prompt tokens to process between two rounds of the others "
        f"(default: {PREFILL_STEP_SIZE}, {CPU_PREFILL_STEP_SIZE} on the CPU)",
    ),
    Option("kv_bits", int, None, None, "Number of bits for KV cache quantization; requests are "
           "then answered one at a time"),
    Option("kv_group_size", int, KV_GROUP_SIZE, None, "Group size for KV cache quantization"),
    Option(
        "quantized_kv_start",
        int,
        QUANTIZED_KV_START,
        None,
        "When --kv-bits is set, start quantizing the KV cache from this step onwards",
    ),
)  # fmt: skip
CACHES = (
    Option(
        "prompt_cache_size",
        int,
        10,
        _FROM_1,
        "Maximum number of distinct caches to hold in the prompt cache",
    ),
    Option(
        "prompt_cache_bytes",
        size,
        None,
        None,
        "Maximum size of the prompt cache and the running requests' caches, e.g. 8GB",
    ),
    Option(
        "prompt_cache_dir",
        str,
        None,
        None,
        "A folder that prompt caches are written to as well, so that they survive a restart",
    ),
    Option(
        "prompt_cache_dir_bytes", size, "10GB", None, "Maximum size of the files in that folder"
    ),
)
GROUPS = (TEMPLATE, NETWORK, REQUESTS, WORK, CACHES)


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser("mlx_dflash2.server", "Serve a target with a drafter behind OpenAI's API.")
    add_model_arguments(parser)
    add_drafting_arguments(parser)
    for options in GROUPS:
        add_options(parser, options)
    add_unsupported_arguments(parser, UNSUPPORTED)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)


def prepare_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments that are out of range before any weights are read, and join two into one.

    A number of drafts becomes the verify width; 0 stays, as what requests do by default.

    Raises:
        ValueError: in one line, naming the option.
    """
    for options in GROUPS:
        check_ranges(args, options)
    if not isinstance(args.chat_template_args, dict):
        raise ValueError("--chat-template-args has to be a JSON object.")
    if args.api_key is not None and not args.api_key.strip():
        raise ValueError("--api-key is empty.")
    if args.num_draft_tokens is not None and args.verify_width is not None:
        raise ValueError("--num-draft-tokens and --verify-width say the same; give one of them.")
    if args.num_draft_tokens:
        args.verify_width, args.num_draft_tokens = args.num_draft_tokens + 1, None
