"""What a product of a few rows with a matrix of weights takes on an Apple GPU.

One row takes as long as reading the weights. Every further row costs instructions, and from the
third generation of chips on MLX's own kernel is bound by them. The instructions are counted on the
bench (`make kernels`). What a chip issues of them is fitted to the times that MLX's users have
published for M4 Pro, M3 Max and M5 Max.
"""

from typing import NamedTuple

from .chips import Chip

# Of the memory's bandwidth, what a product of one row reaches.
REACHED = 0.91
# How sharply the longer one of reading and computing decides.
SHARPNESS = 5
# Instructions that a lane issues in a cycle, up to M4 and from M5 on.
ISSUED, ISSUED_M5 = 1.25, 1.75
TYPICAL_INSTRUCTIONS_A_BYTE = 18.5
# Rows of MLX's kernel for many rows, and its instructions for each weight.
TILE_ROWS, TILE_INSTRUCTIONS = 32, 66.0


def stock_instructions(rows: int) -> float:
    """Return the instructions a weight of MLX's kernel for a few rows, in tiles of five."""
    return 3.13 * rows + 3.68 * -(-rows // 5)


def own_instructions(rows: int) -> float:
    """Return those of this package's kernel, for up to 8 rows."""
    return 1.394 * rows + 3.51


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
        issued = ISSUED if chip.generation < 5 else ISSUED_M5
        cycles = chip.lane_cycles_a_byte
        rate = TYPICAL_INSTRUCTIONS_A_BYTE if cycles is None else issued * cycles
        return cls(rate, chip.generation >= 3)

    def slowdown(self, rows: int, bytes_a_weight: float, own: bool = False) -> float:
        """Return the time of a product of ``rows`` rows in times of one row's.

        Args:
            rows (int): From 1.
            bytes_a_weight (float): Of the matrix, scales included.
            own (bool): With this package's kernel where it is the faster one.
        """
        stock = self._stock(rows, bytes_a_weight)
        if own and 2 <= rows <= 8:
            return min(stock, self._bound(own_instructions(rows), bytes_a_weight))
        return stock

    def _stock(self, rows: int, bytes_a_weight: float) -> float:
        if rows == 1:
            return 1.0
        if not self.wide and rows < 6:
            return float(rows)
        many = TILE_INSTRUCTIONS * -(-rows // TILE_ROWS)
        few = stock_instructions(rows) if self.wide else many
        return self._bound(min(few, many), bytes_a_weight)

    def _bound(self, instructions: float, bytes_a_weight: float) -> float:
        ratio = instructions * REACHED / (bytes_a_weight * self.instructions_a_byte)
        return float((1 + ratio**SHARPNESS) ** (1 / SHARPNESS))


# A GPU whose chip is not known.
TYPICAL = Gpu()
