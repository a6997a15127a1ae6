"""Evaluate a drafter on held-out prompts: decoding, recall, and plots of both."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cli.console import note
from ..cli.progress import Progress
from ..decode.generate import dflash_generate_step
from ..decode.sampling import make_sampler
from ..decode.stats import Stats
from ..drafter.model import Drafter
from ..evaluation.plots import line_plot, new_figure, save_figure
from ..evaluation.prompts import Prompt
from ..evaluation.recall import recall_table

_RESAMPLES = 2000
_INTERVAL = (5, 95)


@dataclass
class Answer:
    """An answer: its prompt's kind and ids, its own ids, and the counters of its rounds."""

    kind: str
    prompt: tuple[int, ...]
    tokens: list[int]
    stats: Stats = field(repr=False)

    @property
    def from_rounds(self) -> int:
        """Tokens that rounds gave: all but that of the prompt's pass."""
        return self.stats.accepted + self.stats.bonus


def answer_prompts(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temp: float = 0.0,
    seed: int = 0,
) -> list[Answer]:
    """Answer prompts by the ordinary decoding loop.

    Args:
        model, tokenizer, drafter: The pair.
        prompts (sequence of Prompt): From :func:`mlx_dflash2.evaluation.prompts.encode`.
        max_tokens (int): The most tokens of an answer.
        temp (float): 0 decodes greedily. Default: ``0.0``.
        seed (int): Of sampling, with the prompt's number added. Default: ``0``.
    """
    answers = []
    for number, prompt in enumerate(Progress(prompts, desc=f"decoding at temperature {temp:g}")):
        stats, tokens = Stats(), []
        steps = dflash_generate_step(
            mx.array(prompt.tokens),
            model,
            drafter,
            max_tokens=max_tokens,
            # The whole block: acceptance is not to depend on how fast this machine is.
            verify_width=drafter.block_size,
            sampler=make_sampler(temp) if temp > 0 else None,
            seed=seed + number if temp > 0 else None,
            stats=stats,
        )
        with closing(steps):
            for token, _, _ in steps:
                tokens.append(token)
                if token in tokenizer.eos_token_ids:
                    break
        answers.append(Answer(prompt.suite, prompt.tokens, tokens, stats))
    return answers


def acceptance(answers: Sequence[Answer]) -> dict[str, Any]:
    """Summarize the acceptance length of answers, pooled over all rounds.

    Returns:
        dict: ``acceptance_length`` (tokens a round, bonus included) with ``interval``, the 90 %
        interval of a bootstrap over prompts; ``by_kind``; ``by_position``, the share of drafts
        there that were emitted; ``rounds``, ``tokens`` and ``prompts``.
    """
    tokens = np.array([answer.from_rounds for answer in answers])
    rounds = np.array([answer.stats.rounds for answer in answers])
    by_kind = {}
    for kind in sorted({answer.kind for answer in answers}):
        own = np.array([answer.kind == kind for answer in answers])
        by_kind[kind] = _ratio(tokens[own].sum(), rounds[own].sum())
    drafted, accepted = (_column_sums(answers, name) for name in ("drafted_at", "accepted_at"))
    return {
        "acceptance_length": _ratio(tokens.sum(), rounds.sum()),
        "interval": interval(tokens, rounds),
        "by_kind": by_kind,
        "by_position": [_ratio(a, d) for a, d in zip(accepted, drafted, strict=True)],
        "rounds": int(rounds.sum()),
        "tokens": int(sum(len(answer.tokens) for answer in answers)),
        "prompts": len(answers),
    }


def interval(tokens: np.ndarray, rounds: np.ndarray) -> list[float]:
    """Return the 90 % interval of the pooled acceptance length, by a bootstrap over prompts."""
    draws = np.random.default_rng(0).integers(0, len(tokens), (_RESAMPLES, len(tokens)))
    lengths = tokens[draws].sum(axis=1) / np.maximum(1, rounds[draws].sum(axis=1))
    return [float(x) for x in np.percentile(lengths, _INTERVAL)]


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _column_sums(answers: Sequence[Answer], name: str) -> list[int]:
    columns = (getattr(answer.stats, name) for answer in answers)
    return [sum(column) for column in zip_longest(*columns, fillvalue=0)]


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
        model, tokenizer, drafter, prompts, max_tokens, seed: As for :func:`answer_prompts`.
        temps (sequence of float): Temperatures; recall needs 0 among them. Default: ``(0.0,)``.
        stride (int): Tokens from one anchor of the recall to the next. Default: ``1``.

    Returns:
        dict: ``decoding`` by temperature, as :func:`acceptance`, and ``recall``, as
        :func:`mlx_dflash2.evaluation.recall.recall_table`, or ``None`` if every answer is shorter
        than a block.
    """
    drafter.eval()
    decoding: dict[str, Any] = {}
    greedy: list[Answer] = []
    for temp in temps:
        answers = answer_prompts(
            model, tokenizer, drafter, prompts, max_tokens=max_tokens, temp=temp, seed=seed
        )
        decoding[f"{temp:g}"] = acceptance(answers)
        greedy = answers if temp == 0 else greedy
    if 0 not in temps:
        note("eval: recall is skipped: it is measured on greedy answers, and no temperature is 0.")
    texts = [(a.prompt, a.tokens) for a in greedy if len(a.tokens) >= drafter.block_size]
    recall = None
    if texts:
        with Progress(total=len(texts), desc="recall") as bar:
            recall = recall_table(model, drafter, texts, stride, lambda _: bar.update())
    return {"decoding": decoding, "recall": recall}


def save_plots(found: dict[str, Any], folder: Path) -> list[Path]:
    """Plot an evaluation in ``acceptance.png``, and the run's log, if any, in ``training.png``.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    curves = {
        f"accepted, temperature {temp}": result["by_position"]
        for temp, result in found["decoding"].items()
    }
    if (recall := found["recall"]) is not None:
        curves["best token right, where all before are"] = recall["recall_best"]
        curves["among the candidates, where all before are"] = recall["recall_candidates"]
    figure = line_plot("Held-out prompts", curves, "share of drafts")
    files = [save_figure(figure, folder / "acceptance.png")]
    log = folder / "log.jsonl"
    if log.is_file():
        files.append(_save_log(log, folder / "training.png"))
    return files


def _save_log(log: Path, path: Path) -> Path:
    """Plot loss and acceptance length by step."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure = new_figure()
    left = figure.subplots()
    steps = [line["step"] for line in lines]
    left.plot(steps, [line["loss"] for line in lines], color="tab:blue")
    left.set(xlabel="step", ylabel="loss", title="Training")
    right = left.twinx()
    right.plot(steps, [line["length"] for line in lines], color="tab:orange")
    right.set(ylabel="acceptance length at the drawn anchors")
    return save_figure(figure, path)
