"""Files of any content end in one line, or in what their content means; never in a traceback."""

import importlib
import json
import random
import shutil
import traceback

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from support.commands import main_of
from support.mutations import damaged_bytes, damaged_json, damaged_lines, damaged_tensors
from support.saved_models import save_drafter, save_target, write_shards
from support.tiny import drafter_config, make_model

FAST, SLOW = 100, 2000
LORA = {"rank": 2, "scale": 4.0, "dropout": 0.0}
ASK = ["-p", "ab cd", "-m", "6", "--verbose", "F"]


def pair(path):
    return ["--model", f"{path / 'target'}", "--draft-model", f"{path / 'drafter'}"]


def adapted(path, adapter="adapter"):
    return [*pair(path), *ASK, "--adapter-path", f"{path / adapter}"]


# name: (file, damage, command, arguments)
KINDS = {
    "target config": ("target/config.json", damaged_json, "generate", lambda p: pair(p) + ASK),
    "drafter config": ("drafter/config.json", damaged_json, "generate", lambda p: pair(p) + ASK),
    "generation config": (
        "target/generation_config.json",
        damaged_json,
        "generate",
        lambda p: pair(p) + ASK,
    ),
    "tokenizer": ("target/tokenizer.json", damaged_json, "generate", lambda p: pair(p) + ASK),
    "tokenizer config": (
        "target/tokenizer_config.json",
        damaged_json,
        "generate",
        lambda p: pair(p) + ASK,
    ),
    "chat template": (
        "target/chat_template.jinja",
        damaged_bytes,
        "generate",
        lambda p: pair(p) + ASK,
    ),
    "target weights": (
        "target/model-00001-of-00003.safetensors",
        damaged_tensors,
        "generate",
        lambda p: pair(p) + ASK,
    ),
    "drafter weights": (
        "drafter/model.safetensors",
        damaged_tensors,
        "generate",
        lambda p: pair(p) + ASK,
    ),
    "index": (
        "target/model.safetensors.index.json",
        damaged_json,
        "generate",
        lambda p: pair(p) + ASK,
    ),
    "adapter config": ("adapter/adapter_config.json", damaged_json, "generate", adapted),
    "adapter weights": ("adapter/adapters.safetensors", damaged_tensors, "generate", adapted),
    "prompt cache": (
        "cache.safetensors",
        damaged_tensors,
        "generate",
        lambda p: [*pair(p), *ASK, "--prompt-cache-file", f"{p / 'cache.safetensors'}"],
    ),
    "prompts": (
        "prompts.jsonl",
        damaged_lines,
        "doctor",
        lambda p: [
            *pair(p),
            "--trace",
            "--suites",
            f"{p / 'prompts.jsonl'}",
            "-m",
            "5",
            "--anchors",
            "1",
        ],
    ),
    "training config": (
        "train.yaml",
        damaged_bytes,
        "train",
        lambda p: ["-c", f"{p / 'train.yaml'}", "export"],
    ),
    "results": (
        "results.json",
        damaged_json,
        "benchmark",
        lambda p: ["compare", f"{p / 'results.json'}", f"{p / 'kept.json'}"],
    ),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    path = tmp_path_factory.mktemp("originals")
    target = save_target(path / "target")
    weights = mx.load(str(target / "model.safetensors"))
    write_shards(target, weights)
    (target / "model.safetensors").unlink()
    (target / "generation_config.json").write_text('{"eos_token_id": [511], "temperature": 0.7}')
    save_drafter(path / "drafter", drafter_config(block_size=4))
    _save_adapter(path / "adapter")
    rows = [{"suite": "one", "prompt": "ab"}, {"messages": [{"role": "user", "content": "cd"}]}]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = f"model: {target}\noutput_path: {path / 'none'}\niters: 3\nonly: [selector, conv]\n"
    (path / "train.yaml").write_text(config)
    return path


def _save_adapter(folder):
    model = make_model("qwen3")
    linear_to_lora_layers(model, 2, LORA)
    weights = {
        name: mx.random.normal(value.shape)
        for name, value in tree_flatten(model.parameters())
        if "lora" in name
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def prepared(originals, invoke, request):
    """The models, and the files that commands make of them."""
    if not (originals / "cache.safetensors").exists():
        cache = ["--save-prompt-cache", f"{originals / 'cache.safetensors'}"]
        assert invoke(*pair(originals), *ASK, *cache, main=main_of("generate"))[0] == 0
        results = ["--json", f"{originals / 'results.json'}", "--limit", "1", "-m", "4"]
        status, _, err = invoke(*pair(originals), *results, main=main_of("benchmark"))
        assert status == 0, err
        shutil.copy(originals / "results.json", originals / "kept.json")
    return originals


def fuzz(prepared, invoke, path, kind, seeds):
    """Run the command on damaged files, and list what is wrong with its answers."""
    name, damage, command, arguments = KINDS[kind]
    models = shutil.copytree(prepared, path / "models")
    file, kept = models / name, (prepared / name).read_bytes()
    usual = invoke(*arguments(models), main=main_of(command))[1]
    wrong, refused = [], 0
    for seed in seeds:
        file.write_bytes(damage(kept, random.Random(f"{kind} {seed}")))
        try:
            status, out, err = invoke(*arguments(models), main=main_of(command))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [
                f"{f.filename[-40:]}:{f.lineno}" for f in frames if "mlx_dflash2/" in f.filename
            ]
            wrong.append((seed, repr(error)[:200], ours[-1]))
            continue
        lines = [line for line in err.splitlines() if "warning: " not in line]
        refused += status != 0
        if status and not (lines and ": " in lines[-1] and len(lines[-1]) < 900):
            wrong.append((seed, status, err))
        elif not status and out != usual and not _is_meant(kind, models, out, invoke, arguments):
            wrong.append((seed, "another answer", out))
    assert refused
    return wrong


def _is_meant(kind, models, out, invoke, arguments):
    """Whether an answer is mlx-lm's from the same files, up to one of our further stop tokens."""
    if kind in ("prompts", "results"):
        return True
    if kind.startswith("drafter"):
        return False
    args = arguments(models)
    place = args.index("--draft-model")
    theirs = args[:place] + args[place + 2 :]
    if kind == "prompt cache":
        theirs = theirs[2:]
    status, text, _ = invoke(*theirs, main=importlib.import_module("mlx_lm.generate").main)
    return status == 0 and text.startswith(out.rstrip("\n"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_selection(prepared, invoke, tmp_path, kind):
    assert not fuzz(prepared, invoke, tmp_path, kind, range(FAST))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_of_each(prepared, invoke, tmp_path, kind):
    assert not fuzz(prepared, invoke, tmp_path, kind, range(SLOW))
