"""A drafter on held-out prompts: real decoding, and what it could have drafted of the text."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from ..cli.console import note
from ..decode.generate import dflash_generate_step
from ..decode.sampling import make_sampler
from ..decode.stats import Stats
from ..drafter.model import Drafter
from ..evaluation.prompts import Prompt
from ..evaluation.recall import recall_table

_RESAMPLES = 2000
_INTERVAL = (5, 95)


@dataclass
class Decoded:
    """One answer: its prompt's kind and ids, its own ids, and what the rounds gave."""

    kind: str
    prompt: tuple[int, ...]
    tokens: list[int]
    stats: Stats = field(repr=False)

    @property
    def given(self) -> int:
        """Tokens that rounds gave: all but the prompt pass'."""
        return self.stats.accepted + self.stats.bonus


def decode(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temp: float = 0.0,
    seed: int = 0,
) -> list[Decoded]:
    """Answer prompts through the ordinary decoding loop.

    Args:
        model (nn.Module): The target.
        tokenizer (TokenizerWrapper): Its tokenizer, for the tokens that end an answer.
        drafter (Drafter): The drafter.
        prompts (sequence of Prompt): From :func:`mlx_dflash2.evaluation.prompts.encode`.
        max_tokens (int): The most tokens of an answer.
        temp (float): 0 decodes greedily. Default: ``0.0``.
        seed (int): Of the draws above temperature 0, with the prompt's number. Default: ``0``.
    """
    answers = []
    for number, prompt in enumerate(tqdm(prompts, desc=f"decoding at temperature {temp:g}")):
        stats, tokens = Stats(), []
        sampler = make_sampler(temp) if temp > 0 else None
        steps = dflash_generate_step(
            mx.array(prompt.tokens),
            model,
            drafter,
            max_tokens=max_tokens,
            sampler=sampler,
            seed=seed + number if temp > 0 else None,
            stats=stats,
        )
        with closing(steps):
            for token, _, _ in steps:
                tokens.append(token)
                if token in tokenizer.eos_token_ids:
                    break
        answers.append(Decoded(prompt.suite, prompt.tokens, tokens, stats))
    return answers


def acceptance(answers: Sequence[Decoded]) -> dict[str, Any]:
    """The acceptance length of answers, pooled over all rounds, and where it comes from.

    Returns:
        dict: ``acceptance_length`` (tokens a round, bonus included) with ``interval``, 5 % to
        95 % of a bootstrap over prompts; ``by_kind``; ``by_position``, the share of drafts there
        that were emitted; ``rounds``, ``tokens`` and ``prompts``.
    """
    given = np.array([answer.given for answer in answers])
    rounds = np.array([answer.stats.rounds for answer in answers])
    kinds = sorted({answer.kind for answer in answers})
    of_kind = {kind: np.array([a.kind == kind for a in answers]) for kind in kinds}
    drafted, accepted = ([_column_sums(answers, name)] for name in ("drafted_at", "accepted_at"))
    return {
        "acceptance_length": _ratio(given.sum(), rounds.sum()),
        "interval": interval(given, rounds),
        "by_kind": {k: _ratio(given[m].sum(), rounds[m].sum()) for k, m in of_kind.items()},
        "by_position": [_ratio(a, d) for a, d in zip(accepted[0], drafted[0], strict=True)],
        "rounds": int(rounds.sum()),
        "tokens": int(sum(len(answer.tokens) for answer in answers)),
        "prompts": len(answers),
    }


def interval(given: np.ndarray, rounds: np.ndarray) -> list[float]:
    """From 5 % to 95 % of a bootstrap over prompts of their pooled acceptance length.

    Args:
        given, rounds (np.ndarray): Tokens that rounds gave, and rounds, one number a prompt.
    """
    draws = np.random.default_rng(0).integers(0, len(given), (_RESAMPLES, len(given)))
    lengths = given[draws].sum(axis=1) / np.maximum(1, rounds[draws].sum(axis=1))
    return [float(x) for x in np.percentile(lengths, _INTERVAL)]


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _column_sums(answers: Sequence[Decoded], name: str) -> list[int]:
    columns = [getattr(answer.stats, name) for answer in answers]
    width = max(map(len, columns), default=0)
    padded = [column + [0] * (width - len(column)) for column in columns]
    return np.array(padded).sum(axis=0).tolist()


def evaluate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temps: Sequence[float] = (0.0,),
    stride: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode at every temperature, then measure recall on the greedy answers.

    Args:
        model, tokenizer, drafter, prompts, max_tokens, seed: As for :func:`decode`.
        temps (sequence of float): Temperatures; recall needs 0 among them. Default: ``(0.0,)``.
        stride (int): Tokens from one anchor of the recall to the next. Default: ``1``.

    Returns:
        dict: ``decoding`` by temperature, as :func:`acceptance`, and ``recall``, as
        :func:`mlx_dflash2.evaluation.recall.recall_table`, or ``None`` where no answer is longer
        than a block.
    """
    drafter.eval()
    decoding, greedy = {}, []
    for temp in temps:
        options = {"max_tokens": max_tokens, "temp": temp, "seed": seed}
        answers = decode(model, tokenizer, drafter, prompts, **options)
        decoding[f"{temp:g}"] = acceptance(answers)
        greedy = answers if temp == 0 else greedy
    if 0 not in temps:
        note("eval: recall is skipped, since it is of the greedy answers and no temperature is 0.")
    texts = [(answer.prompt, answer.tokens) for answer in greedy]
    texts = [text for text in texts if len(text[1]) >= drafter.block_size]
    found = None
    if texts:
        with tqdm(total=len(texts), desc="recall") as bar:
            found = recall_table(model, drafter, texts, stride, lambda _: bar.update())
    return {"decoding": decoding, "recall": found}
