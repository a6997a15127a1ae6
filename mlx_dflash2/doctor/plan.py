"""What a pair should bring, before its weights are read: fit, memory, bytes a round, verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint.files import DRAFTER_FILES, read_headers, weight_files
from ..checkpoint.files import TensorHeader as Stored
from ..checkpoint.load import DrafterSource, device_dtype
from ..checkpoint.tensors import fit_to, main_dtype
from ..decode.defaults import PREFILL_STEP_SIZE
from ..drafter.args import DrafterArgs
from ..drafter.model import Drafter
from ..pairs.find import find_pair
from ..pairs.known import known_target
from ..targets.shape import TargetShape
from .reads import (
    FLOATING,
    Reads,
    cache_bytes,
    context_bytes,
    drafter_reads,
    drafter_tensors,
    num_bytes,
    num_reads,
    target_reads,
    text_config,
    text_tensors,
)

# Means over the five suites that were published with these drafters.
PUBLISHED_LENGTH = {"Qwen3.8-27B": 4.80, "Muse-Glimmer-30B": 5.70}
_NAMES = {mx.bfloat16: "BF16", mx.float32: "F32"}


@dataclass(frozen=True)
class Plan:
    """A pair seen from its configs and headers.

    Attributes:
        config (dict): The target's config.json.
        args (DrafterArgs): The drafter's.
        target, drafter (dict): Tensors as they are once loaded.
        size (int): Bytes of one number of the target's keys and values.
        device (str): ``gpu`` or ``cpu``.
        length (float, optional): Acceptance length at the full block, if one is known.
    """

    config: dict[str, Any]
    args: DrafterArgs
    target: dict[str, Stored]
    drafter: dict[str, Stored]
    size: int
    device: str = "gpu"
    length: float | None = None

    def plain(self, context: int) -> Reads:
        """What a plain step reads after ``context`` tokens."""
        target, head = target_reads(self.target, self.config, 1)
        return Reads(target, head, cache_bytes(self.config, context, self.size))

    def round(self, width: int, context: int, reads: int = 1, again: int = 1) -> Reads:
        """What a round reads.

        Args:
            width (int): Rows of the verify pass.
            context (int): Tokens before it.
            reads (int): How often the verify pass reads the target's weights.
            again (int): How often the draft reads the drafter's, and the head's.
        """
        target, head = target_reads(self.target, self.config, width)
        return Reads(
            target * reads,
            head * reads,
            cache_bytes(self.config, context, self.size),
            drafter_reads(self.drafter, self.args) * again,
            head * again,
            context_bytes(self.args, context, self.drafter_size),
        )

    @property
    def drafter_size(self) -> int:
        """Bytes of one number of the drafter's keys and values."""
        norm = self.drafter["hidden_norm.weight"]
        return 4 if norm.dtype == "F32" else 2

    def seconds(self, width: int, context: int, bandwidth: float) -> float:
        """The least time of a round, or of a plain step at width 1, at some GB/s."""
        if width == 1:
            return self.plain(context).total / bandwidth / 1e9
        reads = num_reads(self.target, width, self.device)
        again = num_reads(self.drafter, self.args.block_size, self.device)
        return self.round(width, context, reads, again).total / bandwidth / 1e9

    def best_width(self, length: float, context: int, bandwidth: float) -> tuple[int, float]:
        """The verify width with the highest ceiling, and that ceiling in tokens a second."""
        rate = position_rate(length, self.args.block_size)
        ceilings = {
            width: length_at(rate, width) / self.seconds(width, context, bandwidth)
            for width in range(2, self.args.block_size + 1)
        }
        return max(ceilings.items(), key=lambda item: item[1])


def length_at(rate: float, width: int) -> float:
    """Acceptance length at a verify width if every draft stays at one rate."""
    return sum(rate**position for position in range(width))


def position_rate(length: float, block_size: int) -> float:
    """The rate at which a full block has this acceptance length."""
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
) -> Plan:
    """Read the configs and headers of a pair.

    Args:
        model, draft_model (str or Path, optional): As for :func:`find_pair`.
        draft_bits (int, optional): As for :func:`mlx_dflash2.load_drafter`.
        length (float, optional): Acceptance length. Default: the published one, if any.

    Raises:
        FileNotFoundError, ValueError: as loading the pair would, in one line.
    """
    # The configs alone tell most of what is wrong: weights, if not here yet, come after them.
    sources = find_pair(model, draft_model, draft_bits=draft_bits)
    config, args = sources.target.config, sources.drafter.args
    # A plan needs fields that mlx-lm has defaults for.
    TargetShape.from_config(config)
    if length is not None and not 1 <= length <= args.block_size:
        raise ValueError(
            f"The acceptance length is {length} but has to be from 1 to {args.block_size}, the "
            "drafter's block."
        )
    stored = _drafter_headers(sources.drafter)
    device = "cpu" if mx.default_device() == mx.cpu else "gpu"
    dtype = device_dtype() or main_dtype(stored)
    drafter = drafter_tensors(stored, _NAMES[dtype], draft_bits)
    folder = sources.target.fetch(DRAFTER_FILES)
    target = text_tensors(read_headers(weight_files(folder, "model*.safetensors")))
    if length is None:
        length = PUBLISHED_LENGTH.get(known_target(sources.drafter.name) or "")
    return Plan(config, args, target, drafter, number_size(target), device, length)


def _drafter_headers(source: DrafterSource) -> dict[str, Stored]:
    """A drafter's tensors by their names in it, checked as loading checks them."""
    # Its random weights are never evaluated.
    drafter = Drafter(source.args)
    stored = drafter.sanitize(read_headers(weight_files(source.fetch(DRAFTER_FILES))))
    fit_to(drafter, stored)
    return stored


