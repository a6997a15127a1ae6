"""The exported drafter of a run: what it was made of, and its card."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..checkpoint.card import describe_scheme
from ..checkpoint.quantization import Quantization
from ..checkpoint.save import config_of, save_drafter
from ..drafter.model import Drafter
from . import checkpoints
from .card import make_card, with_results
from .corpus import Corpus
from .records import read_record, write_record
from .settings import not_default

_FOLDER, _RECORD = "export", "export.json"


def step_of(folder: Path) -> int | None:
    """The step that a run's export is of, if there is one and it is known."""
    file = folder / _RECORD
    return read_record(file).get("step") if (folder / _FOLDER).exists() and file.is_file() else None


def is_there(folder: Path, made: dict[str, Any]) -> bool:
    """Whether a run's export is there already.

    Args:
        folder (Path): The run's.
        made (dict): ``step`` and ``bits`` that are asked for.

    Raises:
        ValueError: if there is an export of something else.
    """
    path, file = folder / _FOLDER, folder / _RECORD
    if not path.exists():
        return False
    found = read_record(file) if file.is_file() else {}
    if found != made:
        raise ValueError(
            f"{path} is of step {found.get('step', 'unknown')} ({_scheme(found)}) but step "
            f"{made['step']} ({_scheme(made)}) is asked for; remove that folder."
        )
    return True


def _scheme(made: dict[str, Any]) -> str:
    return f"{made['bits']} bits" if made.get("bits") else "bfloat16"


def ship(
    drafter: Drafter,
    corpus: Corpus,
    saved: checkpoints.Saved,
    made: dict[str, Any],
    folder: Path,
    name: str,
) -> str:
    """Write a run's export.

    Args:
        drafter (Drafter): The trained one, which is rounded and quantised in place.
        corpus (Corpus): What it was trained on.
        saved (Saved): The checkpoint that it is of.
        made (dict): Its ``step`` and the ``bits`` to quantise to, or ``None``.
        folder (Path): The run's.
        name (str): The target's name or path.

    Returns:
        str: What its weights are.
    """
    cast_to(drafter, mx.bfloat16)
    if made["bits"] is not None:
        Quantization(made["bits"]).apply(drafter)
    settings = saved.settings
    blocks = ("batch_size", "anchors", "grad_accumulation_steps", "processes")
    numbers = {"texts": len(corpus), "tokens": corpus.num_answer_tokens, "steps": saved.step}
    numbers["blocks"] = saved.step
    for count in blocks:
        numbers["blocks"] *= settings[count]
    options = not_default(settings)
    for private in ("model", "data", "prompts", "draft_model"):
        options.pop(private, None)
    # A hub's name says where to get it; a path says where it happened to be.
    target = Path(name).name if Path(name).expanduser().is_dir() else name
    card = make_card(drafter, target, numbers, options, own=settings["data"] is None)
    # First: an export without a record would be of nobody knows what.
    write_record(folder / _RECORD, made)
    save_drafter(drafter, folder / _FOLDER, config_of(drafter.args), card)
    return describe_scheme(drafter)


def cast_to(drafter: Drafter, dtype: mx.Dtype):
    """Round all of a drafter's floating-point tensors, in place."""
    drafter.update(tree_map(lambda x: x.astype(dtype), drafter.parameters()))
    mx.eval(drafter.parameters())


def add_results(folder: Path, found: dict[str, Any]):
    """Write what the eval stage found of a run's export into its card."""
    card = folder / _FOLDER / "README.md"
    card.write_text(with_results(card.read_text(encoding="utf-8"), found), encoding="utf-8")
