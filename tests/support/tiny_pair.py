"""A tiny random pair as ordinary folders, for commands that read them from disk."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from support.tiny import CONFIGS, DENSE, drafter_config, make_drafter, make_model, make_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2"
    "{% if enable_thinking is defined and enable_thinking %} w3{% endif %}"
)


def save_weights(module, folder: Path, config: dict):
    folder.mkdir(parents=True)
    weights = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def save_target(folder: Path, thinking: bool = False) -> Path:
    """A tiny qwen3 whose template knows ``enable_thinking`` if asked to."""
    save_weights(make_model(DENSE), folder, {"model_type": DENSE} | CONFIGS[DENSE])
    template = CHAT_TEMPLATE if thinking else CHAT_TEMPLATE.partition("{% if enable")[0]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def save_drafter(folder: Path, **changes) -> Path:
    """A tiny DFlash 2 drafter for it; ``changes`` go to ``dflash_config``."""
    save_weights(make_drafter(**changes), folder, drafter_config(**changes))
    return folder


def save_prompts(path: Path) -> Path:
    """Two suites of prompts in words that the tiny tokenizer knows."""
    rows = [
        {"suite": "early", "prompt": "w10 w11 w12 w13"},
        {"suite": "late", "prompt": "w300 w301"},
        {"suite": "late", "messages": [{"role": "user", "content": "w7 w8 w9"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path
