"""Memory bandwidth of Apple's chips, from announcements and specifications."""

import json
import re
from pathlib import Path
from typing import NamedTuple

CHIPS = Path(__file__).with_name("chips.json")


class Chip(NamedTuple):
    """A chip and its memory bandwidth in GB/s, lowest and highest of the versions on sale.

    Announcements mostly name the highest alone; then the source is a computer's specifications.
    Apple states none for M1: the figure is that of its memory, LPDDR4X-4266 on 128 bits.
    """

    name: str
    bandwidth: tuple[float, float]
    source: str


def read_chips() -> list[Chip]:
    """Read the known chips."""
    found = json.loads(CHIPS.read_text(encoding="utf-8"))
    return [Chip(chip["name"], tuple(chip["bandwidth"]), chip["source"]) for chip in found]


def find_chip(name: str) -> Chip | None:
    """Find the chip that a name such as ``Apple M4 Max`` stands for."""
    found = re.search(r"\bM\d+( (Pro|Max|Ultra))?\b", name, re.IGNORECASE)
    wanted = found.group(0).lower() if found else ""
    return next((chip for chip in read_chips() if chip.name.lower() == wanted), None)
