"""The target's choice at every row: logits processors, the sampling rule, and acceptance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from ..drafter.model import Proposal
from .accept import Verdict, accept_greedy, accept_sampled
from .sampling import PureProcessor, Sampling, check_seed

GREEDY, REJECTION, COUPLED = "greedy", "rejection", "coupled"


@dataclass
class Decision:
    """``tokens``: accepted drafts, then the target's own; ``logprobs``: at least a row [V] each.

    ``host_reads`` counts how often the host waited for the device.
    """

    tokens: list[int]
    logprobs: list[mx.array]
    finite: bool
    host_reads: int = 1


class Pending(NamedTuple):
    """A decision that is not read yet: ``host`` holds num_accepted, finite and the tokens."""

    host: mx.array
    logprobs: list[mx.array]

    def read(self, host: list[int]) -> Decision:
        num_accepted, finite, *tokens = host
        return Decision(tokens[: num_accepted + 1], self.logprobs, bool(finite))


class Judge:
    """Decides, for one sequence, which drafts stay.

    The rule follows from the sampler. ``greedy``: a draft stays if it is the target's best token.
    ``rejection``, for a :class:`Sampling`: it stays with probability min(1, p / q). ``coupled``,
    for any other callable: it stays if it is what the callable draws from the target's row.

    Rows are judged one after the other, each with a host read, where something would notice that
    a row is judged which is never emitted: an opaque sampler, or a processor that is not pure.

    Args:
        sampler (callable, optional): Default: ``None``, greedy.
        logits_processors (sequence, optional): As in mlx-lm.
        seed (int, optional): Makes the draws repeatable and leaves ``mx.random`` alone. Default:
            ``None``, which takes one number from ``mx.random``.
    """

    def __init__(
        self,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable] | None = None,
        seed: int | None = None,
    ):
        self.sampler = sampler or greedy_sampler
        self.processors = list(logits_processors or ())
        if isinstance(sampler, Sampling):
            self.rule = REJECTION if sampler.temp > 0 else GREEDY
        else:
            self.rule = GREEDY if self.sampler is greedy_sampler else COUPLED
        if self.rule == COUPLED and seed is not None:
            raise ValueError(
                f"`seed` is {seed} but the sampler draws by itself, from mx.random: seed that, or "
                "use mlx_dflash2.make_sampler."
            )
        check_seed(seed)
        self.key = None
        if self.rule == REJECTION:
            number = mx.random.randint(0, 2**31 - 1).item() if seed is None else seed
            self.key = mx.random.key(number)

    def check_vocabulary(self, size: int):
        """Refuse a sampler that mlx-lm would fail on, and leave ``mx.random`` unusable.

        Raises:
            ValueError: if as many tokens are to be left as there are.
        """
        if self.rule == REJECTION and self.sampler.top_k >= size:
            raise ValueError(
                f"`top_k` is {self.sampler.top_k} but has to be below {size}, the target's "
                "vocabulary; 0 keeps all tokens."
            )

    @property
    def temperature(self) -> float:
        """For the drafter's walk: 0 unless acceptance knows how it drew."""
        return self.sampler.temp if self.rule == REJECTION else 0.0

    @property
    def row_by_row(self) -> str | None:
        """What makes it necessary to judge rows one after the other, if anything does."""
        for processor in self.processors:
            if not isinstance(processor, PureProcessor):
                name = getattr(processor, "__name__", type(processor).__name__)
                return f"the logits processor {name}"
        return "the sampler" if self.rule == COUPLED else None

    def next_key(self) -> mx.array | None:
        """A fresh key, independent of all others of this sequence."""
        if self.key is None:
            return None
        self.key, key = mx.random.split(self.key)
        mx.async_eval(self.key)
        return key

    def decide(self, proposal: Proposal, logits: mx.array, history: mx.array | None) -> Decision:
        """Judge drafts [L] by the target's logits [L + 1, V].

        Args:
            proposal (Proposal): The drafts; none at all is fine.
            logits (mx.array): Rows of the anchor and of each draft.
            history (mx.array, optional): All tokens up to the anchor, where there are processors.
        """
        return decide_all([self], [proposal], [logits], [history])[0]

    def begin(
        self, proposal: Proposal, logits: mx.array, history: mx.array | None
    ) -> Decision | Pending:
        """As :meth:`decide`, but what can be judged at once is left to be read."""
        if self.row_by_row:
            return self._one_by_one(proposal, logits, history)
        rows = [self._process(logits[i : i + 1], proposal.tokens[:i], history)
                for i in range(logits.shape[0])] if self.processors else [logits]  # fmt: skip
        logits = mx.concatenate(rows)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        verdict = self._verdict(proposal, logprobs)
        flags = mx.stack([verdict.num_accepted, proposal.finite.astype(mx.uint32)])
        host = mx.concatenate([flags, verdict.tokens.astype(mx.uint32)])
        return Pending(host, list(logprobs))

    def _one_by_one(
        self, proposal: Proposal, logits: mx.array, history: mx.array | None
    ) -> Decision:
        tokens, logprobs = [], []
        drafts, reads = proposal.tokens.tolist(), 2
        for i in range(logits.shape[0]):
            row = self._process(logits[i : i + 1], proposal.tokens[:i], history)
            row = row - mx.logsumexp(row, axis=-1, keepdims=True)
            logprobs.append(row[0])
            if self.rule == REJECTION:
                here = proposal.only(i)
                # A second row, should this draft stay, is judged on its own: it draws nothing.
                verdict = self._verdict(here, mx.concatenate([row] * (1 + here.tokens.size)))
                tokens.append(verdict.tokens[0].item())
                stays, reads = verdict.num_accepted.item() == 1, reads + 2
            else:
                tokens.append(int(self.sampler(row).item()))
                reads += 1
                stays = i < len(drafts) and tokens[-1] == drafts[i]
            if not stays:
                break
        mx.eval(logprobs)
        return Decision(tokens, logprobs, bool(proposal.finite.item()), reads)

    def _process(self, row: mx.array, drafts: mx.array, history: mx.array | None) -> mx.array:
        if self.processors:
            tokens = mx.concatenate([history, drafts.astype(history.dtype)])
            for processor in self.processors:
                row = processor(tokens, row)
        return row

    def _verdict(self, proposal: Proposal, logprobs: mx.array) -> Verdict:
        if self.rule == GREEDY:
            return accept_greedy(proposal.tokens, logprobs)
        p = self.sampler.probs(logprobs, self.next_key())
        candidates, q = proposal.candidates, proposal.q
        if q is None:
            candidates = proposal.tokens[:, None]
            q = mx.ones(candidates.shape)
        return accept_sampled(proposal.tokens, candidates, q, p, self.next_key(), self.next_key())


def decide_all(
    judges: Sequence[Judge],
    proposals: Sequence[Proposal],
    logits: Sequence[mx.array],
    histories: Sequence[mx.array | None],
) -> list[Decision]:
    """Judge one block of each of several sequences, with a single host read where rules allow.

    The arguments are those of :meth:`Judge.decide`, one a sequence; blocks may differ in length.
    """
    decisions = [
        judge.begin(*block)
        for judge, *block in zip(judges, proposals, logits, histories, strict=True)
    ]
    pending = [found for found in decisions if isinstance(found, Pending)]
    if pending:
        # The round's one host read.
        host = mx.concatenate([found.host for found in pending])
        mx.eval(host, [found.logprobs for found in pending])
        host = iter(host.tolist())
    return [
        found.read(list(islice(host, found.host.size))) if isinstance(found, Pending) else found
        for found in decisions
    ]
