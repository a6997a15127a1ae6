"""What the server counts, in Prometheus' text form."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..decode.stats import Stats
from .job import Outcome

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Tokens a round; a block of 16 is the widest that drafters were published with.
LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16)
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one server; what can be asked for is read when it is asked for.

    Args:
        stats (Stats): Of all rounds.
        gauges (dict): By name, what it is and how to read it.
    """

    def __init__(self, stats: Stats, gauges: dict[str, tuple[str, Callable[[], float]]]):
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by route and status", "route", "status")
        self.prompt = self._counter("prompt_tokens", "Prompt tokens of answers")
        self.cached = self._counter("cached_tokens", "Of these, found in the prompt cache")
        self.hits = self._counter("cache_hits", "Answers that went on from a stored prompt")
        self.misses = self._counter("cache_misses", "Answers that did not")
        self.generated = self._counter("generated_tokens", "Tokens of answers")
        self.rounds = self._counter("rounds", "Rounds of answers; several may share a pass")
        self.drafted = self._counter("drafted_tokens", "Drafts that were verified")
        self.accepted = self._counter("accepted_tokens", "Drafts that became part of an answer")
        self.fallbacks = self._counter("draft_failures", "Answers that went on without drafts")
        self.removed = self._counter("hangups", "Answers whose client did not wait for the end")
        self.lengths = self._histogram("acceptance_length", "Tokens a round, by answer", LENGTHS)
        self.first = self._histogram("first_token_seconds", "From begin to first token", SECONDS)
        gauges = gauges | {
            "passes": ("Passes of the target after prompts", lambda: stats.passes),
            "parked_passes": (
                "Of these, without drafts because they did not pay",
                lambda: stats.parked_rounds,
            ),
        }
        for name, (text, read) in gauges.items():
            gauge = Gauge(f"mlx_dflash2_{name}", text, registry=self.registry)
            gauge.set_function(read)

    def count_request(self, route: str, status: int) -> None:
        """Count an answer, of whatever kind."""
        self.requests.labels(route, str(status)).inc()

    def count(self, outcome: Outcome) -> None:
        """Count what an answer took."""
        self.prompt.inc(outcome.prompt_tokens)
        self.cached.inc(outcome.cached_tokens)
        (self.hits if outcome.cached_tokens else self.misses).inc()
        self.generated.inc(outcome.completion_tokens)
        stats = outcome.stats
        self.rounds.inc(stats.rounds)
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        self.fallbacks.inc(outcome.fallback is not None)
        self.removed.inc(outcome.is_removed)
        if stats.rounds:
            self.lengths.observe(stats.acceptance_length)
        if outcome.completion_tokens:
            self.first.observe(outcome.prompt_time)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mlx_dflash2_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mlx_dflash2_{name}", text, buckets=buckets, registry=self.registry)
