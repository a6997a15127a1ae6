"""What oMLX's log says about DFlash: whether drafts ran, answer by answer."""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Below this percentage of accepted drafts, drafting costs more than it gives.
LOW_ACCEPTANCE = 10.0
BREW_LOGS = (Path("/opt/homebrew/var/log/omlx.log"), Path("/usr/local/var/log/omlx.log"))
_ANSWER = r"(?:Chat completion|Completion|Anthropic message|Responses API): "
_EVENTS = {
    re.compile(pattern): kind
    for kind, pattern in (
        ("load", r"Loading model: (?P<model>\S+)"),
        ("failed", r"DFlash enabled for (?P<model>.+?) but (?P<reason>.+)"),
        ("load", r"DFlash enabled for (?P<model>.+?), draft=(?P<draft>.+)"),
        ("failed", r"DFlash[^:]* failed for (?P<model>.+?): (?P<reason>.+)"),
        ("failed", r"(?P<reason>Successfully loaded (?P<model>.+?) as .*fallback from DFlash)"),
        ("failed", r"(?P<reason>DFlash (?:context fallback|(?:\w+ )?generation error): .+)"),
        # oMLX 0.6 has an engine of its own for DFlash.
        ("ready", r"DFlashEngine loaded[^:]*: target=(?P<path>.+?), draft=(?P<draft>[^,]+)"),
        ("drafted", r"DFlash generation complete: (?P<tokens>\d+) .*acceptance=(?P<share>[\d.]+)%"),
        # oMLX 0.7 drafts inside its batched engine, which logs acceptance as for MTP.
        ("ready", r"DFlash drafter loaded: path=(?P<draft>.+?) kind="),
        ("ready", r"DFlash drafter attached to engine:? (?P<path>\S+)"),
        ("mtp", r"MTP\[\d+\] .*?tokens=(?P<tokens>\d+).*?accept=\S+ \((?P<share>[\d.]+)%\)"),
        ("answer", _ANSWER + r"(?:model=(?P<model>[^,]+), )?(?P<tokens>\d+) tokens in"),
    )
}


@dataclass
class LoggedModel:
    """What a log says about a model since it was last loaded.

    Each answer has a time, a number of tokens, and the percentage of accepted drafts if that is
    logged.
    """

    draft: str = ""
    ready: bool = False
    reason: str = ""
    answers: list[tuple[str, int, float | None]] = field(default_factory=list)

    @property
    def acceptance(self) -> float | None:
        """Percentage of drafts accepted, over all answers that log it."""
        drafted = [(tokens, share) for _, tokens, share in self.answers if share is not None]
        total = sum(tokens for tokens, _ in drafted)
        return sum(tokens * share for tokens, share in drafted) / total if total else None

    @property
    def ran(self) -> bool:
        """Whether drafts ran, and were worth it."""
        return not self.reason and (self.acceptance or 0) >= LOW_ACCEPTANCE

    @property
    def verdict(self) -> str:
        """The log in one line."""
        words = "no line about DFlash (off, no draft, another id, or not loaded yet)"
        if self.acceptance is not None:
            low = "" if self.acceptance >= LOW_ACCEPTANCE else ", far too low"
            words = f"DFlash ran: acceptance {self.acceptance:.1f} %{low}"
        elif self.ready:
            words = f"DFlash is loaded ({self.draft}): send a streaming request"
        elif self.draft:
            words = "DFlash was tried, but no line says that it was loaded"
        return f"fell back to plain decoding: {self.reason} ({words})" if self.reason else words

    def rows(self) -> list[str]:
        """Tell of each answer whether drafts ran."""
        missing = "drafts not logged" if self.ready and not self.reason else "no drafts"
        return [
            f"  {time}  {tokens} tokens: "
            + (missing if share is None else f"drafts ran, acceptance {share:.1f} %")
            for time, tokens, share in self.answers
        ]


def read_log(lines: Iterable[str], aliases: Mapping[str, str]) -> dict[str, LoggedModel]:
    """Read a log, oldest line first, and tell what it says of each model, the last one last.

    ``aliases`` maps other names that requests may use to the models' ids.
    """
    models: dict[str, LoggedModel] = {}
    # Acceptance is logged just before the answer that it belongs to.
    pending: list[tuple[str, int, float, str]] = []
    loading = serving = "an unnamed model"
    for kind, found, time in _events(lines):
        tokens, share = int(found.get("tokens") or 0), float(found.get("share") or 0)
        if kind in ("drafted", "mtp"):
            pending.append((time, tokens, share, kind))
            continue
        named = found.get("model") or _model_id(found.get("path") or "")
        name = aliases.get(named, named) or (serving if kind == "answer" and pending else loading)
        if kind == "load":
            models.pop(name, None)
        model = models[name] = models.pop(name) if name in models else LoggedModel()
        if kind == "answer":
            nearest = min(pending, key=lambda other: abs(other[1] - tokens), default=None)
            if nearest is not None:
                pending.remove(nearest)
            # The log of a model's own MTP has the same lines.
            drafted = nearest is not None and (nearest[3] == "drafted" or model.ready)
            model.answers.append((time, tokens, nearest[2] if nearest and drafted else None))
            continue
        model.draft = (found.get("draft") or model.draft).strip()
        model.reason = model.reason or (found.get("reason") or "").strip()
        loading = name
        if kind == "ready":
            model.ready, serving = True, name
    # Answers that the client did not wait for, or a log without their lines.
    for time, tokens, share, kind in pending:
        model = models.setdefault(serving, LoggedModel())
        model.answers += [(time, tokens, share)] if kind == "drafted" or model.ready else []
    return models


def _events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, str | None], str]]:
    for line in lines:
        matches = ((kind, pattern.search(line.rstrip())) for pattern, kind in _EVENTS.items())
        kind, match = next(((kind, match) for kind, match in matches if match), ("", None))
        if match is not None:
            yield kind, match.groupdict(), " ".join(line.split()[:2])


def _model_id(path: str) -> str:
    parts = path.rstrip("/").split("/")
    hub = next((part for part in parts if part.startswith("models--")), parts[-1])
    return hub.removeprefix("models--")


def find_log(base: Path) -> Path:
    """Find the log that oMLX writes itself, or the one that Homebrew keeps of its service."""
    own = base / "logs" / "server.log"
    return next((path for path in (own, *BREW_LOGS) if path.is_file()), own)


def log_lines(path: Path) -> Iterator[str]:
    """Read a log and what was rotated away from it, oldest line first."""
    older = [file for file in path.parent.glob(f"{path.name}.*") if file.is_file()]
    for file in (*sorted(older, key=lambda file: file.stat().st_mtime), path):
        opened = gzip.open if file.suffix == ".gz" else open
        try:
            with opened(file, "rt", encoding="utf-8", errors="replace") as stream:
                yield from stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"log {file}: found a damaged file ({error}); move it away") from None
