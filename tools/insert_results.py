"""Insert the tracked results into README and docs, between their markers.

    python tools/insert_results.py [--check]

A table stands between ``<!-- results: NAME -->`` and ``<!-- end of results -->``. With ``--check``
nothing is written, and the exit status says whether all of them are up to date.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_dflash2.benchmark.file import read
from mlx_dflash2.benchmark.report import report, with_interval
from mlx_dflash2.benchmark.tables import Table, markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "results"
PAGES = ("README.md", "docs/benchmarks.md")
_BLOCK = re.compile(r"<!-- results: (\w+) -->\n(.*?)<!-- end of results -->", re.DOTALL)


def numbers() -> str:
    """Show the embedded pair's figures in one table, with the command and the machine."""
    pair, copies = read(RESULTS / "embedded_pair.json"), read(RESULTS / "copies.json")
    rows = [
        *_rows(pair, f"five suites, {pair['prompts']['count']} prompts"),
        *_rows(copies, f"editing and reading, {copies['prompts']['count']} prompts"),
    ]
    header = ["prompts", "drafts", "tokens a round", "decode speed-up (95 % interval)"]
    where = pair["environment"]
    text = (
        f"`make results` on {where['chip']}, {where['cores']} cores, {where['os']}, MLX "
        f"{where['versions']['mlx']} on the {where['device']} with OpenBLAS, the embedded pair in "
        "float32. It says nothing about a GPU."
    )
    return markdown([Table(header, rows), text])


def _rows(results: dict[str, Any], prompts: str) -> list[list[str]]:
    return [
        [prompts, label, with_interval(arm, "acceptance_pooled"), with_interval(arm, "speedup")]
        for label, arm in results["overall"].items()
        if arm["acceptance_pooled"] is not None
    ]


def whole(name: str) -> Callable[[], str]:
    """Show the whole report of a file."""
    return lambda: markdown(report(read(RESULTS / f"{name}.json")))


BLOCKS: dict[str, Callable[[], str]] = {
    "numbers": numbers,
    "embedded_pair": whole("embedded_pair"),
    "copies": whole("copies"),
}


def insert(text: str) -> str:
    """Return a page with its tables renewed.

    Raises:
        KeyError: for a marker of another name.
    """

    def renew(found: re.Match[str]) -> str:
        return f"<!-- results: {found[1]} -->\n{BLOCKS[found[1]]()}<!-- end of results -->"

    return _BLOCK.sub(renew, text)


def main(argv: list[str]) -> None:
    """Renew all pages, or check them."""
    stale = []
    for name in PAGES:
        page = ROOT / name
        old = page.read_text(encoding="utf-8")
        if (new := insert(old)) != old:
            stale.append(name)
            if argv != ["--check"]:
                page.write_text(new, encoding="utf-8")
    if stale and argv == ["--check"]:
        sys.exit(f"error: the results in {', '.join(stale)} are not those of examples/results")


if __name__ == "__main__":
    main(sys.argv[1:])
