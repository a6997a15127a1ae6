"""The decoding loop: rounds of draft, verify, decide, keep and extend over a list of sequences."""

import time
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..drafter.fit import check_fit
from ..drafter.model import Drafter, Proposal, Proposer
from ..kernels import active_kernels
from ..targets import Forward, bind
from .batch.draft import extend_rows, propose_rows
from .clock import ACCEPT, HOST, SELECT, VERIFY, Clock
from .controller import Controller, start_width
from .guard import DraftGuard
from .host import integer, integers
from .judge import Decision, Judge, decide_all
from .kv_quantization import KVQuantization
from .rollback import Transaction, rows_at_once
from .sequence import Sequence
from .session import Session, open_session
from .stats import LOW_ACCEPTANCE_ROUNDS, Stats

# Every round leaves buffers of new sizes behind: masks, scores, contexts.
ROUNDS_PER_CLEAR = 32


@dataclass
class Round:
    """One target pass over a block of each sequence, and what keeps only some of its rows.

    ``inputs`` [B, W] are anchors and drafts, shorter blocks padded; ``logits`` [B, W, V] the
    target's own; ``decisions`` one a sequence, once the round has been read.
    """

    sequences: list[Sequence]
    proposals: list[Proposal]
    inputs: mx.array
    out: Forward
    logits: mx.array
    transaction: Transaction
    decisions: list[Decision] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def width(self) -> int:
        """Rows of the pass for each sequence."""
        return self.inputs.shape[1]

    @property
    def rows_of_logits(self) -> list[mx.array]:
        """Each sequence's logits [L + 1, V] of its anchor and its L drafts."""
        return [
            rows if 1 + p.tokens.size == rows.shape[0] else rows[: 1 + p.tokens.size]
            for rows, p in zip(self.logits, self.proposals, strict=True)
        ]


