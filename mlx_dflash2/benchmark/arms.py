"""The ways of decoding that a benchmark compares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..copies import MAX_DRAFTS, CopyProposer
from ..decode.defaults import PREFILL_STEP_SIZE
from ..decode.generate import stream_generate
from ..decode.sampling import make_sampler
from ..decode.stats import Stats
from ..drafter.model import Drafter, Proposer
from ..evaluation.machine import num_bytes
from .options import MAX_TOKENS

PLAIN = "plain"


@dataclass(frozen=True)
class BenchSettings:
    """Options that all arms share."""

    max_tokens: int = MAX_TOKENS
    top_p: float = 0.0
    top_k: int = 0
    prefill_step_size: int = PREFILL_STEP_SIZE
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Arm:
    """One way of decoding the target.

    Attributes:
        name (str): Unique among the arms, without the temperature.
        temperature (float): 0 decodes greedily.
        drafter (Drafter, optional): For DFlash.
        draft_lm (nn.Module, optional): A small language model for mlx-lm's own speculation.
        num_draft_tokens (int): Its drafts per round.
        verify_width (int, optional): Rows that the target verifies. Default: adapted each round.
        copies (bool): Also draft copies of the text; without a drafter nothing else.
    """

    name: str
    temperature: float = 0.0
    drafter: Drafter | None = None
    draft_lm: nn.Module | None = None
    num_draft_tokens: int = 3
    verify_width: int | None = None
    copies: bool = False

    @property
    def label(self) -> str:
        """The name with the temperature, unless that is 0."""
        return self.name if self.temperature == 0 else f"{self.name}, T={self.temperature:g}"

    @property
    def is_plain(self) -> bool:
        return self.proposer is None and self.draft_lm is None

    @property
    def proposer(self) -> Proposer | None:
        """The drafter, or copies with it or without one; ``None`` for mlx-lm's own ways."""
        return CopyProposer(self.drafter) if self.copies else self.drafter

    @property
    def rows(self) -> int:
        """The most rows of a verify pass; 1 for plain decoding."""
        if self.draft_lm is not None:
            return self.num_draft_tokens + 1
        block = 1 if self.drafter is None else self.drafter.block_size
        return self.verify_width or max(block, MAX_DRAFTS + 1 if self.copies else 1)

    @property
    def draft_bytes(self) -> int:
        """Bytes of the weights that this arm needs besides the target's."""
        model = self.drafter if self.drafter is not None else self.draft_lm
        return 0 if model is None else num_bytes(model)

    def stream(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        prompt: list[int],
        settings: BenchSettings,
        stats: Stats,
    ) -> Iterator[GenerationResponse]:
        """Decode one prompt; drafts of this package fill in ``stats``."""
        names = "max_tokens", "prefill_step_size"
        options: dict[str, Any] = {name: getattr(settings, name) for name in names}
        if self.temperature > 0:
            mx.random.seed(settings.seed)
            sampler = make_sampler(self.temperature, top_p=settings.top_p, top_k=settings.top_k)
            options["sampler"] = sampler
        if (proposer := self.proposer) is not None:
            options |= {"draft_model": proposer, "verify_width": self.verify_width}
            return stream_generate(model, tokenizer, prompt, stats=stats, **options)
        if self.draft_lm is not None:
            options |= {"draft_model": self.draft_lm, "num_draft_tokens": self.num_draft_tokens}
        return mlx_lm.stream_generate(model, tokenizer, prompt, **options)


def make_arms(
    drafters: dict[str, Drafter],
    temperatures: list[float],
    verify_widths: list[int | None],
    draft_lm: nn.Module | None = None,
    num_draft_tokens: int = 3,
    copies: Sequence[str] = ("off",),
) -> list[Arm]:
    """Make the arms to compare, plain decoding first at each temperature.

    Args:
        drafters (dict): By the name of their arm.
        temperatures, draft_lm, num_draft_tokens: As of :class:`Arm`.
        verify_widths (list): ``None`` adapts it; widths above a drafter's block are left out.
        copies (sequence of str): ``off`` for the drafters, ``with`` for each of them and copies,
            ``only`` for copies alone.

    Raises:
        ValueError: if a width is larger than every drafter's block.
    """
    most = max(drafter.block_size for drafter in drafters.values())
    for width in verify_widths:
        if width is not None and not 2 <= width <= most:
            raise ValueError(f"A verify width is {width} but has to be from 2 to {most}.")
    arms = []
    for temperature in temperatures:
        arms.append(Arm(PLAIN, temperature))
        if draft_lm is not None:
            arms.append(Arm("mlx-lm draft model", temperature, None, draft_lm, num_draft_tokens))
        if "only" in copies:
            arms.append(Arm("copies", temperature, copies=True))
        for name, drafter in drafters.items():
            # Without its selector, a drafter drafts the same tokens at every temperature.
            if temperature != temperatures[0] and lacks_selector(drafter):
                continue
            for width in verify_widths:
                if width is not None and width > drafter.block_size:
                    continue
                suffix = "" if width is None else f" width {width}"
                if "off" in copies:
                    arms.append(Arm(name + suffix, temperature, drafter, verify_width=width))
                if "with" in copies:
                    both = f"{name} and copies{suffix}"
                    arms.append(Arm(both, temperature, drafter, verify_width=width, copies=True))
    return arms


def lacks_selector(drafter: Drafter) -> bool:
    """Tell whether the selector of a DFlash 2 drafter was left out."""
    return drafter.args.generation == 2 and not drafter.args.has_selector
