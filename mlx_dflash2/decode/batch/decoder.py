"""Several sequences being decoded: one target pass verifies a block of each."""

import copy
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...drafter.model import Proposal
from ...kernels import active_kernels
from ..judge import Decision, decide_all
from ..loop import Decoder, usable, warn_low_acceptance
from ..stats import Stats
from .draft import extend_rows, propose_rows
from .rollback import BatchCache


@dataclass
class Row:
    """One prompt's sequence: ``tokens`` is what it has given, an EOS token at its end left out.

    ``decoder`` runs the prompt; after it, it holds what belongs to this sequence alone.
    """

    decoder: Decoder
    prompt: mx.array
    left: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None

    def take(self, tokens: Sequence[int], eos_token_ids: Collection[int]) -> list[int]:
        """Emit tokens up to an EOS token or the end of the budget."""
        emitted = []
        for token in tokens:
            emitted.append(token)
            self.left -= 1
            if token in eos_token_ids:
                self.finish_reason = "stop"
                break
            self.tokens.append(token)
            if self.left == 0:
                self.finish_reason = "length"
                break
        return emitted


class BatchDecoder:
    """Decodes rows side by side until each has finished; others take the place of finished ones.

    Args:
        rows (sequence of Row): At least one; their decoders share target, drafter, guard, stats.
        stream: Where to compute.
        stats (Stats): Filled while decoding.
        eos_token_ids (collection): Tokens that end a row.
        batch_size (int): The most rows to decode at a time.
        prefill_step_size (int): Prompt tokens to process at a time.
        keeps_logprobs (bool): Keep each emitted token's log probability.
        keeps_caches (bool): Keep the caches of finished rows.
        on_finish (callable): Called for each row that has finished.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        stream: Any,
        stats: Stats,
        eos_token_ids: Collection[int],
        *,
        batch_size: int,
        prefill_step_size: int,
        keeps_logprobs: bool = False,
        keeps_caches: bool = False,
        on_finish: Callable[[Row], None] = lambda _: None,
    ):
        first = rows[0].decoder
        self.target, self.proposer, self.guard = first.target, first.proposer, first.guard
        self.block_size, self.verify_width = first.block_size, first.verify_width
        self.waiting, self.rows, self.cache = list(rows), [], BatchCache()
        self.stream, self.stats, self.eos_token_ids = stream, stats, eos_token_ids
        self.batch_size, self.prefill_step_size = batch_size, prefill_step_size
        self.keeps_logprobs, self.keeps_caches = keeps_logprobs, keeps_caches
        self.on_finish = on_finish

    def run(self):
        """Decode until every row has finished."""
        while self.waiting or self.rows:
            if self.waiting and len(self.rows) < self.batch_size:
                self._admit()
            if self.rows:
                start = time.perf_counter()
                with mx.stream(self.stream):
                    self._next_round()
                self.stats.generation_time += time.perf_counter() - start
        self.stats.kernels = active_kernels()

    def _admit(self):
        """Process waiting prompts, each alone, and let those that go on join the batch."""
        joining = []
        while self.waiting and len(self.rows) + len(joining) < self.batch_size:
            row = self.waiting.pop(0)
            if self._prefill(row):
                joining.append(row)
        with mx.stream(self.stream):
            if joining:
                self.cache.join([row.decoder.cache for row in joining])
        self.rows += joining
        mx.clear_cache()

    def _prefill(self, row: Row) -> bool:
        """Give a row its first token; true if it goes on from there."""
        decoder = row.decoder
        if row.left == 0:
            row.finish_reason = "length"
            if not self.keeps_caches:
                self.on_finish(row)
                return False
        # A caller's caches are left as they are, as in mlx-lm.
        decoder.cache = copy.deepcopy(decoder.cache)
        round = decoder.prefill(row.prompt, self.prefill_step_size)
        with mx.stream(self.stream):
            if row.finish_reason is None:
                self._emit([row], [Decision(round.tokens, round.logprobs, True)])
                round.taken = 1
            decoder.settle(extend=row.finish_reason is None)
        if row.finish_reason is not None:
            self._finish(row, decoder.cache)
        return row.finish_reason is None

    def _next_round(self):
        rows, decoders = self.rows, [row.decoder for row in self.rows]
        proposals = self._propose()
        inputs = self._blocks(proposals)
        drafting = self.guard.on and self.verify_width > 1
        taps = self.proposer.target_layer_ids if drafting else ()
        width = inputs.shape[1]
        out = self.target.forward(inputs, self.cache.layers, taps, record=width > 1)
        logits = self.target.logits(out.hidden)
        decisions = decide_all(
            [decoder.judge for decoder in decoders],
            proposals,
            [x[: 1 + p.tokens.size] for x, p in zip(logits, proposals, strict=True)],
            [decoder.history for decoder in decoders],
        )
        self.guard.check(all(decision.finite for decision in decisions))
        emitted, before = self._emit(rows, decisions), self.stats.first_drafts
        keeps = self._count(proposals, decisions, emitted)
        self.cache.commit(width, keeps, out.records)
        if drafting and self.guard.on:
            positions = [decoder.position for decoder in decoders]
            with self.guard.step():
                contexts = [decoder.context for decoder in decoders]
                extend_rows(self.proposer, contexts, inputs, out.taps, positions, keeps)
        for decoder, keep, tokens in zip(decoders, keeps, emitted, strict=True):
            decoder.advance(keep, tokens)
        self._leave(decisions, emitted)
        warn_low_acceptance(self.stats, before)

    def _propose(self) -> list[Proposal]:
        """Drafts for every row, as many as its budget allows; none once drafting has stopped."""
        proposals = [Proposal.none() for _ in self.rows]
        most = self.verify_width if self.guard.on else 1
        widths = [int(min(most, row.left)) for row in self.rows]
        # A row with room for one token takes no key, as on its own.
        places = [b for b, width in enumerate(widths) if width > 1]
        if places:
            decoders = [self.rows[b].decoder for b in places]
            with self.guard.step():
                found = propose_rows(
                    self.proposer,
                    self.target,
                    mx.array([decoder.anchor for decoder in decoders], mx.uint32),
                    [decoder.context for decoder in decoders],
                    self.block_size,
                    [decoder.judge for decoder in decoders],
                )
                drafts = [usable(p, widths[b] - 1) for b, p in zip(places, found, strict=True)]
                for b, proposal in zip(places, drafts, strict=True):
                    proposals[b] = proposal
        return proposals

    def _blocks(self, proposals: Sequence[Proposal]) -> mx.array:
        """Each row's anchor and drafts [B, W]; shorter ones are padded and cut off again."""
        most = max(proposal.tokens.size for proposal in proposals)
        drafts = [mx.pad(p.tokens, (0, most - p.tokens.size)) for p in proposals]
        anchors = mx.array([[row.decoder.anchor] for row in self.rows], mx.uint32)
        return mx.concatenate([anchors, mx.stack(drafts)], axis=1)

    def _emit(self, rows: Sequence[Row], decisions: Sequence[Decision]) -> list[list[int]]:
        emitted = [
            row.take(decision.tokens, self.eos_token_ids)
            for row, decision in zip(rows, decisions, strict=True)
        ]
        if self.keeps_logprobs:
            for row, decision, tokens in zip(rows, decisions, emitted, strict=True):
                ids = mx.array(tokens)[:, None]
                rows = mx.stack(decision.logprobs[: len(tokens)])
                picked = mx.take_along_axis(rows, ids, axis=-1)
                row.logprobs += picked[:, 0].tolist()
                del row.logprobs[len(row.tokens) :]
        return emitted

    def _count(
        self,
        proposals: Sequence[Proposal],
        decisions: Sequence[Decision],
        emitted: Sequence[list[int]],
    ) -> list[int]:
        """Rows of the pass that each sequence keeps: the anchor's, and its emitted drafts'."""
        self.stats.passes += 1
        keeps = []
        for proposal, decision, tokens in zip(proposals, decisions, emitted, strict=True):
            accepted = min(len(tokens), len(decision.tokens) - 1)
            self.stats.count_round(proposal.tokens.size, accepted, len(tokens) > accepted)
            keeps.append(1 + accepted)
        return keeps

    def _leave(self, decisions: Sequence[Decision], emitted: Sequence[list[int]]):
        """Take finished rows out of the batch."""
        stay = [b for b, row in enumerate(self.rows) if row.finish_reason is None]
        for b, row in enumerate(self.rows):
            if row.finish_reason is not None:
                # A last token that is a draft has its row in the caches already.
                if len(emitted[b]) < len(decisions[b].tokens):
                    row.decoder.anchor = None
                self._finish(row, self.cache.extract(b) if self.keeps_caches else [])
        if len(stay) < len(self.rows):
            self.rows = [self.rows[b] for b in stay]
            self.cache.leave(stay)
        if self.rows:
            self.cache.compact([row.decoder.position for row in self.rows])

    def _finish(self, row: Row, prompt_cache: list[Any]):
        if self.keeps_caches:
            row.decoder.cache, row.decoder.keeps_cache = prompt_cache, True
            row.decoder.close()
            row.prompt_cache = row.decoder.cache
        row.decoder.cache, row.decoder.context = [], None
        self.on_finish(row)
