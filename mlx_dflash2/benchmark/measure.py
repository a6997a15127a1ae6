"""Run all arms on all prompts, and measure each run."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.stats import Stats
from ..drafter.model import Drafter
from ..evaluation.machine import num_bytes
from ..evaluation.prompts import Prompt
from .arms import Arm, BenchSettings

WARM_UP_TOKENS = 3


@dataclass
class Sample:
    """One run of one arm on one prompt.

    Attributes:
        arm, suite (str), prompt, trial (int): Which run this is.
        tokens (list): The answer's token ids.
        prompt_tokens (int): Length of the prompt.
        prompt_time (float): Seconds up to the first token.
        decode_time (float): Seconds from the first token to the last.
        total_time (float): Seconds of the whole call.
        accepted (int): Tokens that a drafter, or mlx-lm's draft model, proposed.
        memory (int): Peak bytes: the arm's weights and whatever it allocated besides.
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
    """The models, arms and prompts of a benchmark; drafters by the name of their arm."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    drafters: dict[str, Drafter]
    arms: list[Arm]
    prompts: Sequence[Prompt]
    settings: BenchSettings
    trials: int = 1

    @property
    def num_runs(self) -> int:
        return len(self.prompts) * self.trials * len(self.arms)

    def run(
        self,
        samples: list[Sample],
        progress: Callable[[str], None] = lambda _: None,
        save: Callable[[list[Sample]], object] = lambda _: None,
    ) -> None:
        """Warm every arm up on a short prompt, then run all of them in turns.

        The arms take turns on every prompt, and each trial starts with another arm, so that drift
        of the machine affects all of them alike.

        Args:
            samples (list of Sample): Runs of an earlier start; new ones are appended, a whole
                prompt at a time.
            progress (callable): Called with a description before each run.
            save (callable): Called with all samples after each prompt.
        """
        done = {run.prompt for run in samples}
        if len(done) == len(self.prompts):
            return
        for arm in self.arms:
            progress(f"warm-up, {arm.label}")
            short = Prompt("", "", self.prompts[0].tokens[:WARM_UP_TOKENS])
            self._run_one(arm, short, -1, 0, WARM_UP_TOKENS)
        for index, prompt in enumerate(self.prompts):
            if index in done:
                for arm in self.arms * self.trials:
                    progress(f"{prompt.suite}, {arm.label}")
                continue
            gc.collect()
            runs = []
            for trial in range(self.trials):
                first = (index + trial) % len(self.arms)
                for arm in [*self.arms[first:], *self.arms[:first]]:
                    progress(f"{prompt.suite}, {arm.label}")
                    runs.append(self._run_one(arm, prompt, index, trial))
            samples.extend(runs)
            save(samples)

    def _run_one(
        self, arm: Arm, prompt: Prompt, index: int, trial: int, max_tokens: int | None = None
    ) -> Sample:
        settings = replace(self.settings, seed=self.settings.seed + trial)
        if max_tokens is not None:
            settings = replace(settings, max_tokens=max_tokens)
        stats, tokens, drafted = Stats(), list[int](), list[bool]()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        start = first = last = time.perf_counter()
        ids = list(prompt.tokens)
        for response in arm.stream(self.model, self.tokenizer, ids, settings, stats):
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
    """Count the rounds of mlx-lm's speculation in an answer.

    Every round ends with a token of the target's own, except a last one that ends in a draft: at
    the end of the answer, or at the token limit. ``drafted`` tells for each token whether the
    draft model proposed it.
    """
    return len(drafted) - sum(drafted) + (bool(drafted) and drafted[-1])
