"""Command-line arguments that several commands share, in mlx-lm's spellings."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..decode.kv_quantization import KVQuantization
from ..decode.sampling import check_seed, make_logits_processors, make_sampler
from ..decode.text import StopStrings, check_budget


def add_model_arguments(parser: argparse.ArgumentParser):
    """The target: what mlx-lm loads, and how."""
    parser.add_argument(
        "--model",
        type=str,
        default=None,
        help="The path to the local model directory or Hugging Face repo of the target. Without "
        "it the embedded pair is used",
    )
    parser.add_argument(
        "--adapter-path",
        type=str,
        help="Optional path for the trained adapter weights and config.",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Enable trusting remote code for the target's tokenizer",
    )
    parser.add_argument(
        "--quantize-activations",
        "-qa",
        action="store_true",
        help="Quantize activations using the same quantization config as the corresponding layer.",
    )
    parser.add_argument(
        "--extra-eos-token",
        type=str,
        default=(),
        nargs="+",
        help="Add tokens in the list of eos tokens that stop generation.",
    )


def add_prompt_arguments(parser: argparse.ArgumentParser):
    """The prompt and the chat template around it."""
    parser.add_argument(
        "--prompt",
        "-p",
        default="hello",
        help="Message to be processed by the model ('-' reads from stdin)",
    )
    add_template_arguments(parser)
    parser.add_argument(
        "--prefill-response",
        default=None,
        help="Prefill response to be used for the chat template",
    )
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="Use the raw prompt without the tokenizer's chat template.",
    )


def add_template_arguments(parser: argparse.ArgumentParser):
    """What the chat template puts around a message."""
    parser.add_argument(
        "--system-prompt", default=None, help="System prompt to be used for the chat template"
    )
    parser.add_argument(
        "--chat-template-config",
        type=json_object,
        default=None,
        help="Additional config for `apply_chat_template`. Should be a dictionary of string keys "
        "to values represented as a JSON decodable string.",
    )


def add_drafting_arguments(parser: argparse.ArgumentParser):
    """The drafter, and how much of its block is used."""
    add_draft_model_arguments(parser)
    add_copy_argument(parser)
    parser.add_argument(
        "--block-size",
        type=int,
        default=None,
        help="Rows of the drafter's block, the anchor included (default: as it was trained)",
    )
    parser.add_argument(
        "--verify-width",
        type=int,
        default=None,
        help="The most rows that the target verifies, from 2 (default: the block size, and one "
        "more than there are copies)",
    )


def add_copy_argument(parser: argparse.ArgumentParser) -> None:
    """Copies from the text so far, beside the drafter or instead of it."""
    parser.add_argument(
        "--copy-drafts",
        choices=("off", "with", "only"),
        default="with",
        help="Also draft what followed where the text repeats itself; 'only' needs no drafter "
        "(default: %(default)s)",
    )


def add_draft_model_arguments(parser: argparse.ArgumentParser):
    """The drafter, and how it is loaded."""
    add_draft_model_argument(parser)
    parser.add_argument(
        "--draft-bits",
        type=int,
        choices=(4, 8),
        default=None,
        help="Quantize the drafter's large matrices when it is loaded",
    )


def add_draft_model_argument(parser: argparse.ArgumentParser):
    """The drafter alone."""
    parser.add_argument(
        "--draft-model",
        type=str,
        default=None,
        help="The path to the local directory or Hugging Face repo of the DFlash drafter. It may "
        "be left out for targets with a known one",
    )


def add_max_tokens_argument(parser: argparse.ArgumentParser, default: int):
    """The length of an answer."""
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=default,
        help="Maximum number of tokens to generate, -1 for no limit (default: %(default)s)",
    )


def add_stop_argument(parser: argparse.ArgumentParser):
    """What ends an answer beside an EOS token."""
    parser.add_argument(
        "--stop",
        nargs="+",
        default=None,
        help="Texts that end the answer; no part of one is printed",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser, seed: int | None = None):
    """How tokens are drawn: mlx-lm's settings, and its logits processors."""
    settings = (
        ("--temp", float, 0.0, "Sampling temperature"),
        ("--top-p", float, 1.0, "Sampling top-p"),
        ("--min-p", float, 0.0, "Sampling min-p"),
        ("--top-k", int, 0, "Sampling top-k"),
        ("--xtc-probability", float, 0.0, "Probability of XTC sampling to happen each next token"),
        ("--xtc-threshold", float, 0.1, "Probability that XTC's token candidates need to reach"),
        ("--min-tokens-to-keep", int, 1, "Minimum tokens to keep for min-p sampling."),
        ("--seed", int, seed, "PRNG seed"),
        ("--repetition-penalty", float, None, "Factor on the logits of repeated tokens"),
        ("--repetition-context-size", int, 20, "Tokens that the repetition penalty looks back"),
        ("--presence-penalty", float, None, "Taken from the logit of a token that occurred"),
        ("--presence-context-size", int, 20, "Tokens that the presence penalty looks back"),
        ("--frequency-penalty", float, None, "Taken from a logit for each time it occurred"),
        ("--frequency-context-size", int, 20, "Tokens that the frequency penalty looks back"),
    )
    for name, kind, default, text in settings:
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        "--logit-bias",
        type=logit_bias,
        default=None,
        help="Added to logits, as a JSON object of token ids and numbers",
    )


