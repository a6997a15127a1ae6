"""A checkpoint's tensors against what its config asks for, and their quantisation."""

import warnings
from collections import Counter
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.fields import refuse
from ..drafter.model import Drafter
from .files import Stored

FLOATS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
# Bits and group sizes of each of MLX's modes; the first ones are its defaults.
_MODES = {
    "affine": ((4, 8, 1, 2, 3, 5, 6), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}
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


def fit_to(drafter: Drafter, stored: dict[str, Stored]):
    """Make the drafter's modules quantised where the checkpoint is, and check every tensor.

    Args:
        drafter (Drafter): With random weights; changed in place.
        stored (dict): The checkpoint's tensors by their names in the drafter.

    Raises:
        ValueError: naming the tensor that is missing, unexpected, packed in another format or
            of another shape, or the field of ``quantization`` that is at odds with them.
    """
    _refuse_other_layouts(stored)
    _quantise_as_stored(drafter, stored)
    expected = dict(tree_flatten(drafter.parameters()))
    for kind, names in (
        ("is missing", sorted(expected.keys() - stored.keys())),
        ("is unexpected", sorted(stored.keys() - expected.keys())),
    ):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"The drafter's weights do not match its config: `{names[0]}` {kind}{more}."
            )
    for name, parameter in expected.items():
        dtype, shape = stored[name]
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


def _refuse_other_layouts(stored: dict[str, Stored]):
    for name in sorted(stored):
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
        packed = kind == "weight" and stored[name].dtype not in FLOATS
        if kind in ("qweight", "weight_packed") or (packed and f"{path}.scales" not in stored):
            raise ValueError(
                f"The drafter's `{name}` is packed as {stored[name].dtype} without MLX's "
                f"`{path}.scales`; only MLX's own quantisation is supported."
            )


def _quantise_as_stored(drafter: Drafter, stored: dict[str, Stored]):
    scaled = {name.removesuffix(".scales") for name in stored if name.endswith(".scales")}
    config = drafter.args.quantization
    if config is None:
        if scaled:
            refuse("quantization", None, f"given, as `{min(scaled)}` is quantised")
        return
    if not scaled:
        refuse("quantization", config, "absent, as no tensor is quantised (none has `.scales`)")
    # Named like the tensors, overrides come in the spellings that those come in.
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
        stated = isinstance(override, dict)
        return _scheme(field if stated else "quantization", override if stated else config, module)

    nn.quantize(drafter, class_predicate=scheme)


def _scheme(field: str, entry: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The arguments of ``to_quantized``, checked against the module."""
    if not hasattr(module, "to_quantized"):
        refuse(field, entry, "absent, as this is no matrix")
    mode = entry.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _MODES:
        refuse(f"{field}.mode", mode, "one of " + ", ".join(_MODES))
    values = {"mode": mode}
    for name, allowed in zip(("bits", "group_size"), _MODES[mode], strict=True):
        value = entry.get(name, allowed[0])
        if type(value) is not int or value not in allowed:
            refuse(f"{field}.{name}", value, "one of " + ", ".join(map(str, sorted(allowed))))
        values[name] = value
    size = module.weight.shape[-1]
    if size % values["group_size"]:
        refuse(f"{field}.group_size", values["group_size"], f"a divisor of {size}")
    return values


def main_dtype(stored: dict[str, Stored]) -> mx.Dtype:
    """The dtype that most numbers of a checkpoint have; float16, which overflows, is widened."""
    counts = Counter()
    for dtype, shape in stored.values():
        if dtype in FLOATS:
            counts[dtype] += prod(shape)
    (name, _), *_ = counts.most_common(1)
    return mx.float32 if name == "F16" else FLOATS[name]


def cast(weights: dict[str, mx.array], dtype: mx.Dtype) -> list[tuple[str, mx.array]]:
    """All floating-point tensors in one dtype; packed ones as they are."""
    return [
        (name, value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value)
        for name, value in weights.items()
    ]


def quantise(drafter: Drafter, bits: int, group_size: int):
    """Quantise the large matrices in place; warn once of those that the group does not divide."""
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
