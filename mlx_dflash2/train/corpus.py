"""Texts that the target wrote, as token ids on disk."""

import hashlib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

FIELDS = ("tokens", "lengths", "prompt_lengths")


class Text(NamedTuple):
    """A prompt with its answer: ids [S], the prompt's length, and its kind."""

    tokens: np.ndarray
    prompt_length: int
    kind: str = ""


class Corpus:
    """The texts of all ``*.npz`` shards of a folder, in order of the shards' names.

    A shard holds ``tokens`` (ids of all texts, joined), ``lengths`` and ``prompt_lengths`` (a
    number for each text), and may hold ``kinds`` (a string for each text).

    Args:
        path (str or Path): A folder of shards, or one shard.

    Raises:
        FileNotFoundError: if there is no shard.
        ValueError: naming the shard and what is wrong with it.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise FileNotFoundError(f"{path} does not hold a *.npz shard of texts.")
        parts = [_read_shard(file) for file in files]
        self.tokens, self.lengths, self.prompt_lengths, self.kinds = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Text]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Text:
        index = range(len(self))[index]
        start, length = self.starts[index], self.lengths[index]
        tokens = self.tokens[start : start + length]
        return Text(tokens, int(self.prompt_lengths[index]), str(self.kinds[index]))

    @property
    def digest(self) -> str:
        """A short hash of all texts and their prompts' lengths."""
        found = hashlib.sha256()
        for array in (self.tokens, self.lengths, self.prompt_lengths):
            found.update(array.tobytes())
        return found.hexdigest()[:16]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of all answers."""
        return int(self.lengths.sum() - self.prompt_lengths.sum())


def _read_shard(file: Path) -> tuple[np.ndarray, ...]:
    """Read tokens, lengths, prompt lengths and kinds of a shard."""
    try:
        with np.load(file) as shard:
            found = {name: shard[name] for name in shard.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is not a shard of texts: {error}.") from error
    for name in FIELDS:
        if name not in found:
            raise ValueError(f"{file} has no `{name}`.")
        if not np.issubdtype(found[name].dtype, np.integer) or found[name].ndim != 1:
            raise ValueError(f"`{name}` of {file} is not a list of integers.")
    tokens, lengths, prompt_lengths = (found[name].astype(np.int64) for name in FIELDS)
    if len(lengths) != len(prompt_lengths) or lengths.sum() != len(tokens):
        raise ValueError(f"The lengths of {file} do not add up to its {len(tokens)} tokens.")
    if (tokens < 0).any() or (prompt_lengths < 1).any() or (prompt_lengths > lengths).any():
        raise ValueError(f"{file} holds a negative id, or a prompt longer than its text.")
    kinds = found.get("kinds", np.full(len(lengths), ""))
    if len(kinds) != len(lengths):
        raise ValueError(f"`kinds` of {file} are {len(kinds)}, its texts {len(lengths)}.")
    return tokens.astype(np.uint32), lengths, prompt_lengths, kinds.astype(str)


def write_shard(file: str | Path, texts: Iterable[Text]) -> None:
    """Write texts as one shard, whole or not at all."""
    file, texts = Path(file), list(texts)
    partial = file.with_suffix(".partial")
    with open(partial, "wb") as stream:
        np.savez_compressed(
            stream,
            tokens=np.concatenate([np.asarray(text.tokens, np.uint32) for text in texts]),
            lengths=np.array([len(text.tokens) for text in texts]),
            prompt_lengths=np.array([text.prompt_length for text in texts]),
            kinds=np.array([text.kind for text in texts], dtype=str),
        )
    partial.rename(file)
