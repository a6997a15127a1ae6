"""Find models, and read them: a drafter, or a target with its tokenizer."""

from dataclasses import dataclass
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
    DRAFTER_FILES,
    Source,
    find_source,
    read_header,
    read_headers,
    read_weights,
    weight_files,
)
from .tensors import GROUP_SIZE, GROUP_SIZES, cast, fit_to, main_dtype, quantize

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class DrafterSource(Source):
    """A drafter of which only config.json has been fetched and read.

    Attributes:
        args (DrafterArgs): Its config.
    """

    args: DrafterArgs


def find_target(path_or_hf_repo: str | Path, revision: str | None = None) -> Source:
    """Find a target and read its config.json; weights are neither downloaded nor read.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        revision (str, optional): Revision of the repository. Default: ``None``.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is no such model.
        ValueError: if it is a drafter.
    """
    source = find_source(path_or_hf_repo, revision)
    if is_drafter(source.config):
        raise ValueError(
            f"{path_or_hf_repo}, given as the model, is a drafter; give it as the draft model, "
            "and as the model the language model that it was made for."
        )
    return source


def find_drafter(path_or_hf_repo: str | Path, revision: str | None = None) -> DrafterSource:
    """Find a drafter and read its config.json; weights are neither downloaded nor read.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        revision (str, optional): Revision of the repository. Default: ``None``.

    Raises:
        FileNotFoundError, NotADirectoryError: if there is no such drafter.
        ValueError: if it is not a DFlash drafter, or a field of its config is wrong.
    """
    source = find_source(path_or_hf_repo, revision)
    config = source.config
    if not is_drafter(config):
        kind = ", ".join(architectures(config)) or config.get("model_type") or "unknown kind"
        raise ValueError(
            f"{path_or_hf_repo}, given as the draft model, is not a DFlash drafter: its "
            f"config.json describes a model of {kind}; if it is the target, give it as the model."
        )
    return DrafterSource(**vars(source), args=DrafterArgs.from_dict(config))


def read_drafter_args(path_or_hf_repo: str | Path, revision: str | None = None) -> DrafterArgs:
    """Read the config of a drafter, as :func:`find_drafter`."""
    return find_drafter(path_or_hf_repo, revision).args


def is_drafter(config: dict[str, Any]) -> bool:
    """Return whether a config.json describes a DFlash drafter rather than a language model."""
    names = architectures(config)
    return (
        is_speculators(config)
        or "dflash_config" in config
        or any(name in GENERATIONS or "DFlash" in name for name in names)
    )


def check_bits(bits: int | None, source: DrafterSource) -> None:
    """Check that a drafter that is to be quantized at load is not stored quantized.

    Raises:
        ValueError: in one line.
    """
    if bits is not None and source.args.quantization:
        raise ValueError(
            f"`bits` is {bits} but has to be None: {source.name} is already quantized."
        )


def device_dtype() -> mx.Dtype | None:
    """Return the dtype to load a drafter in on this device, ``None`` for its own.

    MLX's CPU backend emulates bfloat16, which takes several times longer than float32.
    """
    return mx.float32 if mx.default_device() == mx.cpu else None


def load_drafter(
    path_or_hf_repo: str | Path,
    *,
    bits: int | None = None,
    group_size: int = GROUP_SIZE,
    dtype: mx.Dtype | None = None,
    revision: str | None = None,
    lazy: bool = False,
) -> Drafter:
    """Load a DFlash 1 or DFlash 2 drafter, fully evaluated unless ``lazy`` is set.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        bits (int, optional): Quantize the large matrices to 4 or 8 bits. Default: ``None``.
        group_size (int): Group size of that quantization: 32, 64 or 128. Default: ``64``.
        dtype (mx.Dtype, optional): ``mx.bfloat16`` or ``mx.float32`` for everything that is not
            quantized. float16 overflows in these models. Default: ``None``, the dtype of most
            of the checkpoint, with float16 widened to float32.
        revision (str, optional): Revision of the repository. Default: ``None``.
        lazy (bool): Leave the weights unread until they are needed. Default: ``False``.

    Raises:
        FileNotFoundError: if the folder, its config or a weight file is missing.
        NotADirectoryError: if the path is a file.
        ValueError: if an argument, a field of the config or a tensor is wrong.
    """
    _check_options(bits, group_size, dtype)
    source = find_drafter(path_or_hf_repo, revision)
    return read_drafter(source, bits=bits, group_size=group_size, dtype=dtype, lazy=lazy)


