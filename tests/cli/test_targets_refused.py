"""A target that cannot run is refused by every command alike, before a weight is read."""

import json
import shutil

import mlx.core as mx
import pytest
from support.commands import main_of
from support.folders import spoil
from support.saved_models import save_drafter, save_target
from support.tiny import drafter_config


def config(**changes):
    def change(folder):
        file = folder / "config.json"
        values = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return change


def lost_shard(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    names = sorted(weights)
    for number in (1, 2):
        held = {name: weights[name] for name in names[number - 1 :: 2]}
        mx.save_safetensors(str(folder / f"model-0000{number}-of-00003.safetensors"), held)
    (folder / "model.safetensors").unlink()
    (folder / "model-00001-of-00003.safetensors").unlink()


def packed(folder):
    """As other tools pack: integers, and no scales of MLX's."""
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    name = "model.layers.0.mlp.up_proj"
    weights[f"{name}.qweight"] = weights.pop(f"{name}.weight").astype(mx.int32)
    mx.save_safetensors(file, weights)


def quantized_without_saying_so(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj"
    weight, scales, biases = mx.quantize(weights.pop(f"{name}.weight"), 32, 4)
    weights |= {f"{name}.weight": weight, f"{name}.scales": scales, f"{name}.biases": biases}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def no_tokenizer(folder):
    for file in folder.glob("token*"):
        file.unlink()


STABLELM = {
    "model_type": "stablelm",
    "use_qkv_bias": False,
    "partial_rotary_factor": 1.0,
    "layer_norm_eps": 1e-5,
}

# name: (change, part of the message, whether the config alone tells)
CASES = {
    "unknown type": (config(model_type="qwen99"), "qwen99", True),
    "no type": (config(model_type=None), "model_type", True),
    "a type of mlx-lm that is no target": (config(**STABLELM), "stablelm", True),
    "a field of the wrong type": (config(num_hidden_layers="4"), "config.json", True),
    "a missing field": (config(vocab_size=None), "vocab_size", True),
    "absurd depth": (config(num_hidden_layers=10**9), "num_hidden_layers", True),
    "another hidden size": (config(hidden_size=128), "hidden_size", True),
    "another depth": (config(num_hidden_layers=5), "num_target_layers", True),
    "a shard is lost": (lost_shard, "arameters", False),
    "another tool's packing": (packed, "up_proj.qweight", False),
    "no quantization field": (quantized_without_saying_so, "up_proj.scales", False),
    "no tokenizer": (no_tokenizer, "okenizer", False),
}
COMMANDS = ("generate", "chat", "benchmark", "doctor", "train", "omlx")


def arguments(command, target, drafter, out):
    if command == "omlx":
        (out / "base" / "models").mkdir(parents=True)
        place = ["--base-path", f"{out / 'base'}", "--url", "http://127.0.0.1:9"]
        return ["export", *place, "--model", f"{target}", "--draft-model", f"{drafter}"]
    pair = ["--model", f"{target}", "--draft-model", f"{drafter}"]
    more = {
        "train": ["--output-path", f"{out / 'run'}", "data", "taps"],
        "benchmark": ["--limit", "1", "-m", "2"],
    }
    return pair + more.get(command, [])


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    path = tmp_path_factory.mktemp("originals")
    save_target(path / "target")
    save_drafter(path / "drafter", drafter_config(block_size=4))
    return path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_line(originals, tmp_path, invoke, monkeypatch, command, case):
    change, words, from_config = CASES[case]
    if command == "omlx" and not from_config:
        pytest.skip("oMLX reads the weights itself")
    target = shutil.copytree(originals / "target", tmp_path / "target")
    drafter = shutil.copytree(originals / "drafter", tmp_path / "drafter")
    change(target)
    if from_config:
        # Nothing but configs is there to be read.
        for folder in (target, drafter):
            (folder / "model.safetensors").unlink()
    else:
        spoil(target)
        spoil(drafter)
    status, out, err = invoke(*arguments(command, target, drafter, tmp_path), main=main_of(command))
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert status == 1 and "Traceback" not in err and "verdict" not in out, (out, err)
    assert len(lines) == 1 and words in lines[0], err
    assert len(lines[0]) < 700
