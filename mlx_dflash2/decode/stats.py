"""What a generation did: counts that add up to its tokens, and times."""

from dataclasses import dataclass, field

import mlx.core as mx

# Drafters that fit accept a third of their first drafts even on hard text, and most elsewhere.
LOW_ACCEPTANCE = 0.2
LOW_ACCEPTANCE_ROUNDS = 32


@dataclass
class Stats:
    """Counters of one generation, filled while it runs.

    ``generation_tokens == prefills + accepted + bonus``: the prompt gives one token, each round
    its accepted drafts and, unless it was cut short there, the target's own token after them.

    Attributes:
        prompt_tokens (int): Tokens of the prompt that were processed.
        cached_tokens (int): Tokens that the prompt cache already held.
        rounds (int): Target passes after the prompt's; in a batch, each row of one counts.
        passes (int): Target passes after the prompts'; a batch's rows share them.
        drafted (int): Draft tokens that were verified.
        accepted (int): Draft tokens that were emitted.
        bonus (int): Tokens of the target's own after accepted drafts.
        drafted_at, accepted_at (list): The same by position in the block.
        copied_at, copies_accepted_at (list): Those of them that were copied from the text,
            or that a constraint forced.
        block_size, verify_width (int): In effect; a width of 1 does not draft.
        widths (dict): Passes by the rows that each sequence had in them.
        parked_rounds (int): Passes without drafts because drafting did not pay.
        parked (str, optional): Why the last passes were plain, if they were.
        draft_failures (int): Drafter steps that raised or gave non-finite numbers.
        host_reads (int): How often the host waited for the device, for the prompt and all rounds.
        fallback (str, optional): Why drafting stopped before the end, if it did.
        draft_error (Exception, optional): What the drafter raised, if that was the reason.
        rule (str): How drafts were accepted: ``greedy``, ``rejection`` or ``coupled``.
        row_by_row (str, optional): What made it necessary to judge rows one after the other.
        kernels (dict): For each of the package's ops that ran ``metal``, or ``plain: `` and why.
        prompt_time, generation_time (float): Seconds.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefills: int = 0
    rounds: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    bonus: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    copied_at: list[int] = field(default_factory=list)
    copies_accepted_at: list[int] = field(default_factory=list)
    block_size: int = 1
    verify_width: int = 1
    widths: dict[int, int] = field(default_factory=dict)
    parked_rounds: int = 0
    parked: str | None = None
    draft_failures: int = 0
    host_reads: int = 0
    fallback: str | None = None
    draft_error: Exception | None = None
    rule: str = "greedy"
    row_by_row: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    prompt_time: float = 0.0
    generation_time: float = 0.0

    def count_round(self, drafted: int, accepted: int, bonus: bool, copied: bool = False) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.bonus += bonus
        lists = [(self.drafted_at, self.accepted_at)]
        if copied:
            lists.append((self.copied_at, self.copies_accepted_at))
        for drafted_at, accepted_at in lists:
            for counts, number in ((drafted_at, drafted), (accepted_at, accepted)):
                counts.extend([0] * (drafted - len(counts)))
                for position in range(number):
                    counts[position] += 1

    @property
    def copied(self) -> int:
        """Draft tokens that were copied from the text so far."""
        return sum(self.copied_at)

    @property
    def copies_accepted(self) -> int:
        """Copied tokens that were emitted."""
        return sum(self.copies_accepted_at)

    def count_pass(self, width: int) -> None:
        self.passes += 1
        self.widths[width] = self.widths.get(width, 0) + 1

    @property
    def first_drafts(self) -> int:
        """Rounds in which the drafter drafted."""
        return _first(self.drafted_at) - _first(self.copied_at)

    @property
    def generation_tokens(self) -> int:
        return self.prefills + self.accepted + self.bonus

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, the bonus included."""
        return (self.accepted + self.bonus) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of the drafts at each position that were emitted."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def low_acceptance(self) -> str | None:
        """A line about likely causes if fewer first drafts were accepted than should be.

        ``None`` before ``LOW_ACCEPTANCE_ROUNDS`` rounds that drafted, and from a share of
        ``LOW_ACCEPTANCE`` on.
        """
        drafted = self.first_drafts
        accepted = _first(self.accepted_at) - _first(self.copies_accepted_at)
        if drafted < LOW_ACCEPTANCE_ROUNDS or accepted >= LOW_ACCEPTANCE * drafted:
            return None
        return (
            f"only {accepted} of {drafted} first drafts were accepted, fewer than "
            f"{LOW_ACCEPTANCE:.0%}; likely causes, in this order: the drafter was made for another "
            "target or fine-tune, the chat template or thinking mode differs from its training, "
            "the drafter's config or weights are damaged, its dtype or quantization, the text is "
            "unlike its training. `mlx_dflash2 doctor --trace` finds the stage at fault"
        )

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prompt_time if self.prompt_time else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens a second after the first, which the prompt's pass gives."""
        tokens = self.generation_tokens - self.prefills
        return tokens / self.generation_time if self.generation_time else 0.0

    def summary(self) -> str:
        """A few lines in the manner of ``mlx_lm.generate --verbose``."""
        lines = [
            f"Prompt: {self.prompt_tokens} tokens, {self.prompt_tps:.3f} tokens-per-sec",
            f"Generation: {self.generation_tokens} tokens, "
            f"{self.generation_tps:.3f} tokens-per-sec",
            f"Drafting: {self.acceptance_length:.2f} tokens a round in {self.rounds} rounds, "
            f"{self.accepted} of {self.drafted} drafts accepted "
            f"(block {self.block_size}, verify width {self.verify_width}, {self.rule})",
        ]
        if self.parked_rounds:
            why = f": {self.parked}" if self.parked else ""
            lines.append(f"Without drafts in {self.parked_rounds} rounds{why}")
        if len(self.widths) > 1:
            widths = ", ".join(f"{width} x {n}" for width, n in sorted(self.widths.items()))
            lines.append(f"Verify widths (rows x rounds): {widths}")
        if self.row_by_row:
            lines.append(f"Rows judged one by one because of {self.row_by_row}")
        if self.drafted_at:
            rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rates)
            lines.append(f"Acceptance by position: {rates}")
        if self.copied:
            lines.append(f"Copies: {self.copies_accepted} of {self.copied} accepted")
        if self.low_acceptance:
            lines.append(f"Low acceptance: {self.low_acceptance}")
        if plain := [name for name, form in self.kernels.items() if form != "metal"]:
            reasons = {self.kernels[name].removeprefix("plain: ") for name in plain}
            lines.append(f"Plain MLX for {', '.join(plain)}: {'; '.join(sorted(reasons))}")
        if self.fallback:
            lines.append(f"Drafting stopped: {self.fallback}")
        return "\n".join([*lines, f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB"])


def _first(counts: list[int]) -> int:
    return counts[0] if counts else 0
