"""Memory bandwidth of Apple's chips, from Apple's own announcements."""

import re
from typing import NamedTuple

_NEWS = "https://www.apple.com/newsroom/"


class Chip(NamedTuple):
    """``bandwidth`` in GB/s, of the smallest and the largest version sold under this name."""

    name: str
    bandwidth: tuple[float, float]
    source: str


CHIPS = (
    Chip("M1", (68, 68), "https://support.apple.com/111883"),
    Chip("M1 Pro", (200, 200), _NEWS + "2021/10/"),
    Chip("M1 Max", (400, 400), _NEWS + "2021/10/"),
    Chip("M1 Ultra", (800, 800), _NEWS + "2022/03/"),
    Chip("M2", (100, 100), _NEWS + "2022/06/"),
    Chip("M2 Pro", (200, 200), _NEWS + "2023/01/"),
    Chip("M2 Max", (400, 400), _NEWS + "2023/01/"),
    Chip("M2 Ultra", (800, 800), _NEWS + "2023/06/"),
    Chip("M3", (100, 100), _NEWS + "2023/10/"),
    Chip("M3 Pro", (150, 150), _NEWS + "2023/10/"),
    Chip("M3 Max", (300, 400), _NEWS + "2023/10/"),
    Chip("M3 Ultra", (819, 819), _NEWS + "2025/03/"),
    Chip("M4", (120, 120), _NEWS + "2024/05/"),
    Chip("M4 Pro", (273, 273), _NEWS + "2024/10/"),
    Chip("M4 Max", (410, 546), _NEWS + "2024/10/"),
    Chip("M5", (153, 153), _NEWS + "2025/10/"),
    Chip("M5 Pro", (307, 307), _NEWS + "2026/03/"),
    Chip("M5 Max", (460, 614), _NEWS + "2026/03/"),
)


def find_chip(name: str) -> Chip | None:
    """The chip that a name such as ``Apple M4 Max`` stands for."""
    found = re.search(r"\bM\d+( (Pro|Max|Ultra))?\b", name, re.IGNORECASE)
    wanted = found.group(0).lower() if found else ""
    return next((chip for chip in CHIPS if chip.name.lower() == wanted), None)
