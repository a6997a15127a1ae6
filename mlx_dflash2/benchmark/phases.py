"""Time the phases of a round, in a separate pass that waits for each of them.

Waiting removes overlap on the device, so phases show shares only. The time of a round comes from
the ordinary runs.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..decode.clock import Clock
from ..decode.judge import Judge
from ..decode.kv_quantization import KVQuantization
from ..decode.loop import Loop
from ..decode.sampling import make_sampler
from ..decode.stats import Stats
from ..drafter.model import Proposer
from .arms import Arm, BenchSettings


def time_phases(
    model: nn.Module, arm: Arm, proposer: Proposer, prompt: Sequence[int], settings: BenchSettings
) -> dict[str, float]:
    """Measure one answer of an arm that drafts.

    Returns:
        dict: Seconds a round for each of :data:`mlx_dflash2.decode.clock.PHASES`. Each includes
        the building of its graph; host is what passes between rounds.
    """
    with wired_limit(model):
        return _time_phases(model, arm, proposer, prompt, settings)


def _time_phases(
    model: nn.Module, arm: Arm, proposer: Proposer, prompt: Sequence[int], settings: BenchSettings
) -> dict[str, float]:
    clock, stats = Clock(), Stats()
    sampler = None
    if arm.temperature > 0:
        sampler = make_sampler(arm.temperature, top_p=settings.top_p, top_k=settings.top_k)
    loop = Loop(
        model,
        proposer,
        generation_stream,
        stats,
        kv_quantization=KVQuantization(),
        verify_width=arm.verify_width,
        adaptive=False,
        clock=clock,
    )
    sequence = loop.open(Judge(sampler, seed=settings.seed))
    decision = loop.prefill(sequence, mx.array(list(prompt), mx.uint32), settings.prefill_step_size)
    clock.reset()
    left = settings.max_tokens
    while left > 0:
        decision.taken = len(decision.tokens)
        left -= len(decision.tokens)
        if left > 0:
            decision = loop.next_round([sequence], sequence.caches, [left])[0]
    loop.close(sequence)
    return {name: seconds / max(1, stats.rounds) for name, seconds in clock.seconds.items()}
