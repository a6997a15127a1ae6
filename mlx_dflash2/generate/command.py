"""The `mlx_dflash2.generate` command."""

import argparse
import sys

import mlx.core as mx
from mlx_lm.generate import str2bool

from ..arguments import add_drafting_arguments, add_model_arguments, add_prompt_arguments
from ..console import note, prefill_progress, run
from ..load_pair import load_pair
from ..stats import Stats
from ..text import chat_prompt
from .api import DEFAULT_PREFILL_STEP_SIZE, stream_generate


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.generate", description="Generate text from a target with a drafter."
    )
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add_drafting_arguments(parser)
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=100,
        help="Maximum number of tokens to generate, -1 for no limit (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-step-size",
        type=int,
        default=DEFAULT_PREFILL_STEP_SIZE,
        help="Number of prompt tokens to process at a time. Smaller values lower peak memory "
        "during prefill (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=None, help="PRNG seed")
    parser.add_argument(
        "--verbose",
        type=str2bool,
        default=True,
        help="Print a summary on stderr (default: True); 'False' or 'F' prints only the response",
    )
    return parser


def _command(args: argparse.Namespace):
    if args.seed is not None:
        mx.random.seed(args.seed)
    # Read before the models are: an empty prompt should not have to wait for them.
    prompt = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    pair = load_pair(
        args.model,
        args.draft_model,
        draft_bits=args.draft_bits,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        pair.tokenizer.add_eos_token(token)
    prompt = chat_prompt(
        pair.tokenizer,
        prompt,
        system_prompt=args.system_prompt,
        prefill_response=args.prefill_response,
        use_template=not args.ignore_chat_template,
        template_config=args.chat_template_config,
    )
    stats = Stats()
    with prefill_progress() as progress:
        for response in stream_generate(
            pair.model,
            pair.tokenizer,
            prompt,
            args.max_tokens,
            draft_model=pair.drafter,
            block_size=args.block_size,
            verify_width=args.verify_width,
            prefill_step_size=args.prefill_step_size,
            prompt_progress_callback=progress,
            stats=stats,
        ):
            print(response.text, end="", flush=True)
    print()
    if args.verbose:
        note(stats.summary())


def main():
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