def read_drafter(
    source: DrafterSource,
    *,
    bits: int | None = None,
    group_size: int = GROUP_SIZE,
    dtype: mx.Dtype | None = None,
    lazy: bool = False,
) -> Drafter:
    """Read the weights of a drafter that was found; otherwise as :func:`load_drafter`."""
    check_bits(bits, source)
    files = weight_files(source.fetch(DRAFTER_FILES))
    drafter = Drafter(source.args)
    headers = drafter.sanitize(read_headers(files))
    fit_to(drafter, headers)
    weights = drafter.sanitize(read_weights(files))
    drafter.load_weights(cast(weights, dtype or main_dtype(headers)))
    # The file's arrays would outlive the cast or quantized ones made from them.
    weights.clear()
    if bits is not None:
        quantize(drafter, bits, group_size)
    drafter.eval()
    if lazy:
        return drafter
    # This evaluates also derived constants, such as rotation frequencies, which are not
    # parameters. One module at a time, so that its tensors as stored are freed before the next.
    for module in drafter.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
    return drafter


def _check_options(bits: Any, group_size: Any, dtype: Any) -> None:
    if bits is not None and (type(bits) is not int or bits not in (4, 8)):
        raise ValueError(f"`bits` is {bits!r} but has to be 4, 8 or None.")
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"`group_size` is {group_size!r} but has to be one of {sizes}.")
    known = isinstance(dtype, mx.Dtype) and dtype in DTYPES.values()
    if dtype is not None and not known:
        raise ValueError(f"`dtype` is {dtype!r} but has to be one of {', '.join(DTYPES)} or None.")


def load(path_or_hf_repo: str | Path, **kwargs: Any) -> tuple[Any, ...]:
    """Load a target and its tokenizer: :func:`mlx_lm.load` with more checks and stop tokens.

    The tokenizer stops at the end-of-sequence ids of all of its own settings, config.json and
    generation_config.json; mlx-lm leaves out config.json's if the last has some.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        kwargs: Passed to :func:`mlx_lm.load`.

    Raises:
        FileNotFoundError: if the folder, its config or a weight file is missing.
        NotADirectoryError: if the path is a file.
        ValueError: if it is a drafter, or its weights are damaged.
    """
    return read_target(find_target(path_or_hf_repo, kwargs.get("revision")), **kwargs)


def read_target(source: Source, **kwargs: Any) -> tuple[Any, ...]:
    """Read the weights and the tokenizer of a target that was found, as :func:`load`."""
    folder = source.fetch(DEFAULT_ALLOW_PATTERNS)
    for file in weight_files(folder, "model*.safetensors"):
        read_header(file)
    # A local folder, so that mlx-lm does not ask the hub again.
    model, tokenizer, *rest = mlx_lm.load(str(folder), **kwargs)
    missing = _stop_ids(source.config) - set(tokenizer.eos_token_ids)
    if missing:
        tokenizer.eos_token_ids = set(tokenizer.eos_token_ids) | missing
    return model, tokenizer, *rest


def _stop_ids(config: dict[str, Any]) -> set[int]:
    """End-of-sequence ids of a config.json, also those of a nested text model."""
    ids: set[int] = set()
    for level in (config, config.get("text_config")):
        found = level.get("eos_token_id") if isinstance(level, dict) else None
        ids |= {i for i in (found if isinstance(found, list) else [found]) if type(i) is int}
    return ids
