"""Memory bandwidth of Apple's chips, from announcements and specifications."""

import re
from typing import NamedTuple

NEWSROOM = "https://www.apple.com/newsroom/"
_M1_PRO = "2021/10/introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built/"
_M1_ULTRA = "2022/03/apple-unveils-m1-ultra-the-worlds-most-powerful-chip-for-a-personal-computer/"
_M2 = "2022/06/apple-unveils-m2-with-breakthrough-performance-and-capabilities/"
_M2_PRO = "2023/01/apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows/"
_M2_ULTRA = "2023/06/apple-introduces-m2-ultra/"
_M4 = "2024/05/apple-introduces-m4-chip/"
_M4_PRO = "2024/10/apple-introduces-m4-pro-and-m4-max/"
_M5 = "2025/10/apple-unleashes-m5-the-next-big-leap-in-ai-performance-for-apple-silicon/"
_M5_PRO = "2026/03/apple-debuts-m5-pro-and-m5-max-to-supercharge-the-most-demanding-pro-workflows/"
_M6 = "2026/08/apple-introduces-m6-and-m5-ultra-for-a-big-leap-in-performance-and-ai-compute/"
SUPPORT = "https://support.apple.com/en-us/"


class Chip(NamedTuple):
    """A chip and its memory bandwidth in GB/s, lowest and highest of the versions on sale.

    Announcements mostly name the highest alone; then the source is a computer's specifications.
    Apple states none for M1: the figure is that of its memory, LPDDR4X-4266 on 128 bits.
    """

    name: str
    bandwidth: tuple[float, float]
    source: str


CHIPS = (
    Chip("M1", (68, 68), "LPDDR4X-4266, 128 bits"),
    Chip("M1 Pro", (200, 200), NEWSROOM + _M1_PRO),
    Chip("M1 Max", (400, 400), NEWSROOM + _M1_PRO),
    Chip("M1 Ultra", (800, 800), NEWSROOM + _M1_ULTRA),
    Chip("M2", (100, 100), NEWSROOM + _M2),
    Chip("M2 Pro", (200, 200), NEWSROOM + _M2_PRO),
    Chip("M2 Max", (400, 400), NEWSROOM + _M2_PRO),
    Chip("M2 Ultra", (800, 800), NEWSROOM + _M2_ULTRA),
    Chip("M3", (100, 100), SUPPORT + "117735"),
    Chip("M3 Pro", (150, 150), SUPPORT + "117736"),
    Chip("M3 Max", (300, 400), SUPPORT + "117736"),
    Chip("M3 Ultra", (819, 819), SUPPORT + "122211"),
    Chip("M4", (120, 120), NEWSROOM + _M4),
    Chip("M4 Pro", (273, 273), NEWSROOM + _M4_PRO),
    Chip("M4 Max", (410, 546), SUPPORT + "121553"),
    Chip("M5", (153, 153), NEWSROOM + _M5),
    Chip("M5 Pro", (307, 307), NEWSROOM + _M5_PRO),
    Chip("M5 Max", (460, 614), SUPPORT + "128107"),
    Chip("M5 Ultra", (1200, 1200), NEWSROOM + _M6),
    Chip("M6", (153, 170), SUPPORT + "128108"),
)


def find_chip(name: str) -> Chip | None:
    """Find the chip that a name such as ``Apple M4 Max`` stands for."""
    found = re.search(r"\bM\d+( (Pro|Max|Ultra))?\b", name, re.IGNORECASE)
    wanted = found.group(0).lower() if found else ""
    return next((chip for chip in CHIPS if chip.name.lower() == wanted), None)
