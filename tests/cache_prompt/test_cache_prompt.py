"""A cached prompt is gone on from as mlx-lm does, with the drafter's context beside it."""

import importlib

import pytest
from support.commands import main_of, options_of
from support.saved_models import save_drafter, save_target
from support.tiny import DENSE, HYBRID, SLIDING

from mlx_dflash2.decode.cache_file import read_cache_file

their_cache_prompt = importlib.import_module("mlx_lm.cache_prompt")
their_generate = importlib.import_module("mlx_lm.generate")
STORY = "A long story of a fox and a bear."
QUANTIZED = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for kind in (DENSE, HYBRID, SLIDING):
        save_target(path / kind, kind)
    save_drafter(path / "drafter")
    return path


@pytest.fixture
def run(invoke):
    """Runs one of our commands; its exit status, stdout and stderr."""
    return lambda name, *args: invoke(*map(str, args), main=main_of(name))


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
@pytest.mark.parametrize("quantized", [[], QUANTIZED], ids=["plain", "quantized"])
def test_the_answer_is_mlx_lm_s(folders, tmp_path, invoke, run, kind, quantized):
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    if kind == SLIDING and quantized:
        pytest.skip("mlx-lm does not quantize rotating caches")
    pair = ("--model", folders / kind, "--draft-model", folders / "drafter")
    begin = ("--prompt", STORY, *quantized)
    status, out, err = run("cache_prompt", *pair, *begin, "--prompt-cache-file", ours)
    assert status == 0 and out == f"{ours}\n" and "Processed" in err, err
    begin = ("--model", folders / kind, *begin, "--prompt-cache-file", theirs)
    assert invoke(*map(str, begin), main=their_cache_prompt.main)[0] == 0
    rest = ["--prompt", " And?", "-m", "9", *quantized[:4]]
    expected = [*rest, "--prompt-cache-file", theirs, "--verbose", "F"]
    _, expected, _ = invoke(*map(str, expected), main=their_generate.main)
    status, found, err = run("generate", *pair, *rest, "--prompt-cache-file", ours)
    assert status == 0 and found == expected, err
    # mlx-lm reads the file, too.
    theirs = [*rest, "--prompt-cache-file", ours, "--verbose", "F"]
    assert invoke(*map(str, theirs), main=their_generate.main)[1] == expected


def test_the_drafter_s_context_is_saved(folders, tmp_path, run):
    file = tmp_path / "cache.safetensors"
    pair = ("--model", folders / DENSE, "--draft-model", folders / "drafter")
    assert run("cache_prompt", *pair, "--prompt", STORY, "--prompt-cache-file", file)[0] == 0
    content = read_cache_file(str(file))
    assert content.offset >= len(content.tokens) - 1 > 5 and len(content.context) > 0


def test_every_flag_of_mlx_lm_is_here():
    ours = {
        f for a in options_of("cache_prompt").setup_arg_parser()._actions for f in a.option_strings
    }
    theirs = {f for a in their_cache_prompt.setup_arg_parser()._actions for f in a.option_strings}
    assert theirs <= ours


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--eos-token", "x"], 2, "--eos-token is not supported"),
        (["--kv-bits", "7"], 1, "--kv-bits is 7 but has to be"),
        (["--prompt-cache-file", "no/such/folder/x.safetensors"], 2, "no/such/folder"),
        (["--prompt-cache-file", "x.npz"], 2, "has to end in .safetensors"),
    ],
)
def test_what_cannot_be_is_refused(folders, tmp_path, run, arguments, status, words):
    file = tmp_path / "x.safetensors"
    found, out, err = run(
        "cache_prompt", "--model", folders / DENSE, "--draft-model", folders / "drafter",
        "--prompt", "a", "--prompt-cache-file", file, *arguments,
    )  # fmt: skip
    assert found == status and not out and words in err, err
    assert not file.exists()
