"""One sequence being decoded: prefill, then rounds of draft, verify, accept and roll back."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..drafter.fit import check_fit
from ..drafter.model import Drafter, Proposal, Proposer
from ..kernels import active_kernels
from ..targets import Forward, bind
from .guard import DraftGuard
from .judge import Judge
from .kv_quantization import KVQuantization
from .rollback import Transaction, check_caches, num_cached, rows_at_once
from .session import DFlashPromptCache, warn_no_effect
from .stats import LOW_ACCEPTANCE_ROUNDS, Stats

# Every round leaves buffers of new sizes behind: masks, scores, contexts.
ROUNDS_PER_CLEAR = 32


@dataclass
class Round:
    """The tokens of one target pass, and what is needed to keep only some of its rows.

    ``tokens`` holds the accepted drafts and then the bonus; ``logprobs`` a row [V] for each, and
    perhaps more; ``anchor`` is the first input, if known; ``taken`` counts what was emitted.
    """

    tokens: list[int]
    logprobs: list[mx.array]
    anchor: int | None
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
        guard (DraftGuard, optional): Shared by sequences that stop drafting together.

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
        guard: DraftGuard | None = None,
    ):
        self.target, self.proposer = bind(model), draft_model
        if isinstance(draft_model, Drafter):
            check_fit(draft_model.args, self.target.shape)
        self.block_size, self.verify_width = check_widths(
            draft_model.block_size, block_size, verify_width
        )
        self.keeps_cache = prompt_cache is not None
        self.session = prompt_cache if isinstance(prompt_cache, DFlashPromptCache) else None
        if self.session is not None:
            prompt_cache = self.session.caches_for(model)
        fresh = self.target.make_cache(max_kv_size)
        self.cache = prompt_cache if self.keeps_cache else fresh
        check_caches(self.cache, fresh)
        kv_quantization.check(self.cache)
        if max_kv_size is not None and self.keeps_cache:
            warn_no_effect("a prompt cache is given")
        elif max_kv_size is not None and hasattr(model, "make_cache"):
            warn_no_effect("the model makes its own caches")
        judge.check_vocabulary(self.target.vocab_size)
        self.judge, self.kv_quantization = judge, kv_quantization
        self.history: mx.array | None = None
        self.stream, self.stats = stream, stats
        self.position = num_cached(self.cache)
        self.context = (
            draft_model.make_context()
            if self.session is None
            else self.session.context_for(draft_model)
        )
        self.guard = guard or DraftGuard(stats)
        self._context_start = 0
        self.anchor: int | None = None
        self.round: Round | None = None
        stats.block_size, stats.verify_width = self.block_size, self.verify_width
        stats.cached_tokens += self.position
        stats.rule, stats.row_by_row = judge.rule, judge.row_by_row

    @property
    def drafts(self) -> bool:
        return self.guard.on and self.verify_width > 1

    def prefill(
        self,
        prompt: mx.array,
        step_size: int,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> Round:
        """Process the prompt in chunks, its last token alone, and choose the first token."""
        start, total = time.perf_counter(), prompt.size
        # Processors are shown ids of the caller's own type.
        history, prompt = prompt, prompt.astype(mx.uint32)
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
            self.history = history if self.judge.processors else None
            last = prompt[-1:]
            # Only a session needs the number itself.
            anchor = last.item() if self.session is not None else None
            self.round = self._verify(last, Proposal.none(), anchor)
        progress(total, total)
        self.stats.prompt_tokens += total
        self.stats.prompt_time += time.perf_counter() - start
        return self.round

    def next_round(self, max_tokens: float) -> Round:
        """Draft, verify and accept up to ``max_tokens`` tokens after those already emitted."""
        start = time.perf_counter()
        with mx.stream(self.stream):
            self.settle()
            width = int(min(self.verify_width if self.drafts else 1, max_tokens))
            if width > 1:
                width = self._rows_allowed(width)
            anchor, proposal = mx.array([self.anchor], mx.uint32), Proposal.none()
            if width > 1:
                proposal = self._propose(anchor, width)
            inputs = mx.concatenate([anchor, proposal.tokens])
            self.round = self._verify(inputs, proposal, self.anchor)
            if self.stats.rounds % ROUNDS_PER_CLEAR == ROUNDS_PER_CLEAR - 1:
                mx.clear_cache()
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
                extend = self.session is not None
                self.settle(extend)
                anchor, self.anchor = self.anchor, None
                if self.keeps_cache and self.cache and anchor is not None and not covered:
                    self._run_chunk(mx.array([anchor], mx.uint32), extend)
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
            self.guard.stop("the target's cache is full and keeps its first rows (max_kv_size)")
        return int(min(width, ring, self.kv_quantization.rows_at_once(self.cache)))

    def _run_chunk(self, chunk: mx.array, extend: bool = True):
        wanted = extend and self.position + chunk.size > self._context_start
        out, transaction = self._forward(chunk, taps=wanted)
        transaction.commit(chunk.size, out.records)
        position = self.position
        self.position += chunk.size
        if self.session is not None:
            self.session.append(chunk.tolist())
        self.kv_quantization.apply(self.cache)
        if wanted and self.drafts:
            self._extend(chunk, out.taps, position)
        mx.eval([cache.state for cache in self.cache], self._context_state())
        mx.clear_cache()

    def _context_state(self) -> list[mx.array]:
        return getattr(self.context, "state", [])

    def _propose(self, anchor: mx.array, width: int) -> Proposal:
        judge = self.judge
        with self.guard.step():
            proposal = self.proposer.propose(
                self.target,
                anchor,
                self.context,
                self.block_size,
                judge.temperature,
                judge.next_key(),
            )
            return usable(proposal, width - 1)
        return Proposal.none()

    def _extend(self, tokens: mx.array, taps: mx.array | None, position: int):
        """Hand committed rows to the drafter, from the first that a later block can see."""
        first = max(0, self._context_start - position)
        taps = None if taps is None else taps[:, first:]
        with self.guard.step():
            self.proposer.extend(self.context, tokens[first:], taps, position + first)

    def _forward(
        self, tokens: mx.array, taps: bool = False, record: bool = False
    ) -> tuple[Forward, Transaction]:
        transaction = Transaction(self.cache, tokens.size)
        layers = self.proposer.target_layer_ids if taps and self.drafts else ()
        try:
            out = self.target.forward(tokens[None], self.cache, layers, record)
            self.kv_quantization.check_heads(self.cache)
        except BaseException:
            transaction.abort()
            raise
        return out, transaction

    def _verify(self, inputs: mx.array, proposal: Proposal, anchor: int | None) -> Round:
        """Run the anchor and the drafts after it, and let the judge decide on them.

        An error while the drafts themselves are computed, which is only now, ends the generation.
        """
        out, transaction = self._forward(inputs, taps=True, record=inputs.size > 1)
        try:
            logits = self.target.logits(out.hidden)[0]
            # What outlives the round is computed with it: another thread may take the next one.
            attending = [c.state for c in self.cache if not isinstance(c, ArraysCache)]
            lasting = [x for x in (out.taps, self.history) if x is not None]
            mx.async_eval(attending, lasting, self._context_state())
            decision = self.judge.decide(proposal, logits, self.history)
            self.stats.host_reads += decision.host_reads
            # A warning may be an error, too.
            self.guard.check(decision.finite)
        except BaseException:
            transaction.abort()
            raise
        return Round(decision.tokens, decision.logprobs, anchor, inputs, out, transaction)

    def settle(self, extend: bool = True):
        """Keep the rows of the round's emitted tokens; the last of them is the next anchor.

        Args:
            extend (bool): Hand the rows to the drafter, for more rounds. Default: ``True``.
        """
        if self.round is None:
            return
        round, self.round = self.round, None
        kept, emitted, position = round.num_kept, round.tokens[: round.taken], self.position
        first = self.anchor is None
        try:
            round.transaction.commit(kept, round.out.records)
        except BaseException:
            self.cache.clear()
            raise
        self.advance(kept, emitted)
        # From here on caches and anchor are right: what follows may fail without making them wrong.
        if self.session is not None:
            self.session.append([round.anchor, *emitted][:kept])
            if first:
                self.session.checkpoint()
        self.kv_quantization.apply(self.cache)
        if extend and self.drafts:
            taps = round.out.taps
            taps = None if taps is None else taps[:, :kept]
            self._extend(round.inputs[:kept], taps, position)
        self._count(round, first)

    def _count(self, round: Round, first: bool):
        bonus = round.taken > round.num_accepted
        if first:
            self.stats.prefills += bonus
        else:
            before = self.stats.first_drafts
            self.stats.count_round(round.inputs.size - 1, round.num_kept - 1, bonus)
            warn_low_acceptance(self.stats, before)

    def advance(self, kept: int, emitted: list[int]):
        """Account for a round: rows that stay in the caches, and the tokens that they gave."""
        self.position += kept
        self.anchor = emitted[-1] if emitted else None
        if self.history is not None:
            self.history = mx.concatenate([self.history, mx.array(emitted, mx.uint32)])


def warn_low_acceptance(stats: Stats, before: int):
    """Warn once, in the pass that completes the number of first drafts that a judgement needs.

    Args:
        stats (Stats): With the pass counted.
        before (int): First drafts that were counted before it.
    """
    due = before < LOW_ACCEPTANCE_ROUNDS <= stats.first_drafts
    if due and (reason := stats.low_acceptance):
        warnings.warn(f"Drafts are rarely accepted: {reason}.", stacklevel=4)


def usable(proposal: Proposal, count: int) -> Proposal:
    """The first drafts of a proposal, as the target reads them.

    Raises:
        ValueError: if they are no row of ids.
    """
    proposal = proposal.first(count)
    if proposal.tokens.ndim != 1:
        raise ValueError(f"drafts have to be [L] but are {list(proposal.tokens.shape)}")
    return proposal._replace(tokens=proposal.tokens.astype(mx.uint32))


def check_widths(trained: int, block_size: int | None, verify_width: int | None) -> tuple[int, int]:
    """Block size and verify width in effect, for a drafter trained with blocks of ``trained``.

    Raises:
        ValueError: naming the one that is out of range.
    """
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
