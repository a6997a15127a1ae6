"""Prompt caches on disk: what was read once survives a restart."""

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache
from mlx_lm.utils import common_prefix_len

from ..decode.cache_file import read_cache_file
from ..decode.session import DFlashPromptCache, target_fingerprint
from ..drafter.model import Proposer

SUFFIX = ".safetensors"
# Entries that may wait to be written; of more, the oldest are not kept.
MOST_WAITING = 4
# What reading or writing a file can raise; it is then left out, and nothing else is.
FILE_ERRORS = (LookupError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class Entry:
    """Caches to be written: what they cover, and whether they can be cut."""

    tokens: list[int]
    caches: list[Any]
    context: Any
    trims: bool

    def replaces(self, tokens: Sequence[int], trims: bool) -> bool:
        """Whether nothing is lost without another entry."""
        same = len(tokens) == len(self.tokens)
        return (same or (self.trims and trims)) and self.tokens[: len(tokens)] == list(tokens)


@dataclass(frozen=True, eq=False)
class Stored:
    """A file, whose name is the checksum of what it holds."""

    path: Path
    tokens: list[int]
    trims: bool
    nbytes: int

    def covers(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that it spares, where one has to be left."""
        shared = min(common_prefix_len(self.tokens, list(tokens)), len(tokens) - 1)
        return shared if self.trims or shared == len(self.tokens) else 0


class PromptFolder:
    """Prompt caches in files that mlx-lm can read, written on a thread of their own.

    A file is whole or not there at all; the one that was used longest ago goes first.

    Args:
        folder (str or Path): Where to keep them; each target has a folder of its own in it.
        max_bytes (int): The most that they may take.
        model (nn.Module): The target.
        draft_model (Proposer): The drafter, whose context is kept with the caches.

    Raises:
        ValueError: if another process uses the folder.
    """

    def __init__(self, folder: str | Path, max_bytes: int, model: nn.Module, draft_model: Proposer):
        self.max_bytes, self.model, self.draft_model = max_bytes, model, draft_model
        self.folder = Path(folder).expanduser() / target_fingerprint(model)[:32]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock_file.close()
            raise ValueError(f"Another server uses the prompt caches in {folder}.") from error
        self._staging = self.folder / "staging"
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir()
        self.files = self._read_folder()
        self._make_room()
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._writing = self._closed = False
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def write(self, tokens: list[int], caches: list[Any], context: Any) -> None:
        """Have an entry written, whose arrays nobody changes any more."""
        entry = Entry(tokens, caches, context, can_trim_prompt_cache(caches))
        with self._changed:
            kept = [w for w in self._waiting if not entry.replaces(w.tokens, w.trims)]
            self._waiting = [*kept, entry][-MOST_WAITING:]
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._writing)

    def close(self) -> None:
        """Write what waits, and let others use the folder."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._lock_file.close()

    def find(self, tokens: Sequence[int], more_than: int) -> DFlashPromptCache | None:
        """Read the file that spares most of a prompt, cut to what is shared.

        Args:
            tokens (sequence of int): The prompt.
            more_than (int): What it has to spare at least to be worth reading.
        """
        with self._changed:
            while True:
                best = max(self.files, key=lambda file: file.covers(tokens), default=None)
                if best is None or best.covers(tokens) <= more_than:
                    return None
                self.files.remove(best)
                try:
                    found = self._read(best)
                    found.reuse(tokens)
                except FILE_ERRORS as error:
                    self._discard(best.path, error)
                    continue
                self.files.append(best)
                os.utime(best.path)
                return found

    def _read(self, file: Stored) -> DFlashPromptCache:
        if checksum(file.path) != file.path.stem:
            raise ValueError("its checksum is another one")
        cache, _ = DFlashPromptCache.load(file.path, self.model, self.draft_model)
        return cache

    def _read_folder(self) -> list[Stored]:
        """The files that were left behind, the one used last at the end."""
        found = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            try:
                content = read_cache_file(path)
                trims = content.metadata["trims"] == "1"
                found.append(Stored(path, content.tokens, trims, path.stat().st_size))
            except FILE_ERRORS as error:
                self._discard(path, error)
        return found

    def _discard(self, path: Path, error: Exception) -> None:
        logging.warning("The prompt cache %s is broken and left out: %s", path.name, error)
        path.unlink(missing_ok=True)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                entry, self._writing = self._waiting.pop(0), True
            try:
                self._write(entry)
            except FILE_ERRORS as error:
                logging.warning("A prompt cache could not be written: %s", error)
            with self._changed:
                self._writing = False
                self._changed.notify_all()
        mx.clear_streams()

    def _write(self, entry: Entry) -> None:
        cache = DFlashPromptCache(self.model, self.draft_model)
        cache.caches[:] = entry.caches
        cache.tokens, cache.context = entry.tokens, entry.context
        staged = self._staging / f"entry{SUFFIX}"
        cache.save(staged, {"trims": str(int(entry.trims))})
        size = staged.stat().st_size
        if size > self.max_bytes:
            staged.unlink()
            return
        path = self.folder / f"{checksum(staged)}{SUFFIX}"
        with self._changed:
            os.replace(staged, path)
            for file in [f for f in self.files if entry.replaces(f.tokens, f.trims)]:
                self._remove(file, keep=path)
            self.files.append(Stored(path, entry.tokens, entry.trims, size))
            self._make_room()

    def _make_room(self) -> None:
        while self.nbytes > self.max_bytes:
            self._remove(self.files[0])

    def _remove(self, file: Stored, keep: Path | None = None) -> None:
        self.files.remove(file)
        if file.path != keep:
            file.path.unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """What a file is called by."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
