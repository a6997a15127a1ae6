"""A training run on disk: enough to go on as if it had never stopped."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

_KEEP = 2


class Saved(NamedTuple):
    """A checkpoint: the step it was written after, and trees of arrays by name."""

    step: int
    trees: dict[str, Any]
    settings: dict[str, Any]


def save(folder: str | Path, step: int, trees: dict[str, Any], settings: dict[str, Any]):
    """Write a checkpoint, whole or not at all, and remove all but the latest few.

    Args:
        folder (str or Path): Where checkpoints go.
        step (int): Steps done.
        trees (dict): Trees of arrays by name.
        settings (dict): What the run was started with.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, tree in trees.items():
        arrays |= {f"{name}:{path}": value for path, value in tree_flatten(tree)}
    partial = folder / "partial.safetensors"
    metadata = {"step": str(step), "settings": json.dumps(settings)}
    mx.save_safetensors(str(partial), arrays, metadata)
    partial.rename(_file(folder, step))
    for file in files(folder)[:-_KEEP]:
        file.unlink()


def load(file: str | Path) -> Saved:
    """Read a checkpoint.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is none.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no checkpoint {file}.")
    try:
        arrays, metadata = mx.load(str(file), return_metadata=True)
        step, settings = int(metadata["step"]), json.loads(metadata["settings"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is no checkpoint of a training run: {error}.") from error
    trees: dict[str, list] = {}
    for name, value in arrays.items():
        tree, _, path = name.partition(":")
        trees.setdefault(tree, []).append((path, value))
    return Saved(step, {name: tree_unflatten(items) for name, items in trees.items()}, settings)


def refuse_shapes(saved: Saved, weights: Any):
    """Refuse a checkpoint of another drafter.

    Args:
        saved (Saved): The checkpoint.
        weights (dict): The tree of what the drafter trains.

    Raises:
        ValueError: naming a tensor that differs, and both shapes.
    """
    shapes = {name: value.shape for name, value in tree_flatten(weights)}
    found = {name: value.shape for name, value in tree_flatten(saved.trees["weights"])}
    if shapes != found:
        odd = min(n for n in shapes | found if shapes.get(n) != found.get(n))
        raise ValueError(
            f"The checkpoint's `{odd}` is {found.get(odd)} but the drafter's is "
            f"{shapes.get(odd)}; train elsewhere or with the settings of the first run."
        )


def refuse_frozen(saved: Saved, frozen: list[int]):
    """Refuse a checkpoint whose drafter had other weights where it is not trained.

    Args:
        saved (Saved): The checkpoint.
        frozen (list of int): The digest of the drafter's weights that are not trained.

    Raises:
        ValueError: saying so; a checkpoint that has no such digest is let pass.
    """
    if saved.settings.get("frozen", frozen) != frozen:
        raise ValueError(
            "The weights that are not trained are no longer those that this run began with; give "
            "`draft_model` as it was then, or another `output_path`."
        )


def files(folder: str | Path) -> list[Path]:
    """The checkpoints of a folder, the latest last."""
    return sorted(Path(folder).glob("step-*.safetensors"))


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"
