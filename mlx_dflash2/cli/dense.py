"""What the flag `--dense` asks for: the pair in float32 on MLX's CPU backend."""

import argparse
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.dense import dense_size, make_dense, packed_size
from ..evaluation.machine import available_memory
from .console import note

FLAG = "--dense"


def check_dense(args: argparse.Namespace) -> None:
    """Refuse the flag where it cannot work, before weights are read.

    Raises:
        ValueError: in one line, naming the flag.
    """
    if not args.dense:
        return
    if mx.default_device() != mx.cpu:
        raise ValueError(f"{FLAG} has an effect only on MLX's CPU backend, but MLX is on the GPU.")
    for name in ("draft_bits", "quantize_activations"):
        if getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} has no effect with {FLAG}, which undoes quantization.")


def unpack(*models: nn.Module, flag: str = FLAG, say: Callable[[str], None] = note) -> None:
    """Unpack the weights of models, after a line that says how much memory they take.

    Args:
        models (nn.Module): Loaded lazily, so that large weights were not read so far.
        flag (str): What the lines name. Default: ``"--dense"``.
        say (callable): Takes the line. Default: to print it on stderr.

    Raises:
        ValueError: if they do not fit into the memory that is available.
    """
    needed, stored = (sum(map(size, models)) for size in (dense_size, packed_size))
    available = available_memory()
    sizes = (
        f"{needed / 1e9:.2f} GB of float32 weights instead of {stored / 1e9:.2f} GB, "
        f"{available / 1e9:.2f} GB of memory are available"
    )
    if needed > available:
        raise ValueError(f"{flag} needs {sizes}; leave it out.")
    say(f"{flag}: {sizes}.")
    for model in models:
        make_dense(model)
