"""Checkpoints of a training run, and the options that they were made with."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from .options import parse
from .records import refuse_difference

_KEEP = 2
# Options that do not change what is computed, or whose effect is recorded by itself.
_FREE = {
    "stage", "config", "given", "output_path", "time_limit", "save_every", "steps_per_report",
    "no_cache", "taps", "eval_prompts", "num_eval_prompts", "eval_max_tokens", "eval_temp",
    "eval_stride", "bits", "data_batch_size", "grad_checkpoint", "thinking", "no_fast_blas",
}  # fmt: skip
ADVICE = "give another --output-path or the first value"


class Saved(NamedTuple):
    """A checkpoint: the step it was written after, trees of arrays by name, and settings."""

    step: int
    trees: dict[str, Any]
    settings: dict[str, Any]


def save(folder: str | Path, step: int, trees: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all, and remove all but the latest few."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, mx.array] = {}
    for name, tree in trees.items():
        arrays |= {f"{name}:{path}": value for path, value in dict(tree_flatten(tree)).items()}
    partial = folder / "partial.safetensors"
    metadata = {"step": str(step), "settings": json.dumps(settings)}
    mx.save_safetensors(str(partial), arrays, metadata)
    partial.rename(folder / f"step-{step:08d}.safetensors")
    for file in files(folder)[:-_KEEP]:
        file.unlink()


def load(file: str | Path) -> Saved:
    """Read a checkpoint.

    Raises:
        FileNotFoundError, ValueError: if there is no such file, or it is not a checkpoint.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no checkpoint {file}.")
    try:
        arrays, metadata = cast(tuple[Any, Any], mx.load(str(file), return_metadata=True))
        step, settings = int(metadata["step"]), json.loads(metadata["settings"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is not a checkpoint of a training run: {error}.") from error
    trees: dict[str, list[tuple[str, mx.array]]] = {}
    for name, value in arrays.items():
        tree, _, path = name.partition(":")
        trees.setdefault(tree, []).append((path, value))
    return Saved(step, {name: tree_unflatten(items) for name, items in trees.items()}, settings)


def files(folder: str | Path) -> list[Path]:
    """Return a folder's checkpoints, the latest last."""
    return sorted(Path(folder).glob("step-*.safetensors"))


def refuse_shapes(saved: Saved, weights: Any) -> None:
    """Refuse a checkpoint whose tensors differ in shape from a drafter's tree of weights.

    Raises:
        ValueError: naming a tensor that differs, and both shapes.
    """
    shapes, found = (
        {name: value.shape for name, value in dict(tree_flatten(tree)).items()}
        for tree in (weights, saved.trees["weights"])
    )
    if shapes != found:
        odd = min(n for n in shapes | found if shapes.get(n) != found.get(n))
        raise ValueError(
            f"The checkpoint's `{odd}` is {found.get(odd)} but the drafter's is "
            f"{shapes.get(odd)}; use another output path or the settings of the first run."
        )


def refuse_frozen(saved: Saved, frozen: list[int]) -> None:
    """Refuse a checkpoint with another digest of frozen weights; one without any is accepted.

    Raises:
        ValueError: if the two differ.
    """
    if saved.settings.get("frozen", frozen) != frozen:
        raise ValueError(
            "The weights that are not trained differ from those that this run started with; give "
            "the first `draft_model`, or another `output_path`."
        )


def deciding(args: Namespace) -> dict[str, Any]:
    """Return the options that decide what is computed, as JSON keeps them."""
    return json.loads(json.dumps({k: v for k, v in vars(args).items() if k not in _FREE}))


def as_trained(args: Namespace, settings: dict[str, Any], source: Path) -> Namespace:
    """Take the options that decide what is computed from a checkpoint.

    Args:
        args (Namespace): Of the command line, which need not repeat them.
        settings (dict): The checkpoint's.
        source (Path): The checkpoint.

    Raises:
        ValueError: if a given option differs from the checkpoint's, or is missing in both.
    """
    refuse_missing(args, settings, source)
    wanted = deciding(args)
    stored = {name: value for name, value in settings.items() if name in wanted}
    explicit = {name: wanted[name] for name in stored if name in args.given}
    refuse_difference(source, stored, explicit, ADVICE)
    return Namespace(**vars(args) | stored)


def refuse_missing(args: Namespace, settings: dict[str, Any], source: Path) -> None:
    """Refuse a checkpoint that lacks an option: its default may have changed since.

    A flag is different: a checkpoint from before the flag existed was made without it.

    Raises:
        ValueError: naming an option that is neither in the checkpoint nor given.
    """
    for name, value in deciding(args).items():
        if name not in settings and name not in args.given and value is not False:
            raise ValueError(f"{source} does not state its `{name}`; give the value it had.")


def not_default(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's options that differ from their defaults."""
    defaults = deciding(parse([]))
    return {k: v for k, v in settings.items() if k in defaults and v != defaults[k]}
