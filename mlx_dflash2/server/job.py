"""One request on its way through the batch: tokens in, pieces of text out."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from queue import SimpleQueue

import mlx.core as mx
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.batch.decoder import REMOVED, Answer
from ..decode.constraint import Constraint
from ..decode.host import floats, integers
from ..decode.judge import Decision, Judge
from ..decode.loop import Loop
from ..decode.sampling import make_logits_processors, make_sampler
from ..decode.stats import Stats
from ..decode.text import StopStrings, TextStream
from .schema import Request
from .store import PromptStore

# OpenAI's number for tokens that are out of the question.
LEAST_LOGPROB = -9999.0
NORMAL, REASONING = "normal", "reasoning"


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens.

    Attributes:
        tokens (list of int): All of them.
        places (dict): Tokens up to where caches are worth keeping, and what they are.
        machine (TextStateMachine, optional): Splits the answer's text; ``None`` leaves it whole.
        state (str): The machine's first state.
    """

    tokens: list[int]
    places: dict[int, str] = field(default_factory=dict)
    machine: TextStateMachine | None = None
    state: str = NORMAL


@dataclass(frozen=True)
class TokenLogprobs:
    """A token, its log probability, and the most likely tokens with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """What a round adds to an answer.

    ``segments`` are texts with the state that they belong to: ``normal``, ``reasoning`` or
    ``tool``.
    """

    segments: list[tuple[str, str]]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True)
class Outcome:
    """How an answer ended, and what it took.

    ``stats`` are its rounds; ``fallback`` says why drafting stopped, and ``problem`` why the
    schema ended the answer, if they did. Times in seconds.
    """

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stats: Stats
    fallback: str | None
    problem: str | None
    prompt_time: float
    generation_time: float

    @property
    def is_removed(self) -> bool:
        """Whether the client did not wait for the end."""
        return self.finish_reason == REMOVED


class Job(Answer):
    """A request and its answer.

    The thread of the connection makes it, reads its ``events`` and may :meth:`cancel` it; the
    generation thread does everything else.

    Args:
        request (Request): What was asked for.
        prompt (Prompt): Its tokens.
        tokenizer (TokenizerWrapper): The target's tokenizer.
        max_tokens (int): The most tokens to generate.
        special_tokens (list of int): Those that XTC leaves alone.
        is_gone (callable): Whether the client has hung up.
        constraint (Constraint, optional): What the answer has to follow.

    Attributes:
        events (SimpleQueue): A :class:`Piece` a round, and at last an :class:`Outcome` or the
            exception that ended it.
        outcome (Outcome, optional): What it took, once it has ended.
        cancelled (bool): Whether nobody waits for the answer any more.
    """

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        tokenizer: TokenizerWrapper,
        max_tokens: int,
        special_tokens: list[int],
        is_gone: Callable[[], bool] = lambda: False,
        constraint: Constraint | None = None,
    ):
        self.request, self.all_tokens, self.places = request, prompt.tokens, prompt.places
        self.special_tokens, self.left = special_tokens, max_tokens
        self.constraint = constraint
        self.events: SimpleQueue[Piece | Outcome | BaseException] = SimpleQueue()
        self.cancelled, self.is_gone, self.keeps_caches = False, is_gone, True
        self.text = TextStream(tokenizer, StopStrings(tuple(request.stop)))
        self.machine = None if prompt.machine is None else prompt.machine.make_state(prompt.state)
        self.read, self.tokens, self.ends = 0, [], []
        self.finish_reason, self.history = None, None
        self.outcome: Outcome | None = None
        self.cached, self.begun_at, self.first_at = 0, 0.0, 0.0

    def cancel(self) -> None:
        """Say that nobody waits for the answer any more."""
        self.cancelled = True

    def attach(self, loop: Loop, store: PromptStore) -> None:
        """Say what it will be decoded with."""
        self.loop, self.store = loop, store

    def begin(self) -> None:
        """Go on from the longest stored prefix."""
        self.begun_at = time.perf_counter()
        request = self.request
        judge = Judge(
            make_sampler(**request.sampling, xtc_special_tokens=self.special_tokens),
            [
                *make_logits_processors(**request.processors),
                *([] if self.constraint is None else [self.constraint]),
            ],
            request.seed,
        )
        seeded = not judge.is_repeatable_at_any_width and request.verify_width != 1
        session, self.cached = self.store.fetch(self.all_tokens, whole=seeded)
        self.sequence = self.loop.open(judge, session, verify_width=request.verify_width)
        # Nothing is done with its caches at the end but to store them.
        self.sequence.session.kept = False
        self.prompt = mx.array(self.all_tokens[self.cached :], mx.uint32)
        if judge.processors:
            self.history = mx.array(self.all_tokens, mx.uint32)
        self.ends = [place - self.cached for place in sorted(self.places) if place > self.cached]

    def reached(self) -> None:
        """Store a copy of the caches at a place worth keeping."""
        place, sequence = self.cached + self.read, self.sequence
        self.store.keep(
            self.all_tokens[:place],
            sequence.caches,
            sequence.drafter_context,
            self.places[place],
            own=False,
        )

    def take(self, decision: Decision, eos_token_ids: Collection[int]) -> None:
        """Hand out a round's tokens up to the end of the answer."""
        if not self.first_at:
            self.first_at = time.perf_counter()
        text = ""
        for token in decision.tokens:
            decision.taken += 1
            self.left -= 1
            self.tokens.append(token)
            if token in eos_token_ids:
                self.finish_reason = "stop"
                break
            text += self.text.add(token)
            if self.text.ended or self.left == 0:
                self.finish_reason = "stop" if self.text.ended else "length"
                break
        if self.finish_reason is not None:
            text += self.text.finish()
            if self.text.stops.found:
                self.finish_reason = "stop"
        self.events.put(Piece(self._split(text), self._logprobs(decision)))

    def end(self, loop: Loop) -> None:
        """Store the caches, and say how it went."""
        sequence = self.sequence
        covered = (self.all_tokens + self.tokens)[: sequence.position]
        if len(covered) > self.cached:
            context, sequence.context = sequence.drafter_context, None
            self.store.keep(covered, sequence.caches, context, "assistant", own=True)
        now = time.perf_counter()
        first = self.first_at or now
        self.outcome = Outcome(
            self.finish_reason or REMOVED,
            len(self.all_tokens),
            self.cached,
            len(self.tokens),
            sequence.stats,
            loop.stats.fallback if sequence.drafts else None,
            None if self.constraint is None else self.constraint.problem,
            first - self.begun_at,
            now - first,
        )
        self.events.put(self.outcome)

    def fail(self, error: BaseException) -> None:
        """End it without an answer."""
        self.events.put(error)

    def _split(self, text: str) -> list[tuple[str, str]]:
        if self.machine is None:
            return [(NORMAL, text)]
        self.machine, segments = TextStateMachine.split(self.machine, text)
        if self.finish_reason is not None:
            self.machine, rest, state = TextStateMachine.flush(self.machine)
            segments.append((state, rest))
        return segments

    def _logprobs(self, decision: Decision) -> list[TokenLogprobs]:
        if not self.request.logprobs:
            return []
        found = []
        for token, row in zip(decision.tokens[: decision.taken], decision.logprobs, strict=False):
            count = self.request.top_logprobs
            best = mx.argpartition(-row, kth=max(0, count - 1))[:count]
            best = best[mx.argsort(-row[best])]
            ids = [token, *integers(best)]
            # A token that is not allowed has none; JSON has no infinity.
            values = floats(mx.maximum(row[mx.array(ids)], LEAST_LOGPROB))
            found.append(
                TokenLogprobs(token, values[0], list(zip(ids[1:], values[1:], strict=True)))
            )
        return found
