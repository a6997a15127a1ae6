"""What oMLX's server log says about DFlash, the only proof that it runs."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Below this share of accepted drafts, drafting costs more than it gives.
LOW_ACCEPTANCE = 10.0

_ENABLED = re.compile(r"DFlash enabled for (?P<model>.+?), draft=(?P<draft>.+)")
_FAILED = re.compile(r"DFlash (?:start|init) failed for (?P<model>.+?): (?P<reason>.+)")
_MISSING = re.compile(r"DFlash enabled for (?P<model>.+?) but (?P<reason>.+)")
_FELL_BACK = re.compile(r"(?P<reason>Successfully loaded (?P<model>.+?) as .*fallback from DFlash)")
_LOADED = re.compile(r"DFlashEngine loaded[^:]*: target=(?P<path>.+?), draft=(?P<draft>.+?), ")
_VERIFY = re.compile(r"verify=(?P<mode>\w+)")
_LEFT = re.compile(r"(?P<reason>DFlash context fallback: .+)")
_ERROR = re.compile(r"(?P<reason>DFlash (?:streaming )?generation error: .+)")
_DONE = re.compile(
    r"DFlash generation complete: (?P<tokens>\d+) tokens, (?P<rate>[\d.]+) tok/s, "
    r"acceptance=(?P<acceptance>[\d.]+)%"
)


@dataclass(frozen=True)
class Verdict:
    """Whether DFlash ran for a model, in one line."""

    ran: bool
    text: str


@dataclass
class _Run:
    """What the log says since a model was last loaded."""

    draft: str = ""
    mode: str = ""
    loaded: bool = False
    reason: str = ""
    done: list[tuple[int, float, float]] = field(default_factory=list)


def read_log(lines: Iterable[str], model_id: str | None = None) -> Verdict:
    """Read a server log and say whether DFlash ran at the model's last load.

    Args:
        lines (iterable): The lines of ``logs/server.log``, oldest first.
        model_id (str, optional): The model. Default: the last one that DFlash was on for.
    Returns:
        Verdict: DFlash ran, with which acceptance; or it did not, and why.
    """
    runs: dict[str, _Run] = {}
    last = loaded = ""
    for model, event, match in _events(lines):
        last = model or last
        # Only lines about loading name a model; the others are about the one that is loaded.
        run = runs.setdefault(last if model or event == "loaded" else loaded, _Run())
        if event == "enabled":
            runs[last] = _Run(draft=match["draft"].strip())
        elif event == "loaded":
            loaded = last
            mode = _VERIFY.search(match.string)
            run.loaded, run.draft, run.mode = True, match["draft"], mode["mode"] if mode else ""
        elif event == "done":
            run.done.append(
                (int(match["tokens"]), float(match["rate"]), float(match["acceptance"]))
            )
        elif not run.reason:
            run.reason = match["reason"].strip()
    if list(runs) == [""]:  # the log begins after the model was loaded
        return _judge("a model that the log does not name", runs[""])
    wanted = model_id or last
    return _judge(wanted, runs.get(wanted))


def _events(lines: Iterable[str]) -> Iterator[tuple[str, str, re.Match[str]]]:
    """Model (empty where the line names none), kind and match of each line about DFlash."""
    for line in lines:
        if "DFlash" not in line:
            continue
        for kind, pattern in (
            ("enabled", _ENABLED),
            ("failed", _FAILED),
            ("failed", _MISSING),
            ("failed", _FELL_BACK),
            ("loaded", _LOADED),
            ("failed", _LEFT),
            ("failed", _ERROR),
            ("done", _DONE),
        ):
            if match := pattern.search(line):
                yield match.groupdict().get("model") or "", kind, match
                break


def _judge(model: str, run: _Run | None) -> Verdict:
    if run is None:
        name = f"DFlash enabled for {model}" if model else "DFlash enabled for"
        return Verdict(
            False,
            f"no line {name!r}: oMLX did not try DFlash (another model id, dflash_enabled off, no "
            "draft, or the model is not loaded yet)",
        )
    summary = _summary(run)
    if run.reason:
        before = f"{summary}, then " if run.done else ""
        return Verdict(False, f"{model}: {before}fell back to plain decoding: {run.reason}")
    if not run.loaded and not run.done:
        return Verdict(False, f"{model}: DFlash was tried, but no line 'DFlashEngine loaded'")
    if not run.done:
        return Verdict(
            False,
            f"{model}: DFlash is loaded (draft {run.draft}, verify {run.mode or 'not logged'}), "
            "but no generation is logged yet: send a streaming request",
        )
    if _acceptance(run) < LOW_ACCEPTANCE:
        return Verdict(
            False,
            f"{model}: {summary}: far too low; on M1 and M2 set dflash_draft_quant_activation_bits "
            "to 32, else check the drafter",
        )
    return Verdict(True, f"{model}: {summary}")


def _acceptance(run: _Run) -> float:
    tokens = sum(n for n, _, _ in run.done)
    weighted = sum(n * acceptance for n, _, acceptance in run.done)
    return weighted / tokens if tokens else 0.0


def _summary(run: _Run) -> str:
    tokens = sum(n for n, _, _ in run.done)
    rate = run.done[-1][1] if run.done else 0.0
    return (
        f"DFlash ran: {len(run.done)} generations, {tokens} tokens, acceptance "
        f"{_acceptance(run):.1f} %, last at {rate:.1f} tok/s"
    )


def what_to_look_for(model_id: str, drafter: str, log: Path | str = "logs/server.log") -> str:
    """Name the good and the bad lines of the server's log.

    Args:
        model_id (str): The target's id.
        drafter (str): The drafter's path or repo id.
        log (Path): The log.
    Returns:
        str: Lines for the user.
    """
    return "\n".join(
        (
            f"look for these lines in {log} after the first streaming request:",
            f"  good  DFlash enabled for {model_id}, draft={drafter}",
            "  good  DFlashEngine loaded: target=..., draft=..., ... verify=dflash",
            "  good  DFlash generation complete: ... acceptance=NN% (well above 0)",
            f"  bad   DFlash start failed for {model_id}: ...",
            f"  bad   DFlash init failed for {model_id}: ...",
            f"  bad   Successfully loaded {model_id} as ... (fallback from DFlash)",
            f"  bad   no 'DFlash enabled for {model_id}' at all: another id, or no draft",
            f"or let this command read it: mlx_dflash2.omlx check --log {log}",
        )
    )
