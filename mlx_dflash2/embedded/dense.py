"""The embedded pair in float32, for MLX's CPU backend, which has no fast quantized product."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten

from ..checkpoint.card import converted_card
from ..checkpoint.dense import make_dense
from ..checkpoint.files import read_config
from ..checkpoint.load import UNQUANTIZED, load_drafter
from ..checkpoint.save import save_drafter


def write_dense_target(source: Path, folder: Path, files: Sequence[str]) -> None:
    """Write a target with the float32 numbers that another one's weights stand for.

    Args:
        source (Path): The folder of an mlx-lm model.
        folder (Path): An empty folder.
        files (sequence of str): The files of ``source``, of which config.json and
            model.safetensors are changed.
    """
    model, *_ = mlx_lm.load(str(source), lazy=True)
    make_dense(model)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = read_config(source)
    del config["quantization"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in files:
        if not (folder / name).exists():
            shutil.copy(source / name, folder / name)


def write_dense_drafter(source: Path, folder: Path) -> None:
    """Write a drafter with the float32 numbers that another one's weights stand for.

    Args:
        source (Path): The folder of a drafter.
        folder (Path): A folder that is empty and is replaced.
    """
    drafter = load_drafter(source, bits=UNQUANTIZED, dtype=mx.float32)
    make_dense(drafter)
    card = (source / "README.md").read_text(encoding="utf-8")
    folder.rmdir()
    save_drafter(drafter, folder, read_config(source), converted_card(card, drafter))
