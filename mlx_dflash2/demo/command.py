"""Decode two prompts with the embedded pair and plainly: compare tokens, and time both."""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, wired_limit
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from ..blas.measure import blas_file
from ..cli.console import note, prefill_progress, streamed_answer
from ..decode.generate import stream_generate
from ..decode.stats import Stats
from ..evaluation.parity import TIE, compare_tokens
from ..pairs.find import find_pair
from ..pairs.load import Pair, load_pair

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the sum of a list of numbers.",
)
# A CPU decodes a few tokens a second; a GPU needs more of them for a steady figure.
MAX_TOKENS = {mx.cpu: 48, mx.gpu: 128}
# Passes that are timed with one wait.
PASSES = {mx.cpu: 1, mx.gpu: 64}


@dataclass
class Answer:
    """One answer.

    Attributes:
        tokens (list of int): Its token ids.
        logprobs (list of mx.array): A row of log probabilities [V] for each.
        seconds (float): Time from the first token to the last.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[mx.array] = field(default_factory=list)
    seconds: float = 0.0


def decode(responses: Iterable[GenerationResponse]) -> Answer:
    """Print a stream's text while it is generated, and time it."""
    answer, start = Answer(), 0.0
    with streamed_answer() as show:
        for response in responses:
            start = start or time.perf_counter()
            answer.tokens.append(response.token)
            answer.logprobs.append(response.logprobs)
            show(response.text)
    answer.seconds = time.perf_counter() - start
    return answer


def encode(pair: Pair, question: str) -> list[int]:
    """Encode a question in the target's chat template."""
    return pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )


def compare(
    pair: Pair, question: str, prompt: list[int], max_tokens: int
) -> tuple[Answer, Answer, Stats]:
    """Decode the answer to a question's prompt with drafts, then without."""
    stats = Stats()
    print(f"\n> {question}\n\n[with drafts]")
    models = (pair.model, pair.tokenizer, prompt, max_tokens)
    with prefill_progress() as progress:
        drafted = decode(
            stream_generate(
                *models,
                draft_model=pair.drafter,
                prompt_progress_callback=progress,
                stats=stats,
            )
        )
    print("\n[plain mlx-lm]")
    with prefill_progress() as progress:
        plain = decode(mlx_lm.stream_generate(*models, prompt_progress_callback=progress))
    print(
        f"\n{len(plain.tokens)} tokens; acceptance length {stats.acceptance_length:.2f}; "
        f"with drafts {_tps([drafted]):.2f} tokens/s, plain mlx-lm {_tps([plain]):.2f} tokens/s"
    )
    return drafted, plain, stats


def difference(drafted: Answer, plain: Answer) -> str | None:
    """Describe the first token that differs, in one line; ``None`` if all are equal."""
    if drafted.tokens == plain.tokens:
        return None
    pairs = enumerate(zip(drafted.tokens, plain.tokens, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), None)
    if index is None:
        return f"{len(drafted.tokens)} tokens with drafts but {len(plain.tokens)} plainly"
    found, expected = drafted.tokens[index], plain.tokens[index]
    gap = (plain.logprobs[index][expected] - plain.logprobs[index][found]).item()
    return (
        f"token {index} is {found} with drafts but {expected} plainly, where plain decoding "
        f"puts the two {gap:.2g} apart in log probability"
    )


def verify_cost(model: nn.Module, rows: int, repeats: int = 3) -> float:
    """Time a target pass over some rows, relative to one over a single row."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.ones((1, 16), mx.uint32), cache=cache))
    # On a GPU waiting for a single pass would count as much as a small model's pass.
    calls = PASSES[mx.default_device().type]

    def seconds(length: int) -> float:
        start, logits = time.perf_counter(), []
        for _ in range(calls):
            # Each pass writes to the places of the one before, so it waits for it.
            logits.append(model(mx.ones((1, length), mx.uint32), cache=cache))
            trim_prompt_cache(cache, length)
        mx.eval(logits)
        return time.perf_counter() - start

    # In turns, so that another load on the machine affects both alike. The first pass of a
    # shape may compile kernels and does not count.
    with wired_limit(model):
        times = [(seconds(rows), seconds(1)) for _ in range(repeats + 1)][1:]
    block, single = (statistics.median(column) for column in zip(*times, strict=True))
    return block / single


def speed_report(
    plain_tps: float, drafted_tps: float, acceptance: float, rows: int, cost: float, cpu: bool
) -> str:
    """Explain the measured figures in a few lines.

    Args:
        plain_tps, drafted_tps (float): Tokens a second without and with drafts.
        acceptance (float): Tokens a round.
        rows (int): Rows of a verify pass.
        cost (float): Time of a verify pass relative to a pass over one row.
        cpu (bool): Whether MLX computes on the CPU.
    """
    lines = [
        f"With drafts {drafted_tps:.2f} tokens/s, plain mlx-lm {plain_tps:.2f} tokens/s: "
        f"{drafted_tps / plain_tps:.2f} times the speed.",
        f"A verify pass of {rows} rows costs {cost:.1f} plain steps here, and gave "
        f"{acceptance:.2f} tokens.",
    ]
    if cost > acceptance:
        lines.append("So drafting cannot pay here, even with a drafter that takes no time.")
    if cpu:
        lines.append(
            f"MLX's CPU backend computed this in float32, with {Path(blas_file()).name}; it says "
            "nothing about the speed on a GPU."
        )
    return "\n".join(lines)


def _warm_up(pair: Pair) -> None:
    for drafter in (pair.drafter, None):
        for _ in stream_generate(pair.model, pair.tokenizer, [1, 2], 3, draft_model=drafter):
            pass


def _check(
    model: nn.Module, prompt: list[int], drafted: Answer, plain: Answer, stats: Stats
) -> str | None:
    """Exit if the tokens are not those of plain mlx-lm; describe a tie between two tokens."""
    if stats.fallback:
        sys.exit(f"error: drafting stopped: {stats.fallback}")
    if (found := difference(drafted, plain)) is None:
        return None
    audited = compare_tokens(model, prompt, plain.tokens, drafted.tokens, stats.verify_width)
    if audited.verdict != TIE:
        sys.exit(f"error: the tokens are not those of plain mlx-lm: {found}")
    return (
        f"A tie: {found}; the same row in a pass of several, as mlx-lm's own prompt passes are, "
        f"moves by {audited.noise:.2g}."
    )


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    pair = load_pair(find_pair())
    device = mx.default_device().type
    _warm_up(pair)
    compared, ties = [], []
    for question in PROMPTS:
        prompt = encode(pair, question)
        compared.append(compare(pair, question, prompt, MAX_TOKENS[device]))
        ties.append(_check(pair.model, prompt, *compared[-1]))
    same = "\nBoth answers have exactly the tokens of plain mlx-lm."
    print("\n".join(["", *filter(None, ties)]) if any(ties) else same)

    note("Timing a verify pass ...")
    rows = pair.drafter.block_size
    cost = verify_cost(pair.model, rows)
    drafted, plain, stats = zip(*compared, strict=True)
    acceptance = sum(s.accepted + s.bonus for s in stats) / sum(s.rounds for s in stats)
    print(speed_report(_tps(plain), _tps(drafted), acceptance, rows, cost, device == mx.cpu))


def _tps(runs: Sequence[Answer]) -> float:
    return sum(len(r.tokens) - 1 for r in runs) / sum(r.seconds for r in runs)
