"""The `mlx_dflash2.server` command."""

import argparse
import logging
import signal
import threading
from functools import partial
from types import FrameType
from typing import Any

from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import get_system_fingerprint
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..cli.build import prefill_step_size
from ..cli.console import note
from ..decode.kv_quantization import KVQuantization
from ..decode.sampling import make_sampler
from .access import ANY, Access
from .generator import Generator
from .handler import Handler
from .http import Server
from .limits import DRAIN_SECONDS, SPARE_CONNECTIONS, Queue
from .options import UNLIMITED, prepare_arguments
from .pair import DEFAULT_MODEL, PairProvider
from .schema import Defaults
from .spill import PromptFolder

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse arguments that are out of range before any weights are read, and fill in some.

    Raises:
        ValueError: in one line, naming the option.
    """
    prepare_arguments(args)
    make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k)
    KVQuantization(args.kv_bits, args.kv_group_size, args.quantized_kv_start)
    args.prefill_step_size = prefill_step_size(args.prefill_step_size)


def make_defaults(args: argparse.Namespace, provider: PairProvider) -> Defaults:
    """What requests may leave out, and what they may say.

    Raises:
        ValueError: if an option does not fit the pair.
    """
    vocab_size = provider.target.vocab_size
    if args.top_k >= vocab_size:
        raise ValueError(f"`top_k` is {args.top_k} but has to be below {vocab_size}.")
    return Defaults(
        max_tokens=args.max_tokens,
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        vocab_size=provider.target.num_embeddings,
        max_draft_tokens=(args.verify_width or args.block_size or provider.pair.most_rows) - 1,
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


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    check_arguments(args)
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
        note("Answers say how many of their drafts were accepted: `usage`, `timings`, /metrics")
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
