"""The target's hidden states that a drafter is trained on: cached on disk or computed anew."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np

from ..cli.progress import Progress
from ..targets import Target
from .corpus import Corpus
from .records import read_record, refuse_difference, write_record

TEXTS_PER_FILE = 256
_RECORD = "taps.json"


class TextTaps(NamedTuple):
    """Of N texts, padded on the right: ``taps`` [N, S, T * H], ``final`` [N, S, H] or ``None``."""

    taps: mx.array
    final: mx.array | None


class TapSource(Protocol):
    """A source of the taps of a corpus' texts."""

    def read(self, texts: Sequence[int], length: int) -> TextTaps:
        """Return the taps of texts by number, padded to ``length`` rows."""


class ComputedTaps:
    """Taps that the target computes each time, with ``final`` also the head's input."""

    def __init__(self, target: Target, corpus: Corpus, layers: Sequence[int], final: bool) -> None:
        self.target, self.corpus, self.layers, self.final = target, corpus, list(layers), final

    def read(self, texts: Sequence[int], length: int) -> TextTaps:
        """See :class:`TapSource`."""
        tokens = mx.array(padded_tokens(self.corpus, texts, length))
        # Padding comes after the texts: none of their rows attends to it.
        out = self.target.forward(tokens, self.target.make_cache(), self.layers)
        return TextTaps(cast(mx.array, out.taps), out.hidden if self.final else None)


class CachedTaps:
    """Taps in memory-mapped bfloat16 files, one for every ``TEXTS_PER_FILE`` texts.

    Args:
        folder (str or Path): From :func:`write_taps`.
        corpus (Corpus): The texts.
        final (bool): Whether to return the head's input, too.
        known: Fields that the cache's record has to have, such as ``layers``.

    Raises:
        FileNotFoundError, ValueError: if a file is missing, or the taps are of something else.
    """

    def __init__(self, folder: str | Path, corpus: Corpus, final: bool, **known: Any) -> None:
        folder = Path(folder)
        record = folder / _RECORD
        if not record.is_file():
            raise FileNotFoundError(f"{folder} does not hold taps; run the taps stage first.")
        self.about = _read_about(record)
        wanted = {"texts": len(corpus), "rows": len(corpus.tokens), "digest": corpus.digest} | known
        refuse_difference(record, self.about, wanted, "run the taps stage in another folder")
        if final and not self.about["final"]:
            raise ValueError(f"{folder} was made without the input of the target's head.")
        self.corpus, self.final = corpus, final
        self.files = [
            np.memmap(file, np.uint16, "r", shape=(_rows(corpus, texts), self.about["width"]))
            for file, texts in _files(folder, corpus).items()
        ]

    def read(self, texts: Sequence[int], length: int) -> TextTaps:
        """See :class:`TapSource`."""
        width = self.about["width"]
        rows = np.zeros((len(texts), length, width), np.uint16)
        for row, text in zip(rows, texts, strict=True):
            number = text // TEXTS_PER_FILE
            start = _rows(self.corpus, range(number * TEXTS_PER_FILE, text))
            count = min(length, int(self.corpus.lengths[text]))
            row[:count] = self.files[number][start : start + count]
        split = [width - self.about["final"]]
        taps, final = mx.split(mx.array(rows).view(mx.bfloat16), split, axis=-1)
        return TextTaps(taps, final if self.final else None)


def write_taps(
    target: Target,
    corpus: Corpus,
    layers: Sequence[int],
    folder: str | Path,
    *,
    final: bool = True,
    model: str = "",
    dequantize: bool = False,
    batch_size: int = 8,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Write the files that :class:`CachedTaps` reads, except those that are there.

    Args:
        target, corpus: The target and the texts.
        layers (sequence of int): Layers to tap, increasing.
        folder (str or Path): Where the files go.
        final (bool): Whether to store the head's input; a folder that already stores it keeps
            storing it. Default: ``True``.
        model, dequantize: The target's name and whether it was dequantized, for the record.
        batch_size (int): Texts per pass. Default: ``8``.
        share (tuple of int): Rank and number of the processes that write together.

    Raises:
        ValueError: if the folder holds taps of another target, of other texts or layers.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hidden = target.shape.hidden_size
    found = _read_about(folder / _RECORD) if (folder / _RECORD).exists() else None
    final = final or bool(found and found["final"])
    about = {
        "model": model,
        "dequantize": dequantize,
        "layers": list(layers),
        "texts": len(corpus),
        "rows": len(corpus.tokens),
        "digest": corpus.digest,
        "final": hidden if final else 0,
        "width": hidden * (len(layers) + final),
    }
    if found is None:
        write_record(folder / _RECORD, about)
    else:
        refuse_difference(folder / _RECORD, found, about, "give another folder or remove that one")
    source = ComputedTaps(target, corpus, layers, final)
    # Shared by number, not by what is left: processes do not start at the same time.
    mine = list(_files(folder, corpus).items())[share[0] :: share[1]]
    todo = {file: texts for file, texts in mine if not file.exists()}
    total = sum(_rows(corpus, texts) for texts in todo.values())
    with Progress(total=total, desc="taps", unit="tok", disable=not todo) as bar:
        for file, texts in todo.items():
            _write_file(source, texts, file, batch_size, bar)


def _read_about(file: Path) -> dict[str, Any]:
    found = read_record(file)
    for name in ("texts", "rows", "digest", "dequantize", "layers", "final", "width"):
        if name not in found:
            raise ValueError(
                f"{file} has no `{name}`; remove {file.parent} and run the taps stage again."
            )
    return found


def _write_file(
    source: ComputedTaps, texts: range, file: Path, batch_size: int, bar: Progress
) -> None:
    corpus, partial = source.corpus, file.with_suffix(".partial")
    width = source.target.shape.hidden_size * (len(source.layers) + source.final)
    # Written batch by batch: a file's rows may not fit into memory.
    written = np.memmap(partial, np.uint16, "w+", shape=(_rows(corpus, texts), width))
    by_length = sorted(texts, key=lambda text: corpus.lengths[text])
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        found = source.read(batch, int(corpus.lengths[batch[-1]]))
        parts = [part for part in found if part is not None]
        joined = mx.concatenate(parts, axis=-1).astype(mx.bfloat16).view(mx.uint16)
        for text, row in zip(batch, np.array(joined), strict=True):
            first, length = _rows(corpus, range(texts[0], text)), int(corpus.lengths[text])
            written[first : first + length] = row[:length]
            bar.update(length)
    written.flush()
    partial.rename(file)


def _files(folder: Path, corpus: Corpus) -> dict[Path, range]:
    """Return the files of a cache with their texts, by number."""
    texts = range(len(corpus))
    parts = [texts[first : first + TEXTS_PER_FILE] for first in texts[::TEXTS_PER_FILE]]
    return {folder / f"taps-{number:05d}.bin": part for number, part in enumerate(parts)}


def _rows(corpus: Corpus, texts: range) -> int:
    """Count the tokens of consecutive texts."""
    return int(corpus.starts[texts.stop] - corpus.starts[texts.start])


def padded_tokens(corpus: Corpus, texts: Sequence[int], length: int) -> np.ndarray:
    """Return ids [N, length] of texts by number, cut or padded with 0."""
    tokens = np.zeros((len(texts), length), np.uint32)
    for row, text in zip(tokens, texts, strict=True):
        found = corpus[text].tokens[:length]
        row[: len(found)] = found
    return tokens
