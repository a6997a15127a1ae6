"""Running all arms on all prompts, prompt by prompt, and what one run gives."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.stats import Stats
from ..drafter.model import Drafter
from ..evaluation.prompts import Prompt
from .arms import Arm, Settings, num_bytes

WARM_UP_TOKENS = 3


@dataclass
class Sample:
    """One run of one arm on one prompt.

    Attributes:
        arm, suite (str), prompt, trial (int): Which run this is.
        tokens (list): What was emitted.
        prompt_tokens (int), prompt_time (float): Seconds up to the first token.
        decode_time (float): Seconds from the first token to the last.
        total_time (float): Seconds of the whole call.
        accepted (int): Tokens that a drafter, or mlx-lm's draft model, had proposed.
        memory (int): Peak bytes: the arm's own weights and all that came on top while it ran.
        rounds (int): Verify passes of mlx-lm's speculation; a DFlash arm's are in ``stats``.
        stats (dict): A DFlash arm's counters.
    """

    arm: str
    suite: str
    prompt: int
    trial: int
    tokens: list[int]
    prompt_tokens: int
    prompt_time: float
    decode_time: float
    total_time: float
    accepted: int
    memory: int
    rounds: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def decode_tps(self) -> float:
        return (len(self.tokens) - 1) / self.decode_time if self.decode_time else 0.0

    @property
    def total_tps(self) -> float:
        return len(self.tokens) / self.total_time

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prompt_time


@dataclass
class Bench:
    """The models, the arms and the prompts of a benchmark; drafters by their arms' name."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    drafters: dict[str, Drafter]
    arms: Sequence[Arm]
    prompts: Sequence[Prompt]
    settings: Settings
    trials: int = 1

    @property
    def num_runs(self) -> int:
        return len(self.prompts) * self.trials * len(self.arms)

    def run(self, progress: Callable[[str], None] = lambda _: None) -> list[Sample]:
        """Every arm once on a short prompt to warm up, then all in turns.

        The arms take turns on every prompt, and each trial starts with another one, so that what
        changes on the machine meanwhile meets all of them.

        Args:
            progress (callable): Called with a description before each run.
        """
        for arm in self.arms:
            progress(f"warm-up, {arm.label}")
            short = Prompt("", "", self.prompts[0].tokens[:WARM_UP_TOKENS])
            self._run_one(arm, short, -1, 0, WARM_UP_TOKENS)
        samples = []
        for index, prompt in enumerate(self.prompts):
            gc.collect()
            for trial in range(self.trials):
                first = (index + trial) % len(self.arms)
                for arm in [*self.arms[first:], *self.arms[:first]]:
                    progress(f"{prompt.suite}, {arm.label}")
                    samples.append(self._run_one(arm, prompt, index, trial))
        return samples

    def _run_one(
        self, arm: Arm, prompt: Prompt, index: int, trial: int, max_tokens: int | None = None
    ) -> Sample:
        settings = self.settings
        settings = Settings(**asdict(settings) | {"seed": settings.seed + trial})
        if max_tokens is not None:
            settings = Settings(**asdict(settings) | {"max_tokens": max_tokens})
        stats, tokens, drafted = Stats(), [], []
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        start = first = last = time.perf_counter()
        for response in arm.stream(
            self.model, self.tokenizer, list(prompt.tokens), settings, stats
        ):
            last = time.perf_counter()
            first = last if not tokens else first
            tokens.append(response.token)
            drafted.append(response.from_draft)
        end = time.perf_counter()
        weights = num_bytes(self.model) + arm.draft_bytes
        return Sample(
            arm.label,
            prompt.suite,
            index,
            trial,
            tokens,
            len(prompt.tokens),
            first - start,
            last - first,
            end - start,
            sum(drafted),
            weights + max(0, mx.get_peak_memory() - before),
            0 if arm.draft_lm is None else rounds_of(drafted),
            asdict(stats) if arm.proposer is not None else {},
        )


def rounds_of(drafted: Sequence[bool]) -> int:
    """Rounds of mlx-lm's speculation that gave an answer.

    Each ends with a token of the target's own, but for a last one that ends in a draft: one that
    ends the answer, or is the last token asked for.

    Args:
        drafted (sequence of bool): Of each token whether the draft model had proposed it.
    """
    return len(drafted) - sum(drafted) + (bool(drafted) and drafted[-1])
