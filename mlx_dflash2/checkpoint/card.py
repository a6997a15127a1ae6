"""Describe a drafter that was written: its model card, and lines for the terminal."""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..drafter.model import Drafter
from .save import matrices, quantization_of

_CARD = """\
---
{base}library_name: mlx
tags: [mlx, dflash, speculative-decoding]
---

# {name}

A DFlash {generation} drafter, converted to MLX format from {source}:
{scheme}.
It is not a model on its own: it uses the embedding, the head and the hidden states of the
target that it was trained for.

```shell
mlx_dflash2.generate --model TARGET --draft-model {name} --prompt "Hello"
```
"""
# The train command's cards have such a row.
_WEIGHTS = re.compile(r"^\| Weights \| .* \|$", re.MULTILINE)


def make_card(drafter: Drafter, source: str, name: str) -> str:
    """Make a short model card.

    Args:
        drafter (Drafter): The drafter as it is written.
        source (str): Folder or repository that it was read from.
        name (str): The card's name for it.
    """
    local = Path(source).expanduser().is_dir()
    return _CARD.format(
        # The path of a local folder is private.
        source=f"`{Path(source).expanduser().resolve().name}`" if local else f"`{source}`",
        base="" if local else f"base_model: {source}\n",
        name=name,
        generation=drafter.args.generation,
        scheme=describe_scheme(drafter),
    )


def weights_row(drafter: Drafter) -> str:
    """Make the row of a card's table about a drafter's weights."""
    return f"| Weights | {describe_scheme(drafter)} |"


def converted_card(card: str, drafter: Drafter) -> str:
    """Return the source's card; its row about the weights, if it has one, is updated."""
    return _WEIGHTS.sub(lambda _: weights_row(drafter), card, count=1)


def describe_scheme(drafter: Drafter) -> str:
    """Name bits and group size of the quantized matrices, and the dtype of the rest."""
    dtype = str(drafter.dtype).rpartition(".")[2]
    section = quantization_of(drafter)
    if section is None:
        return f"all {dtype}"
    text = f"{section['bits']} bits in groups of {section['group_size']}"
    own = {f"{s['bits']}" for s in section.values() if isinstance(s, dict)}
    if own:
        text += f" (some {' or '.join(sorted(own))} bits)"
    return f"{text}, the rest {dtype}"


def bits_per_weight(drafter: Drafter) -> float:
    """Count the bits on disk for each number of the unquantized drafter."""
    weights: dict[str, mx.array] = dict(tree_flatten(drafter.parameters()))
    quantized = {path: module for path, module in matrices(drafter) if "scales" in module}
    numbers = sum(prod(m.scales.shape) * m.group_size for m in quantized.values())
    for name, value in weights.items():
        if name.rpartition(".")[0] not in quantized:
            numbers += value.size
    return sum(value.nbytes for value in weights.values()) * 8 / numbers


def describe(drafter: Drafter, path: Path, left: list[str]) -> Iterator[str]:
    """Yield lines about a drafter that was written.

    Args:
        drafter (Drafter): The drafter as it is written.
        path (Path): The folder that holds it.
        left (list of str): Matrices that could not be quantized.
    """
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    bits = f"{bits_per_weight(drafter):.3f} bits per weight"
    yield f"Wrote {path}: {size / 1e9:.3g} GB, {bits}: {describe_scheme(drafter)}."
    if quantization_of(drafter) is None:
        return
    if left:
        yield f"Not quantized, as the group size does not divide their rows: {_named(left)}."
    kept = [name for name, module in matrices(drafter) if "scales" not in module]
    parts = [_named([name for name in kept if name not in left]), "norms"]
    if drafter.args.has_conv:
        parts.append("base_kernel")
    yield f"Not quantized, as always: {', '.join(filter(None, parts))}."


def _named(paths: list[str]) -> str:
    """Count modules by the last part of their paths."""
    counts = Counter(path.rpartition(".")[2] for path in paths)
    return ", ".join(f"{count} {name}" for name, count in counts.items())
