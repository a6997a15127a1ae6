"""Find drafters, and read them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..drafter.args import GENERATIONS, DrafterArgs
from ..drafter.fields import architectures
from ..drafter.model import Drafter
from ..drafter.speculators import is_speculators
from .defaults import DTYPE_NAMES, GROUP_SIZE, GROUP_SIZES
from .files import (
    DRAFTER_FILES,
    Source,
    find_source,
    read_headers,
    read_weights,
    weight_files,
)
from .tensors import cast, fit_to, main_dtype, quantize

DTYPES = {name: getattr(mx, name) for name in DTYPE_NAMES}
# The bits that keep a drafter's matrices as they are stored.
UNQUANTIZED = 16


@dataclass(frozen=True)
class DrafterSource(Source):
    """A drafter of which only config.json has been fetched and read.

    Attributes:
        args (DrafterArgs): Its config.
    """

    args: DrafterArgs


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
    if bits not in (None, UNQUANTIZED) and source.args.quantization:
        raise ValueError(
            f"`bits` is {bits} but has to be None: {source.name} is already quantized."
        )


def bits_at_load(bits: int | None, source: DrafterSource, gpu: bool | None = None) -> int | None:
    """Return the bits to quantize a drafter to, ``None`` to leave it as it is stored.

    A GPU takes 4 where none are asked for: it spends most of a draft on reading weights, and what
    4 bits change of the drafts costs less than they save. The CPU backend gains nothing.
    """
    gpu = mx.default_device() == mx.gpu if gpu is None else gpu
    if bits is None and gpu and not source.args.quantization:
        return 4
    return None if bits == UNQUANTIZED else bits


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
        bits (int, optional): Quantize the large matrices to 4 or 8 bits; 16 leaves them as they
            are stored. Default: ``None``, 4 on a GPU and as stored on the CPU.
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
    check_bits(bits, source)
    bits = bits_at_load(bits, source)
    return read_drafter(source, bits=bits, group_size=group_size, dtype=dtype, lazy=lazy)


def read_drafter(
    source: DrafterSource,
    *,
    bits: int | None = None,
    group_size: int = GROUP_SIZE,
    dtype: mx.Dtype | None = None,
    lazy: bool = False,
) -> Drafter:
    """Read the weights of a drafter that was found; otherwise as :func:`load_drafter`.

    Here no ``bits`` leave the drafter as it is stored, on every device.
    """
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
    if bits is not None and (type(bits) is not int or bits not in (4, 8, UNQUANTIZED)):
        raise ValueError(f"`bits` is {bits!r} but has to be 4, 8, {UNQUANTIZED} or None.")
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"`group_size` is {group_size!r} but has to be one of {sizes}.")
    known = isinstance(dtype, mx.Dtype) and dtype in DTYPES.values()
    if dtype is not None and not known:
        raise ValueError(f"`dtype` is {dtype!r} but has to be one of {', '.join(DTYPES)} or None.")
