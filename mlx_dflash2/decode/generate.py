"""Generate tokens and text from a target with a drafter, with mlx-lm's arguments."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafter.model import Drafter, Proposer
from .defaults import KV_GROUP_SIZE, MAX_TOKENS, PREFILL_STEP_SIZE, QUANTIZED_KV_START
from .judge import Judge
from .loop import Loop
from .options import GenerationOptions, LogitsProcessor, Sampler
from .session import DFlashPromptCache
from .stats import Stats
from .text import StopStrings, check_prompt, encode_prompt, responses, stop_strings, wrap_tokenizer
from .warm import warm_up

Steps = Generator[tuple[int, mx.array, bool], None, None]
# Arguments of a single run rather than options.
_OF_A_RUN = ("prompt_cache", "prompt_progress_callback", "stats")


def dflash_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Proposer,
    stream: Any = generation_stream,
    *,
    max_tokens: int = MAX_TOKENS,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    seed: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | DFlashPromptCache | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int = KV_GROUP_SIZE,
    quantized_kv_start: int = QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stats: Stats | None = None,
) -> Steps:
    """Generate token ids that a drafter proposes and the target verifies.

    The tokens follow the target's own distribution whatever the drafter does: at temperature 0
    each one is the target's best, above it they are distributed as mlx-lm would draw them.

    Args:
        prompt (mx.array): Token ids [S], at least one.
        model (nn.Module): The target, from mlx-lm.
        draft_model (Proposer): The drafter, from :func:`mlx_dflash2.load_drafter`.
        stream (mx.Stream): The stream to compute on. Default: mlx-lm's own.
        max_tokens (int): The most tokens to yield; ``-1`` for no limit. Default: ``256``.
        sampler (callable, optional): From :func:`mlx_dflash2.make_sampler`, whose drafts are
          accepted by rejection sampling; or any sampler of mlx-lm's kind, whose own draws are
          compared with the drafts. Default: ``None``, greedy.
        logits_processors (list, optional): As in mlx-lm; each is called once for every token
          with exactly the tokens before it, unless it is a :class:`PureProcessor`.
        seed (int, optional): Makes the draws of a :func:`mlx_dflash2.make_sampler` sampler
          repeatable, and leaves ``mx.random`` alone. Default: ``None``, which uses ``mx.random``.
        block_size (int, optional): Rows of the drafter's block, anchor included, at most the
          number that it was trained with; 1 decodes plainly. Default: that number.
        verify_width (int, optional): Rows of the block that the target verifies, from 2 to
          ``block_size``. Default: what should be fastest in each round, 1 included; with a
          ``seed``, whose draws depend on the widths, ``block_size``.
        max_kv_size (int, optional): Maximum size of the key-value cache; as in mlx-lm it applies
          where no ``prompt_cache`` is given and the model does not make its own caches.
        prompt_cache (list or DFlashPromptCache, optional): The caches of what comes before the
          prompt: the target's, or also the drafter's context. They are updated in place: when the
          generator ends or is closed they cover exactly the prompt and the yielded tokens.
        prefill_step_size (int): Prompt tokens to process at a time. Default: ``2048``.
        kv_bits, kv_group_size, quantized_kv_start (int): Quantization of the key-value cache, as
          in mlx-lm. Defaults: ``None`` (no quantization), ``64``, ``5000``.
        prompt_progress_callback (callable, optional): Called with the prompt tokens processed
          so far and their total.
        stats (Stats, optional): Filled with what happened, complete when the generator ends.

    Yields:
        tuple[int, mx.array, bool]: A token, its row of log probabilities [V], and whether the
        drafter proposed it.

    Raises:
        ValueError: if an argument, or the pair of models, does not fit.
    """
    options = GenerationOptions(
        max_tokens=max_tokens,
        sampler=sampler,
        logits_processors=logits_processors,
        seed=seed,
        block_size=block_size,
        verify_width=verify_width,
        max_kv_size=max_kv_size,
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
    )
    yield from generate_tokens(
        prompt,
        model,
        draft_model,
        options,
        stream,
        prompt_cache=prompt_cache,
        prompt_progress_callback=prompt_progress_callback,
        stats=stats,
    )


def generate_tokens(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Proposer,
    options: GenerationOptions,
    stream: Any = generation_stream,
    *,
    prompt_cache: list[Any] | DFlashPromptCache | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stats: Stats | None = None,
) -> Steps:
    """Generate token ids as :func:`dflash_generate_step`, with options as one object."""
    check_prompt(prompt)
    judge = make_judge(options)
    loop = make_loop(
        model, draft_model, options, [judge], stream, Stats() if stats is None else stats
    )
    sequence = loop.open(judge, prompt_cache, options.max_kv_size)
    left = options.token_limit
    try:
        callback = prompt_progress_callback or (lambda *_: None)
        decision = loop.prefill(sequence, prompt, options.prefill_step_size, callback)
        while left > 0:
            left -= len(decision.tokens)
            for row, token in enumerate(decision.tokens):
                if row == decision.num_accepted:
                    loop.draft_ahead([left])
                decision.taken += 1
                yield token, decision.logprobs[row], row < decision.num_accepted
            if left > 0:
                decision = loop.next_round([sequence], sequence.caches, [left])[0]
    finally:
        loop.close(sequence)


def make_judge(options: GenerationOptions) -> Judge:
    """Make the judge of one sequence, whose draws are its own."""
    return Judge(options.sampler, options.logits_processors, options.seed)


def make_loop(
    model: nn.Module,
    draft_model: Proposer,
    options: GenerationOptions,
    judges: Sequence[Judge],
    stream: Any,
    stats: Stats,
) -> Loop:
    """Make the loop that decodes the sequences of some judges; on a GPU warm the pair up."""
    loop = Loop(
        model,
        draft_model,
        stream,
        stats,
        kv_quantization=options.kv_quantization,
        block_size=options.block_size,
        verify_width=options.verify_width,
        adaptive=all(judge.is_repeatable_at_any_width for judge in judges),
    )
    if mx.default_device() == mx.gpu and isinstance(draft_model, Drafter):
        with loop.guard.step():
            widths = sorted({1, loop.verify_width})
            warm_up(loop.target, draft_model, stream, loop.block_size, widths)
    return loop


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = MAX_TOKENS,
    draft_model: Proposer | None = None,
    stream: Any = generation_stream,
    *,
    stop: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate text in segments, as :func:`mlx_lm.stream_generate`.

    Args:
        model (nn.Module): The target, from mlx-lm.
        tokenizer (TokenizerWrapper): The target's tokenizer.
        prompt (str, mx.array or list of int): Text, or token ids.
        max_tokens (int): The most tokens to generate; ``-1`` for no limit. Default: ``256``.
        draft_model (Proposer, optional): The drafter. Default: ``None``, which is
          :func:`mlx_lm.stream_generate` itself.
        stream (mx.Stream): The stream to compute on. Default: mlx-lm's own.
        stop (str or list of str, optional): Texts that end the answer. No part of one is ever
          shown; generation, its counts and the caches end with the token that completes it.
        kwargs: The remaining options of :func:`dflash_generate_step`.

    Yields:
        GenerationResponse: A text segment and what is known about it; ``from_draft`` tells
        whether the drafter proposed its token.

    Raises:
        ValueError: as :func:`dflash_generate_step`, or for ``max_tokens`` 0.
    """
    if draft_model is None:
        if stop_strings(stop):
            raise ValueError("`stop` needs a `draft_model`: mlx-lm itself has no stop strings.")
        yield from mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens, stream=stream, **kwargs
        )
        return
    run = {name: kwargs.pop(name, None) for name in _OF_A_RUN}
    options = GenerationOptions.for_text(max_tokens=max_tokens, stop=stop, **kwargs)
    yield from stream_text(model, tokenizer, prompt, draft_model, options, stream, **run)