SAMPLING = (
    "temp",
    "top_p",
    "min_p",
    "min_tokens_to_keep",
    "top_k",
    "xtc_probability",
    "xtc_threshold",
)
PROCESSORS = (
    "logit_bias",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
)
CACHE = ("max_kv_size", "prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")
LOADING = ("model", "draft_model", "draft_bits", "adapter_path", "trust_remote_code")
DRAFTING = ("block_size", "verify_width")


def named(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments that a function takes under the same names."""
    return {name: getattr(args, name) for name in names}


def load_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of :func:`mlx_dflash2.pairs.load.load_pair`."""
    return named(args, LOADING) | {
        "tokenizer_config": {"trust_remote_code": args.trust_remote_code},
        "model_config": {"quantize_activations": args.quantize_activations},
    }


def sampling_options(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The generation options ``sampler``, ``logits_processors`` and ``seed`` of the arguments.

    Raises:
        ValueError: if a setting is out of its range.
    """
    # MLX does not check indices: what one beyond the logits does is undefined.
    size = len(tokenizer.get_vocab())
    for token in args.logit_bias or ():
        if not 0 <= token < size:
            raise ValueError(f"`logit_bias` names token {token} but there are 0 to {size - 1}.")
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    return {
        "sampler": make_sampler(**named(args, SAMPLING), xtc_special_tokens=special),
        "logits_processors": make_logits_processors(**named(args, PROCESSORS)),
        "seed": args.seed,
    }


def check_generation(args: argparse.Namespace):
    """Refuse generation options that are out of range, before any weights are read.

    Raises:
        ValueError: in one line, naming the option.
    """
    if args.max_tokens == 0:
        raise ValueError("`max_tokens` has to be non-zero (-1 for no limit).")
    check_budget(args.max_tokens, args.prefill_step_size)
    check_seed(args.seed)
    make_sampler(**named(args, SAMPLING))
    KVQuantization(args.kv_bits, args.kv_group_size, args.quantized_kv_start).check(())
    StopStrings(args.stop)


def add_cache_arguments(parser: argparse.ArgumentParser):
    """The target's key-value cache, and the prompt's way into it."""
    parser.add_argument(
        "--max-kv-size", type=int, default=None, help="Set the maximum key-value cache size"
    )
    parser.add_argument(
        "--prefill-step-size",
        type=int,
        default=2048,
        help="Number of prompt tokens to process at a time. Smaller values lower peak memory "
        "during prefill (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-bits",
        type=int,
        default=None,
        help="Number of bits for KV cache quantization. Defaults to no quantization.",
    )
    parser.add_argument(
        "--kv-group-size", type=int, default=64, help="Group size for KV cache quantization."
    )
    parser.add_argument(
        "--quantized-kv-start",
        type=int,
        default=5000,
        help="When --kv-bits is set, start quantizing the KV cache from this step onwards.",
    )


class Refused(argparse.Action):
    """A flag of mlx-lm that has no meaning here: using it is an error that says why."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} is not supported: {self.help}")


def add_refused_arguments(parser: argparse.ArgumentParser, reasons: dict[str, str]):
    """Flags of mlx-lm's command that would be ignored, each with what to do instead."""
    for name, reason in reasons.items():
        parser.add_argument(name, action=Refused, nargs="*", help=reason)


def logit_bias(text: str) -> dict[int, float]:
    """An argument that maps token ids to numbers."""
    try:
        return {int(token): float(bias) for token, bias in json_object(text).items()}
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"token ids and numbers are needed: {error}") from error


def safetensors_file(text: str) -> str:
    """An argument that names a file to be written: better refused before an answer than after."""
    path = Path(text).expanduser()
    if path.suffix != ".safetensors":
        raise argparse.ArgumentTypeError(f"{text} has to end in .safetensors")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return str(path)


def json_object(text: str) -> dict[str, Any]:
    """An argument that holds a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, not {text}")
    return value
