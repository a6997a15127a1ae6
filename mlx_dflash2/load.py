"""Loading: a folder or hub repository to a drafter, or to a target and its tokenizer."""

import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten

from .checkpoint import read_config, read_weights, resolve, weight_files
from .drafter import Drafter
from .drafter_args import GENERATIONS, DrafterArgs
from .speculators import is_speculators

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
# The large matrices; norms, convolutions and the selector stay in their dtype.
QUANTISED_AT_LOAD = (
    "fc",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json describes a DFlash drafter rather than a language model."""
    architectures = config.get("architectures") or []
    return (
        is_speculators(config)
        or "dflash_config" in config
        or any(name in GENERATIONS or "DFlash" in name for name in architectures)
    )


def read_drafter_args(path_or_hf_repo: str | Path, revision: str | None = None) -> DrafterArgs:
    """Read only the config of a drafter.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: in one line, as :func:`load_drafter`.
    """
    folder = resolve(path_or_hf_repo, revision)
    config = read_config(folder)
    if not is_drafter(config):
        kind = config.get("architectures") or config.get("model_type")
        raise ValueError(
            f"{path_or_hf_repo} is not a DFlash drafter: its config.json describes {kind}."
        )
    return DrafterArgs.from_dict(config)


def load_drafter(
    path_or_hf_repo: str | Path,
    *,
    bits: int | None = None,
    group_size: int = 64,
    dtype: mx.Dtype | None = None,
    revision: str | None = None,
) -> Drafter:
    """Load a DFlash 1 or DFlash 2 drafter, fully evaluated.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        bits (int, optional): Quantise the large matrices to 4 or 8 bits. Default: ``None``.
        group_size (int): Group size of that quantisation: 32, 64 or 128. Default: ``64``.
        dtype (mx.Dtype, optional): ``mx.bfloat16`` or ``mx.float32`` for everything that is not
            quantised. float16 overflows in these models. Default: ``None``, the checkpoint's
            dtype, with float16 widened to float32.
        revision (str, optional): Revision of the repository. Default: ``None``.

    Raises:
        FileNotFoundError: if the folder, its config or a weight file is missing.
        NotADirectoryError: if the path is a file.
        ValueError: if an argument, a field of the config or a tensor is not as it has to be.
    """
    if bits not in (None, 4, 8):
        raise ValueError(f"`bits` has to be 4, 8 or None but is {bits!r}.")
    if group_size not in (32, 64, 128):
        raise ValueError(f"`group_size` has to be 32, 64 or 128 but is {group_size!r}.")
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"`dtype` has to be one of {', '.join(DTYPES)} or None but is {dtype}.")
    args = read_drafter_args(path_or_hf_repo, revision)
    if bits is not None and args.quantization:
        raise ValueError(
            f"`bits` is {bits} but {path_or_hf_repo} is already quantised; leave `bits` out."
        )
    drafter = Drafter(args)
    weights = drafter.sanitize(read_weights(weight_files(resolve(path_or_hf_repo, revision))))
    if args.quantization:
        _quantise_as_stored(drafter, weights)
    _check_weights(drafter, weights)
    drafter.load_weights(list(_cast(weights, dtype).items()))
    weights.clear()
    if bits is not None:
        _quantise(drafter, bits, group_size)
    drafter.eval()
    # Derived constants, such as rotation frequencies, are no parameters but arrays all the same.
    mx.eval([value for module in drafter.modules() for value in module.values()])
    return drafter


def _quantise_as_stored(drafter: Drafter, weights: dict[str, mx.array]):
    """Make a module quantised where, and as, the checkpoint holds it quantised."""

    def stored(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        override = drafter.args.quantization.get(path)
        return override if isinstance(override, dict) else True

    default = drafter.args.quantization
    missing = [name for name in ("group_size", "bits") if name not in default]
    if missing:
        raise ValueError(f"Drafter config: `quantization` lacks {' and '.join(missing)}.")
    nn.quantize(
        drafter,
        group_size=default["group_size"],
        bits=default["bits"],
        mode=default.get("mode", "affine"),
        class_predicate=stored,
    )


def _check_weights(drafter: Drafter, weights: dict[str, mx.array]):
    expected = dict(tree_flatten(drafter.parameters()))
    own = [name for name in weights if name.startswith(("lm_head.", "embed_tokens.", "t2d", "d2t"))]
    if own:
        raise ValueError(
            f"The drafter has a vocabulary of its own (`{own[0]}`); only drafters that share the "
            "target's embedding and head are supported."
        )
    for kind, names in (
        ("is missing", sorted(expected.keys() - weights.keys())),
        ("is unexpected", sorted(weights.keys() - expected.keys())),
    ):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"The drafter's weights do not match its config: `{names[0]}` {kind}{more}."
            )
    for name, parameter in expected.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(
                f"The drafter's `{name}` has shape {list(weights[name].shape)} but its config "
                f"asks for {list(parameter.shape)}."
            )


def _cast(weights: dict[str, mx.array], dtype: mx.Dtype | None) -> dict[str, mx.array]:
    def cast(value: mx.array) -> mx.array:
        if not mx.issubdtype(value.dtype, mx.floating):
            return value
        if dtype is None:
            return value.astype(mx.float32) if value.dtype == mx.float16 else value
        return value.astype(dtype)

    return {name: cast(value) for name, value in weights.items()}


def _quantise(drafter: Drafter, bits: int, group_size: int):
    left = []

    def large(path: str, module: nn.Module) -> bool:
        if path.rsplit(".", 1)[-1] not in QUANTISED_AT_LOAD:
            return False
        fits = module.weight.shape[-1] % group_size == 0
        if not fits:
            left.append(path)
        return fits

    nn.quantize(drafter, group_size=group_size, bits=bits, class_predicate=large)
    if left:
        warnings.warn(
            f"{len(left)} matrices of the drafter, first `{left[0]}`, are not quantised: "
            f"`group_size` {group_size} does not divide their rows.",
            stacklevel=3,
        )


def load(path_or_hf_repo: str, **kwargs: Any) -> tuple[Any, ...]:
    """Load a target and its tokenizer: :func:`mlx_lm.load`, after a look at what it is given.

    Args:
        path_or_hf_repo (str): A folder, or a repository of the Hugging Face hub.
        kwargs: Passed to :func:`mlx_lm.load`.

    Raises:
        ValueError: if it is a drafter.
    """
    folder = Path(path_or_hf_repo).expanduser()
    if folder.exists():
        config = read_config(resolve(folder))
        if is_drafter(config):
            raise ValueError(
                f"{path_or_hf_repo} is a DFlash drafter; give it as the draft model, and as the "
                "model the language model that it was made for."
            )
        weight_files(folder)
    return mlx_lm.load(path_or_hf_repo, **kwargs)
