"""What Apple's chips read and compute in a second, from announcements and specifications."""

import json
import re
from pathlib import Path
from typing import NamedTuple

CHIPS = Path(__file__).with_name("chips.json")
# Lanes of a GPU core.
LANES = 128


class Chip(NamedTuple):
    """A chip: memory bandwidth in GB/s, lowest and highest of the versions on sale.

    The GPU's cores are those of the largest version; its clock is as users have measured it.

    Announcements mostly name the highest alone; then the source is a computer's specifications.
    Apple states none for M1: the figure is that of its memory, LPDDR4X-4266 on 128 bits.
    """

    name: str
    bandwidth: tuple[float, float]
    source: str
    cores: int | None = None
    ghz: float | None = None

    @property
    def generation(self) -> int:
        """Return the number in the name."""
        return int(self.name.split()[0][1:])

    @property
    def lane_cycles_a_byte(self) -> float | None:
        """Return the cycles of all lanes of the GPU in the time of reading a byte."""
        if self.cores is None or self.ghz is None:
            return None
        return self.cores * LANES * self.ghz / self.bandwidth[1]


def read_chips() -> list[Chip]:
    """Read the known chips."""
    found = json.loads(CHIPS.read_text(encoding="utf-8"))
    return [Chip(**chip | {"bandwidth": tuple(chip["bandwidth"])}) for chip in found]


def find_chip(name: str) -> Chip | None:
    """Find the chip that a name such as ``Apple M4 Max`` stands for."""
    found = re.search(r"\bM\d+( (Pro|Max|Ultra))?\b", name, re.IGNORECASE)
    wanted = found.group(0).lower() if found else ""
    return next((chip for chip in read_chips() if chip.name.lower() == wanted), None)
