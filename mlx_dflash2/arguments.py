"""Command-line arguments that several commands share, in mlx-lm's spellings."""

import argparse
import json
from typing import Any


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
    parser.add_argument(
        "--system-prompt", default=None, help="System prompt to be used for the chat template"
    )
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
        help="Rows of the block that the target verifies, from 2 (default: the block size)",
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


def json_object(text: str) -> dict[str, Any]:
    """An argument that holds a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, not {text}")
    return value
