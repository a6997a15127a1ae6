"""Prompts to write a corpus from: built in, or from a file."""

import json
import math
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..evaluation.prompts import read_rows

GRAMMAR = Path(__file__).with_name("prompts.json")
SPLITS = ("train", "held_out")
# A slot's name, and a digit where a template wants several different values of one slot.
_FIELD = re.compile(r"\{([a-z]+)(\d?)\}")


class PromptRow(NamedTuple):
    """A chat to be answered, and what kind of task it is."""

    kind: str
    messages: list[dict[str, str]]


class Grammar:
    """The templates of one split and the values of their slots.

    Args:
        split (str): ``train`` or ``held_out``; they share no template and no topic.
    """

    def __init__(self, split: str):
        content = json.loads(GRAMMAR.read_text(encoding="utf-8"))
        self.templates = {kind: both[split] for kind, both in content["templates"].items()}
        self.slots = {name: both[split] for name, both in content["slots"].items()}
        self.slots |= content["shared"]
        for name, (low, high) in content["ranges"].items():
            self.slots[name] = [str(number) for number in range(low, high + 1)]

    def size(self, template: str) -> int:
        """How many different texts a template can become."""
        size = 1
        for slot, fields in _fields(template).items():
            values = self.slots[slot]
            if len(fields) == 1:
                size *= sum(map(self.size, values))
            else:
                size *= math.perm(len(values), len(fields))
        return size

    def fill(self, template: str, rng: random.Random) -> str:
        """One of these texts. Values of slots may have slots themselves."""
        chosen = {}
        for slot, fields in _fields(template).items():
            values = rng.sample(self.slots[slot], len(fields))
            chosen |= {
                field: self.fill(value, rng) for field, value in zip(fields, values, strict=True)
            }
        return _FIELD.sub(lambda match: chosen[match[0]], template)

    def texts(self, kind: str, rng: random.Random) -> Iterator[str]:
        """All texts of a kind, each once, its templates taking turns while they last."""
        left = {template: self.size(template) for template in self.templates[kind]}
        seen = set()
        while left:
            for template in rng.sample(list(left), len(left)):
                text = self.fill(template, rng)
                if text not in seen:
                    seen.add(text)
                    left[template] -= 1
                    yield text
                if not left[template]:
                    del left[template]


def _fields(template: str) -> dict[str, list[str]]:
    """Per slot its different fields, in order of appearance."""
    fields: dict[str, list[str]] = {}
    for match in _FIELD.finditer(template):
        found = fields.setdefault(match[1], [])
        if match[0] not in found:
            found.append(match[0])
    return fields


def built_in(split: str, seed: int, count: int) -> list[PromptRow]:
    """Different prompts of all kinds in turn; a larger count only adds to a smaller one.

    Args:
        split (str): ``train`` or ``held_out``.
        seed (int): Other seeds give other prompts.
        count (int): How many.

    Raises:
        ValueError: for another split, or a count that is below 1 or beyond what there is.
    """
    if split not in SPLITS:
        raise ValueError(f"`split` is {split!r} but has to be one of {', '.join(SPLITS)}.")
    grammar = Grammar(split)
    kinds = list(grammar.templates)
    sizes = [sum(map(grammar.size, grammar.templates[kind])) for kind in kinds]
    most = min(size * len(kinds) + turn for turn, size in enumerate(sizes))
    if not 1 <= count <= most:
        raise ValueError(f"`count` is {count} but has to be from 1 to {most} for {split} prompts.")
    streams = [
        (kind, grammar.texts(kind, random.Random(f"{seed} {split} {kind}"))) for kind in kinds
    ]
    return list(islice(_turns(streams), count))


def _turns(streams: list[tuple[str, Iterator[str]]]) -> Iterator[PromptRow]:
    while True:
        for kind, texts in streams:
            yield _row(kind, next(texts))


def _row(kind: str, text: str) -> PromptRow:
    return PromptRow(kind, [{"role": "user", "content": text}])


def read(path: str | Path) -> list[PromptRow]:
    """Prompts of a file.

    Args:
        path (str or Path): A ``.txt`` file with a prompt a line, or JSONL with a ``prompt`` or
          ``messages`` a line and perhaps a ``suite``, which becomes the kind. Without one the
          kind is the file's name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the line that is no prompt, or if there is none.
    """
    # Made absolute, so that no file's name is taken for a public suite's.
    path = Path(path).expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of prompts {path}.")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not any(lines):
        raise ValueError(f"{path} holds no prompts.")
    if path.suffix == ".txt":
        return [_row(path.stem, line) for line in lines if line]
    return [PromptRow(row["suite"], row["messages"]) for row in read_rows([str(path)])]
