"""Predict what a pair brings before its weights are read: fit, memory, bytes a round, verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..decode.defaults import PREFILL_STEP_SIZE
from ..drafter.model import Drafter
from ..evaluation.machine import num_bytes
from ..pairs.find import find_pair
from ..pairs.known import known_target
from ..pairs.load import load_pair
from ..targets import Target, bind
from .chips import Chip
from .estimated_reads import (
    Reads,
    TargetBytes,
    context_bytes,
    drafter_reads,
    slowdown,
    target_bytes,
)
from .products import TYPICAL, Gpu

# Means over the five suites that were published with these drafters.
PUBLISHED_LENGTH = {"Qwen3.8-27B": 4.80, "Muse-Glimmer-30B": 5.70}


@dataclass(frozen=True, eq=False)
class Plan:
    """A pair whose weights need not be read.

    ``gpu`` is ``None`` on MLX's CPU backend; ``length`` the acceptance length at the full block,
    if known.
    """

    target: Target
    drafter: Drafter
    gpu: Gpu | None = TYPICAL
    length: float | None = None

    @cached_property
    def sizes(self) -> TargetBytes:
        """The target's bytes."""
        return target_bytes(self.target)

    def plain(self, context: int) -> Reads:
        """Return what a plain step reads after ``context`` tokens."""
        return Reads(self.sizes.weights(1), self.sizes.head, self.sizes.past(context))

    def round(self, width: int, context: int) -> Reads:
        """Return what a round of ``width`` rows reads after ``context`` tokens, all of it once."""
        return Reads(
            self.sizes.weights(width),
            self.sizes.head,
            self.sizes.past(context),
            drafter_reads(self.drafter),
            self.sizes.head,
            context_bytes(self.drafter, context),
        )

    def slowdowns(self, gpu: Gpu | None, own: bool = False) -> list[tuple[float, float, float]]:
        """Return what rounds of each width take for the target's weights, the drafter's, the head.

        In times of reading them once; ``own`` as for :func:`slowdown`.
        """
        target, block = self.target.model, self.drafter.block_size
        draft = slowdown(self.drafter, block, gpu, own), slowdown(target, block - 1, gpu, own)
        return [(slowdown(target, width, gpu, own), *draft) for width in range(1, block + 1)]

    @cached_property
    def _slowdowns(self) -> list[tuple[float, float, float]]:
        return self.slowdowns(self.gpu)

    def seconds(self, width: int, context: int, bandwidth: float) -> float:
        """Return the least time of a round, or of a plain step at width 1, at some GB/s."""
        if width == 1:
            return self.plain(context).total / bandwidth / 1e9
        reads, (verify, draft, head) = self.round(width, context), self._slowdowns[width - 1]
        reading = (
            (reads.target + reads.head) * verify
            + reads.drafter * draft
            + reads.draft_head * head
            + reads.cache
            + reads.context
        )
        return reading / bandwidth / 1e9

    def best_width(self, length: float, context: int, bandwidth: float) -> tuple[int, float]:
        """Return the verify width with the highest ceiling, and that in tokens a second."""
        rate = position_rate(length, self.drafter.block_size)
        ceilings = {
            width: length_at(rate, width) / self.seconds(width, context, bandwidth)
            for width in range(2, self.drafter.block_size + 1)
        }
        return max(ceilings.items(), key=lambda item: item[1])


def length_at(rate: float, width: int) -> float:
    """Return the acceptance length at a verify width if every draft is accepted at one rate."""
    return sum(rate**position for position in range(width))


