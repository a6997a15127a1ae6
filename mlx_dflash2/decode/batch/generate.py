"""Generate responses to many prompts at once with a drafter, with mlx-lm's arguments."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchResponse, generation_stream, wired_limit
from mlx_lm.generate_utils import BatchStats
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...drafter.model import Proposer
from ..checks import check_ids
from ..defaults import BATCH_MAX_TOKENS, COMPLETION_BATCH_SIZE, PREFILL_STEP_SIZE
from ..generate import make_judge, make_loop
from ..options import GenerationOptions, Sampler, refuse_unknown
from ..session import DFlashPromptCache
from ..stats import Stats
from ..text import check_prompt, decode_text, encode_prompt, wrap_tokenizer
from .caches import check_batchable, check_rotation
from .decoder import Answer, BatchDecoder


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | Any,
    prompts: Sequence[str | mx.array | list[int]],
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = BATCH_MAX_TOKENS,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    draft_model: Proposer | None = None,
    stats: Stats | None = None,
    **kwargs: Any,
) -> BatchResponse:
    """Generate responses to a batch of prompts, as :func:`mlx_lm.batch_generate`.

    With a drafter every prompt gets the tokens that it would get on its own. Prompts are
    processed one at a time, each in its own chunks and without padding; then one target pass
    verifies a block of every sequence, and each sequence keeps the drafts that it accepts.

    Args:
        model (nn.Module): The target, from mlx-lm.
        tokenizer (TokenizerWrapper): The target's tokenizer.
        prompts (list): Texts, or token ids.
        prompt_caches (list, optional): The target's caches for what comes before each prompt;
          they are not updated.
        max_tokens (int or list): The most tokens to generate, for all prompts or for each; ``-1``
          for no limit. Default: ``128``.
        verbose (bool): Print progress and a summary. Default: ``False``.
        return_prompt_caches (bool): Return caches that cover prompt and response, its EOS token
          included. Default: ``False``.
        return_token_ids, return_logprobs (bool): Return each response's token ids, and their log
          probabilities, without the EOS token. Default: ``False``.
        draft_model (Proposer, optional): The drafter. Default: ``None``, which is
          :func:`mlx_lm.batch_generate` itself.
        stats (Stats, optional): Filled with what happened, summed over the prompts.
        kwargs: With a drafter the options of :func:`decode_batch`, else those of mlx-lm.

    Raises:
        ValueError: if an argument, the pair of models, or a cache does not fit, in one line and
          before anything is decoded.
    """
    tokenizer = wrap_tokenizer(tokenizer)
    one = isinstance(prompts, str | bytes) or (isinstance(prompts, mx.array) and prompts.ndim < 2)
    if one or not isinstance(prompts, Iterable) or any(isinstance(p, int) for p in prompts):
        raise TypeError("`prompts` has to be a list of prompts, each text or a list of token ids.")
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    if draft_model is None:
        kwargs |= {
            "prompts": [prompt.tolist() for prompt in encoded],
            "prompt_caches": prompt_caches,
            "max_tokens": max_tokens,
            "verbose": verbose,
            "return_prompt_caches": return_prompt_caches,
            "return_token_ids": return_token_ids,
            "return_logprobs": return_logprobs,
        }
        return mlx_lm.batch_generate(model, tokenizer, **kwargs)
    refuse_unknown(kwargs, signature(decode_batch).parameters)
    stats = Stats() if stats is None else stats
    kwargs |= {"return_prompt_caches": return_prompt_caches, "return_logprobs": return_logprobs}
    progress = _Progress(len(encoded), verbose)
    start = time.perf_counter()
    rows = decode_batch(
        model,
        draft_model,
        encoded,
        tokenizer.eos_token_ids,
        prompt_caches=prompt_caches,
        max_tokens=max_tokens,
        stats=stats,
        on_finish=progress,
        **kwargs,
    )
    if verbose:
        print(f"\n{stats.summary()}")
    return BatchResponse(
        [decode_text(tokenizer, row.tokens) for row in rows],
        _batch_stats(stats, time.perf_counter() - start),
        [row.prompt_cache or [] for row in rows] if return_prompt_caches else None,
        [row.tokens for row in rows] if return_token_ids else None,
        [row.logprobs for row in rows] if return_logprobs else None,
    )


def decode_batch(
    model: nn.Module,
    draft_model: Proposer,
    prompts: Sequence[mx.array],
    eos_token_ids: Sequence[int],
    *,
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = BATCH_MAX_TOKENS,
    sampler: Sampler | Sequence[Sampler | None] | None = None,
    logits_processors: Sequence[Any] | None = None,
    seed: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
    completion_batch_size: int = COMPLETION_BATCH_SIZE,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    return_prompt_caches: bool = False,
    return_logprobs: bool = False,
    stream: Any = generation_stream,
    stats: Stats | None = None,
    on_finish: Callable[[Answer], None] = lambda _: None,
) -> list[Answer]:
    """Decode prompts [S] side by side until each gives an EOS token or has its ``max_tokens``.

    Args:
        sampler (callable or list, optional): As in :func:`dflash_generate_step`, for all prompts
          or one for each. Default: ``None``, greedy.
        logits_processors (list, optional): Processors for all prompts, or a list of them for
          each prompt, which processors with a state need.
        seed (int, optional): Prompt i draws as on its own with ``seed + i``.
        block_size, verify_width (int, optional): As in :func:`dflash_generate_step`.
        completion_batch_size (int): The most sequences to decode at a time; the others wait for
          a free place. Default: ``32``.
        prefill_step_size (int): Prompt tokens to process at a time. Default: ``2048``.
        stream (mx.Stream): The stream to compute on. Default: mlx-lm's own.
        on_finish (callable): Called with each row that has finished.

    Raises:
        ValueError: as :func:`batch_generate`.
    """
    if completion_batch_size < 1:
        raise ValueError(
            f"`completion_batch_size` is {completion_batch_size} but has to be 1 or more."
        )
    count, stats = len(prompts), Stats() if stats is None else stats
    shared = GenerationOptions(
        block_size=block_size, verify_width=verify_width, prefill_step_size=prefill_step_size
    )
    options = _options(shared, count, max_tokens, sampler, logits_processors, seed)
    caches = _caches(count, prompt_caches)
    judges = [make_judge(own) for own in options]
    with wired_limit(model, [stream]):
        loop = make_loop(model, draft_model, shared, judges, stream, stats)
    answers = []
    for prompt, cache, judge, own in zip(prompts, caches, judges, options, strict=True):
        check_prompt(prompt)
        with mx.stream(stream):
            check_ids(prompt, loop.target.num_embeddings)
        sequence = loop.open(judge, cache)
        answers.append(
            Answer(sequence, prompt.astype(mx.uint32), own.token_limit, return_prompt_caches)
        )
    if not answers:
        return answers
    check_batchable([answer.sequence.caches for answer in answers])
    check_rotation(model)
    batch = BatchDecoder(
        loop,
        eos_token_ids,
        batch_size=completion_batch_size,
        prefill_step_size=prefill_step_size,
        keeps_logprobs=return_logprobs,
        on_finish=on_finish,
    )
    for answer in answers:
        batch.insert(answer)
    with wired_limit(model, [stream]):
        batch.run()
    return answers


def _options(
    shared: GenerationOptions,
    count: int,
    max_tokens: int | Sequence[int],
    sampler: Any,
    logits_processors: Any,
    seed: int | None,
) -> list[GenerationOptions]:
    """Make the options of each prompt, which counts and draws on its own."""
    budgets = _for_each("max_tokens", max_tokens, count, isinstance(max_tokens, int))
    samplers = _for_each("sampler", sampler, count, sampler is None or callable(sampler))
    flat = not any(p is None or isinstance(p, list | tuple) for p in logits_processors or ())
    processors = _for_each("logits_processors", logits_processors, count, flat)
    return [
        replace(
            shared,
            max_tokens=budgets[i],
            sampler=samplers[i],
            logits_processors=processors[i],
            seed=None if seed is None else seed + i,
        )
        for i in range(count)
    ]


def _caches(count: int, prompt_caches: Any) -> Sequence[list[Any] | None]:
    caches = _for_each("prompt_caches", prompt_caches, count, prompt_caches is None)
    if any(isinstance(cache, DFlashPromptCache) for cache in caches):
        raise ValueError(
            "`prompt_caches` holds a DFlashPromptCache but has to hold lists of the target's "
            "caches, such as its `caches`: a batch does not go on with a conversation."
        )
    return caches


def _for_each(name: str, value: Any, count: int, shared: bool) -> Sequence[Any]:
    """Return one value for each prompt."""
    if not shared and not isinstance(value, Iterable):
        raise TypeError(f"`{name}` is {value!r} but has to be one value or a list of them.")
    values = [value] * count if shared else list(value)
    if len(values) != count:
        raise ValueError(
            f"`{name}` has {len(values)} entries but has to have {count}, one for each prompt."
        )
    return values


class _Progress:
    """Prints mlx-lm's line of progress."""

    def __init__(self, total: int, verbose: bool):
        self.finished, self.total, self.verbose = 0, total, verbose

    def __call__(self, _: Answer) -> None:
        self.finished += 1
        if self.verbose:
            print(
                f"[batch_generate] Finished processing {self.finished}/{self.total} ...", end="\r"
            )


def _batch_stats(stats: Stats, wall_time: float) -> BatchStats:
    return BatchStats(
        prompt_tokens=stats.prompt_tokens,
        prompt_time=stats.prompt_time,
        generation_tokens=stats.generation_tokens,
        generation_steps=stats.passes + bool(stats.prefills),
        decode_time=stats.generation_time,
        wall_time=wall_time,
        peak_memory=mx.get_peak_memory() / 1e9,
    )
