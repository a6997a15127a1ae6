"""Tiny random models saved as ordinary folders, for what reads them from disk."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlx_dflash2 import embedded
from support.drafters import V2, random_weights
from support.tiny import CONFIGS, DENSE, VOCAB, make_model

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
_THINK = "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m.content == 'forbidden' %}{{ raise_exception('Not this.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not (loop.last and m.role == 'assistant') %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    + _THINK
    + "{% if effort is defined %}[{{ effort }}]{% endif %}{% endif %}"
)
WITHOUT_THINKING = CHAT_TEMPLATE.replace(_THINK, "")


def embedded_target() -> Path:
    """The embedded target's folder; skips the test where its weights are not installed."""
    try:
        return embedded.target_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def save_target(
    folder: Path,
    kind: str = DENSE,
    chat_template: str | None = CHAT_TEMPLATE,
    special: tuple[str, ...] = (),
) -> Path:
    """A target of ``tiny.CONFIGS`` with a byte-level tokenizer that has all of its ids.

    ``special`` are more tokens that the tokenizer never splits.
    """
    model_type = {"model_type": kind.split("-")[0], "eos_token_id": 511}
    write_config(folder, CONFIGS[kind] | model_type)
    weights = dict(tree_flatten(make_model(kind).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(special), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def save_drafter(folder: Path, config: dict = V2, weights: dict | None = None) -> Path:
    """A checkpoint of one file; with random float32 weights if none are given."""
    write_config(folder, config)
    weights = random_weights(config) if weights is None else weights
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def save_pair(folder: Path) -> tuple[Path, Path, Path]:
    """A target without thinking, a drafter for it, and a file with two suites of prompts."""
    target = save_target(folder / "target", chat_template=WITHOUT_THINKING)
    rows = [
        {"suite": "early", "prompt": "abcd"},
        {"suite": "late", "prompt": "x y"},
        {"suite": "late", "messages": [{"role": "user", "content": "789"}]},
    ]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return target, save_drafter(folder / "drafter"), prompts


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shards(folder: Path, weights: dict, count: int = 3) -> list[str]:
    """The weights in several files with an index; the names of the files."""
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count] for i, name in enumerate(sorted(weights))}
    for file in files:
        held = {name: weights[name] for name in weights if weight_map[name] == file}
        mx.save_safetensors(str(folder / file), held)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def _tokenizer(special: tuple[str, ...]) -> Tokenizer:
    """Bytes, pairs of letters and special tokens; ``<s>`` comes before plain text."""
    special = (*special, *SPECIAL)
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(a, b) for a in letters for b in letters][: VOCAB - 256 - len(special)]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer
