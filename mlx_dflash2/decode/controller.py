"""The verify width of each round: the one that should give the most tokens a second.

A width pays by how many tokens it is expected to give and by how long its round takes. Both are
learned while decoding goes on: acceptance by position with forgetting, and the median of what
rounds really took by their rows. Nothing runs only to be timed. Below break-even the controller
parks in plain decoding, and tries a draft again at growing intervals.

Copies need no tries: what is expected of them is known before they are verified.
"""

import re
from collections import deque
from collections.abc import Sequence
from statistics import median

import mlx.core as mx

# Rounds that the acceptance estimate looks back on, and what it believes of a first draft before.
MEMORY = 40
PRIOR, PRIOR_WEIGHT = 0.7, 1.0
# Rounds that the rate at the position before counts for.
NEIGHBOR_WEIGHT = 5.0
# Times of a width that count.
SAMPLES = 7
# A width that was not tried yet is believed to cost this share of what its neighbors suggest.
OPTIMISM = 0.9
# Rounds until it is believed to cost no more than the next narrower one, so that it is tried once.
FAITH = 24
# Rounds after which the time of a width is measured again if the width may be the best one.
STALE = 96
# Drafting has to be better than plain decoding by this much to begin again, worse to stop.
MARGIN = 0.03
# Plain rounds before a draft is tried again: first, and at most.
PATIENCE, MOST_PATIENCE = 16, 64
START_WIDTH = 4
# Rounds of a try, and what the past counts then.
MOST_TRIES, FADED = 4, 3.0
# What a very good drafter reaches at every position.
HIGH_RATE = 0.93


class Acceptance:
    """How often the draft at each position stays where all before it did.

    Args:
        positions (int): The most drafts of a round.
    """

    def __init__(self, positions: int):
        self.kept = [PRIOR * PRIOR_WEIGHT] * positions
        self.judged = [PRIOR_WEIGHT] * positions

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one sequence's round."""
        keep = 1 - 1 / MEMORY
        for position in range(min(drafted, accepted + 1)):
            self.kept[position] = keep * self.kept[position] + (position < accepted)
            self.judged[position] = keep * self.judged[position] + 1

    def fade(self) -> None:
        """Believe the past less, so that a few rounds can change the estimate."""
        for position, weight in enumerate(self.judged):
            share = min(1.0, FADED / weight)
            self.kept[position] *= share
            self.judged[position] *= share

    def tokens(self, width: int) -> float:
        """Tokens that a round of a width is expected to give, the bonus included."""
        alive, tokens = 1.0, 1.0
        rate = self.kept[0] / self.judged[0]
        for position in range(width - 1):
            weight = self.judged[position]
            # A position that was hardly reached is believed to be like the one before it.
            rate = (self.kept[position] + NEIGHBOR_WEIGHT * rate) / (weight + NEIGHBOR_WEIGHT)
            alive *= rate
            tokens += alive
        return tokens


class Costs:
    """What a round takes by its rows: medians where it was measured, a line between them."""

    def __init__(self) -> None:
        self.samples: dict[int, deque[float]] = {}
        self.measured_at: dict[int, int] = {}

    def observe(self, rows: int, seconds: float, round_number: int) -> None:
        """Add the time of a round."""
        times = self.samples.setdefault(rows, deque(maxlen=SAMPLES))
        old = round_number - self.measured_at.get(rows, round_number) > STALE // 3
        # The context has grown since old ones; a first round may have compiled its kernels.
        if old or (len(times) == 1 and times[0] > 1.5 * seconds):
            times.clear()
        times.append(seconds)
        self.measured_at[rows] = round_number

    def seconds(self, rows: int, base: tuple[int, float], trust: float = 1.0) -> float:
        """The time of a round, where at least one was measured.

        Args:
            rows (int): Rows of the pass.
            base (tuple): Rows and seconds of a plain round: a line begins there.
            trust (float): How far to believe the line between two measured numbers of rows; at 0
                a round in between is believed to take what the narrower one takes.
        """
        if rows in self.samples:
            return median(self.samples[rows])
        points = sorted((n, median(times)) for n, times in self.samples.items())
        b, high = next((point for point in points if point[0] > rows), points[-1])
        a, low = max((point for point in [base, *points] if point[0] < b), default=base)
        if a < rows < b:
            return OPTIMISM * (low + trust * (high - low) * (rows - a) / (b - a))
        return high + 0.5 * max(0.0, high - low) / max(1, b - a) * (rows - b)


