"""Many prompts at once with a drafter, in mlx-lm's own terms."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchResponse, generation_stream, wired_limit
from mlx_lm.generate_utils import BatchStats
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...drafter.model import Proposer
from ..judge import Judge
from ..kv_quantization import KVQuantization
from ..loop import Loop, check_ids
from ..session import DFlashPromptCache
from ..stats import Stats
from ..text import check_prompt, encode_prompt
from .caches import check_batchable, check_rotation
from .decoder import Answer, BatchDecoder


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | Any,
    prompts: Sequence[str | mx.array | list[int]],
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    draft_model: Proposer | None = None,
    stats: Stats | None = None,
    **kwargs: Any,
) -> BatchResponse:
    """Responses to a batch of prompts, as :func:`mlx_lm.batch_generate`.

    With a drafter every prompt's tokens are those that it would give on its own. Prompts are
    processed one at a time, each in its own chunks and without padding; then one target pass
    verifies a block of every sequence, and each keeps what it accepts.

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
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    if draft_model is None:
        returns = (return_prompt_caches, return_token_ids, return_logprobs)
        prompts = [prompt.tolist() for prompt in encoded]
        return mlx_lm.batch_generate(
            model, tokenizer, prompts, prompt_caches, max_tokens, verbose, *returns, **kwargs
        )
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
        [tokenizer.decode(row.tokens) for row in rows],
        _batch_stats(stats, time.perf_counter() - start),
        [row.prompt_cache for row in rows] if return_prompt_caches else None,
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
    max_tokens: int | Sequence[int] = 128,
    sampler: Callable[[mx.array], mx.array] | Sequence[Callable | None] | None = None,
    logits_processors: Sequence[Any] | None = None,
    seed: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
    completion_batch_size: int = 32,
    prefill_step_size: int = 2048,
    return_prompt_caches: bool = False,
    return_logprobs: bool = False,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    stats: Stats | None = None,
    on_finish: Callable[[Answer], None] = lambda _: None,
) -> list[Answer]:
    """Decode prompts [S] side by side until each gives an EOS token or has its ``max_tokens``.

    Args:
        sampler (callable or list, optional): As in :func:`dflash_generate_step`, for all prompts
          or one for each. Default: ``None``, greedy.
        logits_processors (list, optional): Processors for all prompts, or a list of them for
          each; those that keep a state need a list for each.
        seed (int, optional): Prompt i draws as on its own with ``seed + i``.
        block_size, verify_width (int, optional): As in :func:`dflash_generate_step`.
        completion_batch_size (int): The most sequences to decode at a time; the others wait for
          a free place. Default: ``32``.
        prefill_step_size (int): Prompt tokens to process at a time. Default: ``2048``.
        on_finish (callable): Called with each row that has finished.

    Raises:
        ValueError: as :func:`batch_generate`.
    """
    if completion_batch_size < 1:
        raise ValueError(
            f"`completion_batch_size` has to be 1 or more but is {completion_batch_size}."
        )
    count, stats = len(prompts), Stats() if stats is None else stats
    budgets = _for_each("max_tokens", max_tokens, count, isinstance(max_tokens, int))
    caches = _for_each("prompt_caches", prompt_caches, count, prompt_caches is None)
    if any(isinstance(cache, DFlashPromptCache) for cache in caches):
        raise ValueError(
            "`prompt_caches` holds a DFlashPromptCache, whose conversation a batch cannot go on "
            "with; give its `caches`, the target's."
        )
    judges = _judges(count, sampler, logits_processors, seed)
    loop = Loop(
        model,
        draft_model,
        stream,
        stats,
        kv_quantization=KVQuantization(),
        block_size=block_size,
        verify_width=verify_width,
        adaptive=all(judge.is_repeatable_at_any_width for judge in judges),
    )
    answers = []
    for prompt, budget, cache, judge in zip(prompts, budgets, caches, judges, strict=True):
        check_prompt(prompt, budget, prefill_step_size)
        with mx.stream(stream):
            check_ids(prompt, loop.target.num_embeddings)
        left = float("inf") if budget == -1 else budget
        sequence = loop.open(judge, cache)
        answers.append(Answer(sequence, prompt.astype(mx.uint32), left, return_prompt_caches))
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


def _judges(count: int, sampler: Any, logits_processors: Any, seed: int | None) -> list[Judge]:
    """One for each prompt: what it counts and draws is its own."""
    samplers = _for_each("sampler", sampler, count, sampler is None or callable(sampler))
    shared = not any(p is None or isinstance(p, list | tuple) for p in logits_processors or ())
    processors = _for_each("logits_processors", logits_processors, count, shared)
    seeds = [None if seed is None else seed + i for i in range(count)]
    return [Judge(*row) for row in zip(samplers, processors, seeds, strict=True)]


def _for_each(name: str, value: Any, count: int, shared: bool) -> Sequence[Any]:
    """One value for each prompt."""
    values = [value] * count if shared else list(value)
    if len(values) != count:
        raise ValueError(f"`{name}` has {len(values)} entries but there are {count} prompts.")
    return values


class _Progress:
    """mlx-lm's line of progress."""

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