def position_rate(length: float, block_size: int) -> float:
    """Return the rate at which a full block has this acceptance length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if length_at(middle, block_size) < length else (low, middle)
    return low


def read_plan(
    model: str | Path | None,
    draft_model: str | Path | None,
    draft_bits: int | None = None,
    length: float | None = None,
    chip: Chip | None = None,
    for_gpu: bool = False,
) -> Plan:
    """Load a pair lazily: configs and tensor headers are read, weights are not.

    Args:
        model, draft_model (str or Path, optional): As for :func:`find_pair`.
        draft_bits (int, optional): As for :func:`mlx_dflash2.load_drafter`.
        length (float, optional): Acceptance length. Default: the published one, if any.
        chip (Chip, optional): Of the machine, where it is known.
        for_gpu (bool): Load the drafter as on a GPU, whatever computes here. Default: ``False``.

    Raises:
        FileNotFoundError, ValueError: as loading the pair would, in one line.
    """
    # The configs alone tell most of what is wrong: weights, if not here yet, come after them.
    sources = find_pair(model, draft_model, draft_bits=draft_bits)
    block = sources.drafter.args.block_size
    if length is not None and not 1 <= length <= block:
        raise ValueError(
            f"The acceptance length is {length} but has to be from 1 to {block}, the drafter's "
            "block."
        )
    for_gpu = for_gpu or mx.default_device() == mx.gpu
    pair = load_pair(sources, lazy=True, for_gpu=for_gpu)
    if length is None:
        length = PUBLISHED_LENGTH.get(known_target(sources.drafter.name) or "")
    gpu = Gpu.of(chip) if for_gpu else None
    return Plan(bind(pair.model), pair.drafter, gpu, length)


def report(plan: Plan, context: int, bandwidth: float | None, memory: int) -> Iterator[str]:
    """Yield one line a fact, the verdict last.

    Args:
        plan (Plan): From :func:`read_plan`.
        context (int): Tokens before the round.
        bandwidth (float, optional): Of the memory, in GB/s.
        memory (int): Bytes that the machine recommends to use.
    """
    yield from _fit(plan)
    yield from _memory(plan, context, memory)
    plain, full = plan.plain(context), plan.round(plan.drafter.block_size, context)
    past = "keys, values and states" if plan.sizes.states else "keys and values"
    yield (
        f"bytes of a plain step after {context} tokens: {gigabytes(plain.total)} (weights "
        f"{gigabytes(plain.weights)}, {past} {gigabytes(plain.cache)})"
    )
    yield (
        f"bytes of a round of {plan.drafter.block_size} rows: {gigabytes(full.total)} (target "
        f"{gigabytes(full.target)}, its head {gigabytes(full.head)}, {past} "
        f"{gigabytes(full.cache)}, drafter {gigabytes(full.drafter)}, the head again "
        f"{gigabytes(full.draft_head)}, context {gigabytes(full.context)})"
    )
    if bandwidth is None:
        yield "memory bandwidth: not known for this chip; give --bandwidth"
    else:
        yield from _ceilings(plan, context, bandwidth)
    yield verdict(plan, context, bandwidth)


def _fit(plan: Plan) -> Iterator[str]:
    args = plan.drafter.args
    yield (
        f"fit: the drafter (DFlash {args.generation}) taps layers {args.target_layer_ids} of "
        f"{plan.target.shape.num_layers}, hidden size {args.hidden_size}, vocabulary "
        f"{args.vocab_size}: fits"
    )
    yield f"block: {args.block_size} rows with the anchor; window: {args.sliding_window or 'none'}"
    weights = dict(tree_flatten(plan.drafter.parameters()))
    dtypes = sorted({str(value.dtype).rpartition(".")[2] for value in weights.values()})
    packed = sum(name.endswith(".scales") for name in weights)
    yield f"drafter once loaded: {', '.join(dtypes)}; {packed} matrices quantized"


def _memory(plan: Plan, context: int, memory: int) -> Iterator[str]:
    sizes = plan.sizes
    target, drafter = num_bytes(plan.target.model), num_bytes(plan.drafter)
    layers = dict(tree_flatten([layer.parameters() for layer in plan.target.layers]))
    # The widest layer's activations of one chunk, about four of them alive at once.
    widest = max(value.shape[-2] for value in layers.values() if value.ndim > 1)
    chunk = 4 * min(PREFILL_STEP_SIZE, max(context, 1)) * widest * sizes.number
    kept = context_bytes(plan.drafter, context)
    total = target + drafter + sizes.past(context) + kept + chunk
    states = f" and recurrent states {gigabytes(sizes.states)}" if sizes.states else ""
    yield (
        f"memory: target {gigabytes(target)}, drafter {gigabytes(drafter)}, keys and values "
        f"{gigabytes(sizes.past(1000) - sizes.states)} per 1000 tokens{states}, drafter context "
        f"{gigabytes(kept)}, about {gigabytes(chunk)} more in prefill: {gigabytes(total)} after "
        f"{context} tokens"
    )
    if total > memory:
        yield f"! that is more than the {gigabytes(memory)} of this machine"


def _ceilings(plan: Plan, context: int, bandwidth: float) -> Iterator[str]:
    plain = 1 / plan.seconds(1, context, bandwidth)
    lengths = [plan.length] if plan.length else [2.0, 3.0, 4.0, 5.0, 6.0]
    yield f"ceiling at {bandwidth:g} GB/s, plain: {plain:.1f} tokens/s"
    for length in (n for n in lengths if n <= plan.drafter.block_size):
        width, ceiling = plan.best_width(length, context, bandwidth)
        yield (
            f"ceiling at acceptance length {length:.2f}: {ceiling:.1f} tokens/s "
            f"({ceiling / plain:.2f} times plain) at verify width {width}"
        )


def verdict(plan: Plan, context: int, bandwidth: float | None) -> str:
    """Say in one line whether drafting should pay, and with which verify width.

    The bandwidth scales drafting and plain decoding alike: the verdict does not depend on it.
    What rows cost, and so the chip, does decide.
    """
    bandwidth = bandwidth or 100.0
    plain, full = plan.seconds(1, context, bandwidth), plan.drafter.block_size
    if plan.length is None:
        lengths = (n / 100 for n in range(101, 100 * full + 1))
        for length in lengths:
            width, ceiling = plan.best_width(length, context, bandwidth)
            if ceiling * plain > 1:
                return (
                    f"verdict: pays from an acceptance length of {length:.2f} at the full block "
                    f"on, there with verify width {width}; none is known for this drafter "
                    "(--acceptance-length)"
                )
        return "verdict: drafting cannot pay, a round reads too much"
    width, ceiling = plan.best_width(min(plan.length, full), context, bandwidth)
    gain = ceiling * plain
    says = "should pay" if gain > 1 else "should not pay"
    return (
        f"verdict: {says}, at most {gain:.2f} times plain decoding with verify width {width}, at "
        f"an acceptance length of {plan.length:.2f} for the full block"
    )


def gigabytes(count: float) -> str:
    """Return a number of bytes in GB, or in MB if it is small."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
