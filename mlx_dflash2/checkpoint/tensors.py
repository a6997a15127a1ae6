"""Check a drafter's tensors against its config, cast them, and quantize them."""

import warnings
from collections import Counter
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.fields import refuse
from ..drafter.model import Drafter
from .files import TensorHeader

FLOATS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
# Bits and group sizes of each of MLX's modes; the first ones are its defaults.
_MODES = {
    "affine": ((4, 8, 1, 2, 3, 5, 6), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}
# The large matrices; norms, convolutions and the selector stay in their dtype.
QUANTIZED_AT_LOAD = (
    "fc",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def fit_to(drafter: Drafter, headers: dict[str, TensorHeader]) -> None:
    """Quantize the drafter's modules that are stored quantized, and check every tensor.

    Args:
        drafter (Drafter): With random weights; changed in place.
        headers (dict): Headers of the checkpoint's tensors, by their names in the drafter.

    Raises:
        ValueError: naming the tensor that is missing, unexpected, packed in another format or
            of another shape, or the field of ``quantization`` that contradicts the tensors.
    """
    _refuse_other_layouts(headers)
    _quantize_as_stored(drafter, headers)
    expected: dict[str, mx.array] = dict(tree_flatten(drafter.parameters()))
    for kind, names in (
        ("is missing", sorted(expected.keys() - headers.keys())),
        ("is unexpected", sorted(headers.keys() - expected.keys())),
    ):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"The drafter's weights do not match its config: `{names[0]}` {kind}{more}."
            )
    for name, parameter in expected.items():
        dtype, shape = headers[name]
        if shape != parameter.shape:
            raise ValueError(
                f"The drafter's `{name}` has shape {list(shape)} but its config asks for "
                f"{list(parameter.shape)}."
            )
        packed = {mx.uint32: ("U32", "I32"), mx.uint8: ("U8",)}.get(parameter.dtype, FLOATS)
        if dtype not in packed:
            raise ValueError(
                f"The drafter's `{name}` is stored as {dtype} but has to be {' or '.join(packed)}."
            )


def _refuse_other_layouts(headers: dict[str, TensorHeader]) -> None:
    for name in sorted(headers):
        path, _, kind = name.rpartition(".")
        if name.startswith(("lm_head.", "embed_tokens.", "t2d", "d2t")):
            raise ValueError(
                f"The drafter has a vocabulary of its own (`{name}`); only drafters that share "
                "the target's embedding and head are supported."
            )
        if path.endswith(("qkv_proj", "gate_up_proj")):
            raise ValueError(
                f"The drafter's `{name}` is fused; only separate projections are supported."
            )
        packed = kind == "weight" and headers[name].dtype not in FLOATS
        if kind in ("qweight", "weight_packed") or (packed and f"{path}.scales" not in headers):
            raise ValueError(
                f"The drafter's `{name}` is packed as {headers[name].dtype} without MLX's "
                f"`{path}.scales`; only MLX's own quantization is supported."
            )


def _quantize_as_stored(drafter: Drafter, headers: dict[str, TensorHeader]) -> None:
    scaled = {name.removesuffix(".scales") for name in headers if name.endswith(".scales")}
    config = drafter.args.quantization
    if config is None:
        if scaled:
            refuse("quantization", None, f"given, as `{min(scaled)}` is quantized")
        return
    if not scaled:
        refuse("quantization", config, "absent, as no tensor is quantized (none has `.scales`)")
    # Overrides name modules in the same spellings as the tensors' names.
    named = drafter.sanitize({f"{path}.weight": value for path, value in config.items()})
    overrides = {name.removesuffix(".weight"): value for name, value in named.items()}

    def scheme(path: str, module: nn.Module) -> bool | dict[str, Any]:
        override = overrides.get(path)
        field = f"quantization.{path}"
        if override not in (None, True, False) and not isinstance(override, dict):
            refuse(field, override, "true, false or an object")
        if path not in scaled:
            if isinstance(override, dict):
                refuse(field, override, f"absent or false, as there is no `{path}.scales`")
            return False
        if override is False:
            refuse(field, override, f"absent or true, as there is `{path}.scales`")
        if isinstance(override, dict):
            return _scheme(field, override, module)
        return _scheme("quantization", config, module)

    nn.quantize(drafter, class_predicate=scheme)


def _scheme(field: str, entry: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Read the arguments of ``to_quantized`` from an entry, and check that they fit the module."""
    if not hasattr(module, "to_quantized"):
        refuse(field, entry, "absent, as this is not a matrix")
    mode = entry.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _MODES:
        refuse(f"{field}.mode", mode, "one of " + ", ".join(_MODES))
    values: dict[str, Any] = {"mode": mode}
    for name, allowed in zip(("bits", "group_size"), _MODES[mode], strict=True):
        value = entry.get(name, allowed[0])
        if type(value) is not int or value not in allowed:
            refuse(f"{field}.{name}", value, "one of " + ", ".join(map(str, sorted(allowed))))
        values[name] = value
    size = module.weight.shape[-1]
    if size % values["group_size"]:
        refuse(f"{field}.group_size", values["group_size"], f"a divisor of {size}")
    return values


def main_dtype(headers: dict[str, TensorHeader]) -> mx.Dtype:
    """Return the dtype of most numbers of a checkpoint, or float32 for float16, which overflows."""
    counts: Counter[str] = Counter()
    for dtype, shape in headers.values():
        if dtype in FLOATS:
            counts[dtype] += prod(shape)
    (name, _), *_ = counts.most_common(1)
    return mx.float32 if name == "F16" else FLOATS[name]


def cast(weights: dict[str, mx.array], dtype: mx.Dtype) -> list[tuple[str, mx.array]]:
    """Cast all floating-point tensors to one dtype; packed ones stay as they are."""
    return [
        (name, value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value)
        for name, value in weights.items()
    ]


def quantize(drafter: Drafter, bits: int, group_size: int) -> None:
    """Quantize the large matrices in place, and warn of rows that the group does not divide."""
    left: list[str] = []

    def large(path: str, module: nn.Module) -> bool:
        if path.rsplit(".", 1)[-1] not in QUANTIZED_AT_LOAD:
            return False
        fits = module.weight.shape[-1] % group_size == 0
        if not fits:
            left.append(path)
        return fits

    nn.quantize(drafter, group_size=group_size, bits=bits, class_predicate=large)
    if left:
        warnings.warn(
            f"{len(left)} matrices of the drafter, first `{left[0]}`, are not quantized: "
            f"`group_size` {group_size} does not divide their rows.",
            # Beyond the function that reads the weights, and the public one that calls it.
            stacklevel=4,
        )
