"""Prompts for a corpus: built in, or from a file."""

import json
import math
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ..evaluation.prompts import Chat, read_chats

GRAMMAR = Path(__file__).with_name("prompts.json")
SPLITS = ("train", "held_out")
# A slot's name, and a digit where a template wants several different values of one slot.
_FIELD = re.compile(r"\{([a-z]+)(\d?)\}")


class Grammar:
    """The templates of one split and the values of their slots.

    Args:
        split (str): ``train`` or ``held_out``; they share no template and no topic.
    """

    def __init__(self, split: str) -> None:
        content = json.loads(GRAMMAR.read_text(encoding="utf-8"))
        self.templates = {kind: both[split] for kind, both in content["templates"].items()}
        self.slots = {name: both[split] for name, both in content["slots"].items()}
        self.slots |= content["shared"]
        for name, (low, high) in content["ranges"].items():
            self.slots[name] = [str(number) for number in range(low, high + 1)]

    def size(self, template: str) -> int:
        """Count the different texts that a template can become."""
        size = 1
        for slot, fields in _fields(template).items():
            values = self.slots[slot]
            if len(fields) == 1:
                size *= sum(map(self.size, values))
            else:
                size *= math.perm(len(values), len(fields))
        return size

    def fill(self, template: str, rng: random.Random) -> str:
        """Return one of these texts. Values of slots may have slots themselves."""
        chosen: dict[str, str] = {}
        for slot, fields in _fields(template).items():
            values = rng.sample(self.slots[slot], len(fields))
            chosen |= {
                field: self.fill(value, rng) for field, value in zip(fields, values, strict=True)
            }
        return _FIELD.sub(lambda match: chosen[match[0]], template)

    def texts(self, kind: str, rng: random.Random) -> Iterator[str]:
        """Yield all texts of a kind once, in turns from its templates while they last."""
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
    """Return each slot's different fields, in order of appearance."""
    fields: dict[str, list[str]] = {}
    for match in _FIELD.finditer(template):
        found = fields.setdefault(match[1], [])
        if match[0] not in found:
            found.append(match[0])
    return fields


def built_in(split: str, seed: int, count: int) -> list[Chat]:
    """Return different prompts of all kinds in turn; a larger count adds to a smaller one.

    Raises:
        ValueError: for an unknown split, or a count that is below 1 or above what there is.
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


def _turns(streams: list[tuple[str, Iterator[str]]]) -> Iterator[Chat]:
    while True:
        for kind, texts in streams:
            yield _chat(kind, next(texts))


def _chat(kind: str, text: str) -> Chat:
    return Chat(kind, [{"role": "user", "content": text}])


def read(path: str | Path) -> list[Chat]:
    """Read the prompts of a file.

    Args:
        path (str or Path): A ``.txt`` file with a prompt on each line, or JSONL with ``prompt`` or
          ``messages`` on each line and perhaps a ``suite``. Without one it is the file's name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the line that is not a prompt, or if there is none.
    """
    # Made absolute: a file's name is not taken for a public suite's.
    path = Path(path).expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of prompts {path}.")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not any(lines):
        raise ValueError(f"{path} does not hold prompts.")
    if path.suffix == ".txt":
        return [_chat(path.stem, line) for line in lines if line]
    return read_chats([str(path)])
