"""Text and tokens from a target with a drafter, in mlx-lm's own terms."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafter.model import Proposer
from .judge import Judge
from .kv_quantization import KVQuantization
from .loop import Loop
from .session import DFlashPromptCache
from .stats import Stats
from .text import StopStrings, check_prompt, encode_prompt, responses

DEFAULT_MAX_TOKENS = 256
DEFAULT_PREFILL_STEP_SIZE = 2048
DEFAULT_QUANTIZED_KV_START = 5000


def dflash_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Proposer,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list[Callable[[mx.array, mx.array], mx.array]] | None = None,
    seed: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | DFlashPromptCache | None = None,
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stats: Stats | None = None,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """A generator of token ids that a drafter proposes and the target verifies.

    The tokens follow the target's own distribution whatever the drafter does: at temperature 0
    each one is the target's best, above it they are distributed as mlx-lm would draw them.

    Args:
        prompt (mx.array): Token ids [S], at least one.
        model (nn.Module): The target, from mlx-lm.
        draft_model (Proposer): The drafter, from :func:`mlx_dflash2.load_drafter`.
        max_tokens (int): The most tokens to yield; ``-1`` for no limit. Default: ``256``.
        sampler (callable, optional): From :func:`mlx_dflash2.make_sampler`, whose drafts are
          accepted by rejection sampling; or any sampler of mlx-lm's kind, whose own draws are
          compared with the drafts. Default: ``None``, greedy.
        logits_processors (list, optional): As in mlx-lm; each is called once for every token
          with exactly the tokens before it, unless it is a :class:`PureProcessor`.
        seed (int, optional): Makes the draws of a :func:`mlx_dflash2.make_sampler` sampler
          repeatable, apart from ``mx.random``. Default: ``None``, which draws from there.
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
        kv_bits, kv_group_size, quantized_kv_start (int): Quantisation of the key-value cache, as
          in mlx-lm.
        prompt_progress_callback (callable, optional): Called with the prompt tokens processed
          so far and their total.
        stats (Stats, optional): Filled with what happened, complete when the generator ends.

    Yields:
        tuple[int, mx.array, bool]: A token, its row of log probabilities [V], and whether the
        drafter proposed it.

    Raises:
        ValueError: if an argument, or the pair of models, does not fit.
    """
    check_prompt(prompt, max_tokens, prefill_step_size)
    judge = Judge(sampler, logits_processors, seed)
    loop = Loop(
        model,
        draft_model,
        stream,
        Stats() if stats is None else stats,
        kv_quantization=KVQuantization(kv_bits, kv_group_size, quantized_kv_start),
        block_size=block_size,
        verify_width=verify_width,
        adaptive=judge.is_repeatable_at_any_width,
    )
    sequence = loop.open(judge, prompt_cache, max_kv_size)
    left = float("inf") if max_tokens == -1 else max_tokens
    try:
        callback = prompt_progress_callback or (lambda *_: None)
        decision = loop.prefill(sequence, prompt, prefill_step_size, callback)
        while left > 0:
            for row, token in enumerate(decision.tokens):
                decision.taken += 1
                yield token, decision.logprobs[row], row < decision.num_accepted
            left -= len(decision.tokens)
            if left > 0:
                decision = loop.next_round([sequence], sequence.caches, [left])[0]
    finally:
        loop.close(sequence)


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = DEFAULT_MAX_TOKENS,
    draft_model: Proposer | None = None,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    stop: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """A generator of text segments, as :func:`mlx_lm.stream_generate`.

    Args:
        model (nn.Module): The target, from mlx-lm.
        tokenizer (TokenizerWrapper): The target's tokenizer.
        prompt (str, mx.array or list of int): Text, or token ids.
        max_tokens (int): The most tokens to generate; ``-1`` for no limit. Default: ``256``.
        draft_model (Proposer, optional): The drafter. Default: ``None``, which is
          :func:`mlx_lm.stream_generate` itself.
        stop (str or list of str, optional): Texts that end the answer. No part of one is ever
          shown; generation, its counts and the caches end with the token that completes it.
        kwargs: The remaining options of :func:`dflash_generate_step`.

    Yields:
        GenerationResponse: A text segment and what is known about it; ``from_draft`` tells
        whether the drafter proposed its token.

    Raises:
        ValueError: as :func:`dflash_generate_step`, or for ``max_tokens`` 0.
    """
    stops = StopStrings(stop)
    if draft_model is None:
        if stop:
            raise ValueError("`stop` needs a `draft_model`: mlx-lm itself has no stop strings.")
        yield from mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens, stream=stream, **kwargs
        )
        return
    if max_tokens == 0:
        raise ValueError("`max_tokens` has to be non-zero (-1 for no limit).")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    prompt = encode_prompt(tokenizer, prompt)
    steps = dflash_generate_step(
        prompt, model, draft_model, stream, max_tokens=max_tokens, **kwargs
    )
    with wired_limit(model, [stream]), closing(steps):
        yield from responses(steps, tokenizer, prompt.size, max_tokens, stops)


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | Any,
    prompt: str | mx.array | list[int],
    verbose: bool = False,
    draft_model: Proposer | None = None,
    stats: Stats | None = None,
    **kwargs: Any,
) -> str:
    """A complete response, as :func:`mlx_lm.generate`.

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
        return mlx_lm.generate(model, tokenizer, prompt, verbose=verbose, **kwargs)
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
