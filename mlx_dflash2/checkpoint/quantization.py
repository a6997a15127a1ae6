"""Quantize a drafter for disk: which matrices, and with how many bits."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..drafter.model import Drafter
from .defaults import BITS, DEFAULT_BITS, GROUP_SIZE, GROUP_SIZES
from .tensors import QUANTIZED_AT_LOAD

CODEBOOKS = ("predecessor_codebook", "successor_codebook")


@dataclass(frozen=True)
class Quantization:
    """How to quantize a drafter.

    Attributes:
        bits (int): Bits of the large matrices.
        group_size (int): Numbers that share a scale.
        codebook_bits (int, optional): Bits of the selector's codebooks. Default: ``bits``.

    Raises:
        ValueError: naming the option of the convert command whose value is not allowed.
    """

    bits: int = DEFAULT_BITS
    group_size: int = GROUP_SIZE
    codebook_bits: int | None = None

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("q_bits", self.bits, BITS),
            ("q_codebook_bits", self.codebook_bits, (None, *BITS)),
            ("q_group_size", self.group_size, GROUP_SIZES),
        ):
            if value not in allowed:
                choices = ", ".join(str(choice) for choice in allowed if choice is not None)
                raise ValueError(f"`{option}` is {value} but has to be one of {choices}.")

    def apply(self, drafter: Drafter) -> list[str]:
        """Quantize the large matrices and the codebooks in place.

        Returns:
            list of str: Paths of those left out, as the group size does not divide their rows.

        Raises:
            ValueError: if that leaves nothing to quantize.
        """
        left: list[str] = []
        quantized: list[str] = []

        def scheme(path: str, module: nn.Module) -> bool | dict[str, Any]:
            name = path.rpartition(".")[2]
            if name not in QUANTIZED_AT_LOAD + CODEBOOKS:
                return False
            if module.weight.shape[-1] % self.group_size:
                left.append(path)
                return False
            quantized.append(path)
            bits = (name in CODEBOOKS and self.codebook_bits) or self.bits
            return {"bits": bits, "group_size": self.group_size}

        nn.quantize(drafter, class_predicate=scheme)
        if not quantized:
            raise ValueError(
                f"`q_group_size` is {self.group_size} but has to divide the rows of some matrix."
            )
        mx.eval(drafter.parameters())
        return left
