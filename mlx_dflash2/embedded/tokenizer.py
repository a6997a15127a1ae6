"""Write tokenizer files from the metadata of a GGUF file."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# GGUF's type of control tokens, which text is never encoded to.
CONTROL = 3
# This token ends a document; the metadata names only the one that ends a turn.
END_OF_TEXT = "<|endoftext|>"


def eos_token_ids(info: dict[str, Any]) -> list[int]:
    """List the ids that end an answer: the end of a turn, then the end of a document.

    Args:
        info (dict): GGUF metadata as plain values.
    """
    ids = [info["tokenizer.ggml.eos_token_id"], info["tokenizer.ggml.tokens"].index(END_OF_TEXT)]
    return list(dict.fromkeys(ids))


def write_tokenizer(info: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a folder.

    Args:
        info (dict): GGUF metadata as plain values, with a byte-level BPE of pre-tokenizer
            ``smollm``.
        folder (Path): An existing folder.
    """
    tokens = info["tokenizer.ggml.tokens"]
    _tokenizer(info).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": info["llama.context_length"],
        "add_prefix_space": info["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[info["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[info["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[info["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[info["tokenizer.ggml.unknown_token_id"]],
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = info["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _tokenizer(info: dict[str, Any]) -> Tokenizer:
    tokens = info["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in info["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=info["tokenizer.ggml.add_space_prefix"]),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = info["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    return tokenizer
