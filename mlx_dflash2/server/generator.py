"""The generation thread: requests join and leave one drafted batch."""

import logging
import threading
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from jinja2 import TemplateError
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import ResponseGenerator

from ..decode.batch.decoder import Answer, BatchDecoder
from ..decode.constraint import Constraint
from ..decode.generate import make_loop
from ..decode.options import GenerationOptions
from ..decode.stats import Stats
from .errors import ApiError, invalid
from .job import REASONING, Job, Prompt
from .metrics import Metrics
from .pair import PairProvider
from .schema import Request
from .spill import PromptFolder
from .store import PromptStore

if TYPE_CHECKING:
    from ..decode.grammar import GrammarVocabulary

# How long the idle thread waits before it looks whether it has to stop.
IDLE_SECONDS = 0.1
# What a device or a pair may raise in mid-round: those requests fail, the next ones may not.
ROUND_ERRORS = (MemoryError, RuntimeError, ValueError)


class Generator(ResponseGenerator):
    """Answers jobs on its thread, in one batch of drafted rounds.

    Args:
        provider (PairProvider): The pair, loaded.
        prompt_cache (LRUPromptCache): Prompt caches over requests.
        folder (PromptFolder, optional): Keeps them on disk, too.
    """

    model_provider: PairProvider

    def __init__(
        self,
        provider: PairProvider,
        prompt_cache: LRUPromptCache,
        folder: PromptFolder | None = None,
    ):
        # The thread starts in the base class, so all that it uses has to be there.
        self.store = PromptStore(prompt_cache, provider.model_key, folder)
        self.stats, self.jobs = Stats(), set[Job]()
        self.decoder: BatchDecoder | None = None
        self.metrics = Metrics(
            self.stats,
            {
                "requests_waiting": (
                    "Requests that wait for a place, or for their prompt to be processed",
                    lambda: self.requests.qsize() + len(self.jobs) - self._decoding(),
                ),
                "requests_decoding": ("Requests that take part in the rounds", self._decoding),
                "prompt_cache_entries": ("Entries of the prompt cache", lambda: len(prompt_cache)),
                "prompt_cache_bytes": ("Their bytes", lambda: prompt_cache.nbytes),
            },
        )
        self.batch_size = 1 if provider.one_at_a_time else provider.cli_args.decode_concurrency
        self._tokenizing = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        tokenizer = provider.tokenizer
        # What XTC leaves alone, as in mlx-lm.
        self.special_tokens = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
        super().__init__(provider, prompt_cache)

    def prepare(self, request: Request, is_gone: Callable[[], bool]) -> Job:
        """Make a job of a request; for the thread of its connection.

        Args:
            request (Request): What is asked for.
            is_gone (callable): Whether the client has hung up, to be asked between rounds.

        Raises:
            ApiError: if the prompt does not fit the model, or its chat template.
        """
        provider = self.model_provider
        # Tokenizers of the tokenizers library cannot be used by two threads at once.
        with self._tokenizing:
            prompt = self._prompt(request)
        constraint = None if request.json_schema is None else self._constraint(request, prompt)
        count, limit = len(prompt.tokens), provider.context_length
        if not count:
            raise invalid("prompt", "The prompt has no tokens.")
        if limit is not None and count >= limit:
            raise invalid(
                "messages" if request.chat else "prompt",
                f"The prompt has {count} tokens but the model's context has {limit}, of which the "
                "answer needs at least one.",
                "context_length_exceeded",
            )
        room = request.max_tokens if limit is None else min(request.max_tokens, limit - count)
        return Job(
            request, prompt, provider.tokenizer, room, self.special_tokens, is_gone, constraint
        )

    def submit(self, job: Job) -> None:
        """Hand a job to the generation thread."""
        self.requests.put(job)

    def _constraint(self, request: Request, prompt: Prompt) -> Constraint:
        """What holds the answer to its schema, from the end of its thoughts on."""
        try:
            from ..decode.grammar import JSON_SCHEMA, Grammar, GrammarVocabulary
        except ImportError as error:
            raise invalid(
                "response_format",
                "This server cannot follow schemas: install mlx-dflash2[structured].",
                "unsupported_parameter",
            ) from error
        provider = self.model_provider
        try:
            with self._tokenizing:
                if self._vocabulary is None:
                    size = provider.target.vocab_size
                    self._vocabulary = GrammarVocabulary(provider.tokenizer, size)
            compiled = self._vocabulary.compile(JSON_SCHEMA, request.json_schema or "")
        except ValueError as error:
            raise invalid("response_format", str(error)) from error
        thinks = prompt.state == REASONING
        return Grammar(
            self._vocabulary, compiled, provider.tokenizer.think_end_tokens if thinks else ()
        )

    def _prompt(self, request: Request) -> Prompt:
        tokenizer = self.model_provider.tokenizer
        if not isinstance(request.prompt, str):
            return Prompt(request.prompt)
        try:
            # It reads the request's own fields and, of the options, those of the template.
            tokens, segments, kinds, state, _ = self._tokenize(tokenizer, request, request)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise invalid("messages", f"The prompt cannot be made: {error}") from error
        if not request.chat:
            return Prompt(tokens)
        _, machine = self._make_state_machine(self.model_provider.model_key, tokenizer, [])
        return Prompt(tokens, self._places(segments, kinds), machine, state)

    def _places(self, segments: list[list[int]], kinds: list[str]) -> dict[int, str]:
        """Where caches are worth keeping: the ends of segments, and of the prompt if need be."""
        places, end = {}, 0
        for segment, kind in zip(segments, kinds, strict=True):
            end += len(segment)
            places[end] = kind
        kind = places.pop(end)
        # Whatever can be trimmed goes back here from the end of the answer.
        if kind != "assistant" and not self.model_provider.trims and end > 1:
            places[end - 1] = kind
        return places

    def _generate(self) -> None:
        stream = mx.default_stream(mx.default_device())
        decoder = self._renew(stream)
        while not self._stop:
            self._receive(decoder)
            for job in [job for job in self.jobs if job.cancelled or job.is_gone()]:
                decoder.remove(job)
            if not len(decoder):
                continue
            try:
                decoder.step()
                if self.cli_args.prompt_cache_bytes is not None:
                    self.store.make_room(self.cli_args.prompt_cache_bytes - decoder.nbytes)
            except ROUND_ERRORS as error:
                logging.exception("The round failed.")
                self._fail_all(error)
                decoder = self._renew(stream)
            if not len(decoder) and not decoder.loop.guard.on:
                # A drafter that failed gets another chance with the next request.
                decoder = self._renew(stream)
        self._fail_all(ApiError(503, "The server is shutting down."))
        # What belongs to this thread goes before it: at its exit MLX would race with the process's.
        self.model_provider.reset()
        del decoder
        self.decoder = None
        self.store.make_room(0)
        mx.synchronize(stream)
        mx.clear_streams()

    def _renew(self, stream: Any) -> BatchDecoder:
        """Make a decoder without any answers in it."""
        args, provider = self.cli_args, self.model_provider
        self.stats.fallback = None
        mx.clear_cache()
        options = GenerationOptions(
            block_size=args.block_size,
            verify_width=args.verify_width,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
        )
        loop = make_loop(provider.model, provider.draft_model, options, [], stream, self.stats)
        self.decoder = BatchDecoder(
            loop,
            provider.tokenizer.eos_token_ids,
            batch_size=self.batch_size,
            prefill_step_size=args.prefill_step_size,
            prefill_batch_size=args.prompt_concurrency,
            on_finish=self._finished,
        )
        return self.decoder

    def _decoding(self) -> int:
        decoder = self.decoder
        return 0 if decoder is None else len(decoder.active) + len(decoder.joining)

    def _receive(self, decoder: BatchDecoder) -> None:
        """Take what has been submitted; wait for it if there is nothing to do."""
        try:
            job = self.requests.get(block=not len(decoder), timeout=IDLE_SECONDS)
            while True:
                job.attach(decoder.loop, self.store)
                self.jobs.add(job)
                decoder.insert(job)
                job = self.requests.get_nowait()
        except Empty:
            pass

    def _finished(self, answer: Answer) -> None:
        assert isinstance(answer, Job)
        self.jobs.discard(answer)
        if answer.outcome is not None:
            self.metrics.count(answer.outcome)

    def _fail_all(self, error: Exception) -> None:
        for job in self.jobs:
            job.fail(error)
        self.jobs.clear()
