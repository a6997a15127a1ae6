"""Prompt cache files that mlx-lm's own commands wrote or go on from."""

import importlib

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from support.commands import main_of
from support.saved_models import embedded_target, save_drafter, save_target
from support.tiny import DENSE, HYBRID

from mlx_dflash2 import embedded
from mlx_dflash2.pairs.find import find_pair

generate = importlib.import_module("mlx_dflash2.generate.command")
their_generate = importlib.import_module("mlx_lm.generate")
their_cache_prompt = importlib.import_module("mlx_lm.cache_prompt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for kind in (DENSE, HYBRID):
        save_target(path / kind, kind)
    save_drafter(path / "drafter")
    return path


@pytest.fixture
def invoke(invoke):
    """Runs a command's main; its exit status, stdout and stderr."""
    return lambda module, *args: invoke(
        *map(str, args), main=main_of("generate") if module is generate else module.main
    )


def common(folders, kind):
    return ("--model", folders / kind), ("--draft-model", folders / "drafter")


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
@pytest.mark.parametrize("quantized", [[], ["--kv-bits", "8", "--kv-group-size", "32"]])
def test_a_file_of_mlx_lm_cache_prompt(folders, tmp_path, invoke, kind, quantized):
    file, (model, drafter) = tmp_path / "cache.safetensors", common(folders, kind)
    begin = ["--prompt", "A long story.", "--prompt-cache-file", file]
    start = [*quantized, "--quantized-kv-start", "0"]
    assert invoke(their_cache_prompt, *model, *begin, *start)[0] == 0
    rest = ["--prompt", " And?", "--prompt-cache-file", file, "-m", "9", *quantized]
    status, expected, err = invoke(their_generate, *rest, "--verbose", "F")
    assert status == 0, err
    for more in ([], model):
        status, out, err = invoke(generate, *drafter, *rest, *more)
        assert status == 0, err
        assert out == expected and "Generation: 9 tokens" in err


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_a_file_of_save_prompt_cache(folders, tmp_path, invoke, kind):
    """mlx-lm goes on from it too, and so does the command that wrote it."""
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    model, drafter = common(folders, kind)
    begin = ["--prompt", "A long story.", "-m", "9", "--save-prompt-cache", first]
    assert invoke(generate, *model, *drafter, *begin)[0] == 0
    rest = ["--prompt", "And?", "-m", "9", "--prompt-cache-file", first]
    status, expected, err = invoke(their_generate, *rest, "--verbose", "F")
    assert status == 0, err
    status, out, err = invoke(generate, *drafter, *rest, "--save-prompt-cache", second)
    assert status == 0 and out == expected, err
    rest[-1] = second
    status, expected, _ = invoke(their_generate, *rest, "--verbose", "F")
    assert status == 0 and invoke(generate, *drafter, *rest)[1] == expected


def test_the_embedded_pair_is_found_again_by_its_folder(tmp_path):
    """A saved cache names the folder of its model, and no drafter."""
    folder = str(embedded_target())
    for named in (None, folder):
        sources = find_pair(named)
        assert sources.target.name == folder
        assert sources.drafter.folder == embedded.drafter_path()
    (tmp_path / "config.json").write_text((embedded_target() / "config.json").read_text())
    with pytest.raises(ValueError, match="No drafter is known"):
        find_pair(str(tmp_path))


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_a_file_is_opened_once(folders, tmp_path, invoke, monkeypatch, kind):
    file, (model, drafter) = tmp_path / "cache.safetensors", common(folders, kind)
    begin = ["--prompt", "A long story.", "-m", "9", "--save-prompt-cache", file]
    assert invoke(generate, *model, *drafter, *begin)[0] == 0
    opened, original = [], mx.load

    def load(name, *args, **kwargs):
        opened.append(str(name))
        return original(name, *args, **kwargs)

    monkeypatch.setattr(mx, "load", load)
    rest = ["--prompt", "And?", "-m", "9", "--prompt-cache-file", file]
    status, _, err = invoke(generate, *drafter, *rest)
    assert status == 0 and "Generation: 9 tokens" in err
    assert opened.count(str(file)) == 1
    # It was the first one: what it says decides which models are read.
    assert opened[0] == str(file) and len(opened) == 3


def test_caches_that_do_not_fit_are_refused(folders, tmp_path, invoke, saved_pair):
    file, (model, drafter) = tmp_path / "c.safetensors", common(folders, DENSE)
    start = ["--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "0"]
    begin = ["--prompt", "A story.", "--prompt-cache-file", file]
    assert invoke(their_cache_prompt, *model, *begin, *start)[0] == 0
    nameless = tmp_path / "nameless.safetensors"
    save_prompt_cache(str(nameless), make_prompt_cache(saved_pair.model))
    other, weights = folders / HYBRID, folders / DENSE / "model.safetensors"
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"x")
    for args, message in (
        (["--model", other, *begin], f"--model is {other} but has to be {folders / DENSE}, as in"),
        (["--kv-bits", "8", "--kv-group-size", "32", *begin], "--kv-bits is 8 but has to be 4"),
        (["--kv-bits", "4", *begin], "--kv-group-size is 64 but has to be 32"),
        (["--prompt-cache-file", nameless], "does not name its model"),
        (["--prompt-cache-file", tmp_path / "none.safetensors"], "There is no prompt cache"),
        (["--prompt-cache-file", broken], "broken.safetensors is not a prompt cache"),
        (["--prompt-cache-file", weights], "model.safetensors is not a prompt cache"),
    ):
        status, out, err = invoke(generate, *drafter, *args)
        assert status == 1 and not out and message in err.splitlines()[-1]


def test_files_that_cannot_be_written_are_refused_before_the_answer(tmp_path, invoke):
    for file, message in (("c.bin", "has to end in"), ("none/c.safetensors", "there is no folder")):
        status, out, err = invoke(generate, "--save-prompt-cache", tmp_path / file)
        assert status == 2 and not out and message in err
