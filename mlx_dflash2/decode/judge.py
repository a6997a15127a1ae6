"""The target's choice at every row: logits processors, the sampling rule, and acceptance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from ..drafter.model import Proposal
from .accept import accept_greedy, accept_sampled
from .constraint import Constraint
from .host import integer, integers
from .sampling import PureProcessor, Sampling

GREEDY, REJECTION, COUPLED = "greedy", "rejection", "coupled"


@dataclass
class Decision:
    """What a sequence takes from a target pass: the accepted drafts, then the target's own token.

    Attributes:
        tokens (list of int): The accepted drafts and the bonus.
        logprobs (list of mx.array): A row [V] for each token, and perhaps more.
        num_drafted (int): Drafts that were judged.
        finite (bool): Whether the drafter's numbers were finite.
        host_reads (int): How often the host waited for the device.
        taken (int): Tokens that were handed out; whoever hands them out counts them.
    """

    tokens: list[int]
    logprobs: list[mx.array]
    num_drafted: int
    finite: bool
    host_reads: int = 0
    taken: int = 0

    @property
    def num_accepted(self) -> int:
        """Accepted drafts, handed out or not."""
        return len(self.tokens) - 1

    @property
    def num_kept(self) -> int:
        """Rows of the pass that stay: the anchor's, and one for each draft handed out."""
        return 1 + min(self.taken, self.num_accepted)


