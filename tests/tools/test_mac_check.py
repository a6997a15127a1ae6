"""What the first owner of a Mac runs: every command is one, and no failure stops the others."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mac_check import WIDTHS, Step, check, main, steps

SCRIPT = Path(__file__).parents[2] / "tools" / "mac_check.sh"


@pytest.mark.parametrize("model", [None, "a/model"])
def test_every_command_is_one(model):
    found = {step.name: step for step in steps(model)}
    for width in WIDTHS:
        assert {f"width {width}", f"width {width} --no-kernels"} <= set(found)
    parsed = 0
    for step in found.values():
        package, arguments = step.command[2], list(step.command[3:])
        if package.startswith("mlx_dflash2."):
            command = importlib.import_module(f"{package}.options")
            args = command.setup_arg_parser().parse_args(arguments)
            assert args.model == (None if step.name in ("machine", "kernels") else model)
            parsed += 1
        elif package == "pytest":
            assert all(Path(a).is_dir() for a in arguments if a.startswith("tests/"))
    assert parsed > 2 * len(WIDTHS)
    assert sum(step.limit for step in found.values()) < 60 * 60


def test_no_failure_stops_the_others(tmp_path, capsys):
    python, file = sys.executable, tmp_path / "found.json"
    check(
        iter([
            Step("fails", [python, "-c", "print('why'); raise SystemExit(3)"], 20),
            Step("hangs", [python, "-uc", "print('so far'); import time; time.sleep(60)"], 2),
            Step("works", [python, "-c", "print('fine')"], 20),
        ]),
        file,
    )  # fmt: skip
    content = json.loads(file.read_text())
    assert content["kind"] == "mlx_dflash2.mac_check" and content["environment"]["versions"]
    fails, hangs, works = content["steps"]
    assert (fails["status"], fails["output"]) == (3, ["why"])
    assert (hangs["status"], hangs["output"]) == (None, ["so far"]) and hangs["seconds"] >= 2
    assert (works["status"], works["output"]) == (0, ["fine"])
    assert "ran out of time" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, model, file",
    [([], None, "mac_check.json"), (["m"], "m", "mac_check.json"), (["m", "f"], "m", "f")],
)
def test_arguments(arguments, model, file, monkeypatch):
    module, seen = sys.modules[main.__module__], []
    monkeypatch.setattr(module, "steps", lambda m: seen.append(m))
    monkeypatch.setattr(module, "check", lambda _, place: seen.append(str(place)))
    monkeypatch.setattr(sys, "argv", ["mac_check", *arguments])
    main()
    assert seen == [model, file]


def test_the_script_is_one():
    assert SCRIPT.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", SCRIPT], check=False).returncode == 0
