"""A saved cache knows its model by its weights: others are refused, other names are not."""

import json
import os
import shutil
from importlib import import_module

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from support.commands import main_of
from support.saved_models import save_drafter, save_target
from support.tiny import DENSE, make_model

command = import_module("mlx_dflash2.generate.command")
their_cache_prompt = import_module("mlx_lm.cache_prompt")
LORA = {"rank": 2, "scale": 4.0, "dropout": 0.0}


def save_adapter(folder, seed, scale=4.0):
    model = make_model(DENSE)
    mx.random.seed(seed)
    linear_to_lora_layers(model, 2, LORA)
    weights = {
        name: mx.random.normal(value.shape)
        for name, value in tree_flatten(model.parameters())
        if "lora" in name
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA | {"scale": scale}}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def change_weights(folder, change):
    file = str(folder / "model.safetensors")
    mx.save_safetensors(file, {k: change(k, v) for k, v in mx.load(file).items()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_target(path / "target")
    save_drafter(path / "drafter")
    for name, seed, scale in (("one", 1, 4.0), ("two", 2, 4.0), ("one-louder", 1, 5.0)):
        save_adapter(path / name, seed, scale)
    # A fine-tune leaves the norms and a lot of the rest alone.
    shutil.copytree(path / "target", path / "tuned")
    change_weights(path / "tuned", lambda k, v: v * 1.01 if "layers.2.mlp.down" in k else v)
    shutil.copytree(path / "target", path / "half")
    change_weights(path / "half", lambda k, v: v.astype(mx.bfloat16))
    for bits in (4, 8):
        model = make_model(DENSE, bits=bits)
        folder = shutil.copytree(path / "target", path / f"{bits}-bit")
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        config = json.loads((folder / "config.json").read_text())
        config["quantization"] = {"bits": bits, "group_size": 32}
        (folder / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def run(folders, invoke, tmp_path):
    def run(model, *args, adapter=None):
        pair = ["--model", f"{model}"] if model else []
        pair += ["--draft-model", f"{folders / 'drafter'}", "--prompt", "A story.", "-m", "5"]
        pair += ["--adapter-path", f"{folders / adapter}"] if adapter else []
        return invoke(*pair, *map(str, args), main=main_of("generate"))

    return run


# A model and its adapter.
MADE_WITH = [
    ("target", None),
    ("target", "one"),
    ("target", "two"),
    ("target", "one-louder"),
    ("tuned", None),
    ("half", None),
    ("4-bit", None),
    ("8-bit", None),
]


@pytest.mark.parametrize("first", MADE_WITH, ids=str)
def test_only_the_weights_that_made_it_go_on(folders, run, tmp_path, first):
    file, (name, adapter) = tmp_path / "cache.safetensors", first
    assert run(folders / name, "--save-prompt-cache", file, adapter=adapter)[0] == 0
    for name, adapter in MADE_WITH:
        status, out, err = run(folders / name, "--prompt-cache-file", file, adapter=adapter)
        if (name, adapter) == first:
            assert status == 0 and "warning" not in err, err
        else:
            assert status == 1 and not out and len(err.splitlines()) == 1, err
            assert "was made with another model, or with another adapter" in err


def test_its_model_is_found_under_any_name(folders, run, tmp_path, monkeypatch):
    file = tmp_path / "cache.safetensors"
    monkeypatch.chdir(folders)
    assert run("target", "--save-prompt-cache", file)[0] == 0
    expected = run("target", "--prompt-cache-file", file)[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(folders))
    (tmp_path / "link").symlink_to(folders / "target")
    shutil.copytree(folders / "target", tmp_path / "copy")
    relative = os.path.relpath(folders / "target")
    for name in (None, f"{folders}/target/", "link", "copy", relative, "~/target"):
        status, out, err = run(name, "--prompt-cache-file", file)
        assert status == 0 and out == expected, err
    shutil.copy(file, folders / "home.safetensors")
    assert run(None, "--prompt-cache-file", "~/home.safetensors")[1] == expected


def test_a_file_of_mlx_lm_is_told(folders, run, invoke, tmp_path):
    """It has no fingerprint; its name for the model is compared by the folder that it means."""
    file, target = tmp_path / "cache.safetensors", folders / "target"
    begin = ["--model", f"{target}", "--prompt", "A story.", "--prompt-cache-file", f"{file}"]
    assert invoke(*begin, main=their_cache_prompt.main)[0] == 0
    for name in (None, target, f"{target}/"):
        status, _, err = run(name, "--prompt-cache-file", file)
        assert status == 0 and err.count("does not say which weights it was made with") == 1
    status, _, err = run(folders / "tuned", "--prompt-cache-file", file)
    assert status == 1 and "but has to be" in err
