"""What cannot work is refused in one line before any weights are read."""

import io
import re
import sys

import mlx.core as mx
import pytest
from support.commands import main_of

COMMANDS = ("generate", "chat")
OPTIONS = {
    "--max-tokens 0": "--max-tokens is 0 but has to be non-zero",
    "--max-tokens -5": "--max-tokens is -5 but has to be",
    "--prefill-step-size 0": "--prefill-step-size is 0 but has to be 1 or more",
    "--temp -1": "--temp is -1.* but has to be",
    "--top-p 3": "--top-p is 3.* but has to be",
    "--xtc-threshold 0.9": "--xtc-threshold is 0.9 but has to be",
    "--kv-bits 7": "--kv-bits is 7 but has to be",
    "--kv-bits 4 --kv-group-size 48": "--kv-group-size is 48 but has to be",
    "--seed -1": "--seed is -1 but has to be",
    "--stop ": "--stop holds '' but has to hold",
    "--block-size 99": "--block-size is 99 .* 1 to 4",
    "--verify-width 0": "--verify-width is 0 .* from 1 to 16, as many as are copied",
}


@pytest.fixture
def refusal(monkeypatch, invoke):
    """Runs a command that may not read a tensor; its one line of error."""

    def unread(*args, **kwargs):
        raise AssertionError("weights were read")

    def refusal(command, *args):
        monkeypatch.setattr(mx, "load", unread)
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nq\n"))
        status, out, err = invoke(*args, main=main_of(command))
        assert status == 1 and out == ""
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and err.splitlines()[-1] == lines[0], err
        return lines[0]

    return refusal


def pair(folders):
    return ["--model", f"{folders / 'target'}", "--draft-model", f"{folders / 'drafter'}"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("command", COMMANDS)
def test_options_out_of_range(command, option, refusal, model_folders):
    line = refusal(command, *pair(model_folders), *option.split(" "))
    assert re.search(OPTIONS[option], line), line


@pytest.mark.parametrize("command", COMMANDS)
def test_models_that_are_none(command, refusal, model_folders, tmp_path):
    """With no drafter named, too, the line says what is wrong with the model."""
    drafter, missing = str(model_folders / "drafter"), str(tmp_path / "nowhere")
    assert "is a drafter; give it as the draft model" in refusal(command, "--model", drafter)
    assert f"'{missing}' is neither" in refusal(command, "--model", missing)
    assert "has no config.json" in refusal(command, "--model", str(tmp_path))
    target = str(model_folders / "target")
    assert "No drafter is known" in refusal(command, "--model", target)
    assert "not a DFlash drafter" in refusal(command, "--model", target, "--draft-model", target)
