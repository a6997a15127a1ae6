"""The float32 numbers that quantized weights stand for: the fast form on MLX's CPU backend."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model


def dense_size(model: nn.Module) -> int:
    """Return the bytes of a model's weights after :func:`make_dense`; no weights are read."""
    return 4 * sum(_dense_values(module) for module in model.modules())


def _dense_values(module: nn.Module) -> int:
    """Count the weights of one module, without those of the modules in it."""
    arrays = _arrays(module)
    if "scales" not in arrays:
        return sum(value.size for value in arrays.values())
    # The other arrays of a quantized module say how its weight is packed, but for a bias.
    packed = arrays["weight"]
    bias = arrays["bias"].size if "bias" in arrays else 0
    return packed.nbytes * 8 // module.bits + bias


def make_dense(model: nn.Module) -> None:
    """Replace quantized weights by the float32 numbers that they stand for, in place.

    All other floating-point weights become float32, too.

    Args:
        model (nn.Module): A target or a drafter. If its weights are lazy, no more than one
            quantized matrix is in memory at a time.

    Raises:
        ValueError: naming the module that is quantized in a way that mlx-lm cannot undo.
    """
    for path, module in model.named_modules():
        if "scales" not in module:
            continue
        if "global_scale" in module:
            raise ValueError(_refusal(path, module))
        for name in ("scales", "biases"):
            # With scales of 16 bits the products would be rounded to 16 bits.
            if name in module and mx.issubdtype(module[name].dtype, mx.floating):
                module[name] = module[name].astype(mx.float32)
    dequantize_model(model)
    for path, module in model.named_modules():
        if "scales" in module:
            raise ValueError(_refusal(path, module))
    model.set_dtype(mx.float32)
    for module in model.modules():
        mx.eval(_arrays(module))


def _arrays(module: nn.Module) -> dict[str, mx.array]:
    return {name: value for name, value in module.items() if isinstance(value, mx.array)}


def _refusal(path: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"`{path}` is of the kind {kind}, whose weights mlx-lm cannot dequantize."


def packed_size(model: nn.Module) -> int:
    """Return the bytes of a model's weights as they are."""
    return sum(array.nbytes for module in model.modules() for array in _arrays(module).values())
