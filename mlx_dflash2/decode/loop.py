"""The decoding loop: rounds of draft, verify, decide, keep and extend over a list of sequences."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..copies import CopyProposer, without_copies
from ..drafter.fit import check_fit
from ..drafter.model import Drafter, Proposal, Proposer
from ..kernels import active_kernels
from ..kernels.race import faster
from ..ranks import Ranks
from ..targets import Forward, bind
from .checks import check_draft_model, check_ids, check_widths
from .clock import ACCEPT, HOST, VERIFY, Clock
from .controller import Controller, start_width
from .drafting import Drafting
from .guard import DraftGuard, warn_low_acceptance
from .host import integer, integers
from .judge import Decision, Judge, decide_all
from .kv_quantization import KVQuantization
from .plan import offers_copies, plan_round
from .rollback import Transaction, rows_at_once
from .round import Ahead, Round, aborting, blocks
from .sequence import Sequence
from .session import Session, open_session
from .stats import Stats

# Every round leaves buffers of new sizes behind: masks, scores, contexts.
ROUNDS_PER_CLEAR = 32


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
            that should give the most tokens a second, at most the block's or a copy's.
        adaptive (bool): Choose widths where none is given. Default: ``True``.
        clock (Clock, optional): Takes the time of each phase, and makes each one wait.
        check_ranks (bool): Compare the decisions of all ranks of a sharded target in each round.
            Default: ``False``.

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
        check_ranks: bool = False,
    ):
        check_draft_model(draft_model)
        self.model, self.draft_model, self.target = model, draft_model, bind(model)
        drafter = without_copies(draft_model)
        self.max_copied = draft_model.max_drafts if isinstance(draft_model, CopyProposer) else 0
        if isinstance(drafter, Drafter):
            check_fit(drafter.args, self.target.shape)
        self.block_size, self.verify_width = check_widths(
            draft_model.block_size, block_size, verify_width, self.max_copied
        )
        # What computes few rows faster; the caller's own models stay what they are.
        models = [model, drafter] if isinstance(drafter, Drafter) else [model]
        self.ranks = None if self.target.group is None else Ranks(self.target.group)
        self.check_ranks = check_ranks
        # A race may end differently on each rank, and the bits of its winners differ.
        if self.ranks is None:
            shadow, *shadows = faster(models, max(self.block_size, self.verify_width))
            self.target, drafter = bind(shadow), shadows[0] if shadows else drafter
        self.stream, self.stats, self.clock = stream, stats, clock
        self.kv_quantization = kv_quantization
        own = isinstance(drafter, Drafter | None)
        self.guard = DraftGuard(stats, own, self.max_copied > 0, self.ranks is None)
        self.drafting = Drafting(drafter, self.target, self.block_size, self.guard, clock)
        self.controller: Controller | None = None
        if adaptive and verify_width is None and self.verify_width > 1:
            width = start_width()
            width = width if self.ranks is None else self.ranks.share(width)
            self.controller = Controller(self.block_size, width)
        self.round: Round | None = None
        self._ahead: Ahead | None = None
        self._passes = 0
        stats.block_size, stats.verify_width = self.block_size, self.verify_width

    @property
    def drafts(self) -> bool:
        """Whether the next round may draft: a drafter that failed leaves copies alone."""
        return (self.guard.on and self.block_size > 1) or self.max_copied > 0

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
        context = session.context_for(self.draft_model)
        sequence = Sequence(session, judge, context, self.verify_width)
        if verify_width is not None:
            sequence.verify_width, sequence.adaptive = min(self.verify_width, verify_width), False
            sequence.drafts = verify_width > 1
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
        total, done = prompt.size, 0
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
        size = self.draft_model.context_size
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
            sequence.anchor = integer(last) if sequence.keeps_tokens else None
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
            settled = time.perf_counter() - (self._ahead.seconds if self._ahead else 0.0)
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
        budgets = [min(b, s.verify_width) for b, s in zip(budgets, sequences, strict=True)]
        widest, drafts = self._rows_allowed(layers, budgets), self.guard.on and self.block_size > 1
        plan = plan_round(sequences, budgets, widest, self.max_copied, drafts, self.controller)
        anchors = mx.array([sequence.anchor for sequence in sequences], mx.uint32)
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            histories = [sequence.history for sequence in sequences]
            proposals = self.drafting.propose(
                sequences, anchors, plan.drafter_widths, histories, lazy
            )
        else:
            proposals = [
                proposal.first(width - 1) if width > 1 else Proposal.none()
                for proposal, width in zip(ahead.proposals, plan.drafter_widths, strict=True)
            ]
        proposals = plan.with_copies(proposals)
        return self._verify(sequences, layers, blocks(anchors, proposals), proposals)

    def draft_ahead(self, budgets: Rows[float]) -> None:
        """Begin the next round's drafts, so that the drafter works while the caller does.

        To be called when the last tokens of the round are about to be handed out. The target's
        caches stay as they are, and a caller that stops here loses nothing but the drafts.

        Args:
            budgets (sequence): The most tokens to accept for each sequence after this round.
        """
        round_, most = self.round, min(self.verify_width, max(budgets))
        if round_ is None or not self.guard.on or self.block_size <= 1 or most <= 1:
            return
        # What a constraint forbids is known only once the round is settled, and who does not
        # draft has no context.
        if any(s.judge.constraint is not None or not s.drafts for s in round_.sequences):
            return
        if self.controller is not None and self.controller.choose(int(most), len(budgets)) == 1:
            return
        start = time.perf_counter()
        sequences, decisions = round_.sequences, round_.decisions
        with mx.stream(self.stream):
            anchors = [decision.tokens[-1] for decision in decisions]
            rows = [s.kept(decision) for s, decision in zip(sequences, decisions, strict=True)]
            self._extend(round_, rows, [sequence.position for sequence in sequences])
            if self.guard.on and not offers_copies(sequences, anchors):
                widths = [int(min(self.block_size, budget)) for budget in budgets]
                histories = [
                    s.history_with(d.tokens) for s, d in zip(sequences, decisions, strict=True)
                ]
                ids = mx.array(anchors, mx.uint32)
                proposals = self.drafting.propose(sequences, ids, widths, histories)
                self._ahead = Ahead(proposals, time.perf_counter() - start)
            # The next round may run on another thread.
            mx.async_eval([[s.context_state, s.judge.lasting] for s in sequences])
        self.stats.generation_time += time.perf_counter() - start

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
        rows = [s.advance(decision) for s, decision in zip(sequences, decisions, strict=True)]
        # From here on caches and anchors are right: what follows may fail and leave them so.
        self.kv_quantization.apply(round_.transaction.layers)
        if extend:
            self._extend(round_, rows, positions)
        self._lap(ACCEPT, [s.context_state for s in sequences], round_.states)
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

    def _rows_allowed(self, layers: list[Any], budgets: Rows[float]) -> int:
        """The most rows of a pass that caches, budgets and the loop's own width allow."""
        most: float = self.verify_width if self.drafts else 1
        if most > 1 and max(budgets) > 1:
            ring = rows_at_once(layers)
            if ring <= 1:
                self.guard.stop("the target's cache is full and keeps its first rows (max_kv_size)")
            most = min(most, ring, self.kv_quantization.rows_at_once(layers))
        return int(min(most, max(budgets)))

    def _run_chunk(self, sequence: Sequence, chunk: mx.array, extend: bool = True) -> None:
        """Append known tokens [S] to a sequence's caches and to its context."""
        wanted = extend and sequence.drafts
        wanted = wanted and sequence.position + chunk.size > sequence.context_start
        out, transaction = self._forward(sequence.caches, chunk[None], taps=wanted)
        transaction.commit([chunk.size], out.records)
        position = sequence.position
        sequence.position += chunk.size
        tokens = integers(chunk) if sequence.keeps_tokens else []
        sequence.session.append(tokens)
        self.kv_quantization.apply(sequence.caches)
        if wanted and self.drafts:
            # From the first row that a later block can see.
            first = max(0, sequence.context_start - position)
            taps = None if out.taps is None else out.taps[:, first:]
            kept = chunk.size - first
            self.drafting.extend([sequence], chunk[None, first:], taps, [position + first], [kept])
        states = [cache.state for cache in sequence.caches], sequence.context_state
        mx.async_eval(*states)
        if extend:
            # While the device works.
            self._read([sequence], [tokens], [position])
        mx.eval(*states)
        mx.clear_cache()

    def _read(
        self, sequences: list[Sequence], tokens: Rows[list[int]], positions: Rows[int]
    ) -> None:
        """Show committed tokens to the contexts that want to see them all."""
        with self.guard.step():
            for sequence, row, position in zip(sequences, tokens, positions, strict=True):
                if hasattr(sequence.context, "read"):
                    sequence.context.read(row, position)

    def _extend(self, round_: Round, rows: Rows[list[int]], positions: Rows[int]) -> None:
        """Hand the tokens of the kept rows to the contexts and the rows to the drafter, once."""
        if self.drafts and not round_.extended:
            round_.extended = True
            sequences, taps = round_.sequences, round_.out.taps
            self._read(sequences, rows, positions)
            keeps = [decision.num_kept for decision in round_.decisions]
            self.drafting.extend(sequences, round_.inputs, taps, positions, keeps)

    def _forward(
        self, layers: list[Any], tokens: mx.array, taps: bool = False, record: bool = False
    ) -> tuple[Forward, Transaction]:
        transaction = Transaction(layers, tokens.shape[1])
        taps = taps and self.drafts and self.guard.on
        tap_layers = self.draft_model.target_layer_ids if taps else ()
        with aborting(transaction):
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
        with aborting(transaction):
            logits = self.target.logits(out.hidden)
        return Round(sequences, proposals, inputs, out, logits, transaction)

    def _decide(self, round_: Round) -> Round:
        """Let the judges decide, with one host read where their rules allow.

        An error while the drafts themselves are computed, which is only now, ends the generation.
        """
        sequences = round_.sequences
        with aborting(round_.transaction):
            # Evaluate state that outlives this round now; the next may run on another thread.
            lasting = [round_.out.taps, *(s.history for s in sequences)]
            mx.async_eval(
                round_.states,
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
            if self.ranks is not None and self.check_ranks:
                decided = [(d.num_accepted, d.tokens) for d in round_.decisions]
                what = f"round {self.stats.rounds} (accepted drafts and tokens)"
                self.ranks.check_same(what, decided)
            self.stats.host_reads += sum(d.host_reads for d in round_.decisions)
            # A warning may be an error, too.
            self.guard.check(all(decision.finite for decision in round_.decisions))
        self._lap(ACCEPT)
        return round_

    def _count(self, round_: Round, answering: list[bool]) -> None:
        before = self.stats.first_drafts
        rows = zip(round_.sequences, round_.decisions, round_.proposals, answering, strict=True)
        for sequence, decision, proposal, after_prompt in rows:
            bonus = decision.taken > decision.num_accepted
            counts = decision.num_drafted, decision.num_kept - 1, bonus
            for stats in (self.stats, sequence.stats):
                if after_prompt:
                    stats.count_round(*counts, copied=proposal.copied)
                else:
                    stats.prefills += bonus
        if all(answering):
            self.stats.count_pass(round_.width)
            if self.controller is not None and self.drafts:
                self._control(self.controller, round_)
        warn_low_acceptance(self.stats, before)

    def _control(self, controller: Controller, round_: Round) -> None:
        """Tell the controller what a round took and gave; copies say nothing of the drafter."""
        drafts = [
            (0, 0) if proposal.copied else (decision.num_drafted, decision.num_accepted)
            for proposal, decision in zip(round_.proposals, round_.decisions, strict=True)
        ]
        if self.ranks is not None:
            # Widths follow from times: all ranks go by those of rank 0.
            round_.seconds = self.ranks.share(round_.seconds)
        if round_.width > 1 and not any(drafted for drafted, _ in drafts):
            controller.observe_copies(round_.width * len(drafts), round_.seconds)
        else:
            controller.observe(round_.width, drafts, round_.seconds)
        self.stats.parked = controller.reason
        self.stats.parked_rounds += controller.parked and round_.width == 1

    def _lap(self, phase: str, *results: Any) -> None:
        if self.clock is not None:
            self.clock.lap(phase, *results)