def stream_text(
    model: nn.Module,
    tokenizer: TokenizerWrapper | Any,
    prompt: str | mx.array | list[int],
    draft_model: Proposer,
    options: GenerationOptions,
    stream: Any = generation_stream,
    **run: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate text as :func:`stream_generate`, with options as one object.

    Args:
        model, tokenizer, prompt, draft_model, stream: As for :func:`stream_generate`.
        options (GenerationOptions): From :meth:`GenerationOptions.for_text`.
        run: The arguments ``prompt_cache``, ``prompt_progress_callback`` and ``stats``.
    """
    tokenizer = wrap_tokenizer(tokenizer)
    prompt = encode_prompt(tokenizer, prompt)
    steps = generate_tokens(prompt, model, draft_model, options, stream, **run)
    stops = StopStrings(options.stop)
    with wired_limit(model, [stream]), closing(steps):
        yield from responses(steps, tokenizer, prompt.size, options.max_tokens, stops)


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | Any,
    prompt: str | mx.array | list[int],
    verbose: bool = False,
    draft_model: Proposer | None = None,
    stats: Stats | None = None,
    **kwargs: Any,
) -> str:
    """Generate a complete response, as :func:`mlx_lm.generate`.

    Args:
        model (nn.Module): The target, from mlx-lm.
        tokenizer (TokenizerWrapper): The target's tokenizer.
        prompt (str, mx.array or list of int): Text, or token ids.
        verbose (bool): Print the text while it comes, and a summary on stderr at the end.
          Default: ``False``.
        draft_model (Proposer, optional): The drafter. Default: ``None``, which is
          :func:`mlx_lm.generate` itself.
        stats (Stats, optional): Filled with what happened.
        kwargs: The remaining options of :func:`stream_generate`.
    """
    if draft_model is None:
        if stats is not None:
            raise ValueError("`stats` needs a `draft_model`: mlx-lm itself does not fill it.")
        # It takes arrays too, which its annotations leave out.
        theirs: Any = prompt
        return mlx_lm.generate(model, tokenizer, theirs, verbose=verbose, **kwargs)
    stats, text = Stats() if stats is None else stats, ""
    kwargs |= {"draft_model": draft_model, "stats": stats}
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print()
        print(stats.summary(), file=sys.stderr)
    return text
