"""What README and docs show: commands that parse, results from files, links that lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import options_of

from tools import insert_results

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"```(?:bash|console)?\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"^(?:\$ )?mlx_dflash2[. ](\w+)(.*)$")


def commands():
    """Every command that a page shows in a block, or alone between backticks."""
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in _FENCE.findall(text) for line in joined(block)]
        lines += re.findall(r"`(mlx_dflash2[. ][^`\n]+ [^`\n]+)`", _FENCE.sub("", text))
        for line in lines:
            if found := _COMMAND.match(line):
                yield pytest.param(found[1], found[2], id=f"{page.name}: {line[:50]}")


def joined(block):
    return block.replace("\\\n", " ").split("\n")


@pytest.mark.parametrize("name, rest", list(commands()))
def test_commands_parse(name, rest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples" / "results").mkdir(parents=True)
    argv = shlex.split(rest, comments=True)
    if any(word in ("...", "…", "COMMAND") for word in argv):
        return
    for file in ("config.yaml", "prompts.jsonl"):
        (tmp_path / file).write_text("")
    if argv == ["--help"]:
        options_of(name).setup_arg_parser()
    else:
        options_of(name).parse(argv)


def test_there_are_many_commands():
    assert len(list(commands())) > 25


def test_results_are_those_of_the_files():
    command = [sys.executable, "-m", "tools.insert_results", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_readme_gets_to_the_first_token_early():
    lines = (ROOT / "README.md").read_text().split("\n")
    assert len(lines) <= 150
    assert next(i for i, line in enumerate(lines) if "Qwen3.8-27B-4bit --prompt" in line) < 60


def test_markers_of_results_have_names():
    with pytest.raises(KeyError):
        insert_results.insert("<!-- results: nothing -->\n<!-- end of results -->")
