"""The `mlx_dflash2.server` command."""

import argparse
import json
import logging
import signal
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import get_system_fingerprint
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..cli.arguments import add_drafting_arguments, add_refused_arguments
from ..cli.console import note, run
from ..decode.kv_quantization import KVQuantization
from ..decode.sampling import make_sampler
from ..decode.text import check_budget
from .access import ANY, Access
from .generator import Generator
from .handler import Handler
from .http import Server
from .limits import DRAIN_SECONDS, SPARE_CONNECTIONS, Queue
from .pair import DEFAULT_MODEL, PairProvider
from .schema import Defaults
from .spill import PromptFolder

REFUSED = {"--pipeline": "distributed decoding does not draft; use mlx_lm.server"}
LOOPBACK = ("127.0.0.1", "::1", "localhost")
UNLIMITED = 1 << 63


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.server",
        description="Serve a target with a drafter behind an OpenAI API.",
    )
    _add_model_arguments(parser)
    _add_network_arguments(parser)
    _add_request_arguments(parser)
    _add_work_arguments(parser)
    add_refused_arguments(parser, REFUSED)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=str,
        default=None,
        help="The path to the local model directory or Hugging Face repo of the target (default: "
        "the embedded pair)",
    )
    parser.add_argument(
        "--adapter-path",
        type=str,
        help="Optional path for the trained adapter weights and config.",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Enable trusting remote code for the target and its tokenizer",
    )
    add_drafting_arguments(parser)
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        default=None,
        help="Drafts to verify in a round: another way to say --verify-width, which is one more; "
        "0 does not draft unless a request asks for it (default: what is fastest in each round)",
    )
    parser.add_argument(
        "--chat-template", type=str, default="", help="A chat template for the tokenizer"
    )
    parser.add_argument(
        "--use-default-chat-template",
        action="store_true",
        help="Use the default chat template if the tokenizer has none",
    )
    parser.add_argument(
        "--chat-template-args",
        type=json.loads,
        default="{}",
        help="Arguments for the chat template as a JSON object, e.g. "
        """'{"enable_thinking":false}'""",
    )