class Controller:
    """Chooses verify widths for a loop; see the module.

    Args:
        max_width (int): The most rows of a block that the target may verify.
        start_width (int): The width of the first round; 1 starts parked.

    Attributes:
        parked (bool): Whether rounds are plain for now.
        reason (str, optional): Why, in a few words.
    """

    def __init__(self, max_width: int, start_width: int = START_WIDTH):
        self.max_width = max_width
        self.acceptance = Acceptance(max(1, max_width - 1))
        self.plain, self.drafting, self.copying = Costs(), Costs(), Costs()
        self.rounds = self.drafts = 0
        self.parked = start_width == 1 < max_width
        self.reason = "this chip gains little from several rows" if self.parked else None
        self._start = min(max_width, max(2, start_width))
        self._patience, self._waited, self._tries = PATIENCE, 0, 0

    def choose(self, limit: int, sequences: int = 1) -> int:
        """Choose the next round's width, from 1 to ``limit``.

        Args:
            limit (int): The widest that budget and caches allow.
            sequences (int): Sequences that are decoded together.
        """
        limit = min(limit, self.max_width)
        if limit <= 1 or (self.parked and self._waited < self._patience):
            return 1
        if not self.drafting.samples:
            # The first draft is not timed; the second is short, in case nothing is accepted.
            return min(limit, self._start if self.drafts == 0 else 2)
        if not self.plain.samples:
            return 1
        return max(range(2, limit + 1), key=lambda width: self._hope(width, sequences))

    def choose_copies(self, chances: Sequence[Sequence[float]], limit: int, otherwise: int) -> int:
        """Choose the width of a round that verifies nothing but copies.

        Args:
            chances (sequence): For each sequence how likely it is that one copied token stays, two,
                and so on; it may be empty.
            limit (int): The widest that budget and caches allow.
            otherwise (int): The width of :meth:`choose`.

        Returns:
            int: The width, or 1 where the round of the other width should be faster.
        """
        count = len(chances)
        limit = min(limit, 1 + max(map(len, chances), default=0))
        if limit <= 1:
            return 1

        def tokens(width: int) -> float:
            return 1 + sum(sum(row[: width - 1]) for row in chances) / count

        if not self.copying.samples:
            limit = min(limit, START_WIDTH)
        if not self.plain.samples or (otherwise > 1 and not self.drafting.samples):
            return limit if tokens(limit) > self.acceptance.tokens(otherwise) else 1
        if not self.copying.samples:
            return limit

        def rate(width: int) -> float:
            base = count, self._plain_seconds(count)
            return tokens(width) / self.copying.seconds(count * width, base)

        best = max(range(2, limit + 1), key=rate)
        return best if rate(best) > (1 + MARGIN) * self._rate(otherwise, count) else 1

    def observe_copies(self, rows: int, seconds: float) -> None:
        """Learn what a pass of copies took."""
        self.rounds += 1
        self.copying.observe(rows, seconds, self.rounds)

    def observe(self, width: int, drafts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a round.

        Args:
            width (int): Rows of the pass for each sequence.
            drafts (sequence): For each sequence the drafts that were verified and that stayed.
            seconds (float): What the round took.
        """
        self.rounds += 1
        for drafted, accepted in drafts:
            self.acceptance.observe(drafted, accepted)
        rows = width * len(drafts)
        if width == 1:
            self._waited += 1
            self.plain.observe(rows, seconds, self.rounds)
        else:
            self.drafts += 1
            if self.drafts > 1:
                self.drafting.observe(rows, seconds, self.rounds)
        if self.plain.samples and self.drafting.samples:
            self._park_or_go(len(drafts), width > 1, any(accepted for _, accepted in drafts))

    def gain(self, sequences: int = 1) -> float:
        """The speed of the best width by what is known, in times of plain decoding."""
        plain = self._rate(1, sequences)
        return max(self._rate(w, sequences) for w in range(2, self.max_width + 1)) / plain

    def _rate(self, width: int, sequences: int, trust: float = 1.0) -> float:
        """Tokens a second of each sequence."""
        base = sequences, self._plain_seconds(sequences)
        if width == 1:
            return 1 / base[1]
        seconds = self.drafting.seconds(sequences * width, base, trust)
        return self.acceptance.tokens(width) / seconds

    def _plain_seconds(self, sequences: int) -> float:
        nearest = min(self.plain.samples, key=lambda rows: abs(rows - sequences))
        return median(self.plain.samples[nearest])

    def _hope(self, width: int, sequences: int) -> float:
        """The rate, with something added where the time is of long ago or was never taken."""
        age = self.rounds - self.drafting.measured_at.get(sequences * width, self.rounds)
        trust = max(0.0, 1 - self.rounds / FAITH)
        return self._rate(width, sequences, trust) * (1 + 0.1 * min(1.0, age / STALE))

    def _park_or_go(self, sequences: int, drafted: bool, accepted: bool) -> None:
        gain = self.gain(sequences)
        # One timed draft is not enough: it may have compiled its kernels.
        if not self.parked and self.drafts > 2 and gain < 1 - MARGIN:
            self.parked, self._waited, self._tries = True, 0, 0
            self.reason = f"drafting would give {gain:.2f} times the speed of plain decoding"
            self.acceptance.fade()
        elif self.parked and accepted and gain > 1 + MARGIN:
            self.parked, self.reason, self._patience = False, None, PATIENCE
        elif self.parked and drafted:
            self._tries += 1
            if not accepted or self._tries == MOST_TRIES or not self._could_pay(sequences):
                self._waited, self._tries = 0, 0
                # Where even good drafts would not pay, only another context length can help.
                most = MOST_PATIENCE if self._could_pay(sequences) else 4 * MOST_PATIENCE
                self._patience = min(most, 2 * self._patience)
                self.acceptance.fade()

    def _could_pay(self, sequences: int) -> bool:
        """Whether drafting would pay if nearly every draft stayed."""
        base = sequences, self._plain_seconds(sequences)
        for width in range(2, self.max_width + 1):
            tokens = (1 - HIGH_RATE**width) / (1 - HIGH_RATE)
            if tokens * base[1] > self.drafting.seconds(sequences * width, base):
                return True
        return False


def start_width() -> int:
    """The width that a loop starts with on this machine: plain where MLX gains nothing from rows.

    On the first two generations of Apple chips a quantized product of a few rows takes as long as
    so many products of one row.
    """
    if mx.default_device() != mx.gpu:
        return START_WIDTH
    architecture = str(mx.device_info().get("architecture", ""))
    return 1 if re.match(r"applegpu_g1[34]", architecture) else START_WIDTH
