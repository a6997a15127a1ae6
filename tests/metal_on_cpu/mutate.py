"""Small errors put into a kernel on purpose, to see that the bench reports each of them."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Mutant(NamedTuple):
    """A changed text and what was changed, with its line."""

    label: str
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """Every barrier removed and weakened, every store shifted, every loop cut in half, every
    bound removed, every simdgroup operation left to some of the lanes."""
    for match in _statements(text, r"threadgroup_barrier\(mem_flags::mem_threadgroup\);"):
        for how, new in (
            ("removed", ""),
            ("without memory", "threadgroup_barrier(mem_flags::mem_none);"),
            ("for one simdgroup", "simdgroup_barrier(mem_flags::mem_threadgroup);"),
        ):
            yield _replace(text, match.start(), match.end(), new, f"barrier {how}")
    for match in _statements(text, r"(?m)^\s*\w+(?:\[[^\]]*\])*(\[([^\]]*)\])\s*[-+*]?=\s"):
        shifted = f"[({match[2]}) + 1]"
        yield _replace(text, match.start(1), match.end(1), shifted, "store shifted")
    for match in _statements(text, r"\bfor \([^;]*;[^;]*?<\s*(\w+(?:\([^()]*(?:\([^()]*\))?\))?)"):
        half = f"({match[1]}) / 2"
        yield _replace(text, match.start(1), match.end(1), half, "loop halved")
    for match in _statements(text, r"\bmin(?=\()"):
        end = _close(text, match.end())
        argument = re.split(r",", text[match.end() + 1 : end - 1])[0]
        yield _replace(text, match.start(), end, f"({argument})", "bound removed")
    for match in _statements(text, r"\bif \((\w+ < (?:uint\()?[A-Z]\w*\)?)\)"):
        yield _replace(text, match.start(1), match.end(1), "true", "bound removed")
    for match in _statements(text, r"\bsimd_\w+(?=\()"):
        end = _close(text, match.end())
        call = text[match.start() : end]
        argument = re.split(r",", text[match.end() + 1 : end - 1])[0]
        condition = "lane < 16" if "uint lane" in text else f"({argument}) > 0"
        guarded = f"({condition} ? {call} : ({argument}))"
        yield _replace(text, match.start(), end, guarded, f"{match[0]} guarded")


def _statements(text: str, pattern: str) -> Iterator[re.Match]:
    """Matches outside comments."""
    for match in re.finditer(pattern, text):
        line = text[text.rfind("\n", 0, match.end()) + 1 : match.end()]
        if "//" not in line:
            yield match


def _close(text: str, opening: int) -> int:
    """Just behind the bracket that closes the one at ``opening``."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    raise ValueError("unbalanced brackets")


def _replace(text: str, start: int, end: int, new: str, label: str) -> Mutant:
    line = text.count("\n", 0, end) + 1
    return Mutant(f"{label} in line {line}", text[:start] + new + text[end:])
