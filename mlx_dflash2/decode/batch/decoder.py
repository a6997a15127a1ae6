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

REMOVED = "removed"


@dataclass(eq=False)
class Answer:
    """What becomes of one prompt.

    Attributes:
        sequence (Sequence): From :meth:`Loop.open`.
        prompt (mx.array): Token ids [S] that the caches do not cover yet, at least one.
        left (float): Tokens that may still be handed out.
        keeps_caches (bool): Make ``prompt_cache`` at the end.
        history (mx.array, optional): What logits processors are shown. Default: the prompt.
        ends (list of int): Where to stop on the way through the prompt for :meth:`reached`.
        read (int): Tokens of the prompt that have been processed.
        tokens (list of int): The answer, without an EOS token at its end.
        logprobs (list of float): Theirs, if they are kept.
        finish_reason (str, optional): Why it has ended: ``stop``, ``length`` or ``removed``.
        prompt_cache (list, optional): Caches that cover prompt and answer.
    """

    sequence: DecodedSequence
    prompt: mx.array
    left: float
    keeps_caches: bool = False
    history: mx.array | None = None
    ends: list[int] = field(default_factory=list)
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None

    def begin(self) -> None:
        """Get ready to be processed; a caller's caches are left as they are, as in mlx-lm."""
        caches = copy.deepcopy(self.sequence.caches)
        self.sequence.session = Session(caches, kept=self.keeps_caches)

    def reached(self) -> None:
        """Note that the sequence's caches cover one of ``ends``."""

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

    def end(self, loop: Loop) -> None:
        """Keep what is to outlive the sequence, whose caches are its own again."""
        if self.keeps_caches:
            loop.close(self.sequence)
            self.prompt_cache = self.sequence.caches


class BatchDecoder:
    """Answers prompts side by side: they come and go between rounds.

    Args:
        loop (Loop): Decodes them.
        eos_token_ids (collection): Tokens that end an answer.
        batch_size (int): The most sequences to decode at a time; the others wait.
        prefill_step_size (int): Prompt tokens to process at a time.
        prefill_batch_size (int): Prompts to finish between two rounds of :meth:`step`.
        keeps_logprobs (bool): Keep each token's log probability.
        on_finish (callable): Called for each answer that has finished.

    Attributes:
        waiting (list of Answer): Whose prompt has not been processed to its end.
        joining (list of Answer): Who take part in the next round.
        active (list of Answer): Who took part in the last one and go on.
    """

    def __init__(
        self,
        loop: Loop,
        eos_token_ids: Collection[int],
        *,
        batch_size: int,
        prefill_step_size: int,
        prefill_batch_size: int = 8,
        keeps_logprobs: bool = False,
        on_finish: Callable[[Answer], None] = lambda _: None,
    ):
        self.loop, self.eos_token_ids = loop, eos_token_ids
        self.cache = BatchCache()
        self.waiting: list[Answer] = []
        self.joining: list[Answer] = []
        self.active: list[Answer] = []
        self.batch_size, self.prefill_step_size = batch_size, prefill_step_size
        self.prefill_batch_size = prefill_batch_size
        self.keeps_logprobs, self.on_finish = keeps_logprobs, on_finish

    def __len__(self) -> int:
        return len(self.waiting) + len(self.joining) + len(self.active)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all answers that are being processed."""
        alone = [a for a in (*self.waiting, *self.joining) if a.read]
        caches = [cache for answer in alone for cache in answer.sequence.caches]
        return sum(cache.nbytes for cache in (*self.cache.layers, *caches))

    def insert(self, answer: Answer) -> None:
        """Add an answer, at the end of those that wait."""
        self.waiting.append(answer)

    def run(self) -> None:
        """Decode until every prompt has been answered."""
        while len(self):
            while self._has_place():
                self._read_on(self.waiting[0], self.prefill_step_size)
            self._next_round()
        self.loop.stats.kernels = active_kernels()

    def step(self) -> None:
        """Process a step's worth of the prompts that wait, then one round of the others."""
        room, most = self.prefill_step_size, len(self.waiting) - self.prefill_batch_size
        while room > 0 and len(self.waiting) > most and self._has_place():
            room -= self._read_on(self.waiting[0], room)
        self._next_round()

    def remove(self, answer: Answer) -> None:
        """End an answer where it is."""
        answer.finish_reason = REMOVED
        if answer in self.active:
            self._leave()
            return
        for answers in (self.waiting, self.joining):
            if answer in answers:
                answers.remove(answer)
        if answer.read:
            self._finish(answer)
        else:
            self.on_finish(answer)

    def _has_place(self) -> bool:
        return bool(self.waiting) and len(self.active) + len(self.joining) < self.batch_size

    def _read_on(self, answer: Answer, room: int) -> int:
        """Process a chunk of a prompt, or its last token; how many tokens that were."""
        if answer.read == 0 and not self._begin(answer):
            return 0
        last = answer.prompt.size - 1
        if answer.read >= last:
            self._first_token(answer)
            return 1
        goal = min((end for end in answer.ends if end > answer.read), default=last + 1)
        self.loop.expect(answer.sequence, goal - answer.read)
        chunk = answer.prompt[answer.read : min(answer.read + room, goal, last)]
        self.loop.read(answer.sequence, chunk)
        answer.read += chunk.size
        if answer.read in answer.ends:
            answer.reached()
        return chunk.size

    def _begin(self, answer: Answer) -> bool:
        """Get an answer ready; false if there is nothing to be done for it."""
        if answer.left == 0:
            answer.finish_reason = "length"
        if answer.left == 0 and not answer.keeps_caches:
            self.waiting.remove(answer)
            self.on_finish(answer)
            return False
        answer.begin()
        return True

    def _first_token(self, answer: Answer) -> None:
        history = answer.prompt if answer.history is None else answer.history
        decision = self.loop.first_token(answer.sequence, answer.prompt[-1:], history)
        answer.read += 1
        self.waiting.remove(answer)
        with mx.stream(self.loop.stream):
            if answer.finish_reason is None:
                self._take([answer], [decision])
            self.loop.settle()
        if answer.finish_reason is None:
            self.joining.append(answer)
        else:
            self._finish(answer)

    def _join(self) -> None:
        """Let those whose prompts have been processed join the batch."""
        if self.joining:
            with mx.stream(self.loop.stream):
                self.cache.join([answer.sequence.caches for answer in self.joining])
            self.active += self.joining
            self.joining = []
            mx.clear_cache()

    def _next_round(self) -> None:
        self._join()
        answers = self.active
        if not answers:
            return
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
        gone = [answer for answer in self.active if answer.finish_reason is not None]
        with mx.stream(self.loop.stream):
            for b, answer in enumerate(self.active):
                if answer in gone and answer.keeps_caches:
                    answer.sequence.session = Session(self.cache.extract(b), kept=True)
            if gone:
                self.active = [self.active[b] for b in stay]
                self.cache.leave(stay)
            if self.active:
                self.cache.compact([answer.sequence.position for answer in self.active])
        for answer in gone:
            self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        answer.end(self.loop)
        answer.sequence.session, answer.sequence.context = Session([], kept=False), None
        self.on_finish(answer)
