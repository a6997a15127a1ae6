"""The quick answer to "how fast": prompts and answers of given lengths, as mlx_lm.benchmark."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import mlx.core as mx

from ..decode.batch.generate import batch_generate
from ..decode.generate import stream_generate
from ..decode.stats import Stats
from ..drafter.model import Proposer
from ..evaluation.prompts import encode, read_chats
from ..pairs.load import Pair


@dataclass(frozen=True)
class Lengths:
    """Tokens of each prompt and of each answer, and how many are decoded side by side."""

    prompt: int
    generation: int
    batch: int


class Speed(NamedTuple):
    """Rates in tokens a second, peak memory in GB, and tokens a round with drafts."""

    prompt_tps: float
    generation_tps: float
    memory: float
    acceptance_length: float = 1.0

    def __str__(self) -> str:
        return (
            f"prompt_tps={self.prompt_tps:.3f}, generation_tps={self.generation_tps:.3f}, "
            f"tokens_a_round={self.acceptance_length:.2f}, peak_memory={self.memory:.3f}"
        )


def measure(
    pair: Pair,
    lengths: Lengths,
    trials: int,
    step_size: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Speed, Speed]]:
    """Decode the same prompts plainly and with drafts, in turns, and yield both speeds.

    Unlike mlx_lm.benchmark, whose prompts are random ids, prompts are text: nobody can draft what
    follows noise. Answers do not end before their length.

    Args:
        pair (Pair): What is measured; its tokenizer loses its EOS tokens.
        lengths (Lengths): Of prompts and answers.
        trials (int): Times to measure, after a warm-up that is not yielded.
        step_size (int): Prompt tokens to process at a time.
        progress (callable): Called with a description before each run.
    """
    pair.tokenizer.eos_token_ids = set()
    prompts = make_prompts(pair, lengths)
    for trial in range(trials + 1):
        speeds = []
        for proposer in (None, pair.proposer):
            progress(f"{'with drafts' if proposer else 'plain'}, trial {trial or 'warm-up'}")
            speeds.append(_run(pair, proposer, prompts, lengths, step_size))
        if trial > 0:
            yield speeds[0], speeds[1]


def make_prompts(pair: Pair, lengths: Lengths) -> list[list[int]]:
    """Cut prompts out of the built-in ones; each begins with another of them."""
    texts = [list(p.tokens) for p in encode(read_chats(["built-in"]), pair.tokenizer)]
    starts = [texts[i % len(texts) :] + texts[: i % len(texts)] for i in range(lengths.batch)]
    return [list(islice(cycle(chain(*start)), lengths.prompt)) for start in starts]


def _run(
    pair: Pair, proposer: Proposer | None, prompts: list[list[int]], lengths: Lengths, step: int
) -> Speed:
    mx.clear_cache()
    mx.reset_peak_memory()
    stats, models = Stats(), (pair.model, pair.tokenizer)
    options: dict[str, Any] = {"max_tokens": lengths.generation, "prefill_step_size": step}
    if proposer is not None:
        options |= {"draft_model": proposer, "stats": stats}
    if lengths.batch == 1:
        (*_, last) = stream_generate(*models, prompts[0], **options)
        speed = last.prompt_tps, last.generation_tps, last.peak_memory
    else:
        found = batch_generate(*models, prompts, **options).stats
        speed = found.prompt_tps, found.generation_tps, found.peak_memory
    return Speed(*speed, stats.acceptance_length if proposer is not None else 1.0)
