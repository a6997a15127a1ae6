"""One sequence being decoded: prefill, then rounds of draft, verify, accept and roll back."""

import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .drafter import Drafter, Proposal, Proposer
from .judge import Judge
from .kernels import active_kernels
from .kv_quantization import KVQuantization
from .pair import check_fit
from .prompt_cache import DFlashPromptCache
from .rollback import Transaction, check_caches, num_cached, rows_at_once
from .stats import LOW_ACCEPTANCE_ROUNDS, Stats
from .targets import Forward, bind

# What a drafter's step may raise without taking the target's decoding with it.
DRAFT_ERRORS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass
class Round:
    """The tokens of one target pass, and what is needed to keep only some of its rows.

    ``tokens`` holds the accepted drafts and then the bonus; ``logprobs`` [len(tokens), V] their
    rows; ``taken`` counts those that were emitted.
    """

    tokens: list[int]
    logprobs: mx.array
    inputs: mx.array
    out: Forward
    transaction: Transaction
    taken: int = 0

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_kept(self) -> int:
        """Rows whose tokens were emitted: the anchor's, and one for each draft taken."""
        return 1 + min(self.taken, self.num_accepted)


class Decoder:
    """Decodes one sequence; the caches always cover whole emitted tokens between calls.

    Args:
        model (nn.Module): The target, from mlx-lm.
        draft_model (Proposer): A :class:`Drafter`, or anything that drafts.
        stream: Where to compute.
        stats (Stats): Filled while decoding.
        judge (Judge): Decides which drafts stay.
        kv_quantization (KVQuantization): When to quantise the target's caches.
        max_kv_size (int, optional): As in mlx-lm, where no ``prompt_cache`` is given.
        prompt_cache (list or DFlashPromptCache, optional): The target's caches to go on from;
            they are updated in place and, after :meth:`close`, cover exactly the prompt and the
            emitted tokens.
        block_size (int, optional): Rows of the drafter's block. Default: the trained number.
        verify_width (int, optional): Rows that the target verifies. Default: the block's.

    Raises:
        ValueError: if the pair, a cache or a width does not fit, in one line.
    """

    def __init__(
        self,
        model: nn.Module,
        draft_model: Proposer,
        stream: Any,
        stats: Stats,
        *,
        judge: Judge,
        kv_quantization: KVQuantization,
        max_kv_size: int | None = None,
        prompt_cache: list[Any] | DFlashPromptCache | None = None,
        block_size: int | None = None,
        verify_width: int | None = None,
    ):
        self.target, self.proposer = bind(model), draft_model
        if isinstance(draft_model, Drafter):
            check_fit(draft_model.args, self.target.shape)
        self.block_size, self.verify_width = _widths(
            draft_model.block_size, block_size, verify_width
        )
        self.keeps_cache = prompt_cache is not None
        self.session = prompt_cache if isinstance(prompt_cache, DFlashPromptCache) else None
        if self.session is not None:
            prompt_cache = self.session.caches
        self.cache = prompt_cache if self.keeps_cache else self.target.make_cache(max_kv_size)
        check_caches(self.cache)
        kv_quantization.check(self.cache)
        if max_kv_size is not None and (self.keeps_cache or hasattr(model, "make_cache")):
            made = "a prompt cache is given" if self.keeps_cache else "the model makes its own"
            warnings.warn(f"`max_kv_size` has no effect, as in mlx-lm: {made}.", stacklevel=3)
        self.judge, self.kv_quantization = judge, kv_quantization
        self.history: mx.array | None = None
        self.stream, self.stats = stream, stats
        self.position = num_cached(self.cache)
        self.context = (
            draft_model.make_context()
            if self.session is None
            else self.session.context_for(draft_model)
        )
        self.drafting = self.verify_width > 1
        self._context_start = 0
        self.anchor: int | None = None
        self.round: Round | None = None
        stats.block_size, stats.verify_width = self.block_size, self.verify_width
        stats.cached_tokens = self.position
        stats.rule, stats.row_by_row = judge.rule, judge.row_by_row

    def prefill(
        self,
        prompt: mx.array,
        step_size: int,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> Round:
        """Process the prompt in chunks, its last token alone, and choose the first token."""
        start, total = time.perf_counter(), prompt.size
        end = self.position + total
        size = self.proposer.context_size
        self._context_start = 0 if size is None else end - size
        done = 0
        progress(done, total)
        with mx.stream(self.stream):
            while total - done > 1:
                chunk = prompt[done : done + min(step_size, total - done - 1)]
                self._run_chunk(chunk)
                done += chunk.size
                progress(done, total)
            self.history = prompt if self.judge.processors else None
            self.round = self._verify(prompt[-1:], Proposal.none())
        progress(total, total)
        self.stats.prompt_tokens, self.stats.prompt_time = total, time.perf_counter() - start
        return self.round

    def next_round(self, max_tokens: float) -> Round:
        """Draft, verify and accept up to ``max_tokens`` tokens after those already emitted."""
        start = time.perf_counter()
        with mx.stream(self.stream):
            self._settle()
            width = int(min(self.verify_width if self.drafting else 1, max_tokens))
            if width > 1:
                width = self._rows_allowed(width)
            anchor, proposal = mx.array([self.anchor], mx.uint32), Proposal.none()
            if width > 1:
                proposal = self._propose(anchor, width)
            inputs = mx.concatenate([anchor, proposal.tokens])
            self.round = self._verify(inputs, proposal)
        self.stats.generation_time += time.perf_counter() - start
        return self.round

    def close(self):
        """Leave the caller's cache covering exactly the prompt and the emitted tokens.

        If even this is interrupted the cache is emptied, so that it cannot be used by mistake.
        """
        self.stats.kernels = active_kernels()
        with mx.stream(self.stream):
            try:
                covered = self.round is not None and self.round.taken < len(self.round.tokens)
                self.drafting &= self.session is not None
                self._settle()
                anchor, self.anchor = self.anchor, None
                if self.keeps_cache and anchor is not None and not covered:
                    self._run_chunk(mx.array([anchor], mx.uint32))
                if self.session is not None:
                    self.session.checkpoint()
                if self.keeps_cache:
                    mx.eval([cache.state for cache in self.cache])
            except BaseException:
                self.cache.clear()
                raise

    def _rows_allowed(self, width: int) -> int:
        ring = rows_at_once(self.cache)
        if ring <= 1:
            self._stop_drafting("the target's cache is full and keeps its first rows (max_kv_size)")
        return int(min(width, ring, self.kv_quantization.rows_at_once(self.cache)))

    def _run_chunk(self, chunk: mx.array):
        wanted = self.position + chunk.size > self._context_start
        out, transaction = self._forward(chunk, taps=wanted)
        transaction.commit(chunk.size, out.records)
        self.kv_quantization.apply(self.cache)
        if wanted and self.drafting:
            self._extend(chunk, out.taps)
        self._advance(chunk)
        mx.eval([cache.state for cache in self.cache], getattr(self.context, "state", []))
        mx.clear_cache()

    def _advance(self, tokens: mx.array):
        self.position += tokens.size
        if self.session is not None:
            self.session.append(tokens.tolist())

    def _propose(self, anchor: mx.array, width: int) -> Proposal:
        judge = self.judge
        with self._drafter_step():
            proposal = self.proposer.propose(
                self.target,
                anchor,
                self.context,
                self.block_size,
                judge.temperature,
                judge.next_key(),
            ).first(width - 1)
            return proposal._replace(tokens=proposal.tokens.astype(mx.uint32))
        return Proposal.none()

    def _extend(self, tokens: mx.array, taps: mx.array | None):
        """Hand committed rows to the drafter, from the first that a later block can see."""
        first = max(0, self._context_start - self.position)
        taps = None if taps is None else taps[:, first:]
        with self._drafter_step():
            self.proposer.extend(self.context, tokens[first:], taps, self.position + first)

    def _forward(
        self, tokens: mx.array, taps: bool = False, record: bool = False
    ) -> tuple[Forward, Transaction]:
        transaction = Transaction(self.cache, tokens.size)
        layers = self.proposer.target_layer_ids if taps and self.drafting else ()
        try:
            out = self.target.forward(tokens[None], self.cache, layers, record)
        except BaseException:
            transaction.abort()
            raise
        return out, transaction

    def _verify(self, inputs: mx.array, proposal: Proposal) -> Round:
        """Run the anchor and the drafts after it, and let the judge decide on them."""
        out, transaction = self._forward(inputs, taps=True, record=inputs.size > 1)
        try:
            logits = self.target.logits(out.hidden)[0]
            decision = self.judge.decide(proposal, logits, self.history)
        except BaseException:
            transaction.abort()
            raise
        self.stats.host_reads += decision.host_reads
        if not decision.finite:
            self.stats.draft_failures += 1
            self._stop_drafting("the drafter gave non-finite numbers")
        return Round(decision.tokens, decision.logprobs, inputs, out, transaction)

    def _settle(self):
        """Keep the rows of the round's emitted tokens; the last of them is the next anchor."""
        if self.round is None:
            return
        round, self.round = self.round, None
        kept = round.num_kept
        round.transaction.commit(kept, round.out.records)
        self.kv_quantization.apply(self.cache)
        if self.drafting:
            taps = round.out.taps
            self._extend(round.inputs[:kept], None if taps is None else taps[:, :kept])
        self._advance(round.inputs[:kept])
        drafted, accepted = round.inputs.size - 1, kept - 1
        bonus = round.taken > round.num_accepted
        if self.anchor is None:
            self.stats.prefills += bonus
            if self.session is not None:
                self.session.checkpoint()
        else:
            self.stats.count_round(drafted, accepted, bonus)
            self._check_acceptance(drafted)
        self.anchor = round.tokens[round.taken - 1] if round.taken else None
        if self.history is not None:
            emitted = mx.array(round.tokens[: round.taken], dtype=self.history.dtype)
            self.history = mx.concatenate([self.history, emitted])

    def _check_acceptance(self, drafted: int):
        """Warn once, in the round that completes the number that a judgement needs."""
        due = drafted > 0 and self.stats.drafted_at[0] == LOW_ACCEPTANCE_ROUNDS
        if due and (reason := self.stats.low_acceptance):
            warnings.warn(f"Drafts are rarely accepted: {reason}.", stacklevel=4)

    @contextmanager
    def _drafter_step(self):
        try:
            yield
        except DRAFT_ERRORS as error:
            self.stats.draft_failures += 1
            self._stop_drafting(f"the drafter raised {type(error).__name__}: {error}")

    def _stop_drafting(self, reason: str):
        if self.drafting:
            self.drafting, self.stats.fallback = False, reason
            warnings.warn(f"Decoding goes on without drafts: {reason}.", stacklevel=2)


def _widths(trained: int, block_size: int | None, verify_width: int | None) -> tuple[int, int]:
    block = trained if block_size is None else block_size
    if not 1 <= block <= trained:
        raise ValueError(
            f"`block_size` is {block} but has to be from 1 to {trained}, the block that the "
            "drafter was trained with."
        )
    width = block if verify_width is None else verify_width
    if not min(2, block) <= width <= block:
        raise ValueError(
            f"`verify_width` is {width} but has to be from {min(2, block)} to the block of {block}."
        )
    return block, width
