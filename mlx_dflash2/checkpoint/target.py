"""Find targets, and read them with their tokenizers; what cannot run is refused early."""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_adapters, load_model, load_tokenizer

from ..reading import reading
from ..targets import TargetShape, bind
from .files import Source, find_source, read_headers, weight_files
from .load import is_drafter

# Those that mlx-lm reads: all of them, whatever an index says.
_WEIGHTS = "model*.safetensors"
_QUANTIZATION = ("quantization", "quantization_config", "compression_config")
# Far above any published model: a typo is an error, not an hour of building layers.
_MAX_LAYERS = 4096


@dataclass(frozen=True)
class TargetSource(Source):
    """A target of which only config.json has been fetched and read.

    Attributes:
        shape (TargetShape): The sizes that a drafter depends on.
    """

    shape: TargetShape


def find_target(path_or_hf_repo: str | Path, revision: str | None = None) -> TargetSource:
    """Find a target and read its config.json; weights are neither downloaded nor read.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        revision (str, optional): Revision of the repository. Default: ``None``.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is no such model.
        ValueError: if it is a drafter, or a model that mlx-lm or this package does not run.
    """
    source = find_source(path_or_hf_repo, revision)
    if is_drafter(source.config):
        raise ValueError(
            f"{path_or_hf_repo}, given as the model, is a drafter; give it as the draft model, "
            "and as the model the language model that it was made for."
        )
    return TargetSource(**vars(source), shape=_shape(source))


def _shape(source: Source) -> TargetShape:
    """Build the model of a config, whose arrays stay lazy, and see whether it is supported."""
    # How weights are stored is told by their headers.
    config = {name: value for name, value in source.config.items() if name not in _QUANTIZATION}
    nested = config.get("text_config")
    text = config | nested if isinstance(nested, dict) else config
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise ValueError(
            f"{source.folder / 'config.json'}: `num_hidden_layers` is {layers} but has to be at "
            f"most {_MAX_LAYERS}."
        )
    with TemporaryDirectory() as folder, reading(source.folder / "config.json"):
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model, _ = load_model(Path(folder), lazy=True, strict=False)
    target = bind(model)
    with reading(source.folder / "config.json"):
        # Fields of the wrong type, or at odds with each other, show once the layers meet.
        target.logits(target.forward(mx.array([[0]]), target.make_cache()).hidden)
    return target.shape


def load(
    path_or_hf_repo: str | Path, *, revision: str | None = None, **kwargs: Any
) -> tuple[Any, ...]:
    """Load a target and its tokenizer: :func:`mlx_lm.load` with more checks and stop tokens.

    The tokenizer stops at the end-of-sequence ids of all of its own settings, config.json and
    generation_config.json; mlx-lm leaves out config.json's if the last has some.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        revision (str, optional): Revision of the repository. Default: ``None``.
        kwargs: The other options of :func:`mlx_lm.load`.

    Raises:
        FileNotFoundError: if the folder, its config or a weight file is missing.
        NotADirectoryError: if the path is a file.
        ValueError: if it is a drafter, is not supported, or its files are damaged.
    """
    return read_target(find_target(path_or_hf_repo, revision), **kwargs)


def read_target(
    source: Source,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Any, ...]:
    """Read the weights and the tokenizer of a target that was found, as :func:`load`.

    No weight is read before all files are known to be whole and to fit each other.
    """
    folder = source.fetch(DEFAULT_ALLOW_PATTERNS)
    model, config = read_model(folder, model_config, trust_remote_code)
    if adapter_path is not None:
        with reading(adapter_path):
            model = load_adapters(model, str(Path(adapter_path).expanduser()))
        model.eval()
    with reading(f"The tokenizer of {folder}"):
        tokenizer = load_tokenizer(folder, tokenizer_config, config.get("eos_token_id"))
        # Without any file, transformers makes one that knows no words.
        if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
            raise ValueError("there is no vocabulary.")
        _try_out(tokenizer)
    missing = _stop_ids(source.config) - set(tokenizer.eos_token_ids)
    if missing:
        tokenizer.eos_token_ids = set(tokenizer.eos_token_ids) | missing
    if not lazy:
        mx.eval(model.parameters())
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _try_out(tokenizer: TokenizerWrapper) -> None:
    """Use a tokenizer once: a wrong field of its files shows only then.

    Raises:
        ValueError, or whatever transformers raises: if it does not work.
    """
    for token in tokenizer.eos_token_ids:
        if type(token) is not int:
            raise ValueError(f"`eos_token_id` has {token!r} but has to have integers.")
    tokenizer.decode(tokenizer.encode("\n"))
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()


def read_model(
    folder: Path, model_config: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a target whose weights stay unread, and check that they are complete and fit it.

    Args:
        folder (Path): With config and weights.
        model_config (dict, optional): As for :func:`mlx_lm.load`.
        trust_remote_code (bool): As for :func:`mlx_lm.load`.

    Returns:
        tuple: The model, and its config as mlx-lm reads it.

    Raises:
        FileNotFoundError: if a weight file is missing.
        ValueError: if files are damaged, or contradict each other or the config.
    """
    read_headers(weight_files(folder, _WEIGHTS, merged=True))
    with reading(folder):
        return load_model(
            folder, lazy=True, model_config=model_config, trust_remote_code=trust_remote_code
        )


def _stop_ids(config: dict[str, Any]) -> set[int]:
    """End-of-sequence ids of a config.json, also those of a nested text model."""
    ids: set[int] = set()
    for level in (config, config.get("text_config")):
        found = level.get("eos_token_id") if isinstance(level, dict) else None
        ids |= {i for i in (found if isinstance(found, list) else [found]) if type(i) is int}
    return ids
