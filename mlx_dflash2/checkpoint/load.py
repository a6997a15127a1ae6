"""Loading: a folder or hub repository to a drafter, or to a target and its tokenizer."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..drafter.args import GENERATIONS, DrafterArgs
from ..drafter.fields import architectures
from ..drafter.model import Drafter
from ..drafter.speculators import is_speculators
from .files import (
    CONFIG_FILES,
    read_config,
    read_header,
    read_headers,
    read_weights,
    resolve,
    weight_files,
)
from .tensors import cast, fit_to, main_dtype, quantise

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json describes a DFlash drafter rather than a language model."""
    names = architectures(config)
    return (
        is_speculators(config)
        or "dflash_config" in config
        or any(name in GENERATIONS or "DFlash" in name for name in names)
    )


def read_drafter_args(path_or_hf_repo: str | Path, revision: str | None = None) -> DrafterArgs:
    """Read only the config of a drafter; nothing else is downloaded.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: in one line, as :func:`load_drafter`.
    """
    config = read_config(resolve(path_or_hf_repo, revision, CONFIG_FILES))
    if not is_drafter(config):
        kind = ", ".join(architectures(config)) or config.get("model_type") or "no known kind"
        raise ValueError(
            f"{path_or_hf_repo}, given as the draft model, is not a DFlash drafter: its "
            f"config.json describes a model of {kind}; if it is the target, give it as the model."
        )
    return DrafterArgs.from_dict(config)


def check_bits(bits: int | None, args: DrafterArgs, path_or_hf_repo: str | Path):
    """Refuse to quantise a drafter at load that is stored quantised.

    Raises:
        ValueError: in one line.
    """
    if bits is not None and args.quantization:
        raise ValueError(
            f"`bits` is {bits} but {path_or_hf_repo} is already quantised; leave `bits` out."
        )


def load_drafter(
    path_or_hf_repo: str | Path,
    *,
    bits: int | None = None,
    group_size: int = 64,
    dtype: mx.Dtype | None = None,
    revision: str | None = None,
    lazy: bool = False,
) -> Drafter:
    """Load a DFlash 1 or DFlash 2 drafter, fully evaluated unless ``lazy`` is set.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        bits (int, optional): Quantise the large matrices to 4 or 8 bits. Default: ``None``.
        group_size (int): Group size of that quantisation: 32, 64 or 128. Default: ``64``.
        dtype (mx.Dtype, optional): ``mx.bfloat16`` or ``mx.float32`` for everything that is not
            quantised. float16 overflows in these models. Default: ``None``, the dtype of most
            of the checkpoint, with float16 widened to float32.
        revision (str, optional): Revision of the repository. Default: ``None``.
        lazy (bool): Leave the weights unread until they are needed. Default: ``False``.

    Raises:
        FileNotFoundError: if the folder, its config or a weight file is missing.
        NotADirectoryError: if the path is a file.
        ValueError: if an argument, a field of the config or a tensor is not as it has to be.
    """
    _check_options(bits, group_size, dtype)
    args = read_drafter_args(path_or_hf_repo, revision)
    check_bits(bits, args, path_or_hf_repo)
    files = weight_files(resolve(path_or_hf_repo, revision))
    drafter = Drafter(args)
    stored = drafter.sanitize(read_headers(files))
    fit_to(drafter, stored)
    weights = drafter.sanitize(read_weights(files))
    drafter.load_weights(cast(weights, dtype or main_dtype(stored)))
    # The file's arrays would outlive the cast or quantised ones made from them.
    weights.clear()
    if bits is not None:
        quantise(drafter, bits, group_size)
    drafter.eval()
    if lazy:
        return drafter
    # Derived constants, such as rotation frequencies, are no parameters but arrays all the same.
    # One module at a time: its tensors as stored are gone before the next one's are read.
    for module in drafter.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
    return drafter


def _check_options(bits: Any, group_size: Any, dtype: Any):
    if bits is not None and (type(bits) is not int or bits not in (4, 8)):
        raise ValueError(f"`bits` has to be 4, 8 or None but is {bits!r}.")
    if type(group_size) is not int or group_size not in (32, 64, 128):
        raise ValueError(f"`group_size` has to be 32, 64 or 128 but is {group_size!r}.")
    known = isinstance(dtype, mx.Dtype) and dtype in DTYPES.values()
    if dtype is not None and not known:
        raise ValueError(f"`dtype` has to be one of {', '.join(DTYPES)} or None but is {dtype!r}.")


def load(path_or_hf_repo: str | Path, **kwargs: Any) -> tuple[Any, ...]:
    """Load a target and its tokenizer: :func:`mlx_lm.load`, after a look at what it is given.

    The tokenizer stops at the end-of-sequence ids of all of its own settings, config.json and
    generation_config.json; mlx-lm leaves out config.json's where the last has some.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        kwargs: Passed to :func:`mlx_lm.load`.

    Raises:
        FileNotFoundError: if the folder, its config or a weight file is missing.
        NotADirectoryError: if the path is a file.
        ValueError: if it is a drafter, or its weights are damaged.
    """
    revision = kwargs.get("revision")
    config = check_target(path_or_hf_repo, revision)
    folder = resolve(path_or_hf_repo, revision, DEFAULT_ALLOW_PATTERNS)
    for file in weight_files(folder, "model*.safetensors"):
        read_header(file)
    model, tokenizer, *rest = mlx_lm.load(str(folder), **kwargs)
    missing = _stop_ids(config) - set(tokenizer.eos_token_ids)
    if missing:
        tokenizer.eos_token_ids = set(tokenizer.eos_token_ids) | missing
    return model, tokenizer, *rest


def check_target(path_or_hf_repo: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Read a target's config.json alone; a drafter's weights are neither downloaded nor read.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is no such model.
        ValueError: if it is a drafter.
    """
    config = read_config(resolve(path_or_hf_repo, revision, CONFIG_FILES))
    if is_drafter(config):
        raise ValueError(
            f"{path_or_hf_repo}, given as the model, is a drafter; give it as the draft model, "
            "and as the model the language model that it was made for."
        )
    return config


def _stop_ids(config: dict[str, Any]) -> set[int]:
    """End-of-sequence ids of a config.json, also those of a nested text model."""
    ids = set()
    for level in (config, config.get("text_config")):
        found = level.get("eos_token_id") if isinstance(level, dict) else None
        ids |= {i for i in (found if isinstance(found, list) else [found]) if type(i) is int}
    return ids
