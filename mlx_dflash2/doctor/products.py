"""What a product of a few rows with a matrix of weights takes on an Apple GPU.

One row takes as long as reading the weights. Every further row costs instructions, and from the
third generation of chips on MLX's own kernel is bound by them. The counts are fitted to what MLX's
users have published for M4 Pro, M3 Max and M5 Max.
"""

from typing import NamedTuple

from .chips import Chip

# Of the memory's bandwidth, what a product of one row reaches.
REACHED = 0.91
# How sharply the longer one of reading and computing decides.
SHARPNESS = 5
# What M5 issues beside its clock and its cores.
M5_ISSUE = 1.4
TYPICAL_INSTRUCTIONS_A_BYTE = 15.0
# Rows of MLX's kernel for many rows, and its instructions for each weight.
TILE_ROWS, TILE_INSTRUCTIONS = 32, 53.0


class Gpu(NamedTuple):
    """What decides how much rows cost.

    Attributes:
        instructions_a_byte (float): Lane instructions that it issues while it reads a byte.
        wide (bool): Whether MLX has a kernel of several rows for it: from M3 on.
    """

    instructions_a_byte: float = TYPICAL_INSTRUCTIONS_A_BYTE
    wide: bool = True

    @classmethod
    def of(cls, chip: Chip | None) -> "Gpu":
        """Return a chip's GPU, a typical one for a chip that is not known."""
        if chip is None:
            return cls()
        issued = chip.instructions_a_byte or TYPICAL_INSTRUCTIONS_A_BYTE
        return cls(issued * (M5_ISSUE if chip.generation >= 5 else 1), chip.generation >= 3)

    def slowdown(self, rows: int, bytes_a_weight: float) -> float:
        """Return the time of a product of ``rows`` rows in times of one row's."""
        if rows == 1:
            return 1.0
        if not self.wide and rows < 6:
            return float(rows)
        computing = self._instructions(rows) * REACHED
        ratio = computing / (bytes_a_weight * self.instructions_a_byte)
        return float((1 + ratio**SHARPNESS) ** (1 / SHARPNESS))

    def _instructions(self, rows: int) -> float:
        """Return the instructions a weight of MLX's kernel for so many rows."""
        tiles = -(-rows // 5)
        few = 2.9 * rows + 1.3 * tiles
        many = TILE_INSTRUCTIONS * -(-rows // TILE_ROWS)
        return min(few, many) if self.wide else many


# A GPU whose chip is not known.
TYPICAL = Gpu()
