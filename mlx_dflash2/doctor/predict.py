"""Predict the time of a round by part on each of Apple's chips, from counts and announcements."""

from collections.abc import Iterator

from .chips import Chip, read_chips
from .plan import Plan, length_at, position_rate
from .products import REACHED, Gpu

# Launches of a layer and of a pass beside them, counted on Qwen3.8-27B's graph.
RECURRENT_LAUNCHES, LAYER_LAUNCHES, PASS_LAUNCHES = 31, 24, 12
DRAFT_LAUNCHES = 150
# Microseconds that a launch takes beside what it reads, up to M4 and from M5 on.
LAUNCH_MICROSECONDS, LAUNCH_MICROSECONDS_M5 = 4.0, 2.0
# Microseconds a layer in which the GPU waits for the host between two rounds.
HOST_MICROSECONDS = 40.0

Parts = dict[str, float]


def predict(plan: Plan, width: int, context: int, chip: Chip, own: bool = False) -> Parts:
    """Return the milliseconds of the parts of a round, or of a plain step at width 1.

    Args:
        plan (Plan): The pair.
        width (int): Rows that the target verifies.
        context (int): Tokens before the round.
        chip (Chip): With known cores; the largest version of it.
        own (bool): With this package's kernel for products of few rows where that is faster.
    """
    gpu, speed = Gpu.of(chip), chip.bandwidth[1] * REACHED * 1e6
    reads = plan.plain(context) if width == 1 else plan.round(width, context)
    verify, draft, head = plan.slowdowns(gpu, own)[width - 1]
    launch = LAUNCH_MICROSECONDS if chip.generation < 5 else LAUNCH_MICROSECONDS_M5
    layers = range(len(plan.target.layers))
    launches = PASS_LAUNCHES + sum(
        RECURRENT_LAUNCHES if plan.target.is_recurrent(i) else LAYER_LAUNCHES for i in layers
    )
    parts = {
        "target": reads.target * verify / speed,
        "head": reads.head * verify / speed,
        "caches": (reads.cache + reads.context) / speed,
        "drafter": reads.drafter * draft / speed,
        "head again": reads.draft_head * head / speed,
        "launches": launch * (launches + (DRAFT_LAUNCHES if width > 1 else 0)) / 1e3,
        "host": HOST_MICROSECONDS * len(layers) / 1e3 if width > 1 else 0.0,
    }
    return {name: time for name, time in parts.items() if time > 0}


def best(plan: Plan, context: int, chip: Chip, own: bool) -> tuple[int, float]:
    """Return the width with the most tokens a second, and those; 1 is plain decoding."""
    block = plan.drafter.block_size
    rate = position_rate(min(plan.length or 1.0, block), block)
    speeds = {
        width: 1e3 * length_at(rate, width) / sum(predict(plan, width, context, chip, own).values())
        for width in range(1, block + 1)
    }
    return max(speeds.items(), key=lambda item: item[1])


def report(plan: Plan, context: int) -> Iterator[str]:
    """Yield a line for each chip whose GPU is known."""
    block = plan.drafter.block_size
    yield (
        f"predicted for {context} tokens before the round and a block of {block}, in ms; not "
        "measured:"
    )
    for chip in read_chips():
        if chip.lane_cycles_a_byte is None:
            continue
        plain = sum(predict(plan, 1, context, chip).values())
        line = f"{chip.name}: plain {plain:.0f}"
        for own, name in ((False, "MLX's own products"), (True, "this package's")):
            parts = predict(plan, block, context, chip, own)
            shares = ", ".join(f"{part} {time:.1f}" for part, time in parts.items())
            line += f"; with {name} {sum(parts.values()):.0f} ({shares})"
            if plan.length:
                width, speed = best(plan, context, chip, own)
                line += f", at best {speed:.1f} tokens/s at width {width}"
        yield line