def _add_network_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", type=str, default="127.0.0.1", help="Where to listen (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="The port, 0 for a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--allowed-origins",
        type=_names,
        default=(),
        help="Origins of web pages that may use the server, separated by commas, or * for all "
        "(default: none)",
    )
    parser.add_argument(
        "--allowed-hosts",
        type=_names,
        default=(),
        help="More names that clients may call this server by, separated by commas, or * for all "
        "(default: this machine's name and addresses)",
    )
    parser.add_argument(
        "--api-key",
        type=str,
        default=None,
        help="A key that requests have to bring as `Authorization: Bearer KEY`",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=64,
        help="Requests that may wait; more are refused with status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        type=str,
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        help="What to log; only DEBUG logs prompts and answers (default: %(default)s)",
    )


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    for name, kind, default, text in (
        ("--temp", float, 0.0, "Sampling temperature"),
        ("--top-p", float, 1.0, "Nucleus sampling top-p"),
        ("--top-k", int, 0, "Top-k sampling, 0 for all tokens"),
        ("--min-p", float, 0.0, "Min-p sampling"),
        ("--max-tokens", int, 512, "Maximum number of tokens to generate"),
    ):
        parser.add_argument(
            name,
            type=kind,
            default=default,
            help=f"{text}, where a request does not say it (default: {default})",
        )


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--decode-concurrency",
        type=int,
        default=32,
        help="Requests to decode at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-concurrency",
        type=int,
        default=8,
        help="Prompts to finish between two rounds of the others (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-step-size",
        type=int,
        default=2048,
        help="Prompt tokens to process between two rounds of the others (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-cache-size",
        type=int,
        default=10,
        help="Maximum number of distinct caches to hold in the prompt cache (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-cache-bytes",
        type=_size,
        default=None,
        help="Maximum size of the prompt cache and the running requests' caches, e.g. 8GB",
    )
    parser.add_argument(
        "--prompt-cache-dir",
        type=str,
        default=None,
        help="A folder that prompt caches are written to as well, so that they survive a restart",
    )
    parser.add_argument(
        "--prompt-cache-dir-bytes",
        type=_size,
        default="10GB",
        help="Maximum size of the files in that folder (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-bits",
        type=int,
        default=None,
        help="Number of bits for KV cache quantization; requests are then answered one at a time",
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _size(text: str) -> int:
    """A number of bytes, with K, M, G or T behind it, and perhaps B."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number = text.strip().upper().removesuffix("B")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        size = float(number.removesuffix(unit)) * units[unit]
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 8GB") from error
    if not 0 <= size < UNLIMITED:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return int(size)


def prepare_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments that are out of range before any weights are read, and join two into one.

    A number of drafts becomes the verify width; 0 stays, as what requests do by default.

    Raises:
        ValueError: in one line, naming the option.
    """
    for name in ("decode_concurrency", "prompt_concurrency", "prompt_cache_size", "max_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"`{name}` has to be 1 or more but is {getattr(args, name)}.")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"`port` has to be from 0 to {2**16 - 1} but is {args.port}.")
    if args.max_queue < 0:
        raise ValueError(f"`max_queue` has to be 0 or more but is {args.max_queue}.")
    if args.num_draft_tokens is not None and args.verify_width is not None:
        raise ValueError("`num_draft_tokens` and `verify_width` say the same; give one of them.")
    if args.num_draft_tokens is not None and args.num_draft_tokens < 0:
        raise ValueError(f"`num_draft_tokens` has to be 0 or more but is {args.num_draft_tokens}.")
    if args.num_draft_tokens:
        args.verify_width, args.num_draft_tokens = args.num_draft_tokens + 1, None
    if not isinstance(args.chat_template_args, dict):
        raise ValueError("`chat_template_args` has to be a JSON object.")
    if args.api_key is not None and not args.api_key.strip():
        raise ValueError("`api_key` is empty.")
    if args.chat_template and Path(args.chat_template).is_file():
        raise ValueError("`chat_template` has to be the template itself, not a file.")
    check_budget(args.max_tokens, args.prefill_step_size)
    make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k)
    KVQuantization(args.kv_bits, args.kv_group_size, args.quantized_kv_start).check(())


def make_defaults(args: argparse.Namespace, provider: PairProvider) -> Defaults:
    """What requests may leave out, and what they may say.

    Raises:
        ValueError: if an option does not fit the pair.
    """
    vocab_size, block = (
        provider.target.vocab_size,
        args.block_size or provider.pair.drafter.block_size,
    )
    if args.top_k >= vocab_size:
        raise ValueError(f"`top_k` has to be below {vocab_size} but is {args.top_k}.")
    return Defaults(
        max_tokens=args.max_tokens,
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        vocab_size=provider.target.num_embeddings,
        max_draft_tokens=(args.verify_width or block) - 1,
        draft_names=frozenset((*provider.draft_names, DEFAULT_MODEL)),
        drafts=args.num_draft_tokens != 0,
        adapter=args.adapter_path,
    )


class Service:
    """The generation thread and the listening socket, started together and stopped in order.

    Args:
        args (argparse.Namespace): The command's arguments.
        provider (PairProvider): The pair, loaded.

    Raises:
        OSError: if the address cannot be listened on.
        ValueError: if an option does not fit the pair, or the folder of caches is in use.
    """

    def __init__(self, args: argparse.Namespace, provider: PairProvider):
        defaults = make_defaults(args, provider)
        running = 1 if provider.one_at_a_time else args.decode_concurrency
        self.queue = Queue(running, args.max_queue)
        access = Access(args.host, args.api_key, args.allowed_origins, args.allowed_hosts)
        make_handler: Any = partial(
            Handler,
            access=access,
            queue=self.queue,
            defaults=defaults,
            system_fingerprint=get_system_fingerprint(),
        )
        self.http = Server(
            args.host,
            args.port,
            lambda *request: make_handler(self.generator, *request),
            self.queue.limit + SPARE_CONNECTIONS,
        )
        most = UNLIMITED if args.prompt_cache_bytes is None else args.prompt_cache_bytes
        self.folder = _open_folder(args, provider)
        cache = LRUPromptCache(args.prompt_cache_size, most)
        self.generator = Generator(provider, cache, self.folder)
        self.http.start()

    def stop(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Let nobody in, wait for those inside, and stop; false if some were cut short."""
        self.queue.close()
        self.http.stop()
        done = self.queue.wait_empty(seconds)
        self.generator.stop_and_join()
        if self.folder is not None:
            self.folder.close()
        # Their answers are errors now, which take a moment to be sent.
        return done or not self.queue.wait_empty(1.0)


def _open_folder(args: argparse.Namespace, provider: PairProvider) -> PromptFolder | None:
    if args.prompt_cache_dir is None:
        return None
    return PromptFolder(
        args.prompt_cache_dir, args.prompt_cache_dir_bytes, provider.model, provider.draft_model
    )


def _command(args: argparse.Namespace) -> None:
    prepare_arguments(args)
    logging.basicConfig(
        level=getattr(logging, args.log_level), format="%(asctime)s - %(levelname)s - %(message)s"
    )
    maybe_set_recommended_wired_limit()
    provider = PairProvider(args)
    provider.load_default()
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        # The second time the process ends at once.
        signal.signal(number, signal.SIG_DFL)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    service = Service(args, provider)
    try:
        note(f"{provider.name} with the drafter {provider.draft_names[0]} at {service.http.url}")
        for line in _warnings(args, provider):
            note(line)
        stopped.wait()
        note("Stopping: requests that are running may finish.")
    finally:
        if not service.stop():
            note(f"Requests that were not finished after {DRAIN_SECONDS:.0f} seconds were ended.")


def _warnings(args: argparse.Namespace, provider: PairProvider) -> list[str]:
    lines = []
    if provider.one_at_a_time is not None:
        lines.append(f"Requests are answered one at a time: {provider.one_at_a_time}")
    if args.host not in LOOPBACK and args.api_key is None:
        lines.append(f"warning: everybody who reaches {args.host} can use this; see --api-key")
    if ANY in args.allowed_origins:
        lines.append("warning: every web page that a user opens can use this (--allowed-origins *)")
    return lines


def main() -> None:
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