class Judge:
    """Decides, for one sequence, which drafts stay.

    The rule follows from the sampler. ``greedy``: a draft stays if it is the target's best token.
    ``rejection``, for a :class:`Sampling`: it stays with probability min(1, p / q). ``coupled``,
    for any other callable: it stays if it is what the callable draws from the target's row.

    Rows are judged one after the other, each with a host read, where something would notice that
    a row is judged which is never emitted: an opaque sampler, or a processor that is not pure.

    Args:
        sampler (callable, optional): Default: ``None``, greedy.
        logits_processors (sequence, optional): As in mlx-lm; one of them may be a
            :class:`Constraint`.
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
        given = list(logits_processors or ())
        constraints = [p for p in given if isinstance(p, Constraint)]
        if len(constraints) > 1:
            raise ValueError("`logits_processors` holds more than one constraint.")
        self.constraint = constraints[0] if constraints else None
        self.processors = [p for p in given if not isinstance(p, Constraint)]
        if isinstance(sampler, Sampling):
            self.rule = REJECTION if sampler.temp > 0 else GREEDY
        else:
            self.rule = GREEDY if self.sampler is greedy_sampler else COUPLED
        if self.rule == COUPLED and seed is not None:
            raise ValueError(
                f"`seed` is {seed} but the sampler draws by itself, from mx.random: seed that, or "
                "use mlx_dflash2.make_sampler."
            )
        self.seeded = seed is not None
        self.sampling = sampler if isinstance(sampler, Sampling) else None
        self.key: mx.array | None = None
        self._keys: list[mx.array] | None = None
        if self.rule == REJECTION:
            number = integer(mx.random.randint(0, 2**31 - 1)) if seed is None else seed
            self.key = mx.random.key(number)

    def check_vocabulary(self, size: int) -> None:
        """Refuse a sampler that mlx-lm would fail on, and ids that the target does not have.

        Raises:
            ValueError: if as many tokens are to be left as there are, or for an id beyond them.
        """
        top_k = 0 if self.sampling is None else self.sampling.top_k
        if self.rule == REJECTION and top_k >= size:
            raise ValueError(
                f"`top_k` is {top_k} but has to be below {size}, the target's "
                "vocabulary; 0 keeps all tokens."
            )

        if self.constraint is not None and self.constraint.vocab_size != size:
            raise ValueError(
                f"The constraint is for {self.constraint.vocab_size} tokens but the target has "
                f"{size}."
            )
        ids = {
            "xtc_special_tokens": () if self.sampling is None else self.sampling.xtc_special_tokens
        }
        for processor in self.processors:
            if isinstance(processor, PureProcessor):
                ids["logit_bias"] = (*ids.get("logit_bias", ()), *processor.ids)
        for name, given in ids.items():
            for token in given:
                if not 0 <= token < size:
                    raise ValueError(
                        f"`{name}` names token {token} but has to name tokens from 0 to {size - 1}."
                    )

    @property
    def temperature(self) -> float:
        """For the drafter's walk: 0 unless acceptance knows how it drew."""
        return 0.0 if self.sampling is None else self.sampling.temp

    @property
    def is_repeatable_at_any_width(self) -> bool:
        """Whether the same call may verify other widths: a seed's draws depend on them."""
        return self.rule != REJECTION or not self.seeded

    @property
    def row_by_row(self) -> str | None:
        """What makes it necessary to judge rows one after the other, if anything does."""
        for processor in self.processors:
            if not isinstance(processor, PureProcessor):
                name = getattr(processor, "__name__", type(processor).__name__)
                return f"the logits processor {name}"
        return "the sampler" if self.rule == COUPLED else None

    @property
    def lasting(self) -> list[mx.array]:
        """What outlives a round: the next may run on another thread, so it is evaluated here."""
        return [] if self.key is None else [self.key, *(self._keys or ())]

    def process_drafts(self, logits: mx.array, history: mx.array) -> mx.array:
        """Change a drafter's logits as pure processors will change the target's, more or less.

        The drafts are not known yet: each row is processed as if it came next.

        Args:
            logits (mx.array): Rows [L, V] of the target's whole vocabulary.
            history (mx.array): All tokens up to the anchor.
        """
        none = mx.array([], mx.uint32)
        rows = [
            self._process(row, none, history, self.pure) for row in mx.split(logits, len(logits))
        ]
        return mx.concatenate(rows)

    @property
    def pure(self) -> list[PureProcessor]:
        """The processors that may be called for rows which are never emitted."""
        return [p for p in self.processors if isinstance(p, PureProcessor)]

    def draft_key(self) -> mx.array | None:
        """This round's key for the drafter's walk; ``None`` where it takes the best step."""
        return None if self.key is None else self._round_keys(self.key)[0]

    def _round_keys(self, key: mx.array) -> list[mx.array]:
        """Independent keys for one round's draft, filter, acceptance and draw."""
        if self._keys is None:
            self.key, *self._keys = mx.random.split(key, 5)
        return self._keys

    def at_once(
        self, proposal: Proposal, logits: mx.array, history: mx.array | None
    ) -> tuple[mx.array, list[mx.array]]:
        """Judge drafts [L] by the target's logits, without a host read.

        Args:
            proposal (Proposal): The drafts; none at all is fine.
            logits (mx.array): Rows [L + 1, V] of the anchor and of each draft.
            history (mx.array, optional): All tokens up to the anchor, where there are processors.

        Returns:
            tuple: uint32 [L + 4] for the host: how many drafts stay, whether the drafter's
            numbers were finite, whether the target's were, and the tokens; and the rows of log
            probabilities.
        """
        if self.constraint is not None:
            logits = self.constraint.apply(logits, integers(proposal.tokens))
        if self.processors:
            rows = [
                self._process(logits[i : i + 1], proposal.tokens[:i], history, self.processors)
                for i in range(logits.shape[0])
            ]
            logits = mx.concatenate(rows)
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - total
        num_accepted, tokens = self._accept(proposal, logprobs)
        flags = mx.stack([num_accepted, proposal.finite, mx.abs(total.sum()) < float("inf")])
        return mx.concatenate([flags, tokens.astype(mx.uint32)]), list(logprobs)

    def one_by_one(
        self, proposal: Proposal, logits: mx.array, history: mx.array | None
    ) -> Decision:
        """Judge rows one after the other up to the first rejection; as :meth:`at_once`."""
        tokens: list[int] = []
        logprobs: list[mx.array] = []
        drafts, reads = integers(proposal.tokens), 2
        if self.constraint is not None:
            logits = self.constraint.apply(logits, drafts)
        for i in range(logits.shape[0]):
            drafted = proposal.tokens[:i]
            row = self._process(logits[i : i + 1], drafted, history, self.processors)
            total = mx.logsumexp(row, axis=-1, keepdims=True)
            check_finite(bool((mx.abs(total) < float("inf")).item()))
            row = row - total
            logprobs.append(row[0])
            if self.rule == REJECTION:
                here = proposal.only(i)
                # A second row, should this draft stay, is judged on its own: it draws nothing.
                accepted, drawn = self._accept(here, mx.concatenate([row] * (1 + here.tokens.size)))
                tokens.append(integer(drawn[0]))
                stays, reads = accepted.item() == 1, reads + 2
            else:
                tokens.append(integer(self.sampler(row)))
                if not 0 <= tokens[-1] < row.shape[-1]:
                    raise ValueError(
                        f"The sampler chose token {tokens[-1]} but the target has "
                        f"{row.shape[-1]} tokens."
                    )
                reads += 1
                stays = i < len(drafts) and tokens[-1] == drafts[i]
            if not stays:
                break
        mx.eval(logprobs, self.lasting)
        return Decision(tokens, logprobs, len(drafts), bool(proposal.finite.item()), reads)

    def forced(self, most: int) -> list[int]:
        """Drafts that need no drafter because nothing else may follow, perhaps none."""
        return [] if self.constraint is None or most < 1 else self.constraint.forced(most)

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many drafts may follow one after the other."""
        return len(drafts) if self.constraint is None else self.constraint.allowed(drafts)

    def cut(self, proposal: Proposal) -> Proposal:
        """Cut a proposal before the first draft that may not follow, which takes a host read."""
        if self.constraint is None:
            return proposal
        return proposal.first(self.allowed(integers(proposal.tokens)))

    def accept(self, tokens: Sequence[int]) -> None:
        """Note tokens that were emitted."""
        if self.constraint is not None:
            self.constraint.accept(tokens)

    def _process(
        self,
        row: mx.array,
        drafts: mx.array,
        history: mx.array | None,
        processors: Sequence[Callable],
    ) -> mx.array:
        if processors and history is not None:
            tokens = mx.concatenate([history, drafts.astype(history.dtype)])
            shape = row.shape
            for processor in processors:
                row = processor(tokens, row)
            if row.shape != shape:
                raise ValueError(
                    f"A logits processor gave rows of shape {row.shape} but has to keep {shape}."
                )
        return row

    def _accept(self, proposal: Proposal, logprobs: mx.array) -> tuple[mx.array, mx.array]:
        if self.sampling is None or self.key is None:
            return accept_greedy(proposal.tokens, logprobs)
        _, filter_key, accept_key, draw_key = self._round_keys(self.key)
        self._keys = None
        p = self.sampling.probs(logprobs, filter_key)
        candidates, q = proposal.candidates, proposal.q
        if candidates is None or q is None:
            candidates = proposal.tokens[:, None]
            q = mx.ones(candidates.shape)
        return accept_sampled(proposal.tokens, candidates, q, p, accept_key, draw_key)


def decide_all(
    judges: Sequence[Judge],
    proposals: Sequence[Proposal],
    logits: Sequence[mx.array],
    histories: Sequence[mx.array | None],
) -> list[Decision]:
    """Judge one block of each of several sequences, with a single host read where rules allow.

    The arguments are those of :meth:`Judge.at_once`, one a sequence; blocks may differ in length.
    """
    decisions: dict[int, Decision] = {}
    waiting: dict[int, tuple[mx.array, list[mx.array]]] = {}
    blocks = zip(proposals, logits, histories, strict=True)
    for index, (judge, block) in enumerate(zip(judges, blocks, strict=True)):
        if judge.row_by_row:
            decisions[index] = judge.one_by_one(*block)
        else:
            waiting[index] = judge.at_once(*block)
    if waiting:
        # The round's one host read.
        rows = mx.concatenate([host for host, _ in waiting.values()])
        mx.eval(
            rows,
            [logprobs for _, logprobs in waiting.values()],
            [judges[index].lasting for index in waiting],
        )
        numbers = iter(integers(rows))
        for index, (host, logprobs) in waiting.items():
            num_accepted, finite, target_finite, *tokens = islice(numbers, host.size)
            check_finite(bool(target_finite))
            kept = tokens[: num_accepted + 1]
            decisions[index] = Decision(kept, logprobs, len(tokens) - 1, bool(finite))
        decisions[min(waiting)].host_reads = 1
    return [decisions[index] for index in range(len(judges))]


def check_finite(finite: bool) -> None:
    """Refuse to choose a token from numbers that overflowed.

    Raises:
        ValueError: if they did.
    """
    if not finite:
        raise ValueError(
            "The target's logits are not finite: its weights are damaged, its 16-bit numbers "
            "overflow, or the logits processors leave no token."
        )
