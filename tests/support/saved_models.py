"""Tiny random models saved as ordinary folders, for what reads them from disk."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlx_dflash2 import embedded
from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from support.tiny import CONFIGS, DENSE, HIDDEN, VOCAB, make_model

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m.content == 'forbidden' %}{{ raise_exception('Not this.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not (loop.last and m.role == 'assistant') %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    "{% if effort is defined %}[{{ effort }}]{% endif %}{% endif %}"
)
DRAFTER_CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "is_causal": False,
    "num_target_layers": CONFIGS[DENSE]["num_hidden_layers"],
    "block_size": 4,
    "dflash_config": {
        "mask_token_id": 5,
        "target_layer_ids": [1],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
    },
}


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
    folder.mkdir(parents=True)
    weights = dict(tree_flatten(make_model(kind).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = CONFIGS[kind] | {"model_type": kind.split("-")[0], "eos_token_id": 511}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(special), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def save_drafter(folder: Path, **changes) -> Path:
    """A DFlash 2 drafter for the dense target."""
    folder.mkdir(parents=True)
    config = DRAFTER_CONFIG | changes
    mx.random.seed(1)
    drafter = Drafter(DrafterArgs.from_dict(config))
    weights = dict(tree_flatten(drafter.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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
