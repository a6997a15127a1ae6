"""Where a round's time goes: a pass of its own that waits for every phase.

Waiting takes away what the device could have overlapped, so the phases tell shares; how long a
round really takes comes from the runs that nothing disturbs.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decode.judge import Decision, Judge
from ..decode.kv_quantization import KVQuantization
from ..decode.loop import Decoder
from ..decode.sampling import make_sampler
from ..decode.stats import Stats
from ..drafter.model import Drafter, Proposal
from .arms import Arm, BenchSettings

DRAFT, SELECT, VERIFY, ACCEPT, HOST = "draft", "select", "verify", "accept/rollback", "host"
PHASES = (DRAFT, SELECT, VERIFY, ACCEPT, HOST)


class Clock:
    """Seconds by phase."""

    def __init__(self):
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.drafted: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class TimedDrafter:
    """A drafter whose two steps, and whose context, are waited for."""

    def __init__(self, drafter: Drafter, clock: Clock):
        self.drafter, self.clock = drafter, clock
        self.block_size, self.context_size = drafter.block_size, drafter.context_size
        self.target_layer_ids = drafter.target_layer_ids
        # The target's caches: what was rolled back is settled before the context is extended.
        self.cache: Sequence[Any] = ()

    def make_context(self) -> Any:
        return self.drafter.make_context()

    def extend(self, context: Any, tokens: mx.array, taps: mx.array, position: int):
        with self.clock.phase(ACCEPT):
            self.drafter.extend(context, tokens, taps, position)
            mx.eval(context.state, [cache.state for cache in self.cache])

    def propose(
        self,
        target: Any,
        anchor: mx.array,
        context: Any,
        block_size: int,
        temperature: float = 0.0,
        key: mx.array | None = None,
    ) -> Proposal:
        with self.clock.phase(DRAFT):
            hidden, logits = self.drafter.run_block(target, anchor, context, block_size)
            mx.eval(hidden, logits)
        with self.clock.phase(SELECT):
            keys = [key] if temperature > 0 else None
            proposal = self.drafter.choose(anchor, hidden, logits, temperature, keys)[0]
            mx.eval([value for value in proposal if value is not None])
        self.clock.drafted = time.perf_counter()
        return proposal


class TimedJudge(Judge):
    """A judge that waits for the target's logits first."""

    def __init__(self, clock: Clock, **kwargs: Any):
        super().__init__(**kwargs)
        self.clock = clock

    def decide(self, proposal: Proposal, logits: mx.array, history: mx.array | None) -> Decision:
        mx.eval(logits)
        # The loop hands the pass over before it comes here, and may be held up by it there.
        if self.clock.drafted is not None:
            self.clock.seconds[VERIFY] += time.perf_counter() - self.clock.drafted
            self.clock.drafted = None
        with self.clock.phase(ACCEPT):
            return super().decide(proposal, logits, history)


def time_phases(
    model: nn.Module, arm: Arm, prompt: Sequence[int], settings: BenchSettings
) -> dict[str, float]:
    """Seconds a round by phase, from one answer of an arm with a DFlash drafter.

    Verify begins when the drafts are there. Host is what is left of a round: Python, and the
    building of the other graphs.
    """
    clock, stats = Clock(), Stats()
    drafter = TimedDrafter(arm.drafter, clock)
    sampler = None
    if arm.temperature > 0:
        sampler = make_sampler(arm.temperature, top_p=settings.top_p, top_k=settings.top_k)
    decoder = Decoder(
        model,
        drafter,
        generation_stream,
        stats,
        judge=TimedJudge(clock, sampler=sampler, seed=settings.seed),
        kv_quantization=KVQuantization(),
        verify_width=arm.verify_width,
    )
    drafter.cache = decoder.cache
    current = decoder.prefill(mx.array(prompt, mx.uint32), settings.prefill_step_size)
    clock.seconds = dict.fromkeys(PHASES, 0.0)
    left, start = settings.max_tokens, time.perf_counter()
    while left > 0:
        current.taken = len(current.tokens)
        left -= len(current.tokens)
        if left > 0:
            current = decoder.next_round(left)
    total = time.perf_counter() - start
    decoder.close()
    clock.seconds[HOST] = max(0.0, total - sum(clock.seconds.values()))
    return {name: seconds / max(1, stats.rounds) for name, seconds in clock.seconds.items()}
