"""Which matrices of a drafter are quantised on disk, and with how many bits."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..drafter.model import Drafter
from .tensors import QUANTISED_AT_LOAD

CODEBOOKS = ("predecessor_codebook", "successor_codebook")
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class Quantisation:
    """Bits of the large matrices and of the selector's codebooks, ``None`` for the same.

    Raises:
        ValueError: naming the flag whose value is not allowed.
    """

    bits: int = 4
    group_size: int = 64
    codebook_bits: int | None = None

    def __post_init__(self):
        for flag, value, allowed in (
            ("--q-bits", self.bits, BITS),
            ("--q-codebook-bits", self.codebook_bits, (None, *BITS)),
            ("--q-group-size", self.group_size, GROUP_SIZES),
        ):
            if value not in allowed:
                choices = ", ".join(str(choice) for choice in allowed if choice is not None)
                raise ValueError(f"{flag} is {value} but has to be one of {choices}.")

    def apply(self, drafter: Drafter) -> list[str]:
        """Quantise the large matrices and the codebooks in place.

        Returns:
            list of str: Paths of those that stay, as the group size does not divide their rows.

        Raises:
            ValueError: if that leaves nothing to quantise.
        """
        left, quantised = [], []

        def scheme(path: str, module: nn.Module) -> bool | dict[str, Any]:
            name = path.rpartition(".")[2]
            if name not in QUANTISED_AT_LOAD + CODEBOOKS:
                return False
            if module.weight.shape[-1] % self.group_size:
                left.append(path)
                return False
            quantised.append(path)
            bits = (name in CODEBOOKS and self.codebook_bits) or self.bits
            return {"bits": bits, "group_size": self.group_size}

        nn.quantize(drafter, class_predicate=scheme)
        if not quantised:
            raise ValueError(f"--q-group-size {self.group_size} divides the rows of no matrix.")
        mx.eval(drafter.parameters())
        return left