class Loop:
    """Decodes sequences of one target and one drafter, a round at a time.

    Args:
        model (nn.Module): The target, from mlx-lm.
        draft_model (Proposer): A :class:`Drafter`, or anything that drafts.
        stream: Where to compute.
        stats (Stats): Filled while decoding.
        kv_quantization (KVQuantization): When to quantize the target's caches.
        block_size (int, optional): Rows of the drafter's block. Default: the trained number.
        verify_width (int, optional): Rows that the target verifies. Default: in each round those
            that should give the most tokens a second, at most the block's.
        adaptive (bool): Choose widths where none is given. Default: ``True``.
        clock (Clock, optional): Takes the time of each phase, and makes each one wait.

    Raises:
        ValueError: if the pair or a width does not fit, in one line.
    """

    def __init__(
        self,
        model: nn.Module,
        draft_model: Proposer,
        stream: Any,
        stats: Stats,
        *,
        kv_quantization: KVQuantization,
        block_size: int | None = None,
        verify_width: int | None = None,
        adaptive: bool = True,
        clock: Clock | None = None,
    ):
        self.model, self.target, self.proposer = model, bind(model), draft_model
        if isinstance(draft_model, Drafter):
            check_fit(draft_model.args, self.target.shape)
        self.block_size, self.verify_width = check_widths(
            draft_model.block_size, block_size, verify_width
        )
        self.stream, self.stats, self.clock = stream, stats, clock
        self.kv_quantization = kv_quantization
        self.guard = DraftGuard(stats, own=isinstance(draft_model, Drafter))
        self.controller: Controller | None = None
        if adaptive and verify_width is None and self.verify_width > 1:
            self.controller = Controller(self.verify_width, start_width())
        self.round: Round | None = None
        self._passes = 0
        stats.block_size, stats.verify_width = self.block_size, self.verify_width

    @property
    def drafts(self) -> bool:
        """Whether the next round may draft."""
        return self.guard.on and self.verify_width > 1

    def open(
        self,
        judge: Judge,
        prompt_cache: list[Any] | Session | None = None,
        max_kv_size: int | None = None,
        verify_width: int | None = None,
    ) -> Sequence:
        """Begin a sequence.

        Args:
            judge (Judge): Decides which of its drafts stay.
            prompt_cache (list or Session, optional): Caches to go on from. They are updated in
                place and, after :meth:`close`, cover exactly the prompt and the emitted tokens.
            max_kv_size (int, optional): As in mlx-lm, where no ``prompt_cache`` is given.
            verify_width (int, optional): The width of this sequence, at most the loop's; 1 does
                not draft for it. Default: as the loop chooses.

        Raises:
            ValueError: if a cache or a sampler does not fit, in one line.
        """
        session = open_session(self.model, self.target, prompt_cache, max_kv_size)
        self.kv_quantization.check(session.caches)
        judge.check_vocabulary(self.target.vocab_size)
        self.stats.cached_tokens += len(session)
        self.stats.rule, self.stats.row_by_row = judge.rule, judge.row_by_row
        sequence = Sequence(session, judge, session.context_for(self.proposer), self.verify_width)
        if verify_width is not None:
            sequence.verify_width, sequence.adaptive = min(self.verify_width, verify_width), False
        return sequence

    def prefill(
        self,
        sequence: Sequence,
        prompt: mx.array,
        step_size: int,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> Decision:
        """Process a prompt in chunks, its last token alone, and choose the first token.

        From here until :meth:`close` the caller's list of caches holds stand-ins.

        Args:
            sequence (Sequence): From :meth:`open`.
            prompt (mx.array): Token ids [S], at least one.
            step_size (int): Tokens to process at a time.
            progress (callable): Called with the tokens processed so far and their total.
        """
        done, total = 0, prompt.size
        with mx.stream(self.stream):
            check_ids(prompt, self.target.num_embeddings)
        sequence.session.lend()
        self.expect(sequence, total)
        progress(done, total)
        while total - done > 1:
            chunk = prompt[done : done + min(step_size, total - done - 1)]
            self.read(sequence, chunk)
            done += chunk.size
            progress(done, total)
        # Processors are shown ids of the caller's own type.
        decision = self.first_token(sequence, prompt[-1:], prompt)
        progress(total, total)
        return decision

    def expect(self, sequence: Sequence, count: int) -> None:
        """Announce tokens to :meth:`read`: the drafter keeps only the last of them."""
        size = self.proposer.context_size
        sequence.context_start = 0 if size is None else sequence.position + count - size

    def read(self, sequence: Sequence, chunk: mx.array) -> None:
        """Append a chunk [S] of a prompt to a sequence's caches and to its context."""
        start = time.perf_counter()
        with mx.stream(self.stream):
            self._run_chunk(sequence, chunk.astype(mx.uint32))
        self.stats.prompt_tokens += chunk.size
        self.stats.prompt_time += time.perf_counter() - start

    def first_token(self, sequence: Sequence, last: mx.array, history: mx.array) -> Decision:
        """Process a prompt's last token [1] and choose the first token of the answer.

        Args:
            sequence (Sequence): Of which all tokens before have been read.
            last (mx.array): The last token.
            history (mx.array): What logits processors are shown: all tokens up to the last.
        """
        start = time.perf_counter()
        with mx.stream(self.stream):
            if sequence.judge.processors:
                sequence.history = history
            last = last.astype(mx.uint32)
            # Only a conversation needs the number itself.
            sequence.anchor = integer(last) if sequence.session.keeps_tokens else None
            proposals = [Proposal.none()]
            self.round = self._decide(
                self._verify([sequence], sequence.caches, last[None], proposals)
            )
        self.stats.prompt_tokens += 1
        self.stats.prompt_time += time.perf_counter() - start
        return self.round.decisions[0]

    def next_round(
        self, sequences: list[Sequence], layers: list[Any], budgets: Rows[float]
    ) -> list[Decision]:
        """Draft, verify and decide.

        Args:
            sequences (list): Those to decode, in the order of the caches' rows.
            layers (list): The target's caches of all of them.
            budgets (sequence): The most tokens to accept for each.

        Returns:
            list of Decision: One for each sequence; before the next round ``taken`` has to say
            how many of its tokens were handed out.
        """
        start = time.perf_counter()
        with mx.stream(self.stream):
            self.settle()
            settled = time.perf_counter()
            self.round = self._decide(self.launch(sequences, layers, budgets))
            self._passes += 1
            if self._passes % ROUNDS_PER_CLEAR == 0:
                mx.clear_cache()
        end = time.perf_counter()
        self.round.seconds = end - settled
        self.stats.generation_time += end - start
        return self.round.decisions

    def launch(
        self,
        sequences: list[Sequence],
        layers: list[Any],
        budgets: Rows[float],
        lazy: bool = False,
    ) -> Round:
        """Build a round's graph up to the target's logits; see :meth:`next_round`.

        Args:
            lazy (bool): Leave the drafts unevaluated, too. Default: ``False``.
        """
        widths = self._widths(sequences, layers, budgets)
        anchors = mx.array([sequence.anchor for sequence in sequences], mx.uint32)
        proposals = self._propose(sequences, anchors, widths, lazy)
        return self._verify(sequences, layers, _blocks(anchors, proposals), proposals)

    def settle(self, extend: bool = True) -> None:
        """Keep the rows of the tokens that the round's sequences handed out.

        Args:
            extend (bool): Hand the rows to the drafter, for more rounds. Default: ``True``.
        """
        if self.round is None:
            return
        self._lap(HOST)
        start = time.perf_counter()
        round_, self.round = self.round, None
        sequences, decisions = round_.sequences, round_.decisions
        keeps = [decision.num_kept for decision in decisions]
        try:
            round_.transaction.commit(keeps, round_.out.records)
        except BaseException:
            round_.transaction.layers.clear()
            raise
        positions = [sequence.position for sequence in sequences]
        answering = [sequence.answering for sequence in sequences]
        for sequence, decision in zip(sequences, decisions, strict=True):
            sequence.advance(decision)
        # From here on caches and anchors are right: what follows may fail and leave them so.
        self.kv_quantization.apply(round_.transaction.layers)
        if extend and self.drafts:
            self._extend(sequences, round_.inputs, round_.out.taps, positions, keeps)
        self._lap(ACCEPT, [s.context_state for s in sequences], _states(round_))
        round_.seconds += time.perf_counter() - start
        self._count(round_, answering)

    def close(self, sequence: Sequence) -> None:
        """Leave a sequence's caches covering exactly the prompt and the emitted tokens.

        If even this is interrupted the caches are emptied, so that they cannot be used by mistake.
        """
        self.stats.kernels = active_kernels()
        session, extend = sequence.session, sequence.session.keeps_tokens
        with mx.stream(self.stream):
            try:
                self.settle(extend)
                anchor, sequence.anchor = sequence.anchor, None
                if session.kept and sequence.caches and sequence.answering and anchor is not None:
                    self._run_chunk(sequence, mx.array([anchor], mx.uint32), extend)
                session.checkpoint()
                if session.kept:
                    mx.eval([cache.state for cache in sequence.caches])
            except BaseException:
                sequence.caches.clear()
                raise
            finally:
                session.give_back()

    def _widths(
        self, sequences: list[Sequence], layers: list[Any], budgets: Rows[float]
    ) -> list[int]:
        """Rows that each sequence's block may have in this round."""
        budgets = [min(b, s.verify_width) for b, s in zip(budgets, sequences, strict=True)]
        limit: float = self.verify_width if self.drafts else 1
        if limit > 1 and max(budgets) > 1:
            ring = rows_at_once(layers)
            if ring <= 1:
                self.guard.stop("the target's cache is full and keeps its first rows (max_kv_size)")
            limit = min(limit, ring, self.kv_quantization.rows_at_once(layers))
        chosen = limit
        if self.controller is not None and min(limit, max(budgets)) > 1:
            chosen = self.controller.choose(int(min(limit, max(budgets))), len(budgets))
        return [
            int(min(budget, chosen if s.adaptive else limit))
            for budget, s in zip(budgets, sequences, strict=True)
        ]

    def _propose(
        self, sequences: list[Sequence], anchors: mx.array, widths: list[int], lazy: bool
    ) -> list[Proposal]:
        """Draft for every sequence that has room; none drafts once drafting has stopped."""
        proposals = [Proposal.none() for _ in sequences]
        # A sequence with room for one token takes no key, as on its own.
        places = [index for index, width in enumerate(widths) if width > 1]
        for index in places:
            # What a constraint forces is drafted for free.
            forced = sequences[index].judge.forced(widths[index] - 1)
            proposals[index] = proposals[index] if forced is None else forced
        places = [index for index in places if not proposals[index].tokens.size]
        if not places:
            return proposals
        drafting = [sequences[index] for index in places]
        # Our own drafter takes its tokens from the target's head.
        known = None if isinstance(self.proposer, Drafter) else self.target.num_embeddings
        with self.guard.step():
            found = propose_rows(
                self.proposer,
                self.target,
                anchors if len(places) == len(sequences) else anchors[mx.array(places)],
                [sequence.context for sequence in drafting],
                self.block_size,
                [sequence.judge for sequence in drafting],
                self.clock,
            )
            found = [
                usable(proposal, widths[index] - 1, known)
                for index, proposal in zip(places, found, strict=True)
            ]
            # The drafter runs while the target's graph is built; launch errors show here.
            if not lazy:
                mx.async_eval([x for proposal in found for x in proposal if x is not None])
            for index, proposal in zip(places, found, strict=True):
                judge = sequences[index].judge
                proposals[index] = judge.cut(proposal)
                self.stats.host_reads += judge.constraint is not None
        self._lap(SELECT, [[x for x in p if x is not None] for p in proposals])
        return proposals

    def _run_chunk(self, sequence: Sequence, chunk: mx.array, extend: bool = True) -> None:
        """Append known tokens [S] to a sequence's caches and to its context."""
        wanted = extend and sequence.drafts
        wanted = wanted and sequence.position + chunk.size > sequence.context_start
        out, transaction = self._forward(sequence.caches, chunk[None], taps=wanted)
        transaction.commit([chunk.size], out.records)
        position = sequence.position
        sequence.position += chunk.size
        if sequence.session.keeps_tokens:
            sequence.session.append(integers(chunk))
        self.kv_quantization.apply(sequence.caches)
        if wanted and self.drafts:
            # From the first row that a later block can see.
            first = max(0, sequence.context_start - position)
            taps = None if out.taps is None else out.taps[:, first:]
            kept = chunk.size - first
            self._extend([sequence], chunk[None, first:], taps, [position + first], [kept])
        mx.eval([cache.state for cache in sequence.caches], sequence.context_state)
        mx.clear_cache()

    def _extend(
        self,
        sequences: list[Sequence],
        inputs: mx.array,
        taps: mx.array | None,
        positions: list[int],
        keeps: list[int],
    ) -> None:
        rows = [b for b, sequence in enumerate(sequences) if sequence.drafts]
        if not rows:
            return
        if len(rows) < len(sequences):
            inputs = inputs[mx.array(rows)]
            taps = None if taps is None else taps[mx.array(rows)]
        contexts = [sequences[b].context for b in rows]
        positions, keeps = ([numbers[b] for b in rows] for numbers in (positions, keeps))
        with self.guard.step():
            extend_rows(self.proposer, contexts, inputs, taps, positions, keeps)

    def _forward(
        self, layers: list[Any], tokens: mx.array, taps: bool = False, record: bool = False
    ) -> tuple[Forward, Transaction]:
        transaction = Transaction(layers, tokens.shape[1])
        tap_layers = self.proposer.target_layer_ids if taps and self.drafts else ()
        with _aborting(transaction):
            out = self.target.forward(tokens, layers, tap_layers, record)
            self.kv_quantization.check_heads(layers)
        return out, transaction

    def _verify(
        self,
        sequences: list[Sequence],
        layers: list[Any],
        inputs: mx.array,
        proposals: list[Proposal],
    ) -> Round:
        """Run the anchors and the drafts after them through the target."""
        taps = any(sequence.drafts for sequence in sequences)
        out, transaction = self._forward(layers, inputs, taps, record=inputs.shape[1] > 1)
        with _aborting(transaction):
            logits = self.target.logits(out.hidden)
        return Round(sequences, proposals, inputs, out, logits, transaction)

    def _decide(self, round_: Round) -> Round:
        """Let the judges decide, with one host read where their rules allow.

        An error while the drafts themselves are computed, which is only now, ends the generation.
        """
        sequences = round_.sequences
        with _aborting(round_.transaction):
            # Evaluate state that outlives this round now; the next may run on another thread.
            lasting = [round_.out.taps, *(s.history for s in sequences)]
            mx.async_eval(
                _states(round_),
                [x for x in lasting if x is not None],
                [s.context_state for s in sequences],
            )
            self._lap(VERIFY, round_.logits)
            round_.decisions = decide_all(
                [sequence.judge for sequence in sequences],
                round_.proposals,
                round_.rows_of_logits,
                [sequence.history for sequence in sequences],
            )
            self.stats.host_reads += sum(d.host_reads for d in round_.decisions)
            # A warning may be an error, too.
            self.guard.check(all(decision.finite for decision in round_.decisions))
        self._lap(ACCEPT)
        return round_

    def _count(self, round_: Round, answering: list[bool]) -> None:
        before, decisions = self.stats.first_drafts, round_.decisions
        rows = zip(round_.sequences, decisions, answering, strict=True)
        for sequence, decision, after_prompt in rows:
            bonus = decision.taken > decision.num_accepted
            for stats in (self.stats, sequence.stats):
                if after_prompt:
                    stats.count_round(decision.num_drafted, decision.num_kept - 1, bonus)
                else:
                    stats.prefills += bonus
        if all(answering):
            self.stats.count_pass(round_.width)
            if self.controller is not None and self.guard.on:
                drafts = [(decision.num_drafted, decision.num_accepted) for decision in decisions]
                self.controller.observe(round_.width, drafts, round_.seconds)
                self.stats.parked = self.controller.reason
                self.stats.parked_rounds += self.controller.parked and round_.width == 1
        warn_low_acceptance(self.stats, before)

    def _lap(self, phase: str, *results: Any) -> None:
        if self.clock is not None:
            self.clock.lap(phase, *results)


def _blocks(anchors: mx.array, proposals: Rows[Proposal]) -> mx.array:
    """Each sequence's anchor and drafts [B, W]; shorter ones are padded."""
    most = max(proposal.tokens.size for proposal in proposals)
    if most == 0:
        return anchors[:, None]
    if len(proposals) == 1:
        return mx.concatenate([anchors, proposals[0].tokens])[None]
    drafts = [mx.pad(p.tokens, (0, most - p.tokens.size)) for p in proposals]
    return mx.concatenate([anchors[:, None], mx.stack(drafts)], axis=1)


def _states(round_: Round) -> list[Any]:
    """What the pass left in caches of keys and values; recurrent states wait for the commit."""
    return [c.state for c in round_.transaction.layers if not isinstance(c, ArraysCache)]


@contextmanager
def _aborting(transaction: Transaction) -> Iterator[None]:
    """Put the caches back if the pass fails."""
    try:
        yield
    except BaseException:
        transaction.abort()
        raise


def warn_low_acceptance(stats: Stats, before: int) -> None:
    """Warn once, in the pass that completes the number of first drafts that a judgment needs.

    Args:
        stats (Stats): With the pass counted.
        before (int): First drafts that were counted before it.
    """
    due = before < LOW_ACCEPTANCE_ROUNDS <= stats.first_drafts
    if due and (reason := stats.low_acceptance):
        warnings.warn(f"Drafts are rarely accepted: {reason}.", stacklevel=4)


def check_ids(prompt: mx.array, vocab_size: int) -> None:
    """Refuse token ids that the target cannot embed: MLX would read other memory.

    Raises:
        ValueError: naming the id and the place.
    """
    wrong = (prompt < 0) | (prompt >= vocab_size)
    if wrong.any().item():
        index = integer(mx.argmax(wrong))
        raise ValueError(
            f"`prompt` holds token {integer(prompt[index])} at place {index} but the target has "
            f"{vocab_size} tokens; the tokenizer may be of another model."
        )


def usable(proposal: Proposal, count: int, known: int | None = None) -> Proposal:
    """The first drafts of a proposal, as the target reads them.

    Ids from ``known`` on become another one, and the proposal not finite.

    Raises:
        ValueError: if they are not a row of ids.
    """
    proposal = proposal.first(count)
    if proposal.tokens.ndim != 1:
        raise ValueError(f"drafts have to be [L] but are {list(proposal.tokens.shape)}")
    tokens = proposal.tokens.astype(mx.uint32)
    if known is None:
        return proposal._replace(tokens=tokens)
    finite = proposal.finite & (tokens < known).all()
    return proposal._replace(tokens=mx.minimum(tokens, known - 1), finite=finite)


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
