"""Several prompts being answered: one target pass verifies a block of each."""

import copy
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...kernels import active_kernels
from ..host import floats
from ..judge import Decision
from ..loop import Loop
from ..sequence import Sequence as DecodedSequence
from ..session import Session
from .caches import BatchCache


@dataclass
class Answer:
    """What becomes of one prompt: ``tokens`` leaves out an EOS token at the end."""

    sequence: DecodedSequence
    prompt: mx.array
    left: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None

    def take(self, decision: Decision, eos_token_ids: Collection[int]) -> None:
        """Hand out tokens up to an EOS token or the end of the budget."""
        for token in decision.tokens:
            decision.taken += 1
            self.left -= 1
            if token in eos_token_ids:
                self.finish_reason = "stop"
                return
            self.tokens.append(token)
            if self.left == 0:
                self.finish_reason = "length"
                return


class BatchDecoder:
    """Answers prompts side by side until each has finished; waiting ones take free places.

    Args:
        loop (Loop): Decodes them.
        answers (sequence of Answer): At least one.
        eos_token_ids (collection): Tokens that end an answer.
        batch_size (int): The most sequences to decode at a time.
        prefill_step_size (int): Prompt tokens to process at a time.
        keeps_logprobs (bool): Keep each token's log probability.
        keeps_caches (bool): Keep the caches of finished answers.
        on_finish (callable): Called for each answer that has finished.
    """

    def __init__(
        self,
        loop: Loop,
        answers: Sequence[Answer],
        eos_token_ids: Collection[int],
        *,
        batch_size: int,
        prefill_step_size: int,
        keeps_logprobs: bool = False,
        keeps_caches: bool = False,
        on_finish: Callable[[Answer], None] = lambda _: None,
    ):
        self.loop, self.eos_token_ids = loop, eos_token_ids
        self.waiting, self.cache = list(answers), BatchCache()
        self.active: list[Answer] = []
        self.batch_size, self.prefill_step_size = batch_size, prefill_step_size
        self.keeps_logprobs, self.keeps_caches = keeps_logprobs, keeps_caches
        self.on_finish = on_finish

    def run(self) -> None:
        """Decode until every prompt has been answered."""
        while self.waiting or self.active:
            if self.waiting and len(self.active) < self.batch_size:
                self._admit()
            if self.active:
                self._next_round()
        self.loop.stats.kernels = active_kernels()

    def _admit(self) -> None:
        """Process waiting prompts, each alone, and let those that go on join the batch."""
        joining: list[Answer] = []
        while self.waiting and len(self.active) + len(joining) < self.batch_size:
            answer = self.waiting.pop(0)
            if self._prefill(answer):
                joining.append(answer)
        with mx.stream(self.loop.stream):
            if joining:
                self.cache.join([answer.sequence.caches for answer in joining])
        self.active += joining
        mx.clear_cache()

    def _prefill(self, answer: Answer) -> bool:
        """Give an answer its first token; true if it goes on from there."""
        sequence = answer.sequence
        if answer.left == 0:
            answer.finish_reason = "length"
            if not self.keeps_caches:
                self.on_finish(answer)
                return False
        # A caller's caches are left as they are, as in mlx-lm.
        sequence.session = Session(copy.deepcopy(sequence.caches), kept=self.keeps_caches)
        decision = self.loop.prefill(sequence, answer.prompt, self.prefill_step_size)
        with mx.stream(self.loop.stream):
            if answer.finish_reason is None:
                self._take([answer], [decision])
            self.loop.settle(extend=answer.finish_reason is None)
        if answer.finish_reason is not None:
            self._finish(answer)
        return answer.finish_reason is None

    def _next_round(self) -> None:
        answers = self.active
        budgets = [answer.left for answer in answers]
        sequences = [answer.sequence for answer in answers]
        decisions = self.loop.next_round(sequences, self.cache.layers, budgets)
        start = time.perf_counter()
        with mx.stream(self.loop.stream):
            self._take(answers, decisions)
            self.loop.settle()
            self._leave()
        self.loop.stats.generation_time += time.perf_counter() - start

    def _take(self, answers: Sequence[Answer], decisions: Sequence[Decision]) -> None:
        picked = []
        for answer, decision in zip(answers, decisions, strict=True):
            answer.take(decision, self.eos_token_ids)
            if self.keeps_logprobs:
                ids = mx.array(decision.tokens[: decision.taken])[:, None]
                rows = mx.stack(decision.logprobs[: decision.taken])
                picked.append(mx.take_along_axis(rows, ids, axis=-1)[:, 0])
        if picked:
            mx.eval(picked)
            for answer, values in zip(answers, picked, strict=True):
                answer.logprobs += floats(values)
                del answer.logprobs[len(answer.tokens) :]

    def _leave(self) -> None:
        """Take finished answers out of the batch."""
        stay = [b for b, answer in enumerate(self.active) if answer.finish_reason is None]
        for b, answer in enumerate(self.active):
            if answer.finish_reason is not None:
                if self.keeps_caches:
                    answer.sequence.session = Session(self.cache.extract(b), kept=True)
                self._finish(answer)
        if len(stay) < len(self.active):
            self.active = [self.active[b] for b in stay]
            self.cache.leave(stay)
        if self.active:
            self.cache.compact([answer.sequence.position for answer in self.active])

    def _finish(self, answer: Answer) -> None:
        sequence = answer.sequence
        if self.keeps_caches:
            self.loop.close(sequence)
            answer.prompt_cache = sequence.caches
        sequence.session, sequence.context = Session([], kept=False), None
        self.on_finish(answer)
