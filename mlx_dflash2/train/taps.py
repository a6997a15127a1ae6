"""What the target shows a drafter of a text: cached on disk, or computed when it is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from ..targets import Target
from .corpus import Corpus
from .records import read_record, refuse_difference, write_record

TEXTS_PER_FILE = 256
BYTES = 2
_RECORD = "taps.json"


class Shown(NamedTuple):
    """Of N texts, padded on the right: ``taps`` [N, S, T * H], and ``final`` [N, S, H] or None."""

    taps: mx.array
    final: mx.array | None


class TapSource(Protocol):
    """Anything that gives the taps of a corpus' texts."""

    def read(self, texts: Sequence[int], length: int) -> Shown:
        """Of the texts by number, each padded to ``length`` rows."""


class ComputedTaps:
    """Taps that the target computes each time.

    Args:
        target (Target): The target.
        corpus (Corpus): The texts.
        layers (sequence of int): Layers to tap.
        final (bool): Whether to give the rows that the head reads, too.
    """

    def __init__(self, target: Target, corpus: Corpus, layers: Sequence[int], final: bool):
        self.target, self.corpus, self.layers, self.final = target, corpus, list(layers), final

    def read(self, texts: Sequence[int], length: int) -> Shown:
        """See :class:`TapSource`."""
        tokens = mx.array(padded_tokens(self.corpus, texts, length))
        # Padding is behind the texts, where no row of theirs sees it.
        shown = self.target.forward(tokens, self.target.make_cache(), self.layers)
        return Shown(shown.taps, shown.hidden if self.final else None)


class CachedTaps:
    """Taps in bfloat16 files, memory-mapped, a file for every so many texts in order.

    Args:
        folder (str or Path): From :func:`write_taps`.
        corpus (Corpus): The texts that they are of.
        final (bool): Whether to give the rows that the head reads, too.
        known: Fields of the cache's record that have to be so, such as ``layers``.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if they are of other texts or made otherwise, or lack the head's rows.
    """

    def __init__(self, folder: str | Path, corpus: Corpus, final: bool, **known: Any):
        folder = Path(folder)
        file = folder / _RECORD
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no taps; run the taps stage first.")
        self.about = _read_about(file)
        if self.about["texts"] != len(corpus) or self.about["rows"] != len(corpus.tokens):
            raise ValueError(
                f"{folder} holds the taps of {self.about['texts']} texts with "
                f"{self.about['rows']} tokens, the corpus {len(corpus)} with {len(corpus.tokens)}; "
                "run the taps stage again."
            )
        refuse_difference(
            file,
            self.about,
            {"digest": corpus.digest} | known,
            "run the taps stage in another folder",
        )
        if final and not self.about["final"]:
            raise ValueError(f"{folder} was made without what the target's head reads.")
        self.corpus, self.final = corpus, final
        width = self.about["width"]
        self.files = [
            np.memmap(file, np.uint16, "r", shape=(rows, width))
            for file, rows in zip(_files(folder, corpus), _rows_per_file(corpus), strict=True)
        ]

    def read(self, texts: Sequence[int], length: int) -> Shown:
        """See :class:`TapSource`."""
        width, taps = self.about["width"], self.about["width"] - self.about["final"]
        rows = np.zeros((len(texts), length, width), np.uint16)
        for row, text in zip(rows, texts, strict=True):
            file, start = self._place(text)
            count = min(length, int(self.corpus.lengths[text]))
            row[:count] = file[start : start + count]
        taps, final = mx.split(mx.array(rows).view(mx.bfloat16), [taps], axis=-1)
        return Shown(taps, final if self.final else None)

    def _place(self, text: int) -> tuple[np.ndarray, int]:
        first = text // TEXTS_PER_FILE * TEXTS_PER_FILE
        start = int(self.corpus.starts[text] - self.corpus.starts[first])
        return self.files[text // TEXTS_PER_FILE], start


def bytes_needed(corpus: Corpus, width: int) -> int:
    """Disk that the taps of a corpus take, for so many numbers a token."""
    return len(corpus.tokens) * width * BYTES


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
):
    """Write the files that :class:`CachedTaps` reads; those that are there are left alone.

    Args:
        target (Target): The target.
        corpus (Corpus): The texts.
        layers (sequence of int): Layers to tap, increasing.
        folder (str or Path): Where the files go.
        final (bool): Whether to keep what the target's head reads; a folder that was begun with
            it is gone on with it. Default: ``True``.
        model (str): The target's name, kept beside the files. Default: ``""``.
        dequantize (bool): Whether the target's weights were unpacked; kept, too.
            Default: ``False``.
        batch_size (int): Texts a pass. Default: ``8``.
        share (tuple of int): Which part of how many equal ones is this process' to write.

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
        advice = "give another folder or remove that one"
        refuse_difference(folder / _RECORD, found, about, advice)
    source = ComputedTaps(target, corpus, layers, final)
    # By number and not by what is left: processes do not start at the same time.
    mine = range(share[0], len(_files(folder, corpus)), share[1])
    todo = [i for i in mine if not _files(folder, corpus)[i].exists()]
    total = sum(int(_rows_per_file(corpus)[i]) for i in todo)
    with tqdm(total=total, desc="taps", unit="tok", disable=not todo) as bar:
        for number in todo:
            _write_file(source, number, _files(folder, corpus)[number], batch_size, bar)


def _read_about(file: Path) -> dict[str, Any]:
    found = read_record(file)
    for name in ("texts", "rows", "digest", "dequantize", "layers", "final", "width"):
        if name not in found:
            raise ValueError(
                f"{file} has no `{name}`; remove {file.parent} and run the taps stage again."
            )
    return found


def _write_file(source: ComputedTaps, number: int, file: Path, batch_size: int, bar: tqdm):
    corpus = source.corpus
    texts = range(number * TEXTS_PER_FILE, min(len(corpus), (number + 1) * TEXTS_PER_FILE))
    partial = file.with_suffix(".partial")
    rows = int(corpus.lengths[texts[0] : texts[-1] + 1].sum())
    width = source.target.shape.hidden_size * (len(source.layers) + source.final)
    # A batch at a time: a file's rows need not fit into memory.
    written = np.memmap(partial, np.uint16, "w+", shape=(rows, width))
    by_length = sorted(texts, key=lambda text: corpus.lengths[text])
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        shown = source.read(batch, int(corpus.lengths[batch[-1]]))
        parts = [part for part in shown if part is not None]
        joined = mx.concatenate(parts, axis=-1).astype(mx.bfloat16).view(mx.uint16)
        for text, row in zip(batch, np.array(joined), strict=True):
            first, length = corpus.starts[text] - corpus.starts[texts[0]], corpus.lengths[text]
            written[first : first + length] = row[:length]
            bar.update(int(length))
    written.flush()
    partial.rename(file)


def _files(folder: Path, corpus: Corpus) -> list[Path]:
    count = -(-len(corpus) // TEXTS_PER_FILE)
    return [folder / f"taps-{number:05d}.bin" for number in range(count)]


def _rows_per_file(corpus: Corpus) -> np.ndarray:
    edges = corpus.starts[::TEXTS_PER_FILE]
    return np.diff(np.append(edges, corpus.starts[-1]) if edges[-1] != corpus.starts[-1] else edges)


def padded_tokens(corpus: Corpus, texts: Sequence[int], length: int) -> np.ndarray:
    """Ids [N, length] of texts by number, cut or filled up with 0."""
    tokens = np.zeros((len(texts), length), np.uint32)
    for row, text in zip(tokens, texts, strict=True):
        found = corpus[text].tokens[:length]
        row[: len(found)] = found
    return tokens