def number_size(target: dict[str, Stored]) -> int:
    """Bytes of one activation: of the dtype that the norms are stored in."""
    norms = [t for n, t in target.items() if n.endswith("norm.weight") and t.dtype in FLOATING]
    return 4 if norms and norms[0].dtype == "F32" else 2


def report(plan: Plan, context: int, bandwidth: float | None, memory: int) -> Iterator[str]:
    """One line a fact, the verdict last.

    Args:
        plan (Plan): From :func:`read_plan`.
        context (int): Tokens before the round.
        bandwidth (float, optional): GB/s.
        memory (int): Bytes that the machine recommends to use.
    """
    yield from _fit(plan)
    yield from _memory(plan, context, memory)
    plain = plan.plain(context)
    full = plan.round(plan.args.block_size, context)
    yield (
        f"bytes of a plain step after {context} tokens: {gigabytes(plain.total)} (weights "
        f"{gigabytes(plain.weights)}, keys and values {gigabytes(plain.cache)})"
    )
    yield (
        f"bytes of a round of {plan.args.block_size} rows: {gigabytes(full.total)} (target "
        f"{gigabytes(full.target)}, its head {gigabytes(full.head)}, keys and values "
        f"{gigabytes(full.cache)}, drafter {gigabytes(full.drafter)}, the head again "
        f"{gigabytes(full.draft_head)}, context {gigabytes(full.context)})"
    )
    if bandwidth is None:
        yield "memory bandwidth: not known for this chip; give --bandwidth"
    else:
        yield from _ceilings(plan, context, bandwidth)
    yield verdict(plan, context, bandwidth)


def _fit(plan: Plan) -> Iterator[str]:
    args = plan.args
    text = text_config(plan.config)
    yield (
        f"fit: the drafter (DFlash {args.generation}) taps layers {args.target_layer_ids} of "
        f"{text['num_hidden_layers']}, hidden size {args.hidden_size}, vocabulary "
        f"{args.vocab_size}: fits"
    )
    window = args.sliding_window or "none"
    yield f"block: {args.block_size} rows with the anchor; window: {window}"
    dtypes = sorted({stored.dtype for stored in plan.drafter.values()})
    packed = sum(name.endswith(".scales") for name in plan.drafter)
    yield f"drafter once loaded: {', '.join(dtypes)}; {packed} matrices quantised"


def _memory(plan: Plan, context: int, memory: int) -> Iterator[str]:
    target = sum(map(num_bytes, plan.target.values()))
    drafter = sum(map(num_bytes, plan.drafter.values()))
    text = text_config(plan.config)
    thousand = cache_bytes(plan.config, 1000, plan.size)
    # The widest layer's activations of one chunk, about four of them alive at once.
    widest = max(text.get("intermediate_size") or 0, text["hidden_size"])
    chunk = 4 * min(PREFILL_STEP_SIZE, max(context, 1)) * widest * plan.size
    past = cache_bytes(plan.config, context, plan.size)
    kept = context_bytes(plan.args, context, plan.drafter_size)
    total = target + drafter + past + kept + chunk
    yield (
        f"memory: target {gigabytes(target)}, drafter {gigabytes(drafter)}, keys and values "
        f"{gigabytes(thousand)} per 1000 tokens, drafter context {gigabytes(kept)}, about "
        f"{gigabytes(chunk)} more in prefill: {gigabytes(total)} after {context} tokens"
    )
    if total > memory:
        yield f"! that is more than the {gigabytes(memory)} of this machine"


def _ceilings(plan: Plan, context: int, bandwidth: float) -> Iterator[str]:
    plain = 1 / plan.seconds(1, context, bandwidth)
    lengths = [plan.length] if plan.length else [2.0, 3.0, 4.0, 5.0, 6.0]
    yield f"ceiling at {bandwidth:g} GB/s, plain: {plain:.1f} tokens/s"
    for length in (n for n in lengths if n <= plan.args.block_size):
        width, ceiling = plan.best_width(length, context, bandwidth)
        yield (
            f"ceiling at acceptance length {length:.2f}: {ceiling:.1f} tokens/s "
            f"({ceiling / plain:.2f} times plain) at verify width {width}"
        )


def verdict(plan: Plan, context: int, bandwidth: float | None) -> str:
    """One line: should it pay, and with which verify width.

    The bandwidth shifts both sides alike, so that the verdict does not need it.
    """
    bandwidth = bandwidth or 100.0
    plain = plan.seconds(1, context, bandwidth)
    full = plan.args.block_size
    if plan.length is None:
        needed = next(
            (n / 100 for n in range(101, 100 * full + 1)
             if plan.best_width(n / 100, context, bandwidth)[1] * plain > 1),
            None,
        )  # fmt: skip
        if needed is None:
            return "verdict: drafting cannot pay, a round reads too much"
        width, _ = plan.best_width(needed, context, bandwidth)
        return (
            f"verdict: pays from an acceptance length of {needed:.2f} at the full block on, "
            f"there with verify width {width}; none is known for this drafter "
            "(--acceptance-length)"
        )
    width, ceiling = plan.best_width(min(plan.length, full), context, bandwidth)
    gain = ceiling * plain
    says = "should pay" if gain > 1 else "should not pay"
    return (
        f"verdict: {says}, at most {gain:.2f} times plain decoding with verify width {width}, at "
        f"an acceptance length of {plan.length:.2f} for the full block"
    )


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
