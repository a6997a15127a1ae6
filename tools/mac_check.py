"""Checks, races and times this package on a Mac, and writes all of it to one JSON file.

    tools/mac_check.sh [MODEL] [FILE]

Nothing here stops at a failure: what fails is what the file is for.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_dflash2.evaluation.machine import environment

WIDTHS = range(3, 9)
PROMPT = "Write a Python function that parses a CSV file, and explain every line of it."
MAX_TOKENS = 160
# Lines of output that a step keeps, from its end.
KEPT_LINES = 400


class Step(NamedTuple):
    """A command, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    limit: float


def steps(model: str | None) -> Iterator[Step]:
    """What is run, in this order; ``model`` is the target, ``None`` for the embedded pair."""
    python, chosen = sys.executable, ["--model", model] if model else []
    doctor = [python, "-m", "mlx_dflash2.doctor"]
    yield Step("machine", doctor, 60)
    yield Step("kernels", [*doctor, "--kernels"], 240)
    yield Step("race", [*doctor, "--race", *chosen], 180)
    if model:
        yield Step("predicted", [*doctor, "--chips", *chosen], 120)
    tests = [python, "-m", "pytest", "-q", "-m", "metal", "-n", "0", "tests/metal_on_cpu"]
    yield Step("kernels as tests", tests, 240)
    folders = ("tests/kernels", "tests/decode", "tests/drafter", "tests/targets")
    yield Step("tests", [python, "-m", "pytest", "-q", "-n", "auto", *folders], 300)
    generate = [python, "-m", "mlx_dflash2.generate", *chosen, "-p", PROMPT, "-m", str(MAX_TOKENS)]
    plain = [python, "-m", "mlx_lm.generate", *chosen, "-p", PROMPT, "-m", str(MAX_TOKENS)]
    if model:
        yield Step("plain", plain, 120)
    yield Step("adaptive", generate, 120)
    # Its last table audits every answer against plain mlx-lm's.
    audit = ["--limit", "1", "--max-tokens", "48", "--verify-widths", "4", "8"]
    yield Step("benchmark", [python, "-m", "mlx_dflash2.benchmark", *chosen, *audit], 300)
    for width in WIDTHS:
        for extra in ([], ["--no-kernels"]):
            command = [*generate, "--verify-width", str(width), *extra]
            yield Step(" ".join(["width", str(width), *extra]), command, 120)


def run(step: Step) -> dict[str, Any]:
    """Run a step; what it printed, how it ended and how long it took."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            step.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=step.limit,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = None, (error.stdout or b"").decode(errors="replace")
    return {
        "name": step.name,
        "command": list(step.command[1:]),
        "status": status,
        "seconds": round(time.perf_counter() - start, 2),
        "output": output.splitlines()[-KEPT_LINES:],
    }


def check(all_steps: Iterator[Step], file: Path) -> None:
    """Run the steps, and write the file after each, so that an interruption loses little."""
    results: list[dict[str, Any]] = []
    for step in all_steps:
        print(f"{step.name}, at most {step.limit:.0f} s ...", flush=True)
        results.append(run(step))
        ended = "ran out of time" if results[-1]["status"] is None else results[-1]["status"]
        print(f"    status {ended}, {results[-1]['seconds']:.0f} s", flush=True)
        content = {"kind": "mlx_dflash2.mac_check", "environment": environment(), "steps": results}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {file}.")


def main() -> None:
    model, file, *_ = [*sys.argv[1:], None, None]
    check(steps(model), Path(file or "mac_check.json"))


if __name__ == "__main__":
    main()
